"""Parts of a graph in files that are damaged or altered: always a ValueError that names the file and the field."""

import copy
import json
import math
import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("safetensors")

from safetensors import safe_open
from safetensors.torch import save_file

import edgeless.distributed as ed
from edgeless.distributed.store_checks import contents_of
from edgeless.files import json_files
from edgeless.graph.fingerprint import of_tensors

NODES, EDGES, LAST = 12, 30, "part-00001.safetensors"
# What stands in the place of a value of the manifest: of every type that JSON has, and numbers that are too large.
WRONG = (None, True, -1, 0, 1, 10**15, 10**30, 1.5, math.nan, "", "x", "../x", [], [None], [[]], {}, {"x": 1})
INFORMATIVE = {"written_by", "method", "halo", "cut_edges", "num_loops"}  # no part of a graph is made of them


def partitioned(folder, loops=True):
    draw = torch.Generator().manual_seed(0)
    edge_index = torch.randint(NODES, (2, EDGES), generator=draw)
    if loops:
        edge_index[1, :3] = edge_index[0, :3]
    else:
        edge_index[1] = (edge_index[0] + 1 + edge_index[1] % (NODES - 1)) % NODES
    data = {"x": torch.randn(NODES, 3, generator=draw), "train": torch.arange(NODES) % 3 == 0}
    weights = {"w": torch.rand(EDGES, dtype=torch.float64, generator=draw)}
    ed.partition(edge_index, NODES, 2, folder, method="contiguous", node_data=data, edge_data=weights)


@pytest.fixture
def parts(tmp_path):
    partitioned(tmp_path / "parts")
    return tmp_path / "parts"


def manifest_of(folder):
    return json.loads((folder / "manifest.json").read_text())


def write_manifest(folder, manifest, made_anew=False):
    if made_anew:
        manifest["contents"] = contents_of(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def refusal(folder):
    """What load() says of the folder; None where it takes it."""
    try:
        ed.load(folder)
    except ValueError as error:
        return str(error)


def tensors_of(folder):
    dg = ed.load(folder)
    data = {f"n.{name}": t for name, t in dg.ndata.items()} | {f"e.{name}": t for name, t in dg.edata.items()}
    return {"edge_index": dg.edge_index(), "nodes": dg.nodes, "edge_ids": dg.edge_ids, **data}


def places(value, path=()):
    """The paths of all values in a manifest, lists and dicts among them."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def put(manifest, path, value=None, *, delete=False):
    *outer, last = path
    for key in outer:
        manifest = manifest[key]
    if delete:
        del manifest[last]
    else:
        manifest[last] = value


def at(manifest, path):
    for key in path:
        manifest = manifest[key]
    return manifest


def distorted(manifest):
    """(path, the manifest with another value there, or with none)."""
    for path in places(manifest):
        before = at(manifest, path)
        for value in WRONG:
            if type(value) is not type(before) or value != before:
                other = copy.deepcopy(manifest)
                put(other, path, value)
                yield path, other
        other = copy.deepcopy(manifest)
        put(other, path, delete=True)
        yield path, other


def test_every_field_of_the_manifest_with_every_wrong_value(parts):
    manifest, seen = manifest_of(parts), 0
    for path, other in distorted(manifest):
        write_manifest(parts, other)
        said = refusal(parts)
        assert said is not None, (path, at(other, path[:-1]))
        assert str(parts) in said and any(str(key) in said for key in (*path, "contents")), (path, said)
        seen += 1
    assert seen > 500
    assert {path[0] for path in places(manifest)} == set(manifest)


def test_what_is_altered_together_with_the_fingerprint_is_told_by_the_files(parts):
    manifest, expected = manifest_of(parts), tensors_of(parts)
    for path, other in distorted(manifest):
        if path[0] == "contents":
            continue
        write_manifest(parts, other, made_anew=True)
        said = refusal(parts)
        if said is None:
            assert path[0] in INFORMATIVE, (path, at(other, path[:-1]))
            assert all(torch.equal(t, expected[name]) for name, t in tensors_of(parts).items())


@pytest.mark.parametrize("name", ["manifest.json", LAST])
def test_a_bit_that_is_flipped_anywhere(parts, name):
    file = parts / name
    raw = bytearray(file.read_bytes())
    header = len(raw) if name != LAST else 8 + int.from_bytes(raw[:8], "little")
    for place in (*range(header), *range(header, len(raw), 5)):
        raw[place] ^= 1 << place % 8
        file.write_bytes(raw)
        said = refusal(parts)
        assert said is not None and str(parts) in said, (place, said)
        raw[place] ^= 1 << place % 8
    file.write_bytes(raw)
    assert refusal(parts) is None


@pytest.mark.parametrize("name", ["manifest.json", LAST])
def test_files_that_are_cut_off(parts, name):
    file, manifest = parts / name, manifest_of(parts)
    raw = file.read_bytes()
    for length in (*range(0, len(raw) - 1, 29), len(raw) - 2):
        file.write_bytes(raw[:length])
        if name == LAST:
            manifest["files"][1]["bytes"] = len(raw)
            write_manifest(parts, manifest)
            said = refusal(parts)
            assert f"{file} must have {len(raw)} bytes, as the manifest says, and has {length}" in said
            manifest["files"][1]["bytes"] = length  # and where the manifest says so too
            write_manifest(parts, manifest)
        said = refusal(parts)
        assert said is not None and name in said


def rewritten(parts, change, made_anew=True):
    """A part with other tensors, in which the manifest believes."""
    with safe_open(parts / LAST, framework="pt") as opened:
        tensors, about = {name: opened.get_tensor(name) for name in opened.keys()}, opened.metadata()  # noqa: SIM118
    change(tensors, about)
    save_file(tensors, parts / LAST, about or None)
    manifest = manifest_of(parts)
    manifest["files"][1]["bytes"] = os.path.getsize(parts / LAST)
    if made_anew:
        manifest["files"][1]["contents"] = of_tensors(tensors)
    write_manifest(parts, manifest)


def replaced(name, make):
    return lambda tensors, about: tensors.update({name: make(tensors[name]).contiguous()})


def written(name, place, value):
    return replaced(name, lambda t: t.index_put((torch.tensor(place),), torch.tensor(value, dtype=t.dtype)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tensors, about: tensors.pop("src"),
            "must hold nodes, out_degrees, src, dst, edge_ids, kept_ids, node.",
        ),
        (lambda tensors, about: tensors.update(more=torch.ones(1)), "must hold nodes, .* got .*more"),
        (replaced("src", lambda t: t.float()), r"src must be torch.int64 \[\d+\], got torch.float32"),
        (replaced("src", lambda t: t.int()), r"src must be torch.int64 \[\d+\], got torch.int32"),
        (replaced("edge_ids", lambda t: t[:-1]), r"edge_ids must be torch.int64 \[(\d+)\], got torch.int64 \[\d+\]"),
        (replaced("node.x", lambda t: t[:-2]), r"node.x must be torch.float32 \[6, 3\], got torch.float32 \[4, 3\]"),
        (replaced("node.x", lambda t: t.flatten()), r"node.x must be torch.float32 \[6, 3\], got torch.float32 \[18\]"),
        (replaced("edge.w", lambda t: t.half()), r"edge.w must be torch.float64 \[\d+\], got torch.float16"),
        (written("nodes", [0], -1), r"nodes must be in \[0, 12\), got -1 to 11"),
        (replaced("nodes", lambda t: t + 10**9), r"nodes must be in \[0, 12\), got 1000000006 to 1000000011"),
        (replaced("nodes", lambda t: t.flip(0)), "nodes must rise"),
        (written("src", [2], NODES), r"src must be in \[0, 12\), got \d+ to 12"),
        (written("src", [2], -1), r"src must be in \[0, 12\), got -1 to"),
        (written("dst", [1], 5), r"dst must be in \[6, 12\), got 5 to"),
        (written("edge_ids", [-1], EDGES), r"edge_ids must be in \[0, 30\), got \d+ to 30"),
        (replaced("edge_ids", lambda t: t[:1].expand(len(t))), "edge_ids must rise"),
        (written("kept_ids", [-1], EDGES), r"kept_ids must be in \[0, \d+\), got \d+ to 30"),
        (written("out_degrees", [0], -1), r"out_degrees must be in \[0, 31\), got -1 to"),
        (lambda tensors, about: about.update(part="0"), "must be part 1, got part 0"),
        (lambda tensors, about: about.clear(), "got None: it belongs to another partition"),
    ],
)
def test_contents_that_do_not_fit_the_manifest(parts, change, message):
    rewritten(parts, change)
    with pytest.raises(ValueError, match=f"load: {parts / LAST}.*{message}"):
        ed.load(parts)


@pytest.mark.parametrize("name", ["src", "edge_ids", "node.x", "node.train", "edge.w", "out_degrees"])
def test_contents_that_fit_and_are_others(parts, name):
    # Ids of edges must rise and be below their number.
    others = (lambda t: torch.arange(len(t))) if name == "edge_ids" else (lambda t: t.roll(1, 0))
    rewritten(parts, replaced(name, others), made_anew=False)
    words = (
        "must have contents with the fingerprint [0-9a-f]{16}, as the manifest says, got [0-9a-f]{16}: it is damaged"
    )
    with pytest.raises(ValueError, match=f"load: {parts / LAST} {words}"):
        ed.load(parts)


def test_two_parts_that_are_swapped(parts):
    first, last = parts / "part-00000.safetensors", parts / LAST
    a, b = first.read_bytes(), last.read_bytes()
    first.write_bytes(b), last.write_bytes(a)
    manifest = manifest_of(parts)
    for file, raw in zip(manifest["files"], (b, a), strict=True):
        file["bytes"] = len(raw)
    write_manifest(parts, manifest)
    with pytest.raises(ValueError, match=f"{first} must be part 0, got part 1"):
        ed.load(parts)


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/outside.safetensors", "a/b", "..", "", "part-00000.safetensors"]
)
def test_a_name_leads_nowhere_else(parts, name):
    manifest = manifest_of(parts)
    (parts.parent / "outside.safetensors").write_bytes((parts / LAST).read_bytes())
    manifest["files"][1]["name"] = name
    write_manifest(parts, manifest)
    with pytest.raises(ValueError, match=r"manifest.json: files\[1\].name must be 'part-00001.safetensors', got "):
        ed.load(parts)


@pytest.mark.parametrize("text", ["[" * 200_000, '{"a":' * 200_000, "", "null", "\xff", "1" * 5000])
def test_a_manifest_that_is_none(parts, text):
    (parts / "manifest.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"load: .*manifest.json must be "):
        ed.load(parts)


@pytest.mark.parametrize("name", ["sizes", "written_by", "more"])
def test_a_field_that_is_nested_deeply(parts, name):
    manifest = manifest_of(parts)
    for depth in (50, 300, 600, *range(800, 1000)):  # near the limit what is read may be too deep to be written
        text = json.dumps({**manifest, name: "HERE"}).replace('"HERE"', "[" * depth + "]" * depth)
        (parts / "manifest.json").write_text(text)
        said = refusal(parts)
        assert said is not None and "manifest.json" in said


def test_what_is_whole_loads(tmp_path):
    for loops in (False, True):
        folder = tmp_path / str(loops)
        partitioned(folder, loops)
        manifest = manifest_of(folder)
        assert manifest["contents"] == contents_of(manifest)
        (folder / "manifest.json").write_text(
            json.dumps(manifest, indent=8, sort_keys=True)
        )  # as another tool prints it
        found = tensors_of(folder)
        assert found["edge_index"].shape == (2, EDGES) and found["n.x"].dtype == torch.float32


def test_a_fingerprint_of_tensors_is_of_names_dtypes_shapes_and_bits():
    x = torch.arange(24, dtype=torch.float32).view(4, 6)
    flipped = x.clone()
    flipped.view(torch.int32)[1, 2] ^= 1
    others = [{"y": x}, {"x": x.view(6, 4)}, {"x": x.view(torch.int32)}, {"x": flipped}, {"x": x[:3]}, {"x": -x * 0}]
    others += [{"x": x, "y": x[:0]}, {"x": x[:0]}, {"x": x * 0}, {"x": x.bool()}, {"x": x.bool().view(torch.uint8)}]
    found = [of_tensors(tensors) for tensors in ({"x": x}, *others)]
    assert len(set(found)) == len(found)
    shifted = torch.arange(-3, 24, dtype=torch.float32)[3:].view(4, 6)  # a view that begins anywhere in its memory
    assert of_tensors({"x": shifted}) == of_tensors({"x": x.t().contiguous().t()}) == found[0]
    assert of_tensors({"x": x.view(-1)[::2]}) == of_tensors({"x": x.view(-1)[::2].clone()})
    with torch.device("meta"):  # a user's torch.set_default_device
        assert of_tensors({"x": x}) == found[0]


def test_json_is_utf8_whatever_the_locale(tmp_path):
    """Of a manifest that another tool wrote, too."""
    file = tmp_path / "some.json"
    file.write_text('{"Größe": 3}', encoding="utf-8")
    read = "runpy.run_path(sys.argv[1])['read_json'](pathlib.Path(sys.argv[2]))"
    code = f"import pathlib, runpy, sys; print(ascii({read}))"
    ascii_only = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    command = [sys.executable, "-c", code, json_files.__file__, str(file)]
    found = subprocess.run(command, env=ascii_only, capture_output=True, text=True, check=True).stdout
    assert found.strip() == ascii({"Größe": 3})

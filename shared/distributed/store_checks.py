"""Checks of a partition's files: of the manifest by itself, and of a part against the manifest."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import torch
from torch import Tensor

from ..files.json_files import shown
from ..graph.fingerprint import of_tensors, of_text

__all__ = ["FORMAT", "VERSION", "check_manifest", "check_part", "contents_of", "part_name"]

FORMAT, VERSION = "edgeless-parts", 1
_COUNTS = ("num_nodes", "num_edges", "num_loops", "num_parts", "cut_edges")
_BY_PART = ("sizes", "edges", "halo")
_ROWS = ("node_data", "edge_data")
_NEEDED = (*_COUNTS, *_BY_PART, *_ROWS, "written_by", "method", "fingerprint", "files", "contents")
_FINGERPRINT = re.compile("[0-9a-f]{16}")


def part_name(part: int) -> str:
    """The name of a part's file."""
    return f"part-{part:05d}.safetensors"


def contents_of(manifest: dict[str, Any]) -> str:
    """The fingerprint of a manifest without its list of files, each of which has its own fingerprint."""
    said = {name: value for name, value in manifest.items() if name not in ("files", "contents")}
    return of_text(json.dumps(said, sort_keys=True))


def check_manifest(where: str, manifest: Any) -> None:
    """Raises ValueError unless ``manifest`` is as partition() writes it.

    Args:
        where: the call and the file, with which the message begins.
    """
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ValueError(f"{where} must be the manifest of a partition, with the format {FORMAT!r}")
    version = manifest.get("version")
    if not _is_count(version) or not 1 <= version <= VERSION:
        raise ValueError(f"{where} has version {version}, and this edgeless reads up to {VERSION}; update edgeless")
    if missing := [name for name in _NEEDED if name not in manifest]:
        raise ValueError(f"{where} lacks {', '.join(missing)}; partition() writes all of them")

    def expect(holds: bool, name: str, what: str, value: Any) -> None:
        if not holds:
            raise ValueError(f"{where}: {name} must be {what}, got {shown(value)}")

    for name in _COUNTS:
        expect(_is_count(manifest[name]), name, "a whole number of at least 0", manifest[name])
    num_parts, num_edges = manifest["num_parts"], manifest["num_edges"]
    expect(num_parts >= 1, "num_parts", "at least 1", num_parts)
    for name in ("num_loops", "cut_edges"):
        expect(manifest[name] <= num_edges, name, f"at most num_edges, {num_edges}", manifest[name])
    for name in _BY_PART:
        counts = manifest[name]
        holds = isinstance(counts, list) and len(counts) == num_parts and all(map(_is_count, counts))
        expect(holds, name, f"a list of num_parts = {num_parts} whole numbers of at least 0", counts)
    for name, total in (("sizes", "num_nodes"), ("edges", "num_edges")):
        expect(sum(manifest[name]) == manifest[total], name, f"{manifest[total]} in all, as {total}", manifest[name])
    for name in _ROWS:
        kinds = manifest[name]
        holds = isinstance(kinds, dict) and all(map(_is_kind, kinds.values()))
        expect(holds, name, "a dtype and a list of sizes by name", kinds)
    written_by, method = manifest["written_by"], manifest["method"]
    holds = isinstance(written_by, dict) and all(isinstance(version, str) for version in written_by.values())
    expect(holds, "written_by", "versions by name", written_by)
    expect(isinstance(method, str), "method", "a name", method)
    for name in ("fingerprint", "contents"):
        expect(_is_fingerprint(manifest[name]), name, "16 hexadecimal digits", manifest[name])
    files = manifest["files"]
    holds = isinstance(files, list) and len(files) == num_parts and all(isinstance(file, dict) for file in files)
    expect(holds, "files", f"a list of num_parts = {num_parts} entries", files)
    for part, file in enumerate(files):
        name, size, contents = (file.get(key) for key in ("name", "bytes", "contents"))
        expect(name == part_name(part), f"files[{part}].name", repr(part_name(part)), name)
        expect(_is_count(size), f"files[{part}].bytes", "a whole number of at least 0", size)
        expect(_is_fingerprint(contents), f"files[{part}].contents", "16 hexadecimal digits", contents)
    found = contents_of(manifest)
    expect(found == manifest["contents"], "contents", f"{found}, unless a field was altered", manifest["contents"])


def check_part(where: str, manifest: dict[str, Any], part: int, tensors: dict[str, Tensor]) -> None:
    """Raises ValueError unless ``tensors`` are those of a part and fit a manifest that :func:`check_manifest` passed.

    Args:
        where: the call and the file, with which the message begins.
    """
    num_own, num_edges = manifest["sizes"][part], manifest["edges"][part]
    expected = _tensors_of(manifest, num_own, num_edges)
    if sorted(tensors) != sorted(expected):
        raise ValueError(f"{where} must hold {', '.join(expected)}, got {', '.join(tensors) or 'nothing'}")
    for name, (dtype, shape) in expected.items():
        tensor = tensors[name]
        if str(tensor.dtype) != dtype or list(tensor.shape) != shape:
            raise ValueError(f"{where}: {name} must be {dtype} {shape}, got {tensor.dtype} {list(tensor.shape)}")
    first = next(itertools.islice(itertools.accumulate(manifest["sizes"], initial=0), part, None))
    num_kept = manifest["num_edges"] - manifest["num_loops"]
    for name, low, end in (
        ("nodes", 0, manifest["num_nodes"]),
        ("src", 0, manifest["num_nodes"]),
        ("dst", first, first + num_own),
        ("edge_ids", 0, manifest["num_edges"]),
        ("kept_ids", 0, max(num_kept, 1)),
        ("out_degrees", 0, manifest["num_edges"] + 1),
    ):
        if name in tensors and tensors[name].numel():
            least, most = (int(bound) for bound in tensors[name].aminmax())
            if least < low or most >= end:
                raise ValueError(f"{where}: {name} must be in [{low}, {end}), got {least} to {most}")
    for name in ("nodes", "edge_ids"):
        if bool((tensors[name].diff() <= 0).any()):
            raise ValueError(f"{where}: {name} must rise, and there is one that is not above the one before it")
    expected_contents = manifest["files"][part]["contents"]
    if (found := of_tensors(tensors)) != expected_contents:
        raise ValueError(
            f"{where} must have contents with the fingerprint {expected_contents}, as the manifest says, "
            f"got {found}: it is damaged"
        )


def _tensors_of(manifest: dict[str, Any], num_own: int, num_edges: int) -> dict[str, tuple[str, list[int]]]:
    """Name -> (dtype, shape) of the tensors of a part."""
    ids = str(torch.int64)
    expected = {"nodes": (ids, [num_own]), "out_degrees": (ids, [num_own])}
    by_edge = ("src", "dst", "edge_ids") + ("kept_ids",) * (manifest["num_loops"] > 0)
    expected.update({name: (ids, [num_edges]) for name in by_edge})
    for kind, rows in (("node", num_own), ("edge", num_edges)):
        for name, (dtype, shape) in manifest[f"{kind}_data"].items():
            expected[f"{kind}.{name}"] = (dtype, [rows, *shape])
    return expected


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_kind(value: Any) -> bool:
    if not (isinstance(value, list) and len(value) == 2):
        return False
    dtype, shape = value
    return isinstance(dtype, str) and isinstance(shape, list) and all(map(_is_count, shape))


def _is_fingerprint(value: Any) -> bool:
    return isinstance(value, str) and _FINGERPRINT.fullmatch(value) is not None

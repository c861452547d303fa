"""The commands as a user types them."""

import argparse
import importlib.util
import json
import os

import numpy as np
import pytest
import torch

import edgeless
from edgeless import _C
from edgeless.__main__ import main
from edgeless.kernels import Image, NvrtcError, Pack, Store, write_pack
from edgeless.tools.bench import graphs
from edgeless.tools.cli import devices, info_command
from edgeless.tools.cli.devices import UsageError
from edgeless.tools.cli.layers import LAYERS
from edgeless.tools.demo import command as demo

FRAMEWORKS = [name for name in ("pyg", "dgl") if devices.installed(name)]
RESULT = {"runs": [{"seed": 0, "losses": [1.0], "val": 0.5, "test": 0.5}], "seconds": [0.1], "peak_bytes": 10}
TINY = ["--nodes", "200", "--edges", "2000", "--epochs", "3", "--device", "cpu", "--threads", "1"]


def test_info_prints_versions_and_frameworks(capsys):
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    assert edgeless.__version__ in out
    assert f"chosen on this machine: {_C.cpu_capability()}\n" in out
    for name, title in (("pyg", "PyTorch Geometric"), ("dgl", "DGL")):
        (line,) = (line for line in out.splitlines() if line.startswith(title))
        assert ("GATv2Conv" in line) == (name in FRAMEWORKS)
        assert ("not installed" in line) == (name not in FRAMEWORKS)
        assert "aggr" not in line.split()  # a module of two layers, not a layer


def answers():
    return dict(info_command.rows())


def test_info_tells_what_compiles_kernels(monkeypatch, tmp_path):
    class Nvrtc:
        version, file = (13, 5), "/lib/libnvrtc.so.13"

    monkeypatch.setattr(info_command, "installed_nvrtc", lambda: Nvrtc)
    monkeypatch.setattr(info_command.headers, "cuda_headers", lambda: tmp_path)
    assert answers()["CUDA kernels"] == "compiled at their first launch by NVRTC 13.5, /lib/libnvrtc.so.13"
    assert answers()["CUDA headers"] == str(tmp_path)


@pytest.mark.parametrize("cuda, words", [
    (None, f"not compiled here: torch {torch.__version__} is a build without CUDA, and there is no NVRTC"),
    ("13.0", "not compiled here: no NVRTC was found"),
])  # fmt: skip
def test_info_tells_what_is_missing(monkeypatch, cuda, words):
    def missing(words):
        raise NvrtcError(words)

    monkeypatch.setattr(info_command, "installed_nvrtc", lambda: missing("no NVRTC was found"))
    monkeypatch.setattr(info_command.headers, "cuda_headers", lambda: missing("cuda_fp16.h was not found"))
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert (answers()["CUDA kernels"], answers()["CUDA headers"]) == (words, "cuda_fp16.h was not found")


def test_info_tells_where_kernels_are(monkeypatch, tmp_path):
    store, pack = Store(tmp_path / "kernels"), tmp_path / "one.pack"
    monkeypatch.setattr(info_command, "default_store", lambda: store)
    monkeypatch.setattr(info_command, "default_packs", lambda: ())
    assert (answers()["kernel cache"], answers()["kernel packs"]) == (f"{store.folder}, empty", "none")
    assert not store.folder.exists()
    image = Image("cubin", "k", bytes(10**6))
    store.put("a" * 64, image)
    assert answers()["kernel cache"] == f"{store.folder}, 1 kernel, 1.0 MB"
    store.put("b" * 64, image)
    assert answers()["kernel cache"] == f"{store.folder}, 2 kernels, 2.0 MB"
    write_pack(pack, {"a" * 64: image})
    monkeypatch.setattr(info_command, "default_packs", lambda: (Pack(pack),))
    assert answers()["kernel packs"] == f"{pack} with 1"
    monkeypatch.setattr(info_command, "default_packs", lambda: (Pack(tmp_path / "none"),))
    assert answers()["kernel packs"].startswith("EDGELESS_KERNEL_PACKS: [Errno 2]")
    monkeypatch.setattr(info_command, "default_store", lambda: Store(None))
    assert answers()["kernel cache"].startswith("none, since this user has no home directory")


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_demo_trains_both_sides_to_the_same_loss(tmp_path, capsys, framework):
    file, plot = tmp_path / "demo.json", tmp_path / "demo.png"
    draws = importlib.util.find_spec("matplotlib") is not None
    written = ["--json", str(file), *(["--plot", str(plot)] if draws else [])]
    assert main(["demo", "--framework", framework, "--seeds", "2", *written, *TINY]) == 0
    assert not draws or plot.read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    for row in ("time of an epoch", "peak memory", "test accuracy", "±"):
        assert row in out
    assert "different dropout masks" not in out
    measured = json.loads(file.read_text())
    stock, ours = (measured[side] for side in ("stock", "edgeless"))
    assert stock["layer"].split(".")[0] in ("torch_geometric", "dgl")
    assert ours["layer"].startswith(f"edgeless.{framework}.nn")
    assert len(ours["seconds"]) == len(stock["seconds"]) == 2 * 3  # seeds, epochs
    assert stock["peak_bytes"] > 0
    for seed in range(2):
        losses = [side["runs"][seed]["losses"] for side in (stock, ours)]
        assert losses[1] == pytest.approx(losses[0], rel=1e-4)
        assert losses[1][-1] < losses[1][0]


@pytest.mark.skipif(not FRAMEWORKS, reason="needs PyG or DGL")
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_at_the_end(monkeypatch, capsys):
    monkeypatch.setattr("edgeless.tools.demo.command.run_child", lambda *_: RESULT)
    assert main(["demo", "--framework", FRAMEWORKS[0], *TINY, "--json", "/dev/full"]) == 1
    out, err = capsys.readouterr()
    assert "test accuracy" in out
    assert err == "edgeless demo: --json /dev/full: cannot be written (No space left on device)\n"


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("layer", LAYERS)
def test_every_layer_of_the_demo_trains_to_the_stock_loss(monkeypatch, framework, layer):
    from edgeless.tools.demo import train

    if getattr(LAYERS[layer], framework) is None:
        pytest.skip(f"{framework} has no such layer")
    results = {}
    kind = "community" if LAYERS[layer].types is None else "relational"
    source = {"kind": kind, "options": {"num_nodes": 200, "num_edges": 2000}}
    sizes = {"hidden": 8, "heads": 4, "dropout": 0.0, "lr": 0.002, "weight_decay": 0.0, "epochs": 3}
    config = {"data": source, "device": "cpu", "threads": torch.get_num_threads(), "seed": 0, "seeds": 1, **sizes}
    for side in ("stock", "edgeless"):
        monkeypatch.setattr(train, "emit", lambda kind, side=side, **fields: results.update({side: fields}))
        train.run({**config, "framework": framework, "layer": layer, "side": side})
    assert results["edgeless"]["layer"].startswith(f"edgeless.{framework}.nn")
    losses = [results[side]["runs"][0]["losses"] for side in ("stock", "edgeless")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[1][-1] < losses[1][0]


@pytest.mark.skipif("pyg" not in FRAMEWORKS, reason="needs PyG")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize(("layer", "molecules"), [("gatv2", True), ("gin", True), ("own-attention", False)])
def test_molecules_and_own_messages_train_to_the_stock_loss(monkeypatch, layer, molecules, device):
    from edgeless.tools.demo import train

    monkeypatch.setenv("EDGELESS_GENERATE", "on")
    results = {}
    source = {"kind": "community", "options": {"num_nodes": 200, "num_edges": 2000}}
    if molecules:
        source = {"kind": "molecules", "options": {"count": 300}}  # of 150 for training the second batch is short
    sizes = {"hidden": 4, "heads": 2, "dropout": 0.0, "lr": 0.002, "weight_decay": 0.0, "epochs": 3}
    config = {"data": source, "device": device, "threads": 1, "seed": 0, "seeds": 1, **sizes}
    edgeless.report(reset=True)
    for side in ("stock", "edgeless"):
        monkeypatch.setattr(train, "emit", lambda kind, side=side, **fields: results.update({side: fields}))
        train.run({**config, "framework": "pyg", "layer": layer, "side": side})
    calls = edgeless.report(reset=True).layers.values()
    assert sum(one.fused + sum(one.generated.values()) for one in calls) > 0
    stock, ours = (results[side]["runs"][0] for side in ("stock", "edgeless"))
    assert ours["losses"] == pytest.approx(stock["losses"], rel=1e-4)
    assert ours["losses"][-1] < ours["losses"][0]
    assert ours["test"] == pytest.approx(stock["test"], abs=0.02)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_links_are_learnt_to_the_stock_loss_and_ranks(monkeypatch, tmp_path, framework):
    from edgeless.tools.demo import train

    words = [f"n{i}" for i in range(40)]
    triples = [f"{words[i]} {'ab'[i % 2]} {words[(3 * i + step) % 40]}" for step in (1, 7) for i in range(40)]
    files = {"entities.dict": [f"{i}\t{word}" for i, word in enumerate(words)], "relations.dict": ["0\ta", "1\tb"]}
    files.update({"train.txt": triples[:60], "valid.txt": triples[60:70], "test.txt": triples[70:]})
    for name, lines in files.items():
        (tmp_path / name).write_text("\n".join(lines))
    results = {}
    sizes = {"hidden": 8, "heads": 2, "dropout": 0.0, "lr": 0.01, "weight_decay": 0.0, "epochs": 3}
    config = {"data": {"kind": "wn18rr", "root": str(tmp_path)}, "device": "cpu", "threads": 1, "seed": 0, "seeds": 1}
    for side in ("stock", "edgeless"):
        monkeypatch.setattr(train, "emit", lambda kind, side=side, **fields: results.update({side: fields}))
        train.run({**config, **sizes, "framework": framework, "layer": "rgcn", "side": side})
    assert results["edgeless"]["layer"].startswith(f"edgeless.{framework}.nn")
    stock, ours = (results[side]["runs"][0] for side in ("stock", "edgeless"))
    assert ours["losses"] == pytest.approx(stock["losses"], rel=1e-4)
    assert ours["losses"][-1] < ours["losses"][0]
    assert ours["test"] == pytest.approx(stock["test"], rel=1e-2)


@pytest.mark.parametrize(("framework", "layer"), [("pyg", "gatv2"), ("dgl", "transformer"), ("dgl", "gcn")])
def test_every_layer_has_a_heading_and_a_line_of_help(capsys, framework, layer):
    from edgeless.tools.demo.command import side_names

    _, ours = side_names({"framework": framework, "layer": layer}).values()
    with pytest.raises(SystemExit):
        main(["demo", "--help"])
    assert ours.split()[1] in capsys.readouterr().out


@pytest.mark.parametrize(
    ("stock", "ours", "said"), [(3.0, 1.5, "2.0x less"), (1.5, 3.0, "2.0x more"), (1.0, 1.0, "1.0x less"), (1, 0, "")]
)
def test_the_demo_says_more_where_it_is_more(stock, ours, said):
    from edgeless.tools.demo.command import _change

    assert _change(stock, ours) == said


@pytest.mark.skipif(not FRAMEWORKS, reason="needs PyG or DGL")
def test_the_demo_says_that_masks_of_dropout_differ(monkeypatch, capsys):
    monkeypatch.setattr("edgeless.tools.demo.command.run_child", lambda *_: RESULT)
    assert main(["demo", "--framework", FRAMEWORKS[0], "--dropout", "0.5", *TINY]) == 0
    assert "different dropout masks" in capsys.readouterr().out


@pytest.mark.skipif(not FRAMEWORKS, reason="needs PyG or DGL")
def test_demo_reads_cora(shared_data, tmp_path, capsys, monkeypatch):
    from edgeless.tools.demo import train

    def here(module, config, on_event):  # a child of its own would import torch and the framework again
        results = []
        monkeypatch.setattr(train, "emit", lambda kind, **fields: results.append(fields))
        train.run(config)
        return results[-1]

    monkeypatch.setattr("edgeless.tools.demo.command.run_child", here)
    file = tmp_path / "cora.json"
    options = ["--dataset", "cora", "--root", str(shared_data / "planetoid"), "--epochs", "2", "--json", str(file)]
    assert main(["demo", "--framework", FRAMEWORKS[0], "--device", "cpu", *options]) == 0
    config = json.loads(file.read_text())["config"]
    assert (config["hidden"], config["heads"], config["dropout"]) == (8, 8, 0.6)
    assert "2,708 nodes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--dataset", "cora"], "--dataset and --root go together"),
        (["demo", "--dataset", "cora", "--root", "x", "--npz", "y"], "give one"),
        (["demo", "--epochs", "0"], "--epochs must be at least 1, got 0"),
        (["demo", "--nodes", "20"], "--nodes must be at least 160, got 20"),
        (["demo", "--npz", "missing.npz"], "missing.npz: cannot be read"),
        (["demo", "--layer", "rgcn", "--npz", "y"], "--layer rgcn needs a graph with relations"),
        (["demo", "--layer", "rgcn", "--parts", "2"], "does not run on parts of a graph"),
        (["demo", "--layer", "own-attention", "--parts", "2"], "whose messages are generated, does not run on parts"),
        (["demo", "--molecules", "4"], "--molecules must be at least 8, got 4"),
        (["demo", "--molecules", "--npz", "y"], "--molecules and --npz do not go together"),
        (["demo", "--molecules", "--nodes", "200"], "--molecules and --nodes do not go together"),
        (["demo", "--molecules", "--framework", "dgl"], "--molecules needs --framework pyg, got dgl"),
        (["demo", "--molecules", "--layer", "rgcn"], "got --layer rgcn"),
        (
            ["demo", "--dataset", "wn18rr", "--root", "x"],
            "for a layer over relations (rgcn, rgat, hgt), got --layer gatv2",
        ),
        (["demo", "--layer", "rgat", "--framework", "dgl"], "--layer rgat: DGL has no such layer"),
        (["demo", "--layer", "hgt", "--dataset", "wn18rr", "--root", "x"], "they are not all in it"),
        (["bench", "--graph", "arxiv", "--layer", "hgt"], "--graph arxiv has none"),
        (["bench", "--graph", "nowhere"], "--graph nowhere: not one of star, toy"),
        (["bench", "--graph", "toy", "--op", "gatv3_H1_D1"], "an aggregation is called gatv2_H8_D128"),
        (["bench", "--graph", "toy", "--op", "gat_H1_D1", "--peers", "pyg"], "for gat_H1_D1 there are plain"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_status_2(monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(devices, "installed", lambda framework: True)  # the complaint is not about frameworks
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_a_missing_framework_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(devices, "installed", lambda framework: False)
    assert main(["demo", "--framework", "dgl"]) == 2
    assert capsys.readouterr().err == (
        "edgeless demo: DGL is not installed; install it with: pip install 'edgeless[dgl]'\n"
    )


def test_cuda_without_a_gpu_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(devices.torch.cuda, "is_available", lambda: False)
    assert main(["bench", "--graph", "toy", "--op", "gat_H1_D4", "--device", "cuda"]) == 2
    assert capsys.readouterr().err == "edgeless bench: --device cuda: torch sees no GPU\n"


# Options --------------------------------------------------------------------------------------------------------------


def test_version(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0 and capsys.readouterr().out == f"edgeless {edgeless.__version__}\n"


def test_options_have_no_abbreviations(capsys):
    with pytest.raises(SystemExit) as end:
        main(["demo", "--data", "cora"])
    assert end.value.code == 2 and "unrecognized arguments: --data cora" in capsys.readouterr().err


def test_a_demo_with_dropout_takes_three_seeds():
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    framework = next((name for name in ("pyg", "dgl") if devices.installed(name)), None)
    if framework is None:
        pytest.skip("needs PyG or DGL")
    seeds = [
        demo.configure(parser.parse_args(["--framework", framework, "--nodes", "200", "--edges", "400", *more]))[
            "seeds"
        ]
        for more in ([], ["--dropout", "0.5"], ["--dropout", "0.5", "--seeds", "1"])
    ]
    assert seeds == [1, 3, 1]


def test_the_demo_says_when_times_spread():
    config = {"dropout": 0.0, "layer": "gatv2", "data": {"kind": "community"}}
    calm, busy = {"seconds": [1.0] * 10}, {"seconds": [1.0] * 5 + [2.0] * 5}
    assert not any("busy" in line for line in demo.notes(config, {"stock": calm, "edgeless": calm}))
    assert any("busy" in line for line in demo.notes(config, {"stock": calm, "edgeless": busy}))


def test_every_command_on_graphs_takes_the_path_of_a_file(tmp_path, capsys):
    file = tmp_path / "mine.npz"
    x = np.ones((3, 2), np.float32)
    masks = {f"{name}_mask": np.array([True, False, True]) for name in ("train", "val", "test")}
    np.savez(file, x=x, y=np.array([0, 1, 1]), edge_index=np.array([[0, 1], [1, 2]]), **masks)
    graph = graphs.load(str(file), None, torch.device("cpu"))
    assert (graph.name, graph.num_nodes, graph.num_edges, graph.symmetric) == ("mine", 3, 2, False)
    graphs.check_name(str(file), None)
    # The process that measures memory reads the file again.
    options = ["--op", "spmm_none_F8", "--peers", "edgeless", "--mode", "forward", "--rounds", "1", "--device", "cpu"]
    assert main(["bench", "--graph", str(file), *options]) == 0
    out = capsys.readouterr().out
    assert "not measured" not in out and "mine: 3 nodes, 2 edges" in out
    with pytest.raises(UsageError, match="no such file"):
        graphs.check_name(str(tmp_path / "missing.npz"), None)

"""docs/performance.md and the README's picture: written from committed runs, and short."""

import itertools
import json
from pathlib import Path

import pytest
import torch

from edgeless.__main__ import main
from edgeless.tools.bench import engines, generated, picture, shapes
from edgeless.tools.bench.page import (
    ENGINES,
    PARTS,
    SECTIONS,
    SMALL_GRAPHS,
    engines_page,
    files,
    page,
    parts_page,
    steps_page,
)
from edgeless.tools.bench.runs import DEMO, Suite, geometric_mean, read
from edgeless.tools.bench.suites import SUITES
from edgeless.tools.cli import setting
from edgeless.tools.cli.devices import installed

DOCS = Path(__file__).resolve().parents[2] / "docs"
MOST_LINES = 205
WITH_EVERY_GRAPH = 225

SETTING = {
    "date": "2026-11-22",
    "command": "python -m edgeless bench --suite cpu --data DIR",
    "device": "CPU, 2 threads, AVX2",
    "cpu": "a processor",
    "cores": 2,
    "gpus": 0,
    "cuda": None,
    "edgeless": "0.1.0",
    "commit": "abc1234",
    "torch": "2.13.0",
    "torch_geometric": "2.8.1",
    "dgl": None,
}


def row(graph, name, peer, mode="forward_backward", dtype="fp32", ms=10.0, **more):
    case = {"kind": "op", "name": name, "dtype": dtype, "features": 128, "heads": 4, "channels": 32}
    figures = {"failed": None, "median_ms": ms, "spread": 0.1, "runs": 5, "peak_bytes": 40_000_000}
    return {"graph": graph, "case": case, "peer": peer, "mode": mode, "threads": 2, **figures, **more}


def write(folder, name, suite, rows):
    content = {"setting": {**SETTING, "options": {"suite": suite}}, "results": rows}
    (folder / name).write_text(json.dumps(content))


def trained(graph, count, model, peer, step=4.0, total=8.0, **more):
    figures = {"step_ms": step, "total_ms": total, "spread": 0.1, "peak_mb": 50.0, "waste": None, "why": None}
    return {
        "graph": graph,
        "batch_size": count,
        "model": model,
        "peer": peer,
        "failed": None,
        **figures,
        **more,
    }


EPOCHS = (("sage-mean", "gatv2"), ("fp32", "bf16"), ("edgeless", "torch-csr"), ("", "all_to_all", "symmetric"))
STEPS = (("sage-mean", "gatv2"), ("ddp", "average_gradients"), (False, True))


def epoch(graph, model, dtype, way, carrier, ms=40.0, **more):
    counts = {"processes": 2 if carrier else 1, "rank_mb": 300.0, "gradient_error": 1e-6 if carrier else None}
    names = {"graph": graph, "model": model, "dtype": dtype, "way": way, "carrier": carrier}
    return {**names, "epoch_ms": ms, "spread": 0.1, "halo": 1.0, "same_bits": True, **counts, **more}


def step(seeds, model, average, prefetched):
    figures = {"alone_ms": 3.0, "ddp_ms": 4.0, "efficiency": 0.75}
    return {
        "graph": "products",
        "model": model,
        "average": average,
        "prefetched": prefetched,
        "seeds": seeds,
        **figures,
    }


def everything():
    """A run of every suite, with every cell that its section shows."""
    mine = ("", "-pyg", "-dgl", "-pyg-graphed", "-rowsplit", "-wsb")
    peers = ("pyg", "pyg-compiled", "pyg-csr", "dgl", *(f"edgeless{s}" for s in mine))
    best = {"best_peer": {"peer": "PyG", "ms": 20.0, "peak_mb": None}}
    roof = {"roofline_ms": 0.75}
    steps = {"sampling_ms": 5.0, "step_ms": 20.0, "again_ms": 19.0, "new_graph_ms": 1.0}
    blocks = {"engine": "rowsplit", "build_ms": 10.0, "reuse": 1.5}
    suites = {}
    for section in (*SECTIONS, ENGINES):
        options = SUITES.get(section.suite, {})
        names = options.get("layer") or options.get("op") or options.get("minibatch") or options.get("new_graphs")
        names = names or [f"{op}_H{h}_D8" for op in ("gatv2", "gat", "gt") for h in (1, 8)]
        cells = itertools.product(
            options.get("graph", ["artnet", "avazu"]),
            names,
            options.get("dtype", ["fp32"]),
            peers,
            ("forward", "forward_backward"),
            options.get("compare_threads", [2]),
        )
        rows = [
            row(graph, name, peer, mode, dtype, threads=threads, **best, **roof, **steps, **blocks)
            for graph, name, dtype, peer, mode, threads in cells
        ]
        suites[section.suite] = Suite([SETTING], rows)
    suites["h200-scale-out"] = Suite([SETTING], [epoch(*c) for c in itertools.product(("products", "pokec"), *EPOCHS)])
    suites["ddp"] = Suite([SETTING], [step(*case) for case in itertools.product((1024, 8192), *STEPS)])
    peers = ("pyg", "pyg-compiled", "edgeless-pyg", "edgeless-pyg-captured")
    for name, graph, count, model in (("small-molecules", "zinc", 128, "gine"), ("small", "tiny", None, "gcn")):
        suites[name] = Suite([SETTING], [trained(graph, count, model, peer) for peer in peers])
    side = {"seconds": [1.0, 2.0, 3.0], "peak_bytes": 10_000_000, "runs": [{"test": 0.9}]}
    demo = {"title": "a graph; and more", "config": {"layer": "gatv2"}, "stock": side, "edgeless": side}
    suites[DEMO] = Suite([SETTING], [demo])
    return suites


def test_the_committed_files_are_what_the_command_writes():
    for name, text in files(DOCS / "runs").items():
        assert (DOCS / name).read_text() == text, f"run: python -m edgeless.tools.bench.page (docs/{name} is stale)"


def test_the_committed_page_is_short():
    assert len((DOCS / "performance.md").read_text().splitlines()) <= MOST_LINES


def test_the_page_stays_short_with_every_section():
    text = page(everything())
    assert len(text.splitlines()) <= WITH_EVERY_GRAPH
    assert "No run is committed yet" not in text
    for section in SECTIONS:
        assert f"## {section.heading}\n" in text


def test_every_table_has_as_many_cells_in_each_row():
    pages = (make(everything()) for make in (page, engines_page, parts_page, steps_page))
    for block in "\n\n".join(pages).split("\n\n"):
        if block.startswith("|"):
            assert len({line.count("|") for line in block.splitlines()}) == 1


def test_a_missing_run_leaves_the_command_that_makes_it():
    text = page({})
    for section in SECTIONS:
        assert (section.command in text) == (section.suite in {*SUITES, DEMO})
    assert "| --- |" not in text


def test_every_section_is_of_a_suite_that_the_command_has():
    assert {section.suite for section in (*SECTIONS, *PARTS, *SMALL_GRAPHS, ENGINES)} - set(SUITES) <= {DEMO, "shapes"}


def test_the_page_says_what_each_run_was_measured_on():
    text = page({"cpu": Suite([SETTING], [row("cora", "gat", "edgeless-pyg")])})
    assert (
        "- 2026-11-22, a processor, 2 cores; CPU, 2 threads, AVX2; edgeless 0.1.0 (abc1234), torch 2.13.0, PyG 2.8.1: "
        "`python -m edgeless bench --suite cpu --data DIR`"
    ) in text


def test_the_ratio_is_of_the_same_framework():
    times = {"pyg": 30.0, "dgl": 24.0, "edgeless-pyg": 10.0, "edgeless-dgl": 12.0}
    rows = [row("cora", "gat", peer, ms=ms) for peer, ms in times.items()]
    rows.append(row("cora", "gat", "pyg-compiled", ms=None, failed="out of memory"))
    text = page({"cpu": Suite([SETTING], rows)})
    assert "| cora GATConv | 30.0 (3.00), 40 MB | — | 24.0 (2.00), 40 MB | 10.0, 40 MB | 12.0, 40 MB |" in text


def test_the_mean_is_geometric_and_names_the_least():
    rows = [
        row(graph, "gatv2_H2_D64", "edgeless", mode, ms=ms, best_peer={"peer": "x", "ms": 8.0, "peak_mb": None})
        for graph, ms in (("hm", 1.0), ("pokec", 4.0))
        for mode in ("forward", "forward_backward")
    ]
    assert "**4.00** (2.00, pokec)<br>**4.00** (2.00, pokec)" in page({"h200": Suite([SETTING], rows)})
    assert geometric_mean([8.0, 2.0]) == pytest.approx(4.0)


def test_a_layer_on_the_gpu_is_held_against_the_fastest_alternative():
    best = {"best_peer": {"peer": "DGL", "ms": 9.0, "peak_mb": None}}
    rows = [
        row("arxiv", "gat", "pyg", ms=12.0),
        row("arxiv", "gat", "edgeless-pyg", ms=2.0, **best),
        row("arxiv", "gat", "edgeless-pyg-graphed", ms=1.0),
    ]
    assert "2.00, 40 MB (4.50, 9.00)" in page({"h200-layers": Suite([SETTING], rows)})


def test_a_layer_over_relations_that_was_left_out_has_its_reason():
    rows = [
        row("fb15k", "rgat", "pyg", mode, ms=None, failed="left out: needs about 30 GB")
        for mode in ("forward", "forward_backward")
    ]
    rows += [row("fb15k", "rgat", "edgeless-pyg", mode) for mode in ("forward", "forward_backward")]
    text = page({"relations": Suite([SETTING], rows)})
    assert "| fb15k RGATConv | — (left out: needs about 30 GB) | — | 10.0, 40 MB | — |" in text


def test_a_layer_over_relations_is_held_against_the_fastest_by_its_replay():
    best = {"best_peer": {"peer": "DGL's way", "ms": 9.0, "peak_mb": None}}
    rows = [
        row("aifb", "rgcn", "pyg", ms=12.0),
        row("aifb", "rgcn", "edgeless-pyg", ms=2.0, **best),
        row("aifb", "rgcn", "edgeless-pyg-graphed", ms=1.0, **best),
    ]
    assert "2.00 / 1.00 (9.00), 40 MB" in page({"h200-relations": Suite([SETTING], rows)})


def test_the_chosen_engine_is_held_against_the_fastest():
    """Of a graph in both orders; where blocks never pay, where they do, and where one engine alone was timed."""
    blocks = {"build_ms": 30.0, "reuse": 3.2, "blocks_bytes": 1}
    cells = [
        row("hm", "spmm_none_F512", "edgeless-rowsplit", ms=4.0),
        row("hm", "spmm_none_F512", "edgeless-wsb", ms=5.0, **blocks),
        row("hm", "spmm_none_F512", "edgeless-auto", ms=4.1, engine="rowsplit"),
        row("hm:community", "spmm_none_F512", "edgeless-rowsplit", ms=4.0),
        row("hm:community", "spmm_none_F512", "edgeless-wsb", ms=2.0, **blocks),
        row("hm:community", "spmm_none_F512", "edgeless-auto", ms=3.0, engine="rowsplit"),
        row("hm", "min_F512", "edgeless-wsb", failed="wsb: it computes sums and attention only"),
        row("hm", "min_F512", "edgeless-auto", ms=3.0, engine="rowsplit"),
    ]
    shuffled, ordered = engines.choices(cells)
    assert (shuffled.fastest, shuffled.uses) == ("rowsplit", None) and abs(shuffled.slowdown - 1.025) < 1e-9
    assert (ordered.fastest, ordered.engine, ordered.slowdown) == ("wsb", "rowsplit", 1.5)
    assert ordered.uses == 30  # two directions of 30 ms, 2 ms a call
    text = engines_page({"engines": Suite([SETTING], cells)})
    assert "| hm | rowsplit 1.02 / wsb 1.50 | — / — |\n| worst | 1.50 | — |" in text


def test_a_generated_layer_is_held_against_the_faster_of_eager_and_compiled():
    """float32 of width 128 and 64: forward 2 times and, replayed, 4 times; the group's mean is geometric."""
    rows = []
    for name, width, ms in (("resgated", 128, 8.0), ("film", 128, 2.0), ("film", 64, None)):
        for mode in ("forward", "forward_backward"):
            peers = {"pyg": 30.0, "pyg-compiled": 16.0, "edgeless-pyg": ms, "edgeless-pyg-graphed": ms and ms / 2}
            for peer, taken in peers.items():
                cell = row("hm", name, peer, mode, ms=taken, failed=None if taken else "out of memory")
                cell["case"]["features"] = width
                cell["peak_bytes"] = {"pyg": 90, "pyg-compiled": 60, "edgeless-pyg": 20}.get(peer)
                rows.append(cell)
    columns, cells = generated.table(Suite([SETTING], rows))
    assert columns == ["fp32 128, fp32 64", "hm"]
    assert cells == [["**pointwise sums and means**", "**4 / 4; 8 / 8**, 3 (4 resgated)<br>**— / —**"]]
    of_one = Suite([SETTING], [cell for cell in rows if cell["case"]["features"] == 128])
    columns, cells = generated.table(of_one)
    assert columns == ["fp32 128", "hm"]
    assert cells == [
        [
            "**pointwise sums and means**<br>ResGatedGraphConv<br>FiLMConv",
            "**4 / 4; 8 / 8**, 3 (4 resgated)<br>8 / 8 (2 / 2; 4 / 4, 3)<br>2 / 2 (8 / 8; 16 / 16, 3)",
        ]
    ]


def test_the_worst_shape_is_told():
    """In float32 a row of H1 D16 has 64 bytes and counts 128; H2 D32 has 256 and counts 320."""
    rows = [
        row("avazu", name, "edgeless", mode, ms=ms)
        for name, ms in (("gat_H1_D16", 2.56), ("gat_H2_D32", 3.2))
        for mode in ("forward", "forward_backward")
    ]
    columns, cells = shapes.worst_of_each_case(Suite([SETTING], rows))
    assert columns == ["", "avazu"]
    assert cells == [["gat fp32", "2.00 (H1 D16)<br>2.00 (H1 D16)"]]


def test_runs_in_parts_are_one_suite_and_no_cell_stands_twice(tmp_path):
    write(tmp_path, "a.json", "cpu", [row("cora", "gat", "pyg")])
    write(tmp_path, "b.json", "cpu", [row("arxiv", "gat", "pyg")])
    assert read(tmp_path)["cpu"].graphs() == ["cora", "arxiv"]
    write(tmp_path, "c.json", "cpu", [row("cora", "gat", "pyg")])
    with pytest.raises(ValueError, match=r"c\.json and a\.json both hold cora gat"):
        read(tmp_path)


def test_an_epoch_on_parts_is_held_against_one_gpu():
    alone = epoch("pokec", "gatv2", "fp32", "edgeless", "", ms=60.0, rank_mb=400.0)
    carried = [
        epoch("pokec", "gatv2", "fp32", "edgeless", c, ms=ms) for c, ms in (("all_to_all", 40.0), ("symmetric", 30.0))
    ]
    text = parts_page({"h200-scale-out": Suite([SETTING], [alone, *carried])})
    assert "| pokec, gatv2 fp32 | 60.0, 400 MB | 40.0 (1.50) | 30.0 (2.00) |  | 0.75, 0.75 | 1.0e-06 |" in text


def test_no_epoch_stands_twice(tmp_path):
    for name in ("a.json", "b.json"):
        write(tmp_path, name, "h200-scale-out", [epoch("pokec", "gatv2", "fp32", "edgeless", "")])
    with pytest.raises(ValueError, match="both hold pokec gatv2"):
        read(tmp_path)


def test_pictures_for_light_and_dark_pages_show_the_same_figures():
    drawn = picture.files(everything())
    assert set(drawn) == {"picture-light.svg", "picture-dark.svg"}
    plain = list(drawn.values())
    for light, dark in zip(picture.THEMES["light"].bars, picture.THEMES["dark"].bars, strict=True):
        plain[0] = plain[0].replace(f'"{light}"', '"a bar"')
        plain[1] = plain[1].replace(f'"{dark}"', '"a bar"')
    for key in ("text", "quiet"):
        plain[0] = plain[0].replace(getattr(picture.THEMES["light"], key), key)
        plain[1] = plain[1].replace(getattr(picture.THEMES["dark"], key), key)
    assert plain[0] == plain[1]
    assert plain[0].count("10.0<") == plain[0].count("40 MB<") == 2 * len(picture.SHOWN) * len(picture.PEERS)


def test_a_peer_that_was_not_measured_has_no_bar():
    rows = [row("tolokers", layer, peer) for layer in picture.SHOWN for peer in ("pyg", "edgeless-pyg")]
    drawn = picture.files({"cpu": Suite([SETTING], rows)})["picture-light.svg"]
    assert drawn.count("10.0<") == 2 * len(picture.SHOWN)
    assert ">DGL<" not in drawn


def test_a_layer_that_was_not_measured_is_left_out():
    rows = [row("tolokers", "gat", peer) for peer in ("pyg", "edgeless-pyg")]
    suites = {"cpu": Suite([SETTING], [*rows, row("cora", "gatv2", "pyg")])}
    assert "GATv2Conv" not in picture.files(suites)["picture-light.svg"]
    assert "tolokers GATv2Conv" not in page(suites)


def test_no_picture_without_a_run():
    assert picture.files({}) == {}


def test_a_run_says_what_it_was_measured_on(tmp_path, capsys, short_turns):
    file = tmp_path / "run.json"
    options = ["--graph", "toy", "--op", "gat_H1_D8", "--peers", "edgeless", "--device", "cpu", "--no-memory"]
    assert main(["bench", *options, "--rounds", "1", "--data", str(tmp_path), "--json", str(file)]) == 0
    capsys.readouterr()
    content = json.loads(file.read_text())
    written = content["setting"]
    assert written["command"] == (
        "python -m edgeless bench --graph toy --op gat_H1_D8 --peers edgeless --device cpu --no-memory --rounds 1 "
        "--data DIR --json run.json"
    )
    assert str(tmp_path) not in file.read_text()
    assert (written["torch"], written["gpus"]) == (torch.__version__, 0)
    assert (written["torch_geometric"] is None) == (not installed("pyg"))
    assert written["cores"] >= 1
    assert written["cpu"]
    assert [(r["nodes"], r["edges"]) for r in content["results"]] == [(1000, 10_000)] * 2


def test_no_folder_of_the_machine_stands_in_a_command(tmp_path):
    words = ["bench", f"--data={tmp_path}", "--json", f"{tmp_path}/x.json", "--graph", "toy"]
    assert setting.command_line(words) == "python -m edgeless bench --data=DIR --json x.json --graph toy"


def test_training_on_small_graphs_is_held_against_pyg(tmp_path):
    """Of four times as fast and of once as fast with the loader the mean is twice; a peer that failed has no figure."""
    rows = [
        trained("zinc", 128, "gine", "pyg", 8.0, 16.0),
        trained("zinc", 128, "gine", "pyg-compiled", failed="out of memory", step=None, total=None),
        trained("zinc", 128, "gine", "edgeless-pyg-captured", 1.0, 4.0, waste=0.05, peak_mb=60.0),
        trained("qm9", 128, "pna", "pyg", 8.0, 10.0),
        trained("qm9", 128, "pna", "edgeless-pyg-captured", 4.0, 10.0, waste=0.02),
        trained("qm9", 32, "pna", "pyg", 8.0, 10.0),
    ]
    text = steps_page({"small-molecules": Suite([SETTING], rows)})
    assert "| zinc, 128, gine fp32 | 8.00 / 16.0 | — | — | — | 1.00 / 4.00 (8.00 / 4.00) | 1.20 | 5.0 % |" in text
    assert "| qm9, 32, pna fp32 | 8.00 / 10.0 | — | — | — | — | — | — |" in text
    assert "| **128 molecules, geometric mean** |  | — | — | — | **4.00 / 2.00** |  |  |" in text
    assert "One small graph" not in text
    steps = [trained("tiny", None, "gcn", "pyg", 3.0), trained("tiny", None, "gcn", "edgeless-pyg", 2.0)]
    text = steps_page({"small": Suite([SETTING], steps)})
    assert "| tiny, gcn fp32 | 3.00 | — | — | 2.00 (1.50) | — | — |" in text and "Batches of molecules" not in text
    assert "small-graphs-figures.md" not in files(tmp_path)
    for name, part in (("a.json", rows[:3]), ("b.json", rows[3:])):
        write(tmp_path, name, "small-molecules", part)
    assert "| zinc, 128, gine fp32 |" in files(tmp_path)["small-graphs-figures.md"]
    write(tmp_path, "c.json", "small-molecules", rows[:1])
    with pytest.raises(ValueError, match=r"c\.json and a\.json both hold zinc gine"):
        read(tmp_path)

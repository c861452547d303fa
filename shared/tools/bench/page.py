"""``python -m edgeless.tools.bench.page [docs]`` writes docs/performance.md, docs/engines.md and pictures.

They are generated from docs/runs. Every figure is the median of one run, from the file that the command shown with it
wrote. A section without a run names the command that measures it.
"""

from __future__ import annotations

import statistics
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from edgeless.tools.cli.console import megabytes, milliseconds
from edgeless.tools.cli.layers import LAYERS
from edgeless.whole_files import whole_file

from . import ddp, engines, generated, picture, scaleout, shapes
from .command import SUITES
from .peers import LAYER_PEERS, ours
from .runs import DEMO, Suite, geometric_mean, read
from .work import MODES

MISSING = "—"
WIDTH = 150  # characters of a line of text
BACKWARD = "forward_backward"

WRITTEN = (
    "<!-- Written by `python -m edgeless.tools.bench.page` from the files in docs/runs: change those, "
    "not this page. -->"
)
HEAD = f"""\
# Performance

{WRITTEN}

Every figure is the median of one run, whose date, machine and command stand above its table. *Stock* is the framework's
own layer; *compiled* is that under torch.compile. Peers run in one process, in turns, and share inputs; peaks are above
the inputs, on the CPU in a process for each peer, and count what is kept of a graph. A *twin* is a synthetic graph with
the counts and the degree skew of a public one (`shared/tools/bench/twins.py`); Cora and tolokers are real. `DIR` is a
folder with `tolokers.npz` and PyG's raw Cora files. Why kernels are as they are stands in
[decisions](decisions/README.md).
"""


@dataclass(frozen=True)
class Section:
    """One table of the page.

    Attributes:
        suite: a suite of the bench command, or :data:`DEMO`.
        heading, text: heading and text above the table.
        table: returns the table's columns and rows.
    """

    suite: str
    heading: str
    text: str
    table: Callable[[Suite], tuple[Sequence[str], list[list[str]]]]

    @property
    def command(self) -> str:
        """The command that measures the run."""
        if self.suite == DEMO:
            return f"python -m edgeless demo --threads 2 --json docs/runs/{DEMO}.json"
        return f"python -m edgeless bench --suite {self.suite} --data DIR --json docs/runs/{self.suite}.json"


def page(suites: dict[str, Suite]) -> str:
    """The whole page, without sections that have neither a run nor a command that measures one."""
    shown = [section for section in SECTIONS if section.suite in {*suites, *SUITES, DEMO}]
    return "\n".join([HEAD, *("\n".join(_section(section, suites.get(section.suite))) for section in shown)])


def engines_page(suites: dict[str, Suite]) -> str:
    """The page with the table of engines, to which docs/choosing.md refers."""
    body = "\n".join(_section(ENGINES, suites.get(ENGINES.suite))).removeprefix(f"## {ENGINES.heading}\n")
    return f"# {ENGINES.heading}\n\n{WRITTEN}\n\n{body}"


def parts_page(suites: dict[str, Suite]) -> str:
    """The page with the figures of several GPUs, to which docs/scale-out.md refers."""
    body = "\n".join("\n".join(_section(section, suites.get(section.suite))) for section in PARTS)
    return f"# Figures of two GPUs\n\n{WRITTEN}\n\n{body}"


def _section(section: Section, suite: Optional[Suite]) -> list[str]:
    lines = [f"## {section.heading}"]
    if suite is None:
        return [*lines, f"No run is committed yet; this makes one: `{section.command}`", ""]
    columns, rows = section.table(suite)
    marks = ["---", *["---:"] * (len(columns) - 1)]
    lines += textwrap.wrap(section.text, WIDTH, break_on_hyphens=False)
    lines += [*(f"- {describe(setting)}" for setting in suite.settings), ""]
    lines += [f"| {' | '.join(cells)} |" for cells in (columns, marks, *rows)]
    return [*lines, ""]


def describe(setting: dict) -> str:
    """One line on a run: date, machine, versions and command."""
    if setting["gpus"]:
        count = "one" if setting["gpus"] == 1 else setting["gpus"]
        machine = f"{count} {setting['device']}, CUDA {setting['cuda']}"
    else:
        machine = f"{setting['cpu']}, {setting['cores']} cores; {setting['device']}"
    versions = [f"edgeless {setting['edgeless']}" + (f" ({setting['commit']})" if setting["commit"] else "")]
    names = {"torch": "torch", "torch_geometric": "PyG", "dgl": "DGL"}
    versions += [f"{name} {setting[package]}" for package, name in names.items() if setting.get(package)]
    return f"{setting['date']}, {machine}; {', '.join(versions)}: `{setting['command']}`"


# Cells ---------------------------------------------------------------------------------------------------------------


def _time(row: Optional[dict]) -> str:
    return MISSING if row is None else milliseconds(row["median_ms"])


def _memory(row: Optional[dict]) -> str:
    return "" if row is None or row["peak_bytes"] is None else f", {megabytes(row['peak_bytes'])}"


def ratio(value: Optional[float]) -> str:
    """A ratio as text: two decimals below 10, one below 100, none above."""
    if value is None:
        return MISSING
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def _over(row: Optional[dict], mine: Optional[dict]) -> Optional[float]:
    return None if row is None or mine is None else row["median_ms"] / mine["median_ms"]


def _class_of(layer: str) -> str:
    return LAYERS[layer].baseline


def _lines(*lines: str) -> str:
    return "<br>".join(lines)


# Tables --------------------------------------------------------------------------------------------------------------


def _demo(suite: Suite) -> tuple[list[str], list[list[str]]]:
    rows = []
    for run in suite.rows:
        stock, fused = run["stock"], run["edgeless"]
        graph = run["title"].partition(";")[0]
        cells = [f"{run['config']['layer']}, {graph}"]
        for side in (stock, fused):
            seconds, accuracy = statistics.median(side["seconds"]), statistics.mean(r["test"] for r in side["runs"])
            cells.append(f"{milliseconds(1e3 * seconds)} ms, {megabytes(side['peak_bytes'])}, {100 * accuracy:.1f} %")
        cells.append(ratio(statistics.median(stock["seconds"]) / statistics.median(fused["seconds"])))
        cells.append(ratio(stock["peak_bytes"] / fused["peak_bytes"]))
        rows.append(cells)
    return ["layers, graph", "stock: epoch, peak, accuracy", "edgeless", "time, times less", "memory, times less"], rows


def _cpu_layers(suite: Suite) -> tuple[list[str], list[list[str]]]:
    peers = ("pyg", "pyg-compiled", "dgl", "edgeless-pyg", "edgeless-dgl")
    rows = []
    for graph in suite.graphs():
        for case in suite.cases():
            found = {peer: suite.find(graph, case, peer, mode=BACKWARD) for peer in peers}
            cells = []
            for peer, row in found.items():
                faster = "" if ours(peer) else _over(row, found[f"edgeless-{LAYER_PEERS[peer][0]}"])
                cells.append(_time(row) + (f" ({ratio(faster)})" if faster else "") + _memory(row))
            if any(found.values()):
                rows.append([f"{graph} {_class_of(case[0])}", *cells])
    return ["", "PyG", "PyG compiled", "DGL", "edgeless (PyG)", "edgeless (DGL)"], rows


def _cpu_sums(suite: Suite) -> tuple[list[str], list[list[str]]]:
    rows = []
    for case in suite.cases():
        cells = []
        for graph in suite.graphs():

            def row_of(peer: str, graph=graph, case=case) -> Optional[dict]:
                return suite.find(graph, case, peer, mode=BACKWARD)

            mine, dgl = row_of("edgeless-pyg"), row_of("edgeless-dgl")
            sparse = [row for row in map(row_of, ("pyg-csr", "pyg-sparsetensor")) if row is not None]
            fastest = min(sparse, key=lambda row: row["median_ms"], default=None)
            others = [_over(row, mine) for row in (row_of("pyg"), row_of("pyg-compiled"), fastest)]
            others.append(_over(row_of("dgl"), dgl))
            cells.append(_lines(f"{_time(mine)}{_memory(mine)}", ", ".join(map(ratio, others))))
        rows.append([_class_of(case[0]), *cells])
    return ["", *suite.graphs()], rows


def _relations(suite: Suite) -> tuple[list[str], list[list[str]]]:
    peers = ("pyg", "dgl", "edgeless-pyg", "edgeless-dgl")
    rows = []
    for graph in suite.graphs():
        for case in suite.cases():

            def figure(peer: str, mode: str, graph=graph, case=case) -> str:
                row = suite.find(graph, case, peer, mode=mode)
                if row is None:
                    reason = suite.why_not(graph, case, peer, mode=mode)
                    return MISSING if reason is None else f"{MISSING} ({reason})"
                mine = None if ours(peer) else suite.find(graph, case, f"edgeless-{LAYER_PEERS[peer][0]}", mode=mode)
                faster = _over(row, mine)
                return _time(row) + (f" ({ratio(faster)})" if faster else "") + _memory(row)

            cells = [_lines(*dict.fromkeys(figure(peer, mode) for mode in MODES)) for peer in peers]
            if any(cell != MISSING for cell in cells):
                rows.append([f"{graph} {_class_of(case[0])}", *cells])
    return ["", "PyG", "DGL", "edgeless (PyG)", "edgeless (DGL)"], rows


def _minibatch(suite: Suite) -> tuple[list[str], list[list[str]]]:
    rows = []
    for case in suite.cases():
        for graph in suite.graphs():
            for framework, name in (("pyg", "PyG"), ("dgl", "DGL")):
                stock, mine = (suite.find(graph, case, peer) for peer in (framework, f"edgeless-{framework}"))
                if stock is None or mine is None:
                    continue
                new = f"{milliseconds(mine['new_graph_ms'])} = {100 * mine['new_graph_ms'] / mine['step_ms']:.0f} %"
                cells = [
                    milliseconds(row[key])
                    for row, key in ((mine, "sampling_ms"), (stock, "step_ms"), (mine, "step_ms"))
                ]
                rows.append([f"{_class_of(case[0])}, {name}", *cells, ratio(stock["step_ms"] / mine["step_ms"]), new])
    return ["", "sampling, ms", "step, stock", "step, edgeless", "times faster", "of which for a new graph"], rows


def _new_graphs(suite: Suite) -> tuple[list[str], list[list[str]]]:
    ours_of = {"pyg": "PyG", "dgl": "DGL"}
    columns = [
        (f, mode) for f in ours_of if any(row["peer"] == f"edgeless-{f}" for row in suite.rows) for mode in MODES
    ]
    rows = []
    means: list[dict[str, Optional[float]]] = [{} for _ in columns]
    for case in suite.cases():
        cells = []
        for (framework, mode), ratios in zip(columns, means, strict=True):
            found = {}
            for graph in suite.graphs():
                stock, mine = (suite.find(graph, case, p, mode=mode) for p in (framework, f"edgeless-{framework}"))
                found[f"{_class_of(case[0])}, {graph}"] = _over(stock, mine)
            ratios.update(found)
            cells.append(" / ".join(map(ratio, found.values())) if any(found.values()) else MISSING)
        rows.append([_class_of(case[0]), *cells])
    rows.append(["geometric mean (least)", *map(_mean_and_least, means)])
    return ["", *(f"{ours_of[framework]}, {mode.replace('_', ' + ')}" for framework, mode in columns)], rows


def _threads(suite: Suite) -> tuple[list[str], list[list[str]]]:
    counts = sorted({row["threads"] for row in suite.rows})
    rows = []
    for case in suite.cases():
        cells = []
        for graph in suite.graphs():
            for mode in MODES:
                found = [suite.find(graph, case, "edgeless", mode=mode, threads=count) for count in counts]
                cells.append(f"{' / '.join(map(_time, found))} = {ratio(_over(found[0], found[-1]))}")
        rows.append([case[0], *cells])
    return ["", *(f"{graph}, {mode.replace('_', ' + ')}" for graph in suite.graphs() for mode in MODES)], rows


def _best(row: Optional[dict]) -> Optional[float]:
    return None if row is None or "best_peer" not in row else row["best_peer"]["ms"] / row["median_ms"]


def _mean_and_least(ratios: dict[str, Optional[float]]) -> str:
    known = {graph: value for graph, value in ratios.items() if value is not None}
    if not known:
        return MISSING
    least = min(known, key=known.get)
    return f"**{ratio(geometric_mean(list(known.values())))}** ({ratio(known[least])}, {least})"


def _aggregation(suite: Suite) -> tuple[list[str], list[list[str]]]:
    graphs = suite.graphs()
    rows = []
    for case in suite.cases():
        found = {mode: {graph: suite.find(graph, case, "edgeless", mode=mode) for graph in graphs} for mode in MODES}
        cells = []
        for graph in graphs:
            forward, backward = (found[mode][graph] for mode in MODES)
            share = ""
            if forward is not None and forward.get("roofline_ms"):
                share = f", {100 * forward['roofline_ms'] / forward['median_ms']:.0f} %"
            cells.append(
                _lines(
                    f"{_time(forward)} ({ratio(_best(forward))}{share})",
                    f"{_time(backward)} ({ratio(_best(backward))}){_memory(backward)}",
                )
            )
        means = [_mean_and_least({graph: _best(row) for graph, row in found[mode].items()}) for mode in MODES]
        rows.append([f"{case[0]} {case[1]}", _lines(*means), *cells])
    return ["", "geometric mean (least)", *graphs], rows


def _gpu_layers(suite: Suite) -> tuple[list[str], list[list[str]]]:
    graphs, dtypes = suite.graphs(), list(dict.fromkeys(dtype for _, dtype in suite.cases()))
    rows = []
    for name in dict.fromkeys(name for name, _ in suite.cases()):
        lines = [_gpu_layer(suite, (name, dtype)) for dtype in dtypes]
        rows.append([_class_of(name), *(_lines(*cells) for cells in zip(*lines, strict=True))])
    return ["", f"geometric mean (least): {', '.join(dtypes)}", *graphs], rows


def _gpu_layer(suite: Suite, case: tuple[str, str]) -> list[str]:
    cells, ratios = [], {}
    for graph in suite.graphs():
        mine, graphed, *stock = (
            suite.find(graph, case, peer, mode=BACKWARD)
            for peer in ("edgeless-pyg", "edgeless-pyg-graphed", "pyg", "pyg-compiled")
        )
        known = [value for value in (*(_over(row, mine) for row in stock), _best(mine)) if value is not None]
        ratios[graph] = least = min(known, default=None)
        replayed = None if least is None or graphed is None else least * _over(mine, graphed)
        cells.append(f"{_time(mine)}{_memory(mine)} ({ratio(least)}, {ratio(replayed)})")
    return [_mean_and_least(ratios), *cells]


def _gpu_relations(suite: Suite) -> tuple[list[str], list[list[str]]]:
    graphs, rows = suite.graphs(), []
    for case in suite.cases():
        lines = [_gpu_relation(suite, case, mode) for mode in MODES]
        rows.append([f"{_class_of(case[0])} {case[1]}", *(_lines(*cells) for cells in zip(*lines, strict=True))])
    return ["", "geometric mean (least)", *graphs], rows


def _gpu_relation(suite: Suite, case: tuple[str, str], mode: str) -> list[str]:
    cells, ratios = [], {}
    for graph in suite.graphs():
        mine, graphed, stock = (
            suite.find(graph, case, peer, mode=mode) for peer in ("edgeless-pyg", "edgeless-pyg-graphed", "pyg")
        )
        quickest = graphed or mine
        known = [value for value in (_over(stock, quickest), quickest and _best(quickest)) if value is not None]
        ratios[graph] = least = min(known, default=None)
        cells.append(f"{_time(mine)} / {_time(graphed)} ({ratio(least)}){_memory(mine)}")
    return [_mean_and_least(ratios), *cells]


def _engines(suite: Suite) -> tuple[list[str], list[list[str]]]:
    found = {(choice.graph, choice.case): choice for choice in engines.choices(suite.rows)}
    rows = []
    for name in dict.fromkeys(graph.partition(":")[0] for graph in suite.graphs()):
        orders = [graph for graph in suite.graphs() if graph.partition(":")[0] == name]
        rows.append([name, *(" / ".join(_chosen(found.get((g, case))) for g in orders) for case in suite.cases())])
    columns = [[cell.slowdown for (_, of), cell in found.items() if of == case] for case in suite.cases()]
    rows.append(["worst", *(ratio(max(column, default=None)) for column in columns)])
    return ["", *(f"{name} {dtype}" for name, dtype in suite.cases())], rows


def _chosen(choice: Optional[engines.Choice]) -> str:
    return MISSING if choice is None else f"{choice.fastest} {ratio(choice.slowdown)}"


_GENERATED = (
    "How many times as long the faster of PyG and PyG compiled takes, forward / forward + backward, and how many times "
    "as large the lesser of their peaks is: geometric means of each kind of message, in brackets the layer that gains "
    "least with its backward"
)
SECTIONS = (
    Section(DEMO, "Training two layers", "Each side in a process of its own; same seed, graph and parameters.", _demo),
    Section(
        "cpu",
        "CPU: whole layers",
        "Forward + backward, ms and peak memory; 128 features in, 4 heads of 32. In brackets: how many times as long "
        "as edgeless in the same framework. DGL's column of TransformerConv is DotGatConv: one projection, not four.",
        _cpu_layers,
    ),
    Section(
        "cpu-sums",
        "CPU: sums and maxima",
        "Forward + backward of edgeless in PyG, ms and peak; below, how many times as long take PyG, PyG compiled, PyG "
        "on a sparse matrix (the faster of torch.sparse and SparseTensor), and DGL against edgeless in DGL "
        '(SAGEConv(pool) for max, GraphConv(norm="none") for GraphConv).',
        _cpu_sums,
    ),
    Section(
        "relations",
        "CPU: layers over relations",
        "Forward, below forward + backward, ms and peak memory; 64 features in, 64 out, one head. In brackets: how "
        "many times as long as edgeless in the same framework, or why a layer was left out. DGL is given sorted edges "
        "and is told so; DGL's column of RGCNConv is RelGraphConv, and it has no RGAT.",
        _relations,
    ),
    Section(
        "generator-cpu",
        "CPU: messages that are generated",
        f"{_GENERATED}; below, ms of each layer with its own ratios.",
        generated.table,
    ),
    Section(
        "minibatch",
        "CPU: mini-batches",
        "Two layers, 128 -> 128 -> 40, 1,024 seeds with 15 and then 10 neighbours: a new graph at every step, which is "
        "forward, backward and Adam.",
        _minibatch,
    ),
    Section(
        "molecules",
        "CPU: batches of small graphs",
        "Three layers, 64 -> 64, on a batch of 1 / 8 / 32 / 64 molecules of 15 to 29 atoms, one thread; a step "
        "brings a new graph. How many times as long stock takes as edgeless in the same framework; DGL has no RGAT.",
        _new_graphs,
    ),
    Section(
        "threads",
        "CPU: threads",
        "Bare attention, ms with 1 / 2 threads; star is one hub with a million in-edges.",
        _threads,
    ),
    Section(
        "h200",
        "H200: bare attention",
        "Forward, ms (times faster than the fastest published kernel of `shared/tools/bench/h200_peers.json`, share of "
        "the plan's roofline); below, forward + backward and its peak.",
        _aggregation,
    ),
    Section(
        "h200-sums",
        "H200: sums and minima",
        'Rows of 512 numbers, as above. "none" adds, "both" weighs by degrees; a minimum\'s gradient goes to one edge.',
        _aggregation,
    ),
    Section(
        "h200-layers",
        "H200: whole layers",
        "Forward + backward, ms and peak (times faster than the fastest of PyG and PyG compiled in that run and of "
        "`shared/tools/bench/h200_peers.json`, and the same of the step replayed from a CUDA graph); float32, below "
        "bfloat16 autocast.",
        _gpu_layers,
    ),
    Section(
        "h200-relations",
        "H200: layers over relations",
        "64 features in, 64 out, one head; ms called eagerly / replayed from a CUDA graph (times that the replay is "
        "faster than the fastest of PyG in that run and of `shared/tools/bench/h200_relations_peers.json`) and peak; "
        "forward, below forward + backward. bf16: features and parameters.",
        _gpu_relations,
    ),
    Section(
        "h200-molecules",
        "H200: batches of small graphs",
        "As on the CPU, with the time from a step's begin until the GPU is done.",
        _new_graphs,
    ),
    Section(
        "generator",
        "H200: messages that are generated",
        f"{_GENERATED}. Behind a semicolon the same of ours replayed from a CUDA graph. GINEConv's and GENConv's edges "
        "have as many features as nodes; bf16: rows of 16 bits under autocast.",
        generated.table,
    ),
    Section(
        "shapes",
        "H200: shapes",
        "Heads from 1 to 16, widths from 4 to 512: the worst time per byte against the best shape of at least as many "
        "bytes a row; below, with the backward.",
        shapes.worst_of_each_case,
    ),
)


ENGINES = Section(
    "engines",
    "Engines on an H200",
    "Forward + backward on synthetic replicas, shuffled / in community order. A cell names the fastest engine of "
    'rowsplit (edge-balanced CSR), wsb (weighted sparse blocks) and cuSPARSE, and the time of `"auto"`\'s choice over '
    "the fastest engine's. Where both are the same engine, the ratio is the noise between two runs.",
    _engines,
)

PARTS = (
    Section(
        "h200-scale-out",
        "Two H200: full batches on parts",
        "Epochs of three layers 128-128-128-40 with Adam, on one GPU and on two, whose nodes are partitioned at "
        "random: half of all neighbours are remote. Ms (times as fast as one GPU) by each carrier of halo rows; "
        "torch.sparse is SAGE in plain torch on the same parts; a rank's peak over one GPU's (all-to-all, symmetric); "
        "error of the gradients, relative to those of one GPU.",
        scaleout.page_table,
    ),
    Section(
        "ddp",
        "Two H200: mini-batches",
        "Two layers; the ms of a step alone and together with the other process, and the fraction of its speed that it "
        "keeps, by what averages gradients; seeds are those of a process, with 15 and 10 neighbours.",
        ddp.page_table,
    ),
)


def write(docs: Path) -> None:
    """Writes the pages and the pictures."""
    for name, text in files(docs / "runs").items():
        with whole_file(docs / name) as file:
            file.write_text(text)


def files(runs: Path) -> dict[str, str]:
    """Name below docs/ -> contents of the file."""
    suites = read(runs)
    return {
        "performance.md": page(suites),
        "engines.md": engines_page(suites),
        "scale-out-figures.md": parts_page(suites),
        **picture.files(suites),
    }


if __name__ == "__main__":
    write(Path(sys.argv[1] if len(sys.argv) > 1 else "docs"))

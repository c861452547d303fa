"""The tables of docs/performance.md: each takes the runs of a suite and returns its columns and rows."""

from __future__ import annotations

import statistics
from typing import Optional

from edgeless.tools.cli.console import megabytes, milliseconds
from edgeless.tools.cli.layers import LAYERS

from . import engines
from .peers import LAYER_PEERS, ours
from .runs import Suite, geometric_mean
from .work import MODES

MISSING = "—"
BACKWARD = "forward_backward"


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


def demo(suite: Suite) -> tuple[list[str], list[list[str]]]:
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


def cpu_layers(suite: Suite) -> tuple[list[str], list[list[str]]]:
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


def cpu_sums(suite: Suite) -> tuple[list[str], list[list[str]]]:
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


def relations(suite: Suite) -> tuple[list[str], list[list[str]]]:
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


def minibatch(suite: Suite) -> tuple[list[str], list[list[str]]]:
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


def new_graphs(suite: Suite) -> tuple[list[str], list[list[str]]]:
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


def threads(suite: Suite) -> tuple[list[str], list[list[str]]]:
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


def aggregation(suite: Suite) -> tuple[list[str], list[list[str]]]:
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


def gpu_layers(suite: Suite) -> tuple[list[str], list[list[str]]]:
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


def gpu_relations(suite: Suite) -> tuple[list[str], list[list[str]]]:
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


def chosen_engines(suite: Suite) -> tuple[list[str], list[list[str]]]:
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

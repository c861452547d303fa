"""Layers on a graph that is new in every step, as a batch of molecules is: three layers share it, ReLU between them.

Inference is the forward without gradients, training the forward and the gradients of parameters and features. The graph
object of a step is made before its time is taken, for every peer alike; all that a layer derives from it is counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import Tensor

import edgeless
from edgeless.tools import timing
from edgeless.tools.cli.console import milliseconds, plus_minus, print_table, times
from edgeless.tools.cli.devices import describe_device, installed
from edgeless.tools.cli.layers import LAYERS, call_layer, make_input, make_layer
from edgeless.tools.cli.relations import TypedInput, renewed_graph
from edgeless.tools.timing import Timing, clock_of, in_a_line

from .graphs import BenchGraph
from .peers import LAYER_PEERS, ours, wanted_of
from .work import Case

PEERS = ("pyg", "edgeless-pyg", "dgl", "edgeless-dgl")
DEPTH = 3
WARMUP = 3  # steps of a turn that are not timed: another peer ran last


@dataclass
class Step:
    """One peer's figures for one mode: the median of all steps, and their spread (:class:`Timing`)."""

    graph: str
    case: Case
    peer: str
    mode: str
    threads: Optional[int]
    failed: Optional[str] = None
    median_ms: Optional[float] = None
    spread: Optional[float] = None
    runs: int = 0


def peers_of(wanted: Optional[Sequence[str]]) -> list[str]:
    """The wanted peers of this benchmark, or all of them."""
    return wanted_of("--new-graphs", wanted, PEERS)


class Net(torch.nn.Module):
    """Three layers of one kind and width."""

    def __init__(self, case: Case, framework: str, side: str, relations):
        super().__init__()
        self.framework = framework
        width = case.heads * case.channels
        sizes = [(features, case.heads, case.channels) for features in (case.features, *[width] * (DEPTH - 1))]
        layers = [make_layer(case.name, framework, side, *size, relations=relations) for size in sizes]
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, x: Tensor, graph: Any) -> Tensor:
        """``[N, heads * channels]``"""
        for layer in self.layers:
            x = call_layer(self.framework, layer, x, graph).relu()
        return x


@dataclass
class Peer:
    """One peer, ready to run on new graphs like ``graph``."""

    net: Net
    x: Tensor
    graph: Any
    fused: bool

    def renewed(self) -> Any:
        """A new graph for a step."""
        return self.graph.renewed() if isinstance(self.graph, TypedInput) else renewed_graph(self.graph)

    def forward(self, graph: Any) -> Tensor:
        """A step of inference."""
        with torch.no_grad(), self._backend():
            return self.net(self.x, graph)

    def forward_backward(self, graph: Any) -> Tensor:
        """A step of training without its optimiser, with new gradients."""
        for tensor in (self.x, *self.net.parameters()):
            tensor.grad = None
        with self._backend():
            loss = self.net(self.x, graph).square().mean()
            loss.backward()
        return loss.detach()

    def _backend(self):
        # edgeless may not fall back, so that no upstream layer is timed in its row.
        return edgeless.backend("fused" if self.fused else "auto")


def why_not(case: Case, peer: str, device: torch.device) -> Optional[str]:
    """The reason why a peer cannot run a case here, or None."""
    framework = LAYER_PEERS[peer][0]
    if getattr(LAYERS[case.name], framework) is None:
        return "the framework has no such layer"
    if not installed(framework):
        return f"needs {framework}: pip install 'edgeless[{framework}]'"
    if framework == "dgl" and device.type == "cuda":
        import dgl

        try:
            dgl.graph(([0], [0])).to(device)
        except dgl.DGLError:
            return "DGL is built for the CPU only"
    return None


def build(case: Case, peer: str, graph: BenchGraph) -> Peer:
    """Sets up one peer on random features and parameters, the same for every peer of a framework."""
    framework, side, _ = LAYER_PEERS[peer]
    device = graph.edge_index.device
    relations = None if LAYERS[case.name].types is None else graph.relations
    torch.manual_seed(0)
    x = torch.randn(graph.num_nodes, case.features).to(device).requires_grad_()
    torch.manual_seed(0)
    net = Net(case, framework, side, relations).to(device)
    return Peer(net, x, make_input(case.name, framework, graph.edge_index, graph.num_nodes, relations), ours(peer))


def measure(
    graph: BenchGraph, case: Case, wanted: Optional[Sequence[str]], modes: Sequence[str], rounds: int
) -> list[Step]:
    """Times all peers in turns. A peer that cannot run has a reason in place of figures."""
    device, names = graph.edge_index.device, peers_of(wanted)
    failed = {name: reason for name in names if (reason := why_not(case, name, device)) is not None}
    peers = {name: build(case, name, graph) for name in names if name not in failed}
    threads = torch.get_num_threads() if device.type == "cpu" else None
    found = {(name, mode): Timing() for mode in modes for name in peers}
    for _ in range(rounds):
        for (name, mode), taken in found.items():
            if name in failed:
                continue
            try:
                taken.runs += _turn(peers[name], mode, clock_of(device))
            except Exception as error:  # a failing peer must not stop the measurement of the others
                failed[name] = in_a_line(error)
    steps = []
    for mode in modes:
        for name in names:
            step = Step(graph.name, case, name, mode, threads, failed.get(name))
            if step.failed is None:
                taken = found[name, mode]
                step.median_ms, step.spread, step.runs = taken.median, taken.spread, len(taken.runs)
            steps.append(step)
    return steps


def _turn(peer: Peer, mode: str, clock: Callable[[], float]) -> list[float]:
    step = getattr(peer, mode)
    for _ in range(WARMUP):
        step(peer.renewed())
    runs, begin = [], time.perf_counter()
    while not runs or time.perf_counter() - begin < timing.LEAST_SECONDS:
        graph = peer.renewed()
        start = clock()
        step(graph)
        runs.append(clock() - start)
    return runs


def print_steps(graph: BenchGraph, case: Case, steps: list[Step], device: torch.device) -> None:
    """Prints one row per peer and mode."""
    figures = {(step.peer, step.mode): step for step in steps if step.failed is None}
    rows = []
    for (peer, mode), step in figures.items():
        mate = None if ours(peer) else figures.get((f"edgeless-{peer}", mode))
        rows.append(
            [
                peer,
                mode.replace("_", " + "),
                milliseconds(step.median_ms),
                plus_minus(f"{100 * step.spread:.0f} %"),
                "" if mate is None else times(step.median_ms / mate.median_ms),
            ]
        )
    print()
    print_table(
        f"{graph.name}: {graph.num_nodes:,} nodes, {graph.num_edges:,} edges, new in every step; {DEPTH} layers of "
        f"{case.name}, {case.features} -> {case.heads} x {case.channels}; {describe_device(device)}",
        ["peer", "", "ms", "spread", "edgeless is faster by"],
        rows,
        [f"{peer}: {reason}" for peer, reason in {s.peer: s.failed for s in steps if s.failed is not None}.items()],
    )

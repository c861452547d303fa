"""Whole training steps on small graphs: loss, backward and Adam, on batches of molecules or on one small graph.

Molecules are made here, with numbers of atoms and widths of features as in three well-known data sets. Every step has a
new batch. Its time is taken twice: from a batch that is on the device, and with the loader, padding and copies. The
captured peer has padded batches, made on the device (:class:`edgeless.pyg.loader.PaddedLoader`), and so has
``pyg-reduce-overhead``, PyG's model compiled with CUDA graphs, which need repeating sizes; its batch norms are the
upstream ones, which include the padding. The other peers have batches of PyG's loader. In bfloat16 the forward runs
under autocast.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

import edgeless
from edgeless import padding
from edgeless.tools.cli.console import milliseconds, plus_minus, print_table, times
from edgeless.tools.cli.devices import UsageError, describe_device, installed
from edgeless.tools.timing import Timing, clock_of, in_a_line

from .graphs import BenchGraph
from .peers import wanted_of

PEERS = ("pyg", "pyg-compiled", "pyg-reduce-overhead", "edgeless-pyg", "edgeless-pyg-captured")
WIDTH, BONDS, DEPTH, CLASSES = 64, 16, 4, 7
ON_MOLECULES = ("gine", "gatv2", "pna", "gps")
ON_A_GRAPH = ("gcn", "gat", "gatv2", "transformer", "gin")
TURN = 20  # timed batches of a peer's turn
WARMUP = 60  # steps before the first turn: batches of every size have to be recorded
_EPOCH = 40  # batches per data set, so at most 20,480 molecules with batches of 512


class Molecules(NamedTuple):
    """The mean and the deviation of the number of atoms, and the number of features of an atom."""

    mean: float
    spread: float
    features: int


DATASETS = {
    "zinc": Molecules(23.2, 4.5, 28),
    "qm9": Molecules(18.0, 2.9, 11),
    "molhiv": Molecules(25.5, 12.1, 9),
}


@dataclass
class Step:
    """One peer's figures: medians in milliseconds, and their spread (:class:`Timing`).

    Attributes:
        step_ms: forward, loss, backward and optimizer for a batch that is on the device.
        total_ms: the same with the loader and the copy to the device.
        why: a captured peer's reasons for steps that were not replayed.
    """

    graph: str
    batch_size: Optional[int]
    model: str
    peer: str
    dtype: str = "fp32"
    failed: Optional[str] = None
    step_ms: Optional[float] = None
    total_ms: Optional[float] = None
    spread: Optional[float] = None
    peak_mb: Optional[float] = None
    waste: Optional[float] = None
    why: Optional[str] = None


def peers_of(wanted: Optional[Sequence[str]]) -> list[str]:
    """The peers that were named, or all of them.

    Raises:
        UsageError: none of them trains, or PyG is not installed.
    """
    chosen = wanted_of("--training", wanted, PEERS)
    if not installed("pyg"):
        raise UsageError("--training needs PyG: pip install 'edgeless[pyg]'")
    return chosen


def check(models: Sequence[str], graphs: Sequence[str], dtypes: Sequence[str] = ()) -> None:
    """Raises UsageError where a model does not train on a graph, or not in a dtype."""
    for dtype in dtypes:
        if dtype not in ("fp32", "bf16"):
            raise UsageError(f"--dtype {dtype}: for --training there are fp32 and bf16")
    for graph in graphs:
        known = ON_MOLECULES if graph in DATASETS else ON_A_GRAPH
        for model in models:
            if model not in known:
                raise UsageError(f"--training {model}: on {graph} there are {', '.join(known)}")


def molecules(name: str, count: int) -> list[Any]:
    """Chains of atoms with a ring of six for every eighth, bonds in both directions, and random features."""
    from torch_geometric.data import Data

    like, draw, found = DATASETS[name], torch.Generator().manual_seed(0), []
    sizes = (like.mean + like.spread * torch.randn(count, generator=draw)).round().clamp(min=4).int().tolist()
    for number in sizes:
        atoms = torch.arange(number)
        rings = atoms[:-5:8]
        one_way = torch.cat((torch.stack((atoms[:-1], atoms[1:])), torch.stack((rings, rings + 5))), 1)
        edge_index = torch.cat((one_way, one_way.flip(0)), 1)
        x = torch.randn(number, like.features, generator=draw)
        edge_attr = torch.randn(one_way.size(1), BONDS, generator=draw).repeat(2, 1)
        found.append(Data(x=x, edge_index=edge_index, edge_attr=edge_attr, y=torch.randn(1, generator=draw)))
    return found


class OnMolecules(torch.nn.Module):
    """Four layers with batch norms, the mean over atoms, and a linear map."""

    def __init__(self, model: str, features: int):
        super().__init__()
        from torch_geometric import nn

        def mlp() -> torch.nn.Module:
            return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH))

        degrees = torch.tensor([0, 100, 700, 150, 50])
        make: dict[str, Callable[[], torch.nn.Module]] = {
            "gine": lambda: nn.GINEConv(mlp(), edge_dim=BONDS),
            "gatv2": lambda: nn.GATv2Conv(WIDTH, WIDTH // 4, heads=4, edge_dim=BONDS, add_self_loops=False),
            "pna": lambda: nn.PNAConv(
                WIDTH,
                WIDTH,
                ["mean", "min", "max", "std"],
                ["identity", "amplification", "attenuation"],
                degrees,
                edge_dim=BONDS,
            ),
            "gps": lambda: nn.GPSConv(WIDTH, nn.GINEConv(mlp(), edge_dim=BONDS), heads=4),
        }
        self.model, self.pool = model, nn.global_mean_pool
        self.begin = torch.nn.Linear(features, WIDTH)
        self.layers = torch.nn.ModuleList([make[model]() for _ in range(DEPTH)])
        self.norms = torch.nn.ModuleList([torch.nn.BatchNorm1d(WIDTH) for _ in range(DEPTH)])
        self.end = torch.nn.Linear(WIDTH, 1)

    def forward(self, batch: Any) -> Tensor:
        """``[num_graphs]``"""
        x = self.begin(batch.x)
        for layer, norm in zip(self.layers, self.norms):
            if self.model == "gps":
                x = layer(x, batch.edge_index, batch.batch, edge_attr=batch.edge_attr)
            else:
                x = layer(x, batch.edge_index, edge_attr=batch.edge_attr)
            x = norm(x).relu()
        return self.end(self.pool(x, batch.batch, batch.num_graphs)).flatten()


class OnAGraph(torch.nn.Module):
    """Two layers with dropout."""

    def __init__(self, model: str, features: int):
        super().__init__()
        from torch_geometric import nn

        make: dict[str, Callable[[int, int], torch.nn.Module]] = {
            "gcn": nn.GCNConv,
            "gat": lambda width, out: nn.GATConv(width, *_heads(out)),
            "gatv2": lambda width, out: nn.GATv2Conv(width, *_heads(out)),
            "transformer": lambda width, out: nn.TransformerConv(width, *_heads(out)),
            "gin": lambda width, out: nn.GINConv(torch.nn.Linear(width, out)),
        }
        self.first, self.second = make[model](features, WIDTH), make[model](WIDTH, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """``[N, CLASSES]``"""
        x = F.dropout(x, 0.5, self.training)
        x = F.dropout(self.first(x, edge_index).relu(), 0.5, self.training)
        return self.second(x, edge_index)


def _heads(out: int) -> tuple[int, int]:
    """Channels and heads of a layer: eight heads inside, one at the end."""
    return (out // 8, 8) if out == WIDTH else (out, 1)


@dataclass
class Peer:
    """One peer, ready to train."""

    step: Callable[..., Tensor]
    batches: Callable[[], Iterator[Any]]  # iterates forever, over batches on the CPU
    handle: Optional[edgeless.CapturedStep] = None
    sizes: Optional[padding.Sizes] = None

    def why(self) -> Optional[str]:
        """A captured step's reasons for calls that it did not replay, except the first calls of every size."""
        if self.handle is None or self.handle.num_replays:
            return None
        return self.handle.report().replace("\n", ";")


def _of_molecules(peer: str, model: str, name: str, batch_size: int, dtype: str, device: torch.device, graphs) -> Peer:
    from torch_geometric.loader import DataLoader

    torch.manual_seed(0)
    net = OnMolecules(model, DATASETS[name].features)
    captures, pads = peer.endswith("captured"), peer.endswith(("captured", "reduce-overhead"))
    if pads:
        from edgeless.pyg.loader import PaddedLoader

        loader = PaddedLoader(graphs, batch_size, shuffle=True, drop_last=True, device=device)
    else:
        loader = DataLoader(graphs, batch_size, shuffle=True, drop_last=True)
    if captures:
        padding.convert_batchnorm(net)
    net, optimizer = _on(peer, net, device)
    called = _compiled(peer, net, dynamic=True)

    def step(batch: Any) -> Tensor:
        optimizer.zero_grad()
        rows = padding.real_rows(batch) if captures else contextlib.nullcontext()
        with rows, _precision(dtype, device):
            errors = (called(batch).float() - batch.y).abs()
        if pads:
            loss = torch.where(batch.graph_mask, errors, 0).sum() / batch.graph_mask.sum()
        else:
            loss = errors.mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    def batches() -> Iterator[Any]:
        while True:
            yield from loader

    return _captured(Peer(step, batches, sizes=getattr(loader, "sizes", None)), captures, net, optimizer)


def _of_a_graph(peer: str, model: str, graph: BenchGraph, dtype: str, device: torch.device) -> Peer:
    torch.manual_seed(0)
    x = torch.randn(graph.num_nodes, 128).to(device)
    labels = torch.randint(CLASSES, (graph.num_nodes,)).to(device)
    net, optimizer = _on(peer, OnAGraph(model, 128), device)
    called = _compiled(peer, net)

    def step(edge_index: Tensor) -> Tensor:
        optimizer.zero_grad()
        with _precision(dtype, device):
            loss = F.cross_entropy(called(x, edge_index).float(), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    def batches() -> Iterator[Any]:
        while True:
            yield graph.edge_index

    return _captured(Peer(step, batches), peer.endswith("captured"), net, optimizer)


def _compiled(peer: str, net: torch.nn.Module, **options: Any) -> Callable[..., Tensor]:
    if peer.endswith("reduce-overhead"):
        return torch.compile(net, mode="reduce-overhead", **options)
    return torch.compile(net, **options) if peer.endswith("compiled") else net


def _precision(dtype: str, device: torch.device) -> contextlib.AbstractContextManager:
    return torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bf16")


def _on(peer: str, net: torch.nn.Module, device: torch.device):
    if peer.startswith("edgeless"):
        edgeless.accelerate(net)
    net = net.to(device)
    return net, torch.optim.Adam(net.parameters(), lr=1e-3)


def _captured(peer: Peer, captures: bool, net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Peer:
    if captures:
        peer.step = peer.handle = edgeless.capture_step(peer.step, model=net, optimizer=optimizer)
    return peer


def measure(
    name: str,
    graph: Optional[BenchGraph],
    model: str,
    batch_size: Optional[int],
    dtype: str,
    wanted: Optional[Sequence[str]],
    device: torch.device,
    rounds: int,
) -> list[Step]:
    """Times all peers in turns. A peer that cannot run has a reason in place of figures.

    Args:
        name: the name of the data.
        graph: the graph of all steps, or None for the molecules of that name, in batches of ``batch_size``.
        dtype: ``"fp32"`` or ``"bf16"``.
    """
    names, failed, peers = peers_of(wanted), {}, {}
    graphs = [] if graph is not None else molecules(name, min(_EPOCH * batch_size, 20_480))
    found = {peer: (Timing(), Timing()) for peer in names}
    peaks: dict[str, float] = {}
    for at in range(rounds):
        for peer in names:
            if peer in failed:
                continue
            try:
                if peer not in peers:
                    made = (
                        _of_molecules(peer, model, name, batch_size, dtype, device, graphs)
                        if graph is None
                        else _of_a_graph(peer, model, graph, dtype, device)
                    )
                    peers[peer] = made, made.batches()
                warmup = WARMUP if device.type == "cuda" and not at else 3
                steps, total, peak = _turn(*peers[peer], device, warmup)
                found[peer][0].runs += steps
                found[peer][1].runs += total
                peaks[peer] = peak
            except Exception as error:  # a failing peer must not stop the measurement of the others
                failed[peer] = in_a_line(error)
    rows = []
    for peer in names:
        row = Step(name, batch_size, model, peer, dtype, failed.get(peer))
        if row.failed is None:
            steps, total = found[peer]
            row.step_ms, row.total_ms, row.spread = steps.median, total.median, total.spread
            row.peak_mb, row.why = peaks[peer], peers[peer][0].why()
            sizes = peers[peer][0].sizes
            row.waste = None if sizes is None else max(sizes.waste)
        rows.append(row)
    return rows


def _turn(peer: Peer, batches: Iterator[Any], device: torch.device, warmup: int):
    """Milliseconds of steps on batches on the device, and with the loader and the copy; and the peak in MB."""
    now = clock_of(device)
    for _ in range(warmup):
        peer.step(next(batches).to(device))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    steps, total = [], []
    for _ in range(TURN):
        begin = now()
        batch = next(batches).to(device)
        start = now()
        peer.step(batch)
        end = now()
        steps.append(end - start)
        total.append(end - begin)
    peak = torch.cuda.max_memory_allocated(device) / 1e6 if device.type == "cuda" else 0.0
    return steps, total, peak


def print_steps(rows: list[Step], device: torch.device) -> None:
    """Prints one row per peer."""
    figures = {row.peer: row for row in rows if row.failed is None}
    stock = figures.get("pyg")
    table = []
    for peer, row in figures.items():
        ratios = (
            ["", ""]
            if stock is None or row is stock
            else [
                times(stock.step_ms / row.step_ms),
                times(stock.total_ms / row.total_ms),
            ]
        )
        table.append(
            [
                peer,
                milliseconds(row.step_ms),
                milliseconds(row.total_ms),
                plus_minus(f"{100 * row.spread:.0f} %"),
                *ratios,
                f"{row.peak_mb:.0f}" if device.type == "cuda" else "",
                "" if row.waste is None else f"{100 * row.waste:.1f} %",
            ]
        )
    first = rows[0]
    of = f"batches of {first.batch_size} molecules as in {first.graph}" if first.batch_size else first.graph
    notes = [f"{row.peer}: {row.failed or row.why}" for row in rows if row.failed or row.why]
    print()
    print_table(
        f"training {first.model} in {first.dtype} on {of}; {describe_device(device)}",
        ["peer", "step, ms", "with loader", "spread", "faster than PyG by", "with loader", "peak, MB", "padding"],
        table,
        notes,
    )

"""Epochs of full-batch training on one process and on the parts of a graph, one part per process.

Three layers (128 features, 128, 128, 40 classes), ReLU, cross entropy on a tenth of the nodes, Adam, DDP. Parts are
random by default: every second row is remote, the worst case. The gradients of parts are compared with those of one
process, and two backwards bit by bit. Every carrier of halo rows is measured. ``torch-csr`` is the
same SAGE in plain torch: CSR products, ``index_select``, ``all_to_all_single`` and ``index_add_``.
"""

from __future__ import annotations

import copy
import statistics
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import edgeless.distributed as ed
from edgeless.choices.backends import backend
from edgeless.graph.handle import Graph
from edgeless.tools.cli.console import megabytes, milliseconds, print_table, times
from edgeless.tools.cli.devices import UsageError, describe_device, require
from edgeless.tools.cli.layers import make_layer
from edgeless.tools.cli.memory import peak_memory

from . import processes
from .graphs import load
from .runs import Suite
from .work import DTYPES

MODELS = ("sage-mean", "gatv2")
WIDTH, CLASSES, HEADS, LABELLED = 128, 40, 4, 0.1


@dataclass
class Epoch:
    """One way to train, medians in milliseconds.

    Attributes:
        carrier: the carrier of halo rows; empty for one process.
        rank_mb: peak of a training step on the rank with the largest, above the inputs of own nodes; the carrier's
            buffers counted.
        halo: halo rows over own rows, on the rank with the largest ratio.
        gradient_error: the error of all parameters' gradients, relative by norm to those of one process.
        same_bits: whether two backwards agree in every bit.
    """

    graph: str
    model: str
    dtype: str
    way: str
    carrier: str
    processes: int
    epoch_ms: float
    spread: float
    rank_mb: float
    halo: float
    gradient_error: Optional[float]
    same_bits: bool


class Net(nn.Module):
    """Three layers of one kind."""

    def __init__(self, way: str, model: str):
        super().__init__()
        sizes = ((WIDTH, WIDTH), (WIDTH, WIDTH), (WIDTH, CLASSES))
        if way == "torch-csr":
            layers = [CsrSage(*size) for size in sizes]
        else:
            layers = [make_layer(model, "pyg", "edgeless", wide, HEADS, out // HEADS) for wide, out in sizes]
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, graph) -> Tensor:
        *inner, last = self.layers
        for layer in inner:
            x = layer(x, graph).relu()
        return last(x, graph)


# Plain torch ---------------------------------------------------------------------------------------------------------


class CsrSage(nn.Module):
    """SAGE by products with torch's CSR matrices, over own and remote rows."""

    def __init__(self, features: int, out: int):
        super().__init__()
        self.lin_l, self.lin_r = nn.Linear(features, out), nn.Linear(features, out, bias=False)

    def forward(self, x: Tensor, graph: CsrPart) -> Tensor:
        return self.lin_l(_Product.apply(_Remote.apply(x, graph), graph)) + self.lin_r(x)


class CsrPart:
    """The matrix of means ``[n, n + h]``, its transpose, and the rows to send."""

    def __init__(self, graph, dtype: torch.dtype):
        local = graph.local if isinstance(graph, ed.DistGraph) else graph
        self.halo = graph.halo if isinstance(graph, ed.DistGraph) else None
        src, dst = local.edge_index()
        values = local.in_degrees().to(dtype).reciprocal()[dst]
        size = (local.num_dst, local.num_src)
        warnings.filterwarnings("ignore", "Sparse", UserWarning)  # torch's warning that its CSR support is beta
        self.matrix = torch.sparse_coo_tensor(torch.stack((dst, src)), values, size).to_sparse_csr()
        self.transpose = torch.sparse_coo_tensor(torch.stack((src, dst)), values, size[::-1]).to_sparse_csr()


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, graph):
        ctx.graph = graph
        return graph.matrix @ x

    @staticmethod
    def backward(ctx, grad):
        return ctx.graph.transpose @ grad, None


class _Remote(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, graph):
        ctx.halo = halo = graph.halo
        if halo is None:
            return x.view_as(x)
        received = x.new_empty(halo.num_halo, x.size(1))
        dist.all_to_all_single(received, x.index_select(0, halo.sent), halo.num_received, halo.num_sent)
        return torch.cat((x, received))

    @staticmethod
    def backward(ctx, grad):
        halo = ctx.halo
        if halo is None:
            return grad, None
        returned = grad.new_empty(halo.sent.numel(), grad.size(1))
        dist.all_to_all_single(returned, grad[halo.num_own :].contiguous(), halo.num_sent, halo.num_received)
        return grad[: halo.num_own].clone().index_add_(0, halo.sent, returned), None


# Measuring -----------------------------------------------------------------------------------------------------------


def check(models, parts: int, device: torch.device, carriers=()) -> None:
    """Raises UsageError for a configuration that cannot be measured."""
    require("pyg")
    if unknown := [name for name in models if name not in MODELS]:
        raise UsageError(f"--scale-out {' '.join(unknown)}: there are {', '.join(MODELS)}")
    if device.type == "cuda" and torch.cuda.device_count() < parts:
        raise UsageError(f"--parts {parts}: needs as many GPUs, and torch sees {torch.cuda.device_count()}")
    if "symmetric" in carriers and device.type != "cuda":
        raise UsageError(f"--carrier symmetric: needs GPUs, and the device is {device.type}")


def measure(config: dict) -> list[Epoch]:
    """Trains on one process, then on ``config["parts"]`` ones.

    Args:
        config: graph, data (folder or None), device ("cpu" or "cuda"), models, dtypes, parts, method, carriers, rounds,
            threads.
    """
    found: list[Epoch] = []
    with tempfile.TemporaryDirectory() as folder:
        for size in dict.fromkeys((1, config["parts"])):
            found += processes.run(_work, size, config, folder)
    return found


def _work(rank: int, size: int, device: torch.device, config: dict, folder: str):
    ways = [("edgeless", model) for model in config["models"]]
    ways += [("torch-csr", model) for model in config["models"] if model == "sage-mean"]
    for turn, (graph, data) in enumerate(_inputs(rank, size, Path(folder) / "parts", config, device)):
        for dtype in config["dtypes"]:
            for way, model in ways:
                if way == "torch-csr" and (turn or dtype != "fp32" and device.type == "cpu"):
                    continue  # torch-csr has one carrier, and no such product on the CPU
                with backend("fused"):
                    yield _epoch(way, model, dtype, graph, data, size, Path(folder), config, device)


def _inputs(rank: int, size: int, folder: Path, config: dict, device: torch.device):
    """The graph, or this process' part of it for every carrier; features, labels and mask of own nodes."""
    if size > 1 and rank:
        dist.barrier()  # until the parts are written
    else:
        whole = load(config["graph"], config["data"], device)
        draw = torch.Generator().manual_seed(0)
        data = {
            "x": torch.randn(whole.num_nodes, WIDTH, generator=draw),
            "y": torch.randint(CLASSES, (whole.num_nodes,), generator=draw),
            "train": torch.rand(whole.num_nodes, generator=draw) < LABELLED,
        }
        if size == 1:
            graph = Graph.from_edge_index(whole.edge_index, whole.num_nodes, whole.num_nodes)
            yield graph, {name: t.to(device) for name, t in data.items()}
            return
        ed.partition(whole.edge_index, whole.num_nodes, size, folder, method=config["method"], node_data=data)
        del whole, data
        dist.barrier()
    for carrier in config["carriers"]:
        # Otherwise the comparisons between ranks would be timed.
        part = ed.load(folder, device, checked=0, carrier=carrier)
        yield part, part.ndata


def _epoch(way, model, dtype, graph, data, size, folder, config, device) -> Epoch:
    torch.manual_seed(0)
    kind = DTYPES[dtype]
    net = Net(way, model).to(device, kind)
    trained = net
    if size > 1:
        trained = DistributedDataParallel(net, static_graph=True, gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    x, y, train = data["x"].to(kind), data["y"], data["train"]
    walked = CsrPart(graph, kind) if way == "torch-csr" else graph

    def backward() -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(trained(x, walked).float(), y, reduction="none")
        (ed.mean(loss, train, graph) if size > 1 else loss[train].mean()).backward()

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    gradients = []
    for _ in range(2):
        backward()
        gradients.append([copy.deepcopy(p.grad) for p in net.parameters()])
    same = all(map(torch.equal, *gradients))
    error = _error(torch.cat([g.double().flatten().cpu() for g in gradients[0]]), folder / f"{way}-{model}-{dtype}.pt")
    seconds = []
    if size > 1:
        graph.halo.forget()  # so that these rows are counted, and only the buffers of this model
    with peak_memory(device) as peak:
        for number in range(2 + config["rounds"]):
            wait()
            if size > 1:
                dist.barrier()
            begun = time.perf_counter()
            backward()
            optimizer.step()
            wait()
            if number >= 2:
                seconds.append(time.perf_counter() - begun)
    halo, carrier, of_ranks = 0.0, "", [(peak.bytes / 1e6, 0.0, same)]
    if size > 1:
        halo, carrier = graph.num_halo / max(graph.num_own, 1), "all_to_all" if way == "torch-csr" else graph.carrier
        of_ranks *= size
        dist.all_gather_object(of_ranks, ((peak.bytes + graph.halo.carrier.bytes) / 1e6, halo, same))
    mb, halos, bits = zip(*of_ranks)
    middle = statistics.median(seconds)
    spread = (max(seconds) - min(seconds)) / middle
    return Epoch(
        config["graph"],
        model,
        dtype,
        way,
        carrier,
        size,
        1e3 * middle,
        spread,
        max(mb),
        max(halos),
        error,
        all(bits),
    )


def _error(gradient: Tensor, file: Path) -> Optional[float]:
    """The error relative to the gradient of one process, which the first run writes to ``file``."""
    if not file.exists():
        torch.save(gradient, file)
        return None
    return float((gradient - torch.load(file)).norm() / torch.load(file).norm())


def page_table(suite: Suite) -> tuple[list[str], list[list[str]]]:
    """The columns and rows of docs/performance.md, one row for each graph, model and dtype."""
    found = {(e["graph"], e["model"], e["dtype"], e["way"], e["carrier"], e["processes"] > 1): e for e in suite.rows}
    rows = []
    for graph, model, dtype in dict.fromkeys(key[:3] for key in found):
        case = (graph, model, dtype)
        alone = found[(*case, "edgeless", "", False)]
        parts = [found.get((*case, "edgeless", carrier, True)) for carrier in ("all_to_all", "symmetric")]
        plain = found.get((*case, "torch-csr", "all_to_all", True))
        cells = [
            "" if e is None else f"{milliseconds(e['epoch_ms'])} ({alone['epoch_ms'] / e['epoch_ms']:.2f})"
            for e in parts
        ]
        measured = [e for e in parts if e is not None]
        rows.append(
            [
                f"{graph}, {model} {dtype}",
                f"{milliseconds(alone['epoch_ms'])}, {megabytes(1e6 * alone['rank_mb'])}",
                *cells,
                "" if plain is None else milliseconds(plain["epoch_ms"]),
                ", ".join(f"{e['rank_mb'] / alone['rank_mb']:.2f}" for e in measured),
                f"{max(e['gradient_error'] for e in measured):.1e}",
            ]
        )
    return ["", "one GPU", "all-to-all", "symmetric", "torch.sparse", "memory", "gradient"], rows


def print_epochs(epochs: list[Epoch], device: torch.device) -> None:
    """One table for a graph."""
    one = {(e.model, e.dtype, e.way): e for e in epochs if e.processes == 1}
    rows = []
    for e in epochs:
        alone = one[e.model, e.dtype, e.way]
        rows.append(
            [
                f"{e.model} {e.dtype}",
                e.way,
                e.carrier,
                str(e.processes),
                milliseconds(e.epoch_ms),
                "" if e is alone else times(alone.epoch_ms / e.epoch_ms),
                megabytes(1e6 * e.rank_mb),
                "" if e is alone else f"{e.rank_mb / max(alone.rank_mb, 1e-9):.2f}",
                f"{e.halo:.2f}",
                "" if e.gradient_error is None else f"{e.gradient_error:.1e}",
                "yes" if e.same_bits else "no",
            ]
        )
    columns = ["", "", "carrier", "processes", "epoch ms", "", "a rank's peak", "of one's", "halo / own", "gradient"]
    columns.append("same bits")
    notes = ["Peaks are above graph, own features and parameters. Gradients: relative to those of one process."]
    print_table(f"{epochs[0].graph}: full-batch epochs on parts; {describe_device(device)}", columns, rows, notes)

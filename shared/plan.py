"""What runs behind a call, and what it costs: engine, kernel, tile, slices, bytes, time at the roof.

The decisions themselves are made in the core (``core_cuda/attention/cuda/plan.h``, ``core_cuda/common/fold.h``,
``core_cuda/reduction/cuda/plan.h``), by pure functions of sizes; this module asks them and counts bytes. No GPU is
needed: the device is described by a :class:`Device`, the one at hand or a named one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Optional

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from . import _C, engines
from .engines import ROWSPLIT, Engine, origin, pick
from .ops.relational import widths

__all__ = ["DEVICES", "Device", "Step", "attention_steps", "extremum_steps", "record", "spmm_step", "table"]


@dataclass(frozen=True)
class Device:
    """What the plans and the roofs depend on.

    Attributes:
        multiprocessors, l2_bytes, shared_bytes, clusters: as CUDA reports them; ``shared_bytes`` is what a block may
            ask for. Zero for a CPU, whose kernels choose by the row alone.
        l2_roof, hbm_roof: bytes per second of a bare gather of random rows whose set fits the L2 (up to
            ``l2_fits`` bytes), and of others; 0 where nobody has measured them.
    """

    name: str
    multiprocessors: int = 0
    l2_bytes: int = 0
    shared_bytes: int = 0
    clusters: bool = False
    l2_roof: float = 0.0
    hbm_roof: float = 0.0
    l2_fits: int = 0

    @classmethod
    def of(cls, device: torch.device) -> Device:
        """The device of a tensor."""
        if device.type != "cuda":
            return cls(f"CPU ({_C.cpu_capability()})")
        found = torch.cuda.get_device_properties(device)
        known = next((d for d in DEVICES.values() if d.name in found.name), cls(found.name))
        return replace(
            known,
            name=found.name,
            multiprocessors=found.multi_processor_count,
            l2_bytes=found.L2_cache_size,
            shared_bytes=getattr(found, "shared_memory_per_block_optin", known.shared_bytes),
            clusters=found.major >= 9,
        )


# The roofs were measured on an H200 with random rows of 128 bytes and more, 2026-11-21.
DEVICES = {
    "h200": Device("H200", 132, 60 * 2**20, 232448, True, 9.3e12, 4.7e12, 45 * 2**20),
    "a100": Device("A100", 108, 40 * 2**20, 166912, False),
}


@dataclass(frozen=True)
class Step:
    """One pass of an op.

    Attributes:
        op: "attention (gatv2)", "spmm", ...
        step: "forward", "by destination", "by source", "gradient", ...
        engine: whose kernels: "rowsplit" for rows that are divided by edges; "pieces" for edges of one type and row;
            "library" for torch's own products; "cusparse".
        kernel: which of them, and its tile.
        slices: how many parts of a row are walked one after the other, each of which may fit the L2.
        bytes: what has to be read and written when every neighbour's row is read once for every edge.
        seconds: those bytes at the roof of the device, None where it is not known.
        refused: why another engine, which :func:`edgeless.engine` or a measurement chose, does not run it.
        origin: where the choice of the engine is from, where there was one: :func:`edgeless.engine`, a measurement and
            when it was taken, or statistics of the graph.
    """

    op: str
    step: str
    engine: str
    kernel: str
    slices: int
    bytes: int
    seconds: Optional[float]
    refused: str = ""
    origin: str = ""


def _seconds(device: Device, num_bytes: int, gathered: int) -> Optional[float]:
    """``num_bytes`` at the roof of a gather from ``gathered`` bytes, those of a slice."""
    roof = device.l2_roof if gathered <= device.l2_fits else device.hbm_roof
    return num_bytes / roof if roof else None


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# Attention -----------------------------------------------------------------------------------------------------------

_PASSES = {"forward": "forward", "by_dst": "by destination", "by_src": "by source"}


def _attention_bytes(which: str, score: str, sizes: dict, key: int, value: int, statistics: int) -> tuple[int, int]:
    """(bytes of a pass, bytes that an edge gathers of features); ``key``, ``value``: bytes of a row, all heads.

    Of gat, ``key`` are the numbers of a node.
    """
    n_dst, n_src, edges, index = sizes["num_dst"], sizes["num_src"], sizes["num_edges"], sizes["index_bytes"]
    shared = score in ("gatv2", "cosine")  # the values are the keys
    if which == "forward":
        edge, row = (value if shared else key + value), key + value + statistics
        return edges * (edge + index) + n_dst * row, edge
    if which == "by_dst":
        edge, row = (value if shared else key + value), 2 * key + 2 * value + statistics
        return edges * (edge + index) + n_dst * row, edge
    edge, row = key + value, (2 * value if shared else 2 * key + 2 * value)
    return edges * (edge + 2 * statistics + index) + n_src * row, edge


def attention_steps(
    score: str,
    dtype: torch.dtype,
    heads: int,
    key_dim: int,
    value_dim: int,
    *,
    num_src: int,
    num_dst: int,
    num_edges: int,
    device: Device,
    passes: Sequence[str] = ("forward",),
    max_degrees: Sequence[int] = (),
    options: bool = False,
    edge_term: bool = False,
    edge_arrays: Optional[Mapping[str, int]] = None,
    index_bytes: int = 4,
    engine: Engine = ROWSPLIT,
    num_gathered: Sequence[int] = (),
) -> list[Step]:
    """The passes of attention.

    Args:
        score: ``"dot"``, ``"gatv2"``, ``"gat"`` or ``"cosine"``.
        dtype: of the rows.
        key_dim, value_dim: of a head; of gat key_dim is 1.
        passes: of ``"forward"``, ``"by_dst"`` and ``"by_src"``, the two passes of the backward.
        max_degrees: the most edges of a row of the CSR, and of the CSC, where that is known.
        options: whether there are dropout, edge features or weights, or returned attention.
        edge_term: whether there are edge features in the score of gatv2.
        edge_arrays: by pass, how many arrays a kernel reads by edge: edge weights, terms of the logits or the values,
            features in the score of gatv2, gradients of returned weights.
        num_gathered: rows that are read for the edges, by destination and by source, where it is not one for each.
    Raises:
        ValueError: a score, pass or dtype that the kernels do not know.
    """
    size = dtype.itemsize
    statistic = heads * (8 if dtype == torch.float64 else 4)
    key = statistic if score == "gat" else heads * key_dim * size
    value = heads * (key_dim if score in ("gatv2", "cosine") else value_dim) * size
    sizes = {"num_src": num_src, "num_dst": num_dst, "num_edges": num_edges, "index_bytes": index_bytes}
    steps = []
    for which in passes:
        by_src = which == "by_src"
        if num_gathered:
            sizes["num_edges"] = num_gathered[by_src]
        num_bytes, edge = _attention_bytes(which, score, sizes, key, value, statistic)
        rows, gathered = (num_src, num_dst) if by_src else (num_dst, num_src)
        slices = 1
        if engine.kernel is not None:
            kernel = engine.kernel
        elif device.multiprocessors:
            at = 1 if by_src else 0
            plan = _C.attention_plan(
                pass_=which, score=score, dtype=_dtype_name(dtype), heads=heads, key_dim=key_dim, value_dim=value_dim,
                num_rows=rows, num_edges=num_edges, num_gathered=gathered,
                max_degree=max_degrees[at] if len(max_degrees) > at else -1, options=options, edge_term=edge_term,
                edge_arrays=(edge_arrays or {}).get(which, 0), wide_index=index_bytes == 8,
                multiprocessors=device.multiprocessors, l2_bytes=device.l2_bytes,
            )  # fmt: skip
            if not plan:
                kernel = "none: rows this wide are refused"
            else:
                slices, merges = plan["slices"], ", merges hubs" * plan["merges"]
                kernel = (
                    f"{plan['kernel']}, {plan['options']}; {plan['lanes']} lanes x {plan['vectors']} vectors of "
                    f"{plan['vector_bytes']} B, {plan['edges']} edges a batch, {plan['heads_per_slice']} heads "
                    f"a slice; {plan['blocks']} blocks ({plan['resident']} resident){merges}"
                )
        else:
            kernel = _C.cpu_capability()
        seconds = _seconds(device, num_bytes, gathered * edge // slices)
        steps.append(Step(f"attention ({score})", _PASSES[which], engine.name, kernel, slices, num_bytes, seconds))
    return steps


# Sums and extrema ----------------------------------------------------------------------------------------------------


def _fold(
    device: Device, row_bytes: int, rows: int, edges: int, gathered: int, max_degree: int, piece: int, result: int,
    narrow_teams: bool,
):  # fmt: skip
    """(description, slices) of a fold of rows of ``row_bytes``."""
    if not device.multiprocessors:
        return _C.cpu_capability(), 1
    plan = _C.fold_plan(
        vectors=-(-row_bytes // 16), vector_bytes=16, num_rows=rows, num_edges=edges, num_gathered=gathered,
        max_degree=max_degree, carry_bytes=piece, carry_budget=max(1 << 20, result // 8), narrow_teams=narrow_teams,
        multiprocessors=device.multiprocessors, l2_bytes=device.l2_bytes,
    )  # fmt: skip
    merges = ", merges hubs" * plan["merges"]
    return f"{plan['lanes']} lanes, slices of {plan['slice_bytes']} B, {plan['blocks']} blocks{merges}", plan["slices"]


def spmm_step(
    dtype: torch.dtype,
    width: int,
    *,
    num_src: int,
    num_dst: int,
    num_edges: int,
    device: Device,
    max_degree: int = -1,
    weight_bytes: int = 0,
    step: str = "forward",
    index_bytes: int = 4,
    engine: Engine = ROWSPLIT,
    num_rows: Optional[int] = None,
) -> Step:
    """A sum of neighbours' rows of ``width`` numbers.

    Args:
        weight_bytes: of what is read for every edge beside its row.
        num_rows: that are read, where it is not one for every edge.
    """
    row = width * dtype.itemsize
    piece = width * (8 if dtype == torch.float64 else 4)
    if engine.kernel is not None:
        kernel, slices = engine.kernel, 1
    else:
        narrow = _C.narrow_sums_pay(
            num_edges=num_edges, num_rows=num_dst, halves=dtype.itemsize == 2, weighted=weight_bytes > 0
        )
        kernel, slices = _fold(device, row, num_dst, num_edges, num_src, max_degree, piece, num_dst * row, narrow)
    if engine.reads_values:
        weight_bytes = dtype.itemsize
    num_rows = num_edges if num_rows is None else num_rows
    num_bytes = num_rows * (row + index_bytes + weight_bytes) + num_dst * row
    seconds = _seconds(device, num_bytes, num_src * row // slices)
    return Step("spmm", step, engine.name, kernel, slices, num_bytes, seconds)


def extremum_steps(
    dtype: torch.dtype,
    width: int,
    *,
    num_src: int,
    num_dst: int,
    num_edges: int,
    device: Device,
    arg_bytes: int = 4,
    shares: bool = False,
    has_transpose: bool = False,
    backward: bool = True,
    max_degrees: Sequence[int] = (),
    index_bytes: int = 4,
) -> list[Step]:
    """A minimum or maximum of neighbours' rows and how its gradient goes back.

    Args:
        arg_bytes: of an argument, 1, 2 or 4.
        shares: whether equal extrema share the gradient.
        has_transpose: whether the backward is given the CSC.
    """
    row = width * dtype.itemsize
    kernel, slices = _fold(
        device, row, num_dst, num_edges, num_src, max_degrees[0] if max_degrees else -1, width * 8, num_dst * row, True
    )
    num_bytes = num_edges * (row + index_bytes) + num_dst * (row + width * arg_bytes)
    seconds = _seconds(device, num_bytes, num_src * row // slices)
    steps = [Step("neighbor_reduce", "forward", "rowsplit", kernel, slices, num_bytes, seconds)]
    if not backward:
        return steps
    engine = "sent" if not device.multiprocessors else _C.gradient_plan(
        dtype=_dtype_name(dtype), arg_bytes=arg_bytes, wide_index=index_bytes == 8, shares=shares,
        has_transpose=has_transpose, num_rows=num_dst, num_columns=num_src, num_edges=num_edges, width=width,
        multiprocessors=device.multiprocessors, shared_bytes=device.shared_bytes, clusters=device.clusters,
    )  # fmt: skip
    num_bytes = num_dst * (row + width * arg_bytes) + num_src * row
    seconds = num_bytes / device.hbm_roof if device.hbm_roof else None
    return [*steps, Step("neighbor_reduce", "gradient", "rowsplit", engine, 1, num_bytes, seconds)]


# A call --------------------------------------------------------------------------------------------------------------


class _Recorder(TorchDispatchMode):
    """Notes the ops of edgeless that run, with their arguments by name."""

    def __init__(self):
        super().__init__()
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace == "edgeless":
            names = [argument.name for argument in func._schema.arguments]
            self.calls.append((func._schema.name.rpartition("::")[2], {**dict(zip(names, args)), **kwargs}))
        return func(*args, **kwargs)


def record(call, inputs: Sequence[Any]) -> list[Step]:
    """Runs ``call()`` and, where gradients are on, its backward, and returns the steps of the ops that ran.

    Args:
        call: gives a tensor, a dictionary of them, or a tuple that begins with either.
        inputs: tensors, and dictionaries, tuples and lists of them (others are ignored), whose gradients the backward
            makes.
    """
    recorder = _Recorder()
    with recorder, engines.tuner.resting():
        out = call()
        outs = [t for t in _tensors_in(out[0] if isinstance(out, (tuple, list)) else out) if t.requires_grad]
        leaves = [t for t in _tensors_in(inputs) if t.requires_grad]
        if leaves and outs:
            torch.autograd.grad(outs, leaves, [torch.ones_like(t) for t in outs], allow_unused=True)
    return [step for name, args in recorder.calls for step in _steps_by_engine(name, args)]


def _steps_by_engine(name: str, args: dict[str, Any]) -> list[Step]:
    """The steps of an op as the engine in force runs them or, where it refuses, with its words."""
    engine, refused = pick(name, args)
    if name == "spmm":
        return [replace(_spmm_of(args, engine), refused=refused, origin=origin(name, args))]
    if name == "sddmm":
        return [replace(_sddmm_of(args, engine), refused=refused)]
    if name in _ATTENTION:
        passes = ["forward"] if name == "attention" else _backward_passes(args)
        asked = origin(name, args)
        return [replace(step, refused=refused, origin=asked) for step in _attention_of(args, passes, engine)]
    return [replace(step, refused=refused) if step.engine in _OURS else step for step in _steps_of(name, args)]


_OURS = ("rowsplit", "pieces")
_ATTENTION = ("attention", "attention_backward", "attention_backward_into")


def _spmm_of(args: dict[str, Any], engine: Engine) -> Step:
    x, weight = args["x"], args.get("weight")
    weight_bytes = 0 if weight is None else weight.size(1) * weight.element_size()
    if args.get("src_scale") is not None:
        weight_bytes += args["src_scale"].element_size()
    if engine.num_rows is not None:
        weight_bytes = 4  # the bits
    return _sum_of(args, x.dtype, x[0].numel() if len(x) else 0, x.size(0), weight_bytes, engine)


def _sddmm_of(args: dict[str, Any], engine: Engine) -> Step:
    dst, src, sizes = args["dst"], args["src"], _graph_sizes(args)
    device, row = sizes["device"], src[0].numel() * src.element_size() if len(src) else 0
    heads = src.size(1) if src.dim() == 3 else 1
    products = sizes["num_edges"] * heads * (8 if src.dtype == torch.float64 else 4)
    num_bytes = sizes["num_edges"] * (row + sizes["index_bytes"]) + dst.numel() * dst.element_size() + products
    kernel = "SDDMM_ALG_DEFAULT" if engine.kernel else "vectors of 16 B" if device.multiprocessors else device.name
    return Step("sddmm", "products", engine.name, kernel, 1, num_bytes, _seconds(device, num_bytes, len(src) * row))


def _tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return [t for item in value for t in _tensors_in(item)]
    return [value] if isinstance(value, Tensor) else []


def _graph_sizes(args: dict[str, Any]) -> dict[str, Any]:
    indptr, indices = args["csr"][:2]
    return {
        "num_dst": indptr.numel() - 1,
        "num_edges": indices.numel(),
        "index_bytes": indptr.element_size(),
        "device": Device.of(indptr.device),
    }


def _attention_of(args: dict[str, Any], passes: Sequence[str], engine: Engine) -> list[Step]:
    dst, value, score = args["dst"], args.get("value"), args["score"]
    rows = value if score == "gat" and value is not None else dst
    scale, features, grad_weights, grad_out = (
        args.get(name) is not None for name in ("edge_scale", "edge_attr", "grad_weights", "grad_out")
    )
    backward = scale + features + grad_weights + (features and grad_out and score == "dot")
    edge_arrays = {"forward": scale + features, "by_dst": backward, "by_src": backward}
    return attention_steps(
        score, rows.dtype, dst.size(1), dst.size(2) if dst.dim() == 3 else 1,
        (args["src"] if value is None else value).size(-1), num_src=args["src"].size(0), passes=passes,
        max_degrees=args.get("max_degrees") or (), options=args.get("dropout", 0) > 0 or backward > 0,
        edge_term=score == "gatv2" and features, edge_arrays=edge_arrays, engine=engine,
        num_gathered=[engine.num_rows(args[side]) if args[side] else 0 for side in ("csr", "csc")]
        if engine.num_rows else (), **_graph_sizes(args),
    )  # fmt: skip


def _backward_passes(args: dict[str, Any]) -> list[str]:
    needs = args.get("needs", [True] * 7)
    wants_dst, wants_src = needs[0] or any(needs[3:]), needs[1] or needs[2]
    return ["by_dst"] * (wants_dst or wants_src) + ["by_src"] * wants_src


def _steps_of(name: str, args: dict[str, Any]) -> list[Step]:
    if name in ("neighbor_reduce", "neighbor_reduce_backward"):
        x, backward = args["x"], name.endswith("backward")
        arg_bytes = args["arg"].element_size() if backward else args["arg_dtype"].itemsize
        steps = extremum_steps(
            x.dtype, x.size(1), num_src=x.size(0), arg_bytes=arg_bytes, shares=args["ties"] != "first",
            has_transpose=bool(args["csc"]), backward=backward, max_degrees=args.get("max_degrees") or (),
            **_graph_sizes(args),
        )  # fmt: skip
        return steps[1:] if backward else steps
    if name in ("project", "project_sum"):
        return [_product_step(name, args)]
    if name in ("relational_sum", "relational_sum_backward"):
        return _relational_steps(name, args)
    if name in _TYPED_STEPS:
        return [_typed_step(name, args)]
    if name == "relational_layer":
        return _layer_steps(args)
    if name == "relational_layer_backward":
        return _layer_steps_back(args)
    if name in ("pair_attention", "pair_attention_backward"):
        return _pair_steps(name, args)
    return []


def _sum_of(
    args: dict[str, Any], dtype: torch.dtype, width: int, num_src: int, weight_bytes: int, engine: Engine = ROWSPLIT
) -> Step:
    max_degree = (args.get("max_degrees") or [-1])[0]
    return spmm_step(
        dtype, width, num_src=num_src, max_degree=max_degree, weight_bytes=weight_bytes, step="sum",
        engine=engine, num_rows=engine.num_rows and engine.num_rows(args["csr"]), **_graph_sizes(args),
    )  # fmt: skip


def _layer_steps(args: dict[str, Any]) -> list[Step]:
    """A layer over relations is its sum, or one for each pair and the sum of these, and the product of its own rows."""
    x, root = args["x"], args.get("root")
    if not args["csr"]:
        steps = _relational_steps("relational_sum", args)
    else:
        pairs, width = args["by_dst"][3].numel(), widths(args["weight"])[1]
        steps = _relational_steps("relational_sum", {**args, "num_dst": pairs})
        steps.append(_sum_of(args, x.dtype, width, pairs, _edge_bytes(args)))
    if root is not None:
        own = x[: args["num_dst"]] if args.get("own") is None else args["own"]
        steps.append(_product_step("project", {"x": own, "weights": [root.t()]}))
    return steps


def _layer_steps_back(args: dict[str, Any]) -> list[Step]:
    grad, x, needs = args["grad"], args["x"], args["needs"][:2]
    steps = []
    if any(needs) and args["csr"]:
        back = {"csr": args["csc"], "max_degrees": (args.get("max_degrees") or [-1])[1:]}
        steps.append(_sum_of(back, x.dtype, grad.size(1), len(grad), _edge_bytes(args)))
    return steps + _relational_steps("relational_sum_backward", {**args, "needs": needs})


def _edge_bytes(args: dict[str, Any]) -> int:
    return 0 if args.get("edge_weight") is None else args["edge_weight"].element_size()


def _relational_steps(name: str, args: dict[str, Any]) -> list[Step]:
    """A sum over relations, or the gradients of its features and weights; each sums the edges of its pieces."""
    x, weight, gathered = args["x"], args["weight"], args["grad"] if name.endswith("backward") else args["x"]
    device, backward = Device.of(x.device), name.endswith("backward")
    needs = args.get("needs") or [True]
    steps = []
    for step, needed in zip(("of features", "of weights") if backward else ("forward",), needs):
        if not needed:
            continue
        type_ptr, piece_rows, ptr, indices, _, parts, *tiles = args["by_src" if backward else "by_dst"]
        pieces, index = piece_rows.numel(), indices.element_size()
        rows = {"forward": args.get("num_dst", 0), "of features": x.size(0), "of weights": 0}[step]
        width = widths(weight)[step == "forward"]
        num_bytes = indices.numel() * (gathered.size(1) * gathered.element_size() + index) + 2 * pieces * index
        num_bytes += rows * width * x.element_size() + weight.numel() * weight.element_size()
        if step == "of weights":
            num_bytes += pieces * x.size(1) * x.element_size()
        kernel = f"{pieces} pieces of {type_ptr.numel() - 1} types"
        if x.device.type == "cpu":
            kernel = f"{_C.cpu_capability()}, {kernel}, {parts.size(0) - 1} parts"
        elif tiles:  # only products are written and read again
            num_bytes += 2 * pieces * width * x.element_size() * (step != "of weights")
            kernel += ", multiplied while their sums are at hand: less to move than products of sources or sums"
        elif ptr.numel():  # what is made for a piece of several edges is written and read again
            num_bytes += 2 * pieces * (x.size(1) + gathered.size(1)) * x.element_size()
        seconds = num_bytes / device.hbm_roof if device.hbm_roof else None
        steps.append(Step("relational_sum", step, "pieces", kernel, 1, num_bytes, seconds))
    return steps


def _pair_steps(name: str, args: dict[str, Any]) -> list[Step]:
    """Attention over pairs: what is made for pairs and for pieces of destinations, and the pass over the edges."""
    x, weight, walks = args["x"], args["weight"], args["walks"]
    device, index = Device.of(x.device), walks[0].element_size()
    types, depth, width = weight.shape
    nodes, pairs, edges, pieces = x.size(0), walks[1].numel(), walks[3].numel(), walks[9].numel()
    size = x.element_size()
    products = pairs * ((depth + width) * size + index) + weight.numel() * size
    numbers = pieces * (depth * size + 4 + index)  # of a piece, made of its node's row or added to that
    ids = index if args.get("dropout") else 0
    edge = width * size + 2 * index + 4 + ids  # a row, where it is, and the piece's number
    if name == "pair_attention":
        steps = {
            "products of pairs": products,
            "queries of pieces": numbers,
            "forward": edges * edge + nodes * (width * size + 4),
        }
    else:
        of_x, of_weight = args["needs"][0], any(args["needs"][1:3])
        steps = {
            "statistics of rows": nodes * (2 * width * size + 8),
            "by pair": edges * (edge + 12) + 2 * pairs * width * size,
            "of features": (products + pairs * depth * size + numbers + nodes * depth * size) * of_x,
            "of weights": (products + numbers) * of_weight,
        }
    kernel = f"{pairs} pairs, {pieces} pieces of {types} types"
    return [
        Step("pair_attention", step, "pieces", kernel, 1, count, count / device.hbm_roof if device.hbm_roof else None)
        for step, count in steps.items()
        if count
    ]


def _product_step(name: str, args: dict[str, Any]) -> Step:
    xs = args["xs"] if name == "project_sum" else [args["x"]]
    device = Device.of(xs[0].device)
    results = sum(w.size(0) for w in args["weights"]) if name == "project" else args["weights"][0].size(0)
    num_bytes = sum(x.numel() * x.element_size() for x in xs) + xs[0].size(0) * results * xs[0].element_size()
    seconds = num_bytes / device.hbm_roof if device.hbm_roof else None
    shape = f"{xs[0].size(0)} x {xs[0].size(1)} -> {results}"
    return Step(name, "forward", "product", f"{len(args['weights'])} maps, {shape}", 1, num_bytes, seconds)


_TYPED_STEPS = {
    "typed_mm": "product",
    "typed_linear": "product",
    "typed_outer": "of weights",
    "typed_blend": "skip",
    "typed_blend_backward": "gradient of skip",
}


def _typed_step(name: str, args: dict[str, Any]) -> Step:
    """Rows with the matrices, or the numbers, of their types: what is given is read once, and the result written."""
    rows, types = args["x"].size(0), args["offsets"].numel() - 1
    if name in ("typed_mm", "typed_linear"):
        depth, columns = args["x"].size(1), args["weight"].size(2 if name == "typed_mm" else 1)
        shape, made = f"{rows} x {depth} -> {columns}", rows * columns
    elif name == "typed_outer":
        depth, columns = args["x"].size(1), args["y"].size(1)
        shape, made = f"{rows} x {depth}, {columns}", types * depth * columns
    else:
        shape, made = f"{rows} x {args['x'].size(1)}", args["x"].numel() * (2 if name.endswith("backward") else 1)
    num_bytes = sum(t.numel() * t.element_size() for t in _tensors_in(args)) + made * args["x"].element_size()
    device = Device.of(args["x"].device)
    seconds = num_bytes / device.hbm_roof if device.hbm_roof else None
    return Step(name, _TYPED_STEPS[name], "product", f"{types} types, {shape}", 1, num_bytes, seconds)


# Text ----------------------------------------------------------------------------------------------------------------


def table(steps: Sequence[Step]) -> str:
    """The steps as lines of text, one each, and the sum of their times."""
    if not steps:
        return "no op of edgeless runs"
    lines = []
    for step in steps:
        at_roof = "" if step.seconds is None else f", {step.seconds * 1e3:.3g} ms at the roof"
        slices = "" if step.slices == 1 else f" in {step.slices} slices"
        lines.append(f"{step.op}, {step.step}: {step.engine}: {step.kernel}{slices}; {_megabytes(step.bytes)}{at_roof}")
        if step.origin:
            lines.append(f"  (engine by {step.origin})")
        if step.refused:
            lines.append(f"  ({step.refused})")
    known = [step.seconds for step in steps if step.seconds is not None]
    if len(known) == len(steps) > 1:
        lines.append(f"together {sum(known) * 1e3:.3g} ms at the roof")
    return "\n".join(lines)


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.3g} MB" if num_bytes < 1e9 else f"{num_bytes / 1e9:,.3g} GB"

"""Records the ops that run in a call and describes each as steps of :mod:`edgeless.plan`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from . import _C, engines
from .engines import ROWSPLIT, Engine, current_engine, origin, pick
from .graph_checks import opmath_dtype
from .ops.relational import widths
from .plan import Device, Step, attention_steps, extremum_steps, seconds_at_roof, spmm_step, takes_widths

__all__ = ["record"]


class _Recorder(TorchDispatchMode):
    """Records edgeless ops as they run: name, arguments by name, and the current engine."""

    def __init__(self):
        super().__init__()
        self.calls: list[tuple[str, dict[str, Any], str]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace == "edgeless":
            names = [argument.name for argument in func._schema.arguments]
            name = func._schema.name.rpartition("::")[2]
            self.calls.append((name, {**dict(zip(names, args)), **kwargs}, current_engine()))
        return func(*args, **kwargs)


def record(call, inputs: Sequence[Any]) -> list[Step]:
    """Runs ``call()`` and, where gradients are on, its backward, and returns the steps of the ops that ran.

    Args:
        call: returns a tensor, a dictionary of tensors, or a tuple that begins with either.
        inputs: the backward computes gradients of the tensors herein, also of those in dictionaries, tuples and lists;
            other objects are ignored.
    """
    recorder = _Recorder()
    with recorder, engines.tuner.resting():
        out = call()
        outs = [t for t in _tensors_in(out[0] if isinstance(out, (tuple, list)) else out) if t.requires_grad]
        leaves = [t for t in _tensors_in(inputs) if t.requires_grad]
        if leaves and outs:
            torch.autograd.grad(outs, leaves, [torch.ones_like(t) for t in outs], allow_unused=True)
    return [step for call in recorder.calls for step in _steps_by_engine(*call)]


def _steps_by_engine(name: str, args: dict[str, Any], chosen: str) -> list[Step]:
    """The steps of an op on the chosen engine or, if it does not support the op, on another, with the reason."""
    engine, refused = pick(name, args, chosen)
    if name == "spmm":
        return [replace(_spmm_of(args, engine), refused=refused, origin=origin(name, args, chosen))]
    if name == "sddmm":
        return [replace(_sddmm_of(args, engine), refused=refused)]
    if name in _ATTENTION:
        passes = ["forward"] if name == "attention" else _backward_passes(args)
        asked = origin(name, args, chosen)
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
        weight_bytes = 4  # the bits of a block's column
    return _sum_of(args, x.dtype, x[0].numel() if len(x) else 0, x.size(0), weight_bytes, engine)


def _sddmm_of(args: dict[str, Any], engine: Engine) -> Step:
    dst, src, sizes = args["dst"], args["src"], _graph_sizes(args)
    device, row = sizes["device"], src[0].numel() * src.element_size() if len(src) else 0
    heads = src.size(1) if src.dim() == 3 else 1
    products = sizes["num_edges"] * heads * opmath_dtype(src.dtype).itemsize
    num_bytes = sizes["num_edges"] * (row + sizes["index_bytes"]) + dst.numel() * dst.element_size() + products
    kernel = "SDDMM_ALG_DEFAULT" if engine.kernel else "vectors of 16 B" if device.multiprocessors else device.name
    return Step(
        "sddmm", "products", engine.name, kernel, 1, num_bytes, seconds_at_roof(device, num_bytes, len(src) * row)
    )


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
        edge_dim=args["edge_attr"].size(1) if score == "gatv2" and features else 0,
        edge_arrays=edge_arrays, engine=engine,
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
    if name in ("pair_maps", "pair_maps_backward", "pair_maps_backward_over"):
        return _pair_map_steps(name, args)
    if name == "pair_dot_attention":
        return _pair_dot_steps(args)
    if name in ("pair_attention", "pair_attention_backward", "pair_attention_backward_over"):
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
    """The steps of a layer over relations: its relational sum, or the products of its (source, type) pairs and their
    sum; then the product of the destinations' rows and root.
    """
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
    """The steps of a sum over relations, or of the gradients of its features and weights. Each reduces the edges of its
    segments; on CUDA both gradients share one reduction.
    """
    x, weight, backward = args["x"], args["weight"], name.endswith("backward")
    device, size = Device.of(x.device), x.element_size()
    gathered, on_cpu = args["grad"] if backward else x, x.device.type == "cpu"
    depth = gathered.size(1)
    row = depth * (gathered.element_size() if on_cpu else size)  # on CUDA gradients are first cast to the dtype of x
    needs = args.get("needs") or [True]
    steps = []
    for step, needed in zip(("of features", "of weights") if backward else ("forward",), needs):
        if not needed:
            continue
        type_ptr, piece_rows, ptr, indices, _, by_row, *tiles = args["by_src" if backward else "by_dst"]
        pieces, edges, index = piece_rows.numel(), indices.numel(), indices.element_size()
        rows = {"forward": args.get("num_dst", 0), "of features": x.size(0), "of weights": 0}[step]
        width = widths(weight)[step == "forward"]
        fused = bool(tiles) and _fuses(device, x, widths(weight), index == 8)
        weighed = args.get("edge_weight") is not None or len(tiles) > 5
        # Bytes of the segments' sums in memory. Unweighted segments of one edge each need no sum: the row is read.
        sums = pieces * depth * size * bool(ptr.numel() or weighed)
        again = not on_cpu and step == "of weights" and needs[0] and (fused or sums > 0)
        num_bytes = rows * width * size + weight.numel() * weight.element_size()
        if not again:
            num_bytes += edges * (row + index + _edge_bytes(args)) + 2 * pieces * index
            num_bytes += tiles[5].numel() * tiles[5].element_size() if len(tiles) > 5 else 0
        if step == "of weights":
            num_bytes += pieces * x.size(1) * size
        kernel = f"{pieces} pieces of {type_ptr.numel() - 1} types"
        if on_cpu:
            kernel = f"{_C.cpu_capability()}, {kernel}, {by_row.size(0) - 1} parts"
        elif fused:  # sums stay in shared memory; only products are written and read again
            num_bytes += 2 * pieces * width * size * (step != "of weights")
            kernel += ", multiplied while their sums are at hand: less to move than products of sources or sums"
            kernel += _warps_alone(args, device, step, width, rows, (edges, pieces, tiles[1].numel() - 1))
        else:
            num_bytes += sums if again else 2 * sums
            num_bytes += 2 * pieces * width * size * (step != "of weights" and by_row.numel() > 0)
        seconds = num_bytes / device.hbm_roof if device.hbm_roof else None
        steps.append(Step("relational_sum", step, "pieces", kernel, 1, num_bytes, seconds))
    return steps + [_edge_weights_step(args)] if needs[2:] == [True] else steps


def _edge_weights_step(args: dict[str, Any]) -> Step:
    """The step of the gradient of edge weights: for each segment by destination, the gradient's row times the type's
    matrix, and the dot products of that row with the rows of its edges' sources. On CUDA the rows of segments are
    written and read again.
    """
    x, weight, grad = args["x"], args["weight"], args["grad"]
    type_ptr, piece_rows, _, indices, *_ = args["by_dst"]
    device, (depth, width) = Device.of(x.device), widths(weight)
    pieces, edges, index, size = piece_rows.numel(), indices.numel(), indices.element_size(), x.element_size()
    on_cpu = x.device.type == "cpu"
    num_bytes = pieces * (width * (grad.element_size() if on_cpu else size) + 2 * index)
    num_bytes += weight.numel() * weight.element_size() + edges * (depth * size + index + _edge_bytes(args))
    num_bytes += 0 if on_cpu else 2 * pieces * depth * size
    kernel = f"{pieces} pieces of {type_ptr.numel() - 1} types"
    kernel = f"{_C.cpu_capability()}, {kernel}" if on_cpu else kernel
    seconds = num_bytes / device.hbm_roof if device.hbm_roof else None
    return Step("relational_sum", "of edge weights", "pieces", kernel, 1, num_bytes, seconds)


def _warps_alone(
    args: dict[str, Any], device: Device, step: str, width: int, rows: int, counts: tuple[int, int, int]
) -> str:
    """The parts of a fused step that single warps do, as text; ``counts``: edges, segments, tiles."""
    x, in_and_out, backward = args["x"], widths(args["weight"]), step != "forward"
    edges, pieces, tiles = counts
    if x.dtype != torch.float32:
        by_warps = False
    elif backward:
        by_warps = _C.short_gradients_pay(*in_and_out)
    else:
        by_warps = _C.short_pieces_pay(edges, pieces, tiles // device.multiprocessors, max(in_and_out))
    said = "; sixteen pieces a warp" if by_warps else ""
    # The product of a destination's own row and root, where the fused kernel adds it to the sums.
    root, own = args.get("root"), args.get("own")
    adds = root is not None and not (backward and own is not None)
    adds = adds and _fuses(device, x if own is None else own, tuple(root.shape), False)
    widest = max((width, *(root.shape if adds else ())))
    sums = (pieces, rows, rows // device.multiprocessors, widest, x.element_size() == 2)
    if step != "of weights" and _C.short_rows_pay(*sums):
        said += "; a warp adds up sixteen rows"
    return said


def _fuses(device: Device, x: Tensor, in_and_out: tuple[int, int], wide_index: bool) -> bool:
    """Whether the fused kernels support these rows: the conditions of ``core_cuda/relational/fused_cuda.cpp`` on tiled
    segments, device and widths, and rows that are aligned, whole vectors of 16 bytes.
    """
    as_vectors = x.stride(1) == 1 and x.stride(0) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0
    return as_vectors and takes_widths(device.most_fused_width(x.dtype, wide_index), x.dtype, in_and_out)


def _pair_map_steps(name: str, args: dict[str, Any]) -> list[Step]:
    """The steps of keys and values of pairs: one relational sum each, over a graph whose edges are the pairs."""
    backward = name != "pair_maps"
    needs = args.get("needs", [True] * 5)
    steps = []
    for rows, weight, grad, needed in (
        ("k", "k_weight", "grad_keys", (needs[0], needs[2] or needs[4], False)),
        ("v", "v_weight", "grad_values", (needs[1], needs[3], False)),
    ):
        given = {"x": args[rows], "weight": args[weight], "by_dst": args["by_dst"], "by_src": args["by_src"]}
        if backward:
            steps += _relational_steps("relational_sum_backward", {**given, "grad": args[grad], "needs": needed})
        else:
            steps += _relational_steps("relational_sum", {**given, "num_dst": args["by_dst"][3].numel()})
    return [replace(step, op="pair_maps") for step in steps]


def _pair_dot_steps(args: dict[str, Any]) -> list[Step]:
    """The steps of keys, logits, values, and the sum of values weighted by the softmax of the logits."""
    keys, values = _pair_map_steps("pair_maps", {**args, "by_src": []})
    pairs, (_, heads, _, width) = args["by_dst"][3].numel(), args["v_weight"].shape
    rows = args["v"].new_empty((pairs, heads, width), device="meta")
    logits = rows.new_empty((args["csr"][1].numel(), heads))
    products = _sddmm_of({"dst": args["q"].unflatten(1, (heads, -1)), "src": rows, "csr": args["csr"]}, ROWSPLIT)
    # softmax_sum is gat's forward with the logits as edge terms of the score and no score terms of nodes.
    given = {**args, "dst": logits, "src": rows, "value": rows, "score": "gat", "edge_attr": logits}
    sums = _attention_of(given, ["forward"], ROWSPLIT)
    return [replace(step, op="pair_dot_attention") for step in (keys, products, values, *sums)]


def _pair_steps(name: str, args: dict[str, Any]) -> list[Step]:
    """The steps of attention over pairs: the products of pairs, the queries of segments by destination, and the passes
    over the edges.
    """
    x, weight, walks = args["x"], args["weight"], args["walks"]
    device, index = Device.of(x.device), walks[0].element_size()
    types, depth, width = weight.shape
    nodes, pairs, edges, pieces = x.size(0), walks[1].numel(), walks[3].numel(), walks[9].numel()
    size = x.element_size()
    products = pairs * ((depth + width) * size + index) + weight.numel() * size
    numbers = pieces * (depth * size + 4 + index)  # per segment, its node's row, read or added to, and one float
    ids = index if args.get("dropout") else 0
    edge = width * size + 2 * index + 4 + ids  # per edge, a row, two indices and the segment's float
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
    """The step of an op on rows and the matrices, or the scalars, of their types: all inputs are read once, the result
    is written once.
    """
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

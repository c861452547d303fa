"""Describes ops over relations, pairs and linear maps as steps of :mod:`edgeless.plan.steps`, with their kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .. import _C
from ..checks import STAND_INS
from ..ops.relational import widths
from .device import dtype_name
from .steps import Device, Step, named, spmm_step, takes_widths

__all__ = [
    "TYPED_STEPS",
    "adds_root",
    "edge_bytes",
    "pair_steps",
    "product_step",
    "relational_steps",
    "tensors_in",
    "typed_step",
]


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of nested dictionaries, tuples and lists."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return [t for item in value for t in tensors_in(item)]
    return [value] if isinstance(value, Tensor) else []


def _vectors(width: int, dtype: torch.dtype) -> int:
    return -(-width * dtype.itemsize // 16)


def _name_of_sum(
    device: Device, dtype: torch.dtype, width: int, rows: int, edges: int, gathered: int, weight=0
) -> dict:
    """The kernel that sums rows of ``width`` columns, as a plan's names."""
    sizes = {"num_src": gathered, "num_dst": rows, "num_edges": edges, "device": device, "weight_bytes": weight}
    step = spmm_step(dtype, width, **sizes)
    return {"header": step.header, "expression": step.expression}


# Sums over relations -------------------------------------------------------------------------------------------------


def edge_bytes(args: dict[str, Any]) -> int:
    """Bytes of the weight of an edge, 0 where there is none."""
    return 0 if args.get("edge_weight") is None else args["edge_weight"].element_size()


def relational_steps(name: str, args: dict[str, Any]) -> list[Step]:
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
        arrays, plans = args["by_src" if backward else "by_dst"], []
        type_ptr, segment_rows, ptr, indices, _, by_row, *tiles = arrays
        segments, edges, index = segment_rows.numel(), indices.numel(), indices.element_size()
        rows = {"forward": args.get("num_dst", 0), "of features": x.size(0), "of weights": 0}[step]
        width = widths(weight)[step == "forward"]
        fused = bool(tiles) and _fuses(device, x, widths(weight), index == 8)
        weighed = args.get("edge_weight") is not None or len(tiles) > 5
        # Bytes of the segments' sums in memory. Unweighted segments of one edge each need no sum: the row is read.
        sums = segments * depth * size * bool(ptr.numel() or weighed)
        again = not on_cpu and step == "of weights" and needs[0] and (fused or sums > 0)
        num_bytes = rows * width * size + weight.numel() * weight.element_size()
        if not again:
            num_bytes += edges * (row + index + edge_bytes(args)) + 2 * segments * index
            num_bytes += tiles[5].numel() * tiles[5].element_size() if len(tiles) > 5 else 0
        if step == "of weights":
            num_bytes += segments * x.size(1) * size
        kernel = f"{segments} segments of {type_ptr.numel() - 1} types"
        if on_cpu:
            kernel = f"{_C.cpu_capability()}, {kernel}, {by_row.size(0) - 1} parts"
        elif fused:  # sums stay in shared memory; only products are written and read again
            num_bytes += 2 * segments * width * size * (step != "of weights")
            kernel += ", multiplied in the kernel that sums: less to move than products of sources or sums"
            said, plans = _fused_plans(args, device, step, width, rows, arrays)
            kernel += said
        else:
            num_bytes += sums if again else 2 * sums
            num_bytes += 2 * segments * width * size * (step != "of weights" and by_row.numel() > 0)
            if device.multiprocessors:
                plans = _separate_plans(args, device, step, rows, arrays, sums > 0 and not again)
        seconds = num_bytes / device.hbm_roof if device.hbm_roof else None
        steps.append(named(Step("relational_sum", step, "segments", kernel, 1, num_bytes, seconds), *plans))
    return steps + [_edge_weights_step(args)] if needs[2:] == [True] else steps


def _edge_weights_step(args: dict[str, Any]) -> Step:
    """The step of the gradient of edge weights: for each segment by destination, the gradient's row times the type's
    matrix, and the dot products of that row with the rows of its edges' sources. On CUDA the rows of segments are
    written and read again.
    """
    x, weight, grad = args["x"], args["weight"], args["grad"]
    type_ptr, segment_rows, _, indices, *_ = args["by_dst"]
    device, (depth, width) = Device.of(x.device), widths(weight)
    segments, edges, index, size = segment_rows.numel(), indices.numel(), indices.element_size(), x.element_size()
    on_cpu = x.device.type == "cpu"
    num_bytes = segments * (width * (grad.element_size() if on_cpu else size) + 2 * index)
    num_bytes += weight.numel() * weight.element_size() + edges * (depth * size + index + edge_bytes(args))
    num_bytes += 0 if on_cpu else 2 * segments * depth * size
    kernel = f"{segments} segments of {type_ptr.numel() - 1} types"
    kernel = f"{_C.cpu_capability()}, {kernel}" if on_cpu else kernel
    seconds = num_bytes / device.hbm_roof if device.hbm_roof else None
    step = Step("relational_sum", "of edge weights", "segments", kernel, 1, num_bytes, seconds)
    return named(step, *_edge_weight_plans(device, x.dtype, weight, index == 8)) if device.multiprocessors else step


def _edge_weight_plans(device: Device, dtype: torch.dtype, weight: Tensor, wide_index: bool) -> list[dict]:
    product = _C.typed_product_kernel(
        dtype=dtype_name(dtype), depth=weight.size(-1), columns=weight.size(-2), transposed=weight.stride(-2) != 1,
        capability=device.capability,
    )  # fmt: skip
    vectors = _vectors(widths(weight)[0], dtype)
    return [product, _C.sampled_kernel(dtype=dtype_name(dtype), wide_index=wide_index, vectors=vectors)]


def _fuses_root(args: dict[str, Any], device: Device, backward: bool) -> bool:
    """Whether the fused kernel adds the product of a destination's own row and root to the sums."""
    x, root, own = args["x"], args.get("root"), args.get("own")
    if root is None or (backward and own is not None):
        return False
    return _fuses(device, x if own is None else own, tuple(root.shape), False)


def adds_root(args: dict[str, Any]) -> bool:
    """Whether the forward of a layer that sums before it multiplies is fused, its product with root included."""
    device, wide_index = Device.of(args["x"].device), args["by_dst"][3].element_size() == 8
    fused = len(args["by_dst"]) > 6 and _fuses(device, args["x"], widths(args["weight"]), wide_index)
    return fused and _fuses_root(args, device, False)


def _weights_of(args: dict[str, Any], tiles: Sequence[Tensor]) -> str:
    """What the fused kernels multiply rows, or the sums of segments, by."""
    if len(tiles) > 5:
        return "of_segments" if tiles[5].dim() == 2 else "in_order"
    return "none" if args.get("edge_weight") is None else "by_id"


def _fused_plans(
    args: dict[str, Any], device: Device, step: str, width: int, rows: int, arrays: Sequence[Tensor]
) -> tuple[str, list[dict]]:
    """The parts of a fused step that single warps do, as text, and the plans of its kernels."""
    type_ptr, segment_rows, _, indices, _, _, *tiles = arrays
    x, (in_width, out_width), backward = args["x"], widths(args["weight"]), step != "forward"
    segments = segment_rows.numel()
    products = _C.segments_plan(
        backward=backward, dtype=dtype_name(x.dtype), weights=_weights_of(args, tiles), edges=indices.numel(),
        segments=segments, tiles=tiles[1].numel() - 1, types=type_ptr.numel() - 1, in_width=in_width,
        out_width=out_width, multiprocessors=device.multiprocessors,
    )  # fmt: skip
    said = "; sixteen segments a warp" if products["by_warps"] else ""
    if step == "of weights":
        return said, [products]
    root, adds = args.get("root"), _fuses_root(args, device, backward)
    sums = _C.rows_plan(
        dtype=dtype_name(x.dtype), segments=segments, rows=rows, tiles=tiles[2].numel() - 1,
        own_width=max(root.shape) if adds else width, width=width,
        transposed=adds and root.stride(1 - int(backward)) != 1, multiprocessors=device.multiprocessors,
        capability=device.capability, shared_bytes=device.shared_bytes,
    )  # fmt: skip
    said += "; a warp adds up sixteen rows" if sums["by_warps"] else ""
    return f"{said}; {products['blocks']} blocks of {products['share']} tiles", [products, sums]


def _separate_plans(
    args: dict[str, Any], device: Device, step: str, rows: int, arrays: Sequence[Tensor], has_sums: bool
) -> list[dict]:
    """The plans of the separate kernels of a step: the sums of segments, their products, the sums of rows."""
    x, weight, backward = args["x"], args["weight"], step != "forward"
    _, segment_rows, _, indices, _, by_row, *tiles = arrays
    gathered, segments = args["grad"] if backward else x, segment_rows.numel()
    kind, plans = dtype_name(x.dtype), []
    if has_sums:
        weighed = edge_bytes(args) or (4 if len(tiles) > 5 and tiles[5].dim() == 1 else 0)
        plans.append(
            _name_of_sum(device, x.dtype, gathered.size(1), segments, indices.numel(), gathered.size(0), weighed)
        )
    if step == "of weights":
        return [*plans, _C.typed_outer_kernel(dtype=kind, capability=device.capability)]
    depth, columns = weight.size(-1 if backward else -2), weight.size(-2 if backward else -1)
    transposed = weight.stride(-2 if backward else -1) != 1
    plans.append(
        _C.typed_product_kernel(
            dtype=kind, depth=depth, columns=columns, transposed=transposed, capability=device.capability
        )
    )
    if by_row.numel():
        width = widths(weight)[not backward]
        plans.append(_name_of_sum(device, x.dtype, width, rows, segments, segments))
    return plans


def _fuses(device: Device, x: Tensor, in_and_out: tuple[int, int], wide_index: bool) -> bool:
    """Whether the fused kernels support these rows: the conditions of ``core_cuda/relational/fused_cuda.cpp`` on tiled
    segments, device and widths, and rows that are aligned, whole vectors of 16 bytes.
    """
    address = x.storage_offset() * x.element_size() if isinstance(x, STAND_INS) else x.data_ptr()
    as_vectors = x.stride(1) == 1 and x.stride(0) * x.element_size() % 16 == 0 and address % 16 == 0
    return as_vectors and takes_widths(device.most_fused_width(x.dtype, wide_index), x.dtype, in_and_out)


# Attention over pairs ------------------------------------------------------------------------------------------------


def pair_steps(name: str, args: dict[str, Any]) -> list[Step]:
    """The steps of attention over pairs: the products of pairs, the queries of segments by destination, and the passes
    over the edges.
    """
    x, weight, walks = args["x"], args["weight"], args["walks"]
    device, index = Device.of(x.device), walks[0].element_size()
    types, depth, width = weight.shape
    nodes, pairs, edges, segments = x.size(0), walks[1].numel(), walks[3].numel(), walks[9].numel()
    size = x.element_size()
    products = pairs * ((depth + width) * size + index) + weight.numel() * size
    numbers = segments * (depth * size + 4 + index)  # per segment, its node's row, read or added to, and one float
    ids = index if args.get("dropout") else 0
    edge = width * size + 2 * index + 4 + ids  # per edge, a row, two indices and the segment's float
    if name == "pair_attention":
        steps = {
            "products of pairs": products,
            "queries of segments": numbers,
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
    kernel = f"{pairs} pairs, {segments} segments of {types} types"
    found = [
        Step("pair_attention", step, "segments", kernel, 1, count, count / device.hbm_roof if device.hbm_roof else None)
        for step, count in steps.items()
        if count
    ]
    if not device.multiprocessors:
        return found
    plans = _pair_plans(args, device, name == "pair_attention")
    return [named(step, *plans[step.step]) for step in found]


def _pair_plans(args: dict[str, Any], device: Device, forward: bool) -> dict[str, list[dict]]:
    """The plans of the kernels of attention over pairs, by step."""
    x, (_, depth, width), walks = args["x"], args["weight"].shape, args["walks"]
    nodes, pairs, edges, segments = x.size(0), walks[1].numel(), walks[3].numel(), walks[9].numel()
    kind, degrees = dtype_name(x.dtype), [*(args.get("max_degrees") or ()), -1, -1]

    def typed(depth: int, columns: int, transposed: bool) -> dict:
        return _C.typed_product_kernel(
            dtype=kind, depth=depth, columns=columns, transposed=transposed, capability=device.capability
        )

    def over_edges(which: str, rows: int, gathered: int, longest: int) -> dict:
        return _C.pair_plan(
            pass_=which, dtype=kind, vectors=_vectors(width, x.dtype), num_rows=rows, num_edges=edges,
            num_gathered=gathered, max_degree=longest, dropout=bool(args.get("dropout")),
            multiprocessors=device.multiprocessors, l2_bytes=device.l2_bytes,
        )  # fmt: skip

    if forward:
        queries = _C.sampled_kernel(dtype=kind, wide_index=False, vectors=_vectors(depth, x.dtype))
        return {
            "products of pairs": [typed(depth, width, False)],
            "queries of segments": [queries],
            "forward": [over_edges("forward", nodes, pairs, degrees[0])],
        }
    sums = _name_of_sum(device, x.dtype, depth, nodes, pairs + segments, pairs + args["weight"].size(0), 4)
    return {
        "statistics of rows": [_C.deltas_kernel(dtype=kind, vectors=_vectors(width, x.dtype))],
        "by pair": [over_edges("by_src", pairs, nodes, degrees[1])],
        "of features": [typed(width, depth, True), sums],
        "of weights": [_C.typed_outer_kernel(dtype=kind, capability=device.capability)],
    }


# Linear maps ---------------------------------------------------------------------------------------------------------


def _map_kernel(
    device: Device, dtype: torch.dtype, sizes: tuple[int, int, int], nodes: int, divided: bool, transposed: bool
) -> dict:
    """The kernel of a product of ``sizes``, rows, columns and depth; empty where cuBLAS computes it."""
    if not device.multiprocessors:
        return {}
    rows, columns, depth = sizes
    return _C.map_kernel(
        dtype=dtype_name(dtype), rows=rows, columns=columns, depth=depth, nodes=nodes, divided=divided,
        transposed=transposed, capability=device.capability, allows_tf32=torch.backends.cuda.matmul.allow_tf32,
    )  # fmt: skip


def _widths_of_products(args: dict[str, Any]) -> list[int]:
    """The columns of every product of ``project``: maps that are joined are one product."""
    weights, joined, size = args["weights"], args.get("joined") or 1, args["x"].element_size()
    together = len(weights) if joined > 1 and args["x"].size(0) < _LAUNCH_BOUND_ROWS else joined
    columns = [w.size(0) for w in weights]
    if together > 1 and all(width * size % 16 == 0 for width in columns[:together]):
        return [sum(columns[:together]), *columns[together:]]
    return columns


_LAUNCH_BOUND_ROWS = 1 << 15  # kLaunchBoundRows of core_cuda/common/thresholds.h


def product_step(name: str, args: dict[str, Any], way: str = "") -> Step:
    """The step of linear maps of one input, or of a sum of such maps.

    Args:
        way: ``"onto"`` if the product is added to rows that exist, ``"by row sums"`` if the kernel that sums the rows'
            segments computes it.
    """
    xs = args["xs"] if name == "project_sum" else [args["x"]]
    x, weights = xs[0], args["weights"]
    device = Device.of(x.device)
    results = sum(w.size(0) for w in weights) if name == "project" else weights[0].size(0)
    num_bytes = sum(t.numel() * t.element_size() for t in xs) + x.size(0) * results * x.element_size()
    seconds = num_bytes / device.hbm_roof if device.hbm_roof else None
    kernel = f"{len(weights)} maps, {x.size(0)} x {x.size(1)} -> {results}"
    transposed = weights[0].stride(1) != 1 and weights[0].stride(0) == 1
    columns = _widths_of_products(args) if name == "project" else [results]
    products = [(x.size(0), width, x.size(1)) for width in columns]
    found = Step(name, "forward", "product", kernel, 1, num_bytes, seconds)
    if way == "by row sums":
        return replace(found, kernel=f"{kernel}, by the kernel that sums the rows' segments")
    nodes = 0 if way == "onto" else x.size(0)  # 16-bit products are added to any number of rows
    plans = [_map_kernel(device, x.dtype, sizes, nodes, False, transposed) for sizes in products]
    if device.multiprocessors and not all(plans):
        found = replace(found, kernel=f"{kernel}, by cuBLAS")
    return named(found, *plans)


TYPED_STEPS = {
    "typed_mm": "product",
    "typed_linear": "product",
    "typed_outer": "of weights",
    "typed_blend": "skip",
    "typed_blend_backward": "gradient of skip",
}


def typed_step(name: str, args: dict[str, Any]) -> Step:
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
    num_bytes = sum(t.numel() * t.element_size() for t in tensors_in(args)) + made * args["x"].element_size()
    device = Device.of(args["x"].device)
    seconds = num_bytes / device.hbm_roof if device.hbm_roof else None
    step = Step(name, TYPED_STEPS[name], "product", f"{types} types, {shape}", 1, num_bytes, seconds)
    return named(step, _typed_plan(name, args, device)) if device.multiprocessors else step


def _typed_plan(name: str, args: dict[str, Any], device: Device) -> dict:
    x, kind = args["x"], dtype_name(args["x"].dtype)
    if name == "typed_outer":
        return _C.typed_outer_kernel(dtype=kind, capability=device.capability)
    if name not in ("typed_mm", "typed_linear"):
        return _C.blend_kernel(dtype=kind, width=x.size(1), backward=name.endswith("backward"))
    weight, linear = args["weight"], name == "typed_linear"
    return _C.typed_product_kernel(
        dtype=kind, depth=x.size(1), columns=weight.size(1 if linear else 2),
        transposed=weight.stride(1 if linear else 2) != 1, capability=device.capability,
    )  # fmt: skip

"""The plan of a call and its cost: engine, kernel, tile, feature tiles, bytes, time at the roofline.

The core decides (``core_cuda/attention/cuda/plan.h``, ``core_cuda/common/segment_reduce.h``,
``core_cuda/reduction/cuda/plan.h``, ``core_cuda/relational/plan.h``), by pure functions of sizes; this
module calls them and counts bytes. It needs no GPU: a :class:`Device` describes the device, the present one or a named
one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Optional

import torch

from .. import _C
from ..checks import opmath_dtype
from ..choices.engines import ROWSPLIT, Engine
from ..untraced import constant
from .device import DEVICES, Device, dtype_name, planned, planned_for

__all__ = [
    "DEVICES",
    "Device",
    "Step",
    "attention_steps",
    "dtype_name",
    "extremum_steps",
    "most_fused_width",
    "named",
    "planned_for",
    "seconds_at_roof",
    "spmm_step",
    "table",
    "takes_widths",
]


@dataclass(frozen=True)
class Step:
    """One pass of an op.

    Attributes:
        op: "attention (gatv2)", "spmm", ...
        step: "forward", "by destination", "by source", "gradient", ...
        engine: "rowsplit" for edge-balanced CSR kernels; "segments" for kernels over segments of one type and row;
            "product" for matrix products; "cusparse" and others, see :mod:`edgeless.choices.engines`.
        kernel: the kernel and its tile.
        slices: number of feature or head tiles, processed one after the other so that the rows of each may fit the L2.
        bytes: bytes read and written if every edge reads its neighbour's row once.
        seconds: those bytes at the device's roofline, None where it is not known.
        refused: the unsupported reason of another engine that :func:`edgeless.engine` or a measurement chose.
        origin: what chose the engine, if anything did: :func:`edgeless.engine`, a measurement and its date, or
            statistics of the graph.
        header: the file of ``core_cuda`` that has the kernel, where the plan names one.
        expression: the kernel's C++ name with its template arguments.
        further: the file and the name of further kernels, in the order in which they run.
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
    header: str = ""
    expression: str = ""
    further: tuple[tuple[str, str], ...] = ()

    @property
    def kernels(self) -> list[tuple[str, str]]:
        """The file and the C++ name of every kernel that the plan names."""
        return [(self.header, self.expression), *self.further] if self.expression else []


def seconds_at_roof(device: Device, num_bytes: int, gathered: int) -> Optional[float]:
    """The time of ``num_bytes`` at the roofline of a gather from ``gathered`` bytes, those of one feature tile."""
    roof = device.gather_roof(gathered)
    return num_bytes / roof if roof else None


def named(step: Step, *plans: Mapping[str, object]) -> Step:
    """The step with the files and C++ names of its kernels' plans, each once; the plan of a library is empty."""
    names = list(dict.fromkeys((plan["header"], plan["expression"]) for plan in plans if plan))
    if not names:
        return step
    (header, expression), *further = names
    return replace(step, header=header, expression=expression, further=tuple(further))


# Attention -----------------------------------------------------------------------------------------------------------

_PASSES = {"forward": "forward", "by_dst": "by destination", "by_src": "by source"}


def _attention_bytes(which: str, score: str, sizes: dict, key: int, value: int, statistics: int) -> tuple[int, int]:
    """(bytes of a pass, feature bytes gathered per edge). ``key``, ``value``: bytes of a row, all heads; for gat
    ``key`` is a node's score terms, one per head.
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
    dropout: bool = False,
    arrays: bool = False,
    edge_dim: int = 0,
    edge_arrays: Optional[Mapping[str, int]] = None,
    index_bytes: int = 4,
    engine: Engine = ROWSPLIT,
    num_gathered: Sequence[int] = (),
) -> list[Step]:
    """The passes of attention as steps.

    Args:
        score: ``"dot"``, ``"gatv2"``, ``"gat"`` or ``"cosine"``.
        dtype: dtype of the rows.
        key_dim, value_dim: columns of a head; key_dim is 1 for gat.
        passes: any of ``"forward"`` and the backward's ``"by_dst"`` and ``"by_src"``.
        max_degrees: the largest degrees of the CSR and of the CSC, as far as known.
        dropout: whether attention has dropout.
        arrays: whether there are edge features or weights, or returned attention.
        edge_dim: columns of the edge features in gatv2's score, 0 for none.
        edge_arrays: by pass, how many per-edge arrays a kernel reads: edge weights, terms of the logits or the values,
            features in gatv2's score, gradients of returned weights.
        num_gathered: rows read by destination and by source, for an engine that does not read one per edge.
    Raises:
        ValueError: the kernels do not support the score, pass or dtype.
    """
    size = dtype.itemsize
    statistic = heads * opmath_dtype(dtype).itemsize
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
        slices, header, expression = 1, "", ""
        if engine.kernel is not None:
            kernel = engine.kernel
        elif device.multiprocessors:
            at = 1 if by_src else 0
            plan = _C.attention_plan(
                pass_=which, score=score, dtype=dtype_name(dtype), heads=heads, key_dim=key_dim, value_dim=value_dim,
                num_rows=rows, num_edges=num_edges, num_gathered=gathered,
                max_degree=max_degrees[at] if len(max_degrees) > at else -1, dropout=dropout, arrays=arrays,
                edge_dim=edge_dim, edge_arrays=(edge_arrays or {}).get(which, 0), wide_index=index_bytes == 8,
                multiprocessors=device.multiprocessors, l2_bytes=device.l2_bytes,
            )  # fmt: skip
            if not plan:
                kernel = "none: rows this wide are refused"
            else:
                slices, merges = plan["slices"], ", merges hubs" * plan["merges"]
                header, expression = plan["header"], plan["expression"]
                kernel = (
                    f"{plan['kernel']}, {plan['options']}; {plan['lanes']} lanes x {plan['vectors']} vectors of "
                    f"{plan['vector_bytes']} B, {plan['edges']} edges a batch, {plan['heads_per_slice']} heads "
                    f"a slice; {plan['blocks']} blocks ({plan['resident']} resident){merges}"
                )
        else:
            kernel = _C.cpu_capability()
        seconds = seconds_at_roof(device, num_bytes, gathered * edge // slices)
        op, step = f"attention ({score})", _PASSES[which]
        steps.append(
            Step(op, step, engine.name, kernel, slices, num_bytes, seconds, header=header, expression=expression)
        )
    return steps


# Sums and extrema ----------------------------------------------------------------------------------------------------


def _vector_bytes(row_bytes: int, size: int) -> int:
    """Bytes of a vector of a sum's kernel: the widest that rows are made of; rows that none fits are padded."""
    return next((width for width in (16, 8, 4) if width >= size and row_bytes % width == 0), 16)


def _fold(
    device: Device, row_bytes: int, rows: int, edges: int, gathered: int, max_degree: int, segment: int, result: int,
    narrow_sub_warps: bool, number_bytes: int = 0, weighed: bool = False, wide_index: bool = False,
    vector_bytes: int = 16,
):  # fmt: skip
    """(description, plan) of a segment reduction over rows of ``row_bytes``. ``segment``: bytes of a partial result;
    ``result``: bytes of all results; ``number_bytes``: bytes of an element, given for sums.
    """
    if not device.multiprocessors:
        return _C.cpu_capability(), {"slices": 1}
    plan = _C.reduce_plan(
        vectors=-(-row_bytes // vector_bytes), vector_bytes=vector_bytes, num_rows=rows, num_edges=edges,
        num_gathered=gathered, max_degree=max_degree, carry_bytes=segment, carry_budget=max(1 << 20, result // 8),
        narrow_sub_warps=narrow_sub_warps, number_bytes=number_bytes, weighed=weighed, wide_index=wide_index,
        multiprocessors=device.multiprocessors, l2_bytes=device.l2_bytes,
    )  # fmt: skip
    merges = ", merges hubs" * plan["merges"]
    return f"{plan['lanes']} lanes, slices of {plan['slice_bytes']} B, {plan['blocks']} blocks{merges}", plan


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
    scaled_only: bool = False,
    by_head: bool = False,
) -> Step:
    """The step of a sum of neighbours' rows of ``width`` columns.

    Args:
        weight_bytes: bytes read per edge beside its row and index.
        scaled_only: these bytes are scales of the sources, and there are no weights of edges.
        by_head: heads have weights of their own.
        num_rows: rows read, where an engine does not read one per edge.
    """
    row = width * dtype.itemsize
    segment = width * opmath_dtype(dtype).itemsize
    fold: dict = {"slices": 1}
    vector_bytes = _vector_bytes(row, dtype.itemsize)
    if engine.kernel is not None:
        kernel = engine.kernel
    else:
        narrow = _C.narrow_sums_pay(
            num_edges=num_edges, num_rows=num_dst, halves=dtype.itemsize == 2, weighted=weight_bytes > 0
        )
        kernel, fold = _fold(
            device, row, num_dst, num_edges, num_src, max_degree, segment, num_dst * row, narrow,
            dtype.itemsize, weight_bytes > 0, index_bytes == 8, vector_bytes,
        )  # fmt: skip
    name: dict = {}
    if "lanes" in fold:
        name = _C.sum_kernel(
            dtype=dtype_name(dtype), wide_index=index_bytes == 8, vector_bytes=vector_bytes,
            weight=weight_bytes > 0 and not scaled_only, scale=scaled_only, by_head=by_head, lanes=fold["lanes"],
            slices=fold["slices"], slice_bytes=fold["slice_bytes"], num_rows=num_dst, num_edges=num_edges,
            gathered_bytes=num_src * -(-row // vector_bytes) * vector_bytes, result_bytes=num_dst * row,
        )  # fmt: skip
    slices = fold["slices"]
    if engine.reads_values:
        weight_bytes = dtype.itemsize
    num_rows = num_edges if num_rows is None else num_rows
    num_bytes = num_rows * (row + index_bytes + weight_bytes) + num_dst * row
    seconds = seconds_at_roof(device, num_bytes, num_src * row // slices)
    return named(Step("spmm", step, engine.name, kernel, slices, num_bytes, seconds), name)


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
    reduce: str = "max",
) -> list[Step]:
    """The steps of a minimum or maximum of neighbours' rows and of its gradient.

    Args:
        reduce: ``"max"`` or ``"min"``.
        arg_bytes: bytes of an argmin or argmax, 1, 2 or 4.
        shares: whether equal extrema share the gradient.
        has_transpose: whether the backward has the CSC.
    """
    row = width * dtype.itemsize
    kernel, fold = _fold(
        device, row, num_dst, num_edges, num_src, max_degrees[0] if max_degrees else -1, width * 8, num_dst * row, True
    )
    slices, kind, wide_index = fold["slices"], dtype_name(dtype), index_bytes == 8
    num_bytes = num_edges * (row + index_bytes) + num_dst * (row + width * arg_bytes)
    seconds = seconds_at_roof(device, num_bytes, num_src * row // slices)
    forward = Step("neighbor_reduce", "forward", "rowsplit", kernel, slices, num_bytes, seconds)
    if device.multiprocessors:
        is_max = reduce == "max"
        name = _C.extremum_kernel(dtype=kind, wide_index=wide_index, shares=shares, is_max=is_max)
        forward = named(forward, name)
    if not backward:
        return [forward]
    engine, name = "sent", {}
    if device.multiprocessors:
        given = {
            "dtype": kind, "arg_bytes": arg_bytes, "wide_index": wide_index, "shares": shares,
            "has_transpose": has_transpose, "num_rows": num_dst, "num_columns": num_src, "num_edges": num_edges,
            "width": width, "multiprocessors": device.multiprocessors, "shared_bytes": device.shared_bytes,
            "clusters": device.clusters,
        }  # fmt: skip
        name = _C.gradient_plan(**given)
        engine = name["engine"]
    num_bytes = num_dst * (row + width * arg_bytes) + num_src * row
    seconds = num_bytes / device.hbm_roof if device.hbm_roof else None
    return [forward, named(Step("neighbor_reduce", "gradient", "rowsplit", engine, 1, num_bytes, seconds), name)]


# Sums over relations -------------------------------------------------------------------------------------------------


@cache
def _known_width(device: torch.device, dtype: torch.dtype, wide_index: bool) -> int:
    return Device.of(device).most_fused_width(dtype, wide_index)


@constant
def most_fused_width(device: torch.device, dtype: torch.dtype, wide_index: bool = False) -> int:
    """The widest rows of ``dtype`` that the fused sum-and-multiply kernels support (``core_cuda/relational/plan.h``).

    Layers over relations need it in every call, so it is cached. In a torch.compile program it is a constant.

    Args:
        device: device of the tensors.
        wide_index: whether the graph's ids are int64.
    Returns:
        Number of columns; 0 where the device has no such kernels.
    """
    if device.type == "cuda" and (other := planned()) is not None:
        return other.most_fused_width(dtype, wide_index)
    return _known_width(device, dtype, wide_index)


def takes_widths(most: int, dtype: torch.dtype, in_and_out: tuple[int, int]) -> bool:
    """Whether the fused kernels support these widths: at most ``most`` (:func:`most_fused_width`) and whole vectors of
    16 bytes. Widths may be symbolic sizes of a torch.compile program.
    """
    return all(0 < width <= most and width * dtype.itemsize % 16 == 0 for width in in_and_out)


# Text ----------------------------------------------------------------------------------------------------------------


def table(steps: Sequence[Step]) -> str:
    """The steps as lines of text, and the sum of their times."""
    if not steps:
        return "no op of edgeless runs"
    lines = []
    for step in steps:
        at_roof = "" if step.seconds is None else f", {step.seconds * 1e3:.3g} ms at the roofline"
        slices = "" if step.slices == 1 else f" in {step.slices} slices"
        lines.append(f"{step.op}, {step.step}: {step.engine}: {step.kernel}{slices}; {_megabytes(step.bytes)}{at_roof}")
        for header, expression in step.kernels:
            lines.append(f"  (core_cuda/{header}: {expression.replace('edgeless::cuda::', '')})")
        if step.origin:
            lines.append(f"  (engine by {step.origin})")
        if step.refused:
            lines.append(f"  ({step.refused})")
    known = [step.seconds for step in steps if step.seconds is not None]
    if len(known) == len(steps) > 1:
        lines.append(f"together {sum(known) * 1e3:.3g} ms at the roofline")
    return "\n".join(lines)


def _megabytes(num_bytes: int) -> str:
    number, unit = (num_bytes / 1e6, "MB") if num_bytes < 1e9 else (num_bytes / 1e9, "GB")
    return f"{float(f'{number:.3g}'):,g} {unit}"  # three digits, and no exponent where there are four before the point

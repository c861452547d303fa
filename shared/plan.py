"""The plan of a call and its cost: engine, kernel, tile, feature tiles, bytes, time at the roofline.

The core decides (``core_cuda/attention/cuda/plan.h``, ``core_cuda/common/fold.h``, ``core_cuda/reduction/cuda/plan.h``,
``core_cuda/relational/plan.h``), by pure functions of sizes; this module calls them and counts bytes. It needs no GPU:
a :class:`Device` describes the device, the present one or a named one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Optional

import torch

from . import _C
from .engines import ROWSPLIT, Engine
from .graph_checks import opmath_dtype
from .untraced import constant

__all__ = [
    "DEVICES",
    "Device",
    "Step",
    "attention_steps",
    "extremum_steps",
    "most_fused_width",
    "seconds_at_roof",
    "spmm_step",
    "table",
    "takes_widths",
]


@dataclass(frozen=True)
class Device:
    """The properties of a device that plans and rooflines depend on.

    Attributes:
        multiprocessors, l2_bytes, shared_bytes, clusters: as CUDA reports them; ``shared_bytes`` is the opt-in limit of
            shared memory per block. Zero for a CPU, whose kernels choose by the row alone.
        capability: the compute capability, 80 for 8.0; zero for a CPU.
        l2_roof, hbm_roof: measured bandwidth in bytes per second of a bare gather of random rows, from a set that fits
            the L2 (up to ``l2_fits`` bytes) and from a larger one; 0 where it was not measured.
    """

    name: str
    multiprocessors: int = 0
    l2_bytes: int = 0
    shared_bytes: int = 0
    clusters: bool = False
    l2_roof: float = 0.0
    hbm_roof: float = 0.0
    l2_fits: int = 0
    capability: int = 0

    @classmethod
    def of(cls, device: torch.device) -> Device:
        """The device of a tensor."""
        if device.type != "cuda":
            return cls(f"CPU ({_C.cpu_capability()})")
        if not torch.cuda.is_available():  # tracing for a GPU of another machine, where the ops decide again
            return DEVICES["h200"]
        index = torch.cuda.current_device() if device.index is None else device.index
        found = torch.cuda.get_device_properties(device)
        known = next((d for d in DEVICES.values() if d.name in found.name), cls(found.name))
        return replace(
            known,
            name=found.name,
            multiprocessors=found.multi_processor_count,
            l2_bytes=found.L2_cache_size,
            shared_bytes=_C.shared_bytes_of_block(index),  # older versions of torch do not say
            clusters=found.major >= 9,
            capability=10 * found.major + found.minor,
        )

    def most_fused_width(self, dtype: torch.dtype, wide_index: bool) -> int:
        """:func:`most_fused_width` on this device."""
        return _C.most_fused_width(
            dtype=_dtype_name(dtype), wide_index=wide_index, capability=self.capability, shared_bytes=self.shared_bytes
        )


# The gather bandwidths were measured on an H200 with random rows of 128 bytes and more, 2026-11-21.
DEVICES = {
    "h200": Device("H200", 132, 60 * 2**20, 232448, True, 9.3e12, 4.7e12, 45 * 2**20, 90),
    "a100": Device("A100", 108, 40 * 2**20, 166912, False, capability=80),
}


@dataclass(frozen=True)
class Step:
    """One pass of an op.

    Attributes:
        op: "attention (gatv2)", "spmm", ...
        step: "forward", "by destination", "by source", "gradient", ...
        engine: "rowsplit" for edge-balanced CSR kernels; "pieces" for kernels over segments of one type and row;
            "product" for matrix products; "cusparse" and others, see :mod:`edgeless.engines`.
        kernel: the kernel and its tile.
        slices: number of feature or head tiles, processed one after the other so that the rows of each may fit the L2.
        bytes: bytes read and written if every edge reads its neighbour's row once.
        seconds: those bytes at the device's roofline, None where it is not known.
        refused: the unsupported reason of another engine that :func:`edgeless.engine` or a measurement chose.
        origin: what chose the engine, if anything did: :func:`edgeless.engine`, a measurement and its date, or
            statistics of the graph.
        header: the file of ``core_cuda`` that has the kernel, where the plan names one.
        expression: the kernel's C++ name with its template arguments.
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


def seconds_at_roof(device: Device, num_bytes: int, gathered: int) -> Optional[float]:
    """The time of ``num_bytes`` at the roofline of a gather from ``gathered`` bytes, those of one feature tile."""
    roof = device.l2_roof if gathered <= device.l2_fits else device.hbm_roof
    return num_bytes / roof if roof else None


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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
    options: bool = False,
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
        options: whether there are dropout, edge features or weights, or returned attention.
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
                pass_=which, score=score, dtype=_dtype_name(dtype), heads=heads, key_dim=key_dim, value_dim=value_dim,
                num_rows=rows, num_edges=num_edges, num_gathered=gathered,
                max_degree=max_degrees[at] if len(max_degrees) > at else -1, options=options, edge_dim=edge_dim,
                edge_arrays=(edge_arrays or {}).get(which, 0), wide_index=index_bytes == 8,
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


def _fold(
    device: Device, row_bytes: int, rows: int, edges: int, gathered: int, max_degree: int, piece: int, result: int,
    narrow_teams: bool, number_bytes: int = 0, weighed: bool = False, wide_index: bool = False,
):  # fmt: skip
    """(description, number of feature tiles) of a segment reduction over rows of ``row_bytes``. ``piece``: bytes of a
    partial result; ``result``: bytes of all results; ``number_bytes``: bytes of an element, given for sums.
    """
    if not device.multiprocessors:
        return _C.cpu_capability(), 1
    plan = _C.fold_plan(
        vectors=-(-row_bytes // 16), vector_bytes=16, num_rows=rows, num_edges=edges, num_gathered=gathered,
        max_degree=max_degree, carry_bytes=piece, carry_budget=max(1 << 20, result // 8), narrow_teams=narrow_teams,
        number_bytes=number_bytes, weighed=weighed, wide_index=wide_index, multiprocessors=device.multiprocessors,
        l2_bytes=device.l2_bytes,
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
    """The step of a sum of neighbours' rows of ``width`` columns.

    Args:
        weight_bytes: bytes read per edge beside its row and index.
        num_rows: rows read, where an engine does not read one per edge.
    """
    row = width * dtype.itemsize
    piece = width * opmath_dtype(dtype).itemsize
    if engine.kernel is not None:
        kernel, slices = engine.kernel, 1
    else:
        narrow = _C.narrow_sums_pay(
            num_edges=num_edges, num_rows=num_dst, halves=dtype.itemsize == 2, weighted=weight_bytes > 0
        )
        kernel, slices = _fold(
            device, row, num_dst, num_edges, num_src, max_degree, piece, num_dst * row, narrow,
            dtype.itemsize, weight_bytes > 0, index_bytes == 8,
        )  # fmt: skip
    if engine.reads_values:
        weight_bytes = dtype.itemsize
    num_rows = num_edges if num_rows is None else num_rows
    num_bytes = num_rows * (row + index_bytes + weight_bytes) + num_dst * row
    seconds = seconds_at_roof(device, num_bytes, num_src * row // slices)
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
    """The steps of a minimum or maximum of neighbours' rows and of its gradient.

    Args:
        arg_bytes: bytes of an argmin or argmax, 1, 2 or 4.
        shares: whether equal extrema share the gradient.
        has_transpose: whether the backward has the CSC.
    """
    row = width * dtype.itemsize
    kernel, slices = _fold(
        device, row, num_dst, num_edges, num_src, max_degrees[0] if max_degrees else -1, width * 8, num_dst * row, True
    )
    num_bytes = num_edges * (row + index_bytes) + num_dst * (row + width * arg_bytes)
    seconds = seconds_at_roof(device, num_bytes, num_src * row // slices)
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
        at_roof = "" if step.seconds is None else f", {step.seconds * 1e3:.3g} ms at the roof"
        slices = "" if step.slices == 1 else f" in {step.slices} slices"
        lines.append(f"{step.op}, {step.step}: {step.engine}: {step.kernel}{slices}; {_megabytes(step.bytes)}{at_roof}")
        if step.expression:
            lines.append(f"  (core_cuda/{step.header}: {step.expression.replace('edgeless::cuda::', '')})")
        if step.origin:
            lines.append(f"  (engine by {step.origin})")
        if step.refused:
            lines.append(f"  ({step.refused})")
    known = [step.seconds for step in steps if step.seconds is not None]
    if len(known) == len(steps) > 1:
        lines.append(f"together {sum(known) * 1e3:.3g} ms at the roof")
    return "\n".join(lines)


def _megabytes(num_bytes: int) -> str:
    number, unit = (num_bytes / 1e6, "MB") if num_bytes < 1e9 else (num_bytes / 1e9, "GB")
    return f"{float(f'{number:.3g}'):,g} {unit}"  # three digits, and no exponent where there are four before the point

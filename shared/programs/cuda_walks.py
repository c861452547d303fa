"""Runs walks on CUDA: lowers them, compiles their text where it is first launched, and launches it."""

from __future__ import annotations

import functools
import hashlib
import struct
from collections.abc import Sequence
from typing import Any, Union

import torch
from torch import Tensor
from torch.fx import Node

from .. import _C
from ..capture.watching import reads as note_reads
from ..choices.gpus import gpu_refusal
from ..graph.handle import Graph
from ..kernels.provider import named_text, prepare
from .cuda_code import write
from .cuda_parts import HEADER, Stage
from .cuda_text import NAMESPACE
from .items import Folded, Item, NotLowered, Operand, RowRead
from .lower import Lowered, lower
from .online import Online, online
from .ops import shaped
from .rules import space_of
from .schedule import Walk
from .spaces import Sizes

THREADS, SLOTS_OF_BLOCK = 128, 4  # as in core_cuda/common/segment_reduce.h and partition.h
MOST_REGISTERS = 220  # of a thread, about: with more, two passes take less time than one
# Sums over all edges beside anything else: with more, too few blocks fit on an SM to hide how long a gather takes.
MOST_JOINT_SUMS = 512
_SPACE = "edgeless::cuda::programs::"
_PLAN_BYTES = 56  # of a plan of the core, which packs it
_BEFORE_POINTERS = f"QQQqq {_PLAN_BYTES}s qQ 3q"  # WalkArgs of core_cuda/programs/walk.cuh


class Pass:
    """A stage with its text and its kernels' names."""

    def __init__(self, stage: Stage, by_lanes: bool = False):
        self.text = write(stage, by_lanes)
        # The core knows a kernel by its name alone.
        space = f"p{hashlib.sha256(self.text.code.encode()).hexdigest()[:24]}"
        self.header = named_text(HEADER, self.text.code.replace(f"programs::{NAMESPACE}", f"programs::{space}"))
        own = f"{_SPACE}{space}::"
        self.kernels = {
            wide: (
                f"{_SPACE}walk_kernel<{own}Walk<{index}>, {index}, {own}Args, {self.text.blocks}>",
                f"edgeless::cuda::merge_reduced_kernel<{own}Walk<{index}>, {index}, {own}Args>",
            )
            for wide, index in ((False, "int32_t"), (True, "int64_t"))
        }
        self.merges: set[tuple] = set()  # devices, with types of ids, that have the second kernel loaded
        self.packed = struct.Struct(f"={_BEFORE_POINTERS} {max(len(self.text.reads), 1)}Q {len(self.writes) or 1}Q")

    @property
    def writes(self) -> list[Item]:
        return self.text.writes

    @functools.lru_cache(maxsize=8)  # noqa: B019  one object for each walk
    def places(self, number: int, device: torch.device) -> tuple[Tensor, bool]:
        """For each element of a total its place in [columns, vectors], and whether all lanes are added first."""
        places = torch.from_numpy(self.text.totals[number].places)
        over_lanes = bool((places[:, 1] < 0).any())
        flat = places[:, 0] if over_lanes else places[:, 0] * self.text.vectors + places[:, 1]
        return flat.to(device), over_lanes


def _passes(stage: Stage) -> list[Pass]:
    """A stage in one pass, or in several where one would need more registers than a thread has."""
    try:
        whole, parts = Pass(stage), []
        if sum(t.item.numel for t in whole.text.totals if not t.in_tiles) > MOST_JOINT_SUMS:
            parts = stage.apart()
        if not parts and whole.text.registers > MOST_REGISTERS:
            many = sum(item.numel for item in stage.totals) > MOST_JOINT_SUMS
            parts = stage.apart() or (stage.halves() if many else [])
        return [each for part in parts for each in _passes(part)] or [whole]
    except NotLowered:
        if not stage.halves():
            return [Pass(stage, by_lanes=True)]
        return [each for part in stage.halves() for each in _passes(part)]


class CudaWalk:
    """A walk as passes over the edges; each fold that another reads needs a pass of its own before.

    Raises:
        NotLowered: no code can be generated.
    """

    def __init__(self, walk: Walk, sizes: Sizes, needed: set[Node]):
        self.walk, self.lowered = walk, lower(walk, sizes, needed)
        self.passes = [each for stage in stages_of(self.lowered) for each in _passes(stage)]

    def of_lanes(self) -> tuple[int, int]:
        """How many results lanes compute, and how many numbers they sum over all edges; the rest is in tiles."""
        totals = [total for each in self.passes for total in each.text.totals if not total.in_tiles]
        in_tiles = sum(each.text.in_tiles for each in self.passes)
        return len(self.walk.sinks) - in_tiles, sum(total.item.numel for total in totals)

    def has_products_by_edge(self) -> bool:
        """Whether tensor cores multiply what lanes have computed for an edge."""
        return any(each.text.by_products for each in self.passes)

    def prepare(self, device: torch.device) -> None:
        """Begins to compile its kernels beside each other, in the background; a launch waits for its kernel."""
        if torch.cuda.is_available():
            major, minor = torch.cuda.get_device_capability(device)
            prepare([(each.header, name) for each in self.passes for name in each.kernels[False]], 10 * major + minor)

    def __call__(self, values: dict[Node, Any], graph: Graph, sizes: Sizes, receiving: int) -> list[Any]:
        """The values of the walk's sinks."""
        by_receiving = self.walk.end == receiving
        arrays = graph.csr if by_receiving else graph.csc
        known = graph.cached_max_degrees()
        longest = known[1 - by_receiving] if len(known) > 1 - by_receiving else -1
        device = arrays[0].device
        made: dict[int, Tensor] = {}  # by the id of items
        rows, edges = arrays[0].numel() - 1, sizes.edges
        for each in self.passes:
            _run(each, values, made, arrays, rows, edges, sizes, longest, device)
        results: dict[Node, Any] = {}
        for node, fold, arg in self.lowered.folds:
            found = _with_rows(made[id(fold)], fold, node, rows)
            if isinstance(node.meta["val"], (tuple, list)):
                found = (found, None if arg is None else _with_rows(made[id(arg)], arg, node, rows))
            results[node] = found
        for total in self.lowered.totals:
            results[total.node] = shaped(made[id(total.source)], total.shape).to(total.dtype)
        for node, item in self.lowered.by_edge:
            results[node] = _with_rows(made[id(item)], item, node, edges)
        return [results[sink] for sink in self.walk.sinks]


def stages_of(lowered: Lowered) -> list[Stage]:
    """Groups what a walk computes into passes: what depends on folds of the row comes after them."""
    if any(total.row is not None for total in lowered.totals):
        raise NotLowered("sums over all edges into rows that the edges choose")
    levels: dict[int, int] = {}
    folds: dict[int, Folded] = {}
    sums: dict[int, Online] = {}
    with_arguments = {id(fold) for _, fold, arg in lowered.folds if arg is not None}

    def level(item: Item) -> int:
        if id(item) not in levels:
            levels[id(item)] = level_of_fold(item) if isinstance(item, Folded) else level_of(item)
        return levels[id(item)]

    def level_of(item: Item) -> int:
        return max(map(level, [item.row] if isinstance(item, RowRead) else item.parts()), default=0)

    def level_of_fold(fold: Folded) -> int:
        folds[id(fold)] = fold
        found = online(fold)
        if found is not None and id(found.top) not in with_arguments:
            needs = level(found.source) + 1, 0 if found.divisor is None else level(found.divisor)
            if max(needs) <= level(found.top):
                sums[id(fold)] = found
                return level(found.top)
        return level(fold.source) + 1

    for _, fold, arg in lowered.folds:
        level(fold)
        if arg is not None:
            level(arg)
    sources = [(total.source, "totals") for total in lowered.totals] + [(i, "by_edge") for _, i in lowered.by_edge]
    places = [(level(item), kind, item) for item, kind in sources]
    count = max([place + 1 for place, *_ in places] + [levels[key] for key in folds])
    stages = [Stage() for _ in range(count)]
    for key, fold in folds.items():
        stages[levels[key] - 1].folds.append(fold)
        if key in sums:
            stages[levels[key] - 1].online[key] = sums[key]
    for place, kind, item in places:
        getattr(stages[place], kind).append(item)
    return stages


@functools.cache
def _processors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def _run(each: Pass, values, made, arrays, rows: int, edges: int, sizes: Sizes, longest: int, device) -> None:
    text = each.text
    outputs, totals = [], []
    blocks, slices, slots, plan = _C.walk_plan(
        vectors=text.vectors, carry_bytes=text.carry if text.carry > 1 else 0, has_totals=bool(text.totals),
        num_rows=rows, num_edges=edges, max_degree=longest, multiprocessors=_processors(device.index),
    )  # fmt: skip
    first_total = len(text.writes) - len(text.totals)
    for i, item in enumerate(text.writes):
        if i >= first_total:
            total = text.totals[i - first_total]
            kind = torch.float64 if item.dtype is torch.float64 else torch.float32
            totals.append(torch.empty((blocks, total.columns, text.vectors), dtype=kind, device=device))
            outputs.append(totals[-1])
            continue
        count = item.numel * (rows if isinstance(item, Folded) else edges)
        if edges:
            made[id(item)] = torch.empty(count, dtype=item.dtype, device=device)
        else:
            fill = 1 if isinstance(item, Folded) and item.reduce == "prod" else 0
            made[id(item)] = torch.full((count,), fill, dtype=item.dtype, device=device)
        outputs.append(made[id(item)])
    if edges == 0 or rows == 0:
        for total in text.totals:
            made[id(total.item)] = torch.zeros(total.item.shape, dtype=total.item.dtype, device=device)
        return
    reads = [_aligned(values[item.node], item) if isinstance(item, Operand) else made[id(item)] for item in text.reads]
    carry = None
    if slots:
        carry = torch.empty(2 * slots * text.vectors * text.carry, dtype=torch.uint8, device=device)
    note_reads((*reads, *arrays))
    indptr, indices, ids = arrays
    words = each.packed.pack(
        indptr.data_ptr(), indices.data_ptr(), 0 if ids is None else ids.data_ptr(), rows, edges,
        plan, text.vectors, 0 if carry is None else carry.data_ptr(),
        sizes.sources, sizes.destinations, sizes.edges,
        *[t.data_ptr() for t in reads] or [0], *[t.data_ptr() for t in outputs] or [0],
    )  # fmt: skip
    walk, merge = each.kernels[indptr.dtype is torch.int64]
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    _launch(each.header, walk, (blocks, slices, 1), words, stream, text.shared_bytes)
    loaded = device.index, indptr.dtype
    if slots or (loaded not in each.merges and not _captures()):
        # Without slots it is loaded alone: a capture, which loads nothing, may not know the longest row and need some.
        grid = (-(-slots // SLOTS_OF_BLOCK), -(-text.vectors // THREADS), 1)
        _launch(each.header, merge, grid, words, stream)
        each.merges.add(loaded)
    for i, (total, parts) in enumerate(zip(text.totals, totals)):
        flat, over_lanes = each.places(i, device)
        sums = parts.sum((0, 2)) if over_lanes else parts.sum(0).view(-1)
        made[id(total.item)] = sums.index_select(0, flat)


def _captures() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _launch(header: str, expression: str, grid: Sequence[int], words: bytes, stream: int, shared: int = 0) -> None:
    _C.launch_kernel(
        header=header, expression=expression, grid=grid, block=THREADS, arguments=[words],
        shared_bytes=shared, cluster=1, cooperative=False, stream=stream,
    )  # fmt: skip


def _with_rows(flat: Tensor, item: Item, node: Node, rows: int) -> Tensor:
    """A result in its shape, in which the rows are in the dimension of their space."""
    dim = space_of(node).dim
    if not dim:
        return shaped(flat, [rows * item.shape[0], *item.shape[1:]])
    apart = flat.view(rows, *item.shape).movedim(0, dim).flatten(dim, dim + 1)
    return apart.clone(memory_format=torch.contiguous_format)


def _aligned(x: Tensor, item: Operand) -> Tensor:
    """A contiguous tensor with its rows in front, whose memory begins at a multiple of 16 bytes."""
    if x.dtype is not item.dtype:
        raise TypeError(f"a walk for {item.dtype} is given {x.dtype}")
    if item.kind != "param" and item.dim:
        x = x.unflatten(item.dim, (-1, item.shape[item.dim])).movedim(item.dim, 0)
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def cuda_walk(walk: Walk, sizes: Sizes, needed: set[Node], device: torch.device) -> Union[CudaWalk, str]:
    """The walk compiled for a GPU, or why there is none."""
    refusal = gpu_refusal(device)
    if refusal is not None:
        return refusal
    try:
        found = CudaWalk(walk, sizes, needed)
    except NotLowered as error:
        return str(error)
    except Exception as error:  # whatever the lowering breaks at, the interpreter runs
        return f"it cannot be compiled, {type(error).__name__}: {str(error)[:160]}"
    found.prepare(device)
    return found

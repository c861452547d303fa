"""The plans of the bench's aggregations, from which the commands take bytes and times at the roofline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Optional

import torch

from edgeless.choices.engines import ROWSPLIT, named
from edgeless.functional.aggregation import gathered_degree
from edgeless.plan.steps import Device, Step, attention_steps, extremum_steps, spmm_step

from .ops import parse

_SCORES = {"gatv2": "gatv2", "gat": "gat", "gt": "dot"}
_SUMS = ("forward", "backward")


class Sizes(NamedTuple):
    """The sizes of a graph that a plan depends on."""

    num_src: int
    num_dst: int
    num_edges: int


def steps_of(
    op: str,
    dtype: torch.dtype,
    sizes: Sizes,
    device: Device,
    dropout: bool = False,
    arrays: bool = False,
    max_degree: int = -1,
    engine: str = "auto",
) -> list[Step]:
    """The steps of an aggregation called as the bench calls it, the forward's first.

    Args:
        op: the name of the aggregation, ``"gatv2_H8_D128"``.
        dropout: whether attention has dropout.
        arrays: whether attention reads or writes per-edge arrays.
        max_degree: edges of the longest row, -1 where it is not known.
        engine: the engine of sums.
    Raises:
        ValueError: no aggregation has this name.
    """
    kind, heads, width = parse(op)
    given = {**sizes._asdict(), "device": device}
    if kind in _SCORES:
        score = _SCORES[kind]
        return attention_steps(
            score, dtype, heads, 1 if score == "gat" else width, width, passes=("forward", "by_dst", "by_src"),
            max_degrees=[] if max_degree < 0 else [max_degree, max_degree], dropout=dropout, arrays=arrays, **given,
        )  # fmt: skip
    if kind.startswith("spmm"):
        weight = 4 if kind == "spmm_both" else 0
        refused = "" if device.multiprocessors else "the tensors are not on a GPU"
        if named(engine) is ROWSPLIT or not refused:
            runs, why = named(engine), ""
        else:
            runs, why = ROWSPLIT, f"{engine}: {refused}"
        given |= {"weight_bytes": weight, "scaled_only": weight > 0, "engine": runs}
        steps = (spmm_step(dtype, width, step=step, **given) for step in _SUMS)
        return [replace(step, refused=why) for step in steps]
    arg_bytes = 4 if max_degree < 0 else 1 if max_degree <= 2**8 else 2 if max_degree <= 2**16 else 4
    degree = gathered_degree(bool(device.multiprocessors), sizes.num_src, dtype.itemsize, arg_bytes, shares=False)
    has_transpose = sizes.num_edges <= degree * sizes.num_dst
    return extremum_steps(dtype, width, arg_bytes=arg_bytes, has_transpose=has_transpose, reduce=kind, **given)


def of_mode(steps: Sequence[Step], mode: str) -> Sequence[Step]:
    """The steps of a mode of the bench, ``"forward"`` or ``"forward_backward"``."""
    return [step for step in steps if mode != "forward" or step.step == "forward"]


def seconds_at_roof(steps: Sequence[Step]) -> Optional[float]:
    """The time of all steps at the roofline, None where it is not known."""
    seconds = [step.seconds for step in steps]
    return None if None in seconds else sum(seconds)

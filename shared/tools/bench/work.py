"""The timed work: one peer's computation on given inputs, the forward alone or with all gradients."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Optional, Union

import torch
from torch import Tensor

import edgeless
from edgeless.tools.cli.devices import UsageError

from .ops import ATTENTION, parse

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
MODES = ("forward", "forward_backward")
SHORT_MS = 2.0  # below it, the host's time to launch a run may affect the measurement


@dataclass(frozen=True)
class Case:
    """A layer ("gatv2", "gat", "transformer", "agnn") or a bare aggregation ("gatv2_H2_D64") in one precision.

    For a layer a 16-bit dtype means autocast, as users train. For an aggregation, and for a layer over relations, the
    inputs have that dtype, including the layer's parameters.
    """

    kind: str  # "layer" or "op"
    name: str
    dtype: str
    features: int = 128  # input features of a layer
    heads: int = 4
    channels: int = 32
    dropout: float = 0.0  # of attention weights

    @property
    def label(self) -> str:
        """The text of the case in a heading."""
        return f"{self.name} {self.dtype}" + (f" dropout {self.dropout:g}" if self.dropout else "")

    @property
    def op(self) -> str:
        """The aggregation without its sizes: "gatv2", "spmm_both"."""
        return parse(self.name)[0]


def op_case(name: str, dtype: str, dropout: float = 0.0) -> Case:
    """The case of an aggregation with a name like "gatv2_H8_D128" or "spmm_both_F512"; ValueError for other names, and
    for dropout in sums and extrema.
    """
    op, heads, channels = parse(name)
    if dropout and op not in ATTENTION:
        raise ValueError(f"dropout is of attention ({', '.join(ATTENTION)}), got {dropout:g} for {name}")
    return Case("op", name, dtype, heads=heads, channels=channels, dropout=dropout)


@dataclass
class Work:
    """One peer, ready to run.

    Attributes:
        compute: the forward, which returns the output or a list of outputs.
        inputs: the tensors whose gradients the backward computes: features, parameters.
        autocast: the dtype of autocast, or None.
        rows: the number of rows of each output; known before the first run.
        grad_out: the gradients of the outputs; drawn at the first run if they are not given.
    """

    compute: Callable[[], Union[Tensor, list[Tensor]]]
    inputs: list[Tensor]
    autocast: Optional[torch.dtype] = None
    rows: Sequence[int] = ()
    grad_out: Optional[list[Tensor]] = None

    def _precision(self):
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.inputs[0].device.type, self.autocast)

    def forward(self) -> None:
        """Runs the forward without gradients, as in inference."""
        with torch.no_grad(), self._precision():
            self.compute()

    def forward_backward(self) -> None:
        """The forward and the gradients of every input under a random gradient of the output."""
        with self._precision():
            outs = self.outputs()
        if self.grad_out is None:
            self.grad_out = [torch.randn_like(out) for out in outs]
        torch.autograd.grad(outs, self.inputs, self.grad_out, allow_unused=True)

    def outputs(self) -> list[Tensor]:
        """The results of ``compute`` as a list."""
        outs = self.compute()
        return outs if isinstance(outs, list) else [outs]

    def is_replayed(self, mode: str) -> bool:
        """Returns whether later runs of the mode replay a CUDA graph."""
        return False

    def mode(self, name: str) -> Callable[[], None]:
        """The method that runs one of :data:`MODES`."""
        return getattr(self, name)


@dataclass
class GraphedWork(Work):
    """The same work, captured in a CUDA graph at the first run of each mode and replayed from then on."""

    _captured: dict[str, torch.cuda.CUDAGraph] = field(default_factory=dict, init=False)

    def forward(self) -> None:
        """Replays the forward."""
        self._replay("forward", super().forward)

    def forward_backward(self) -> None:
        """Replays the forward and the backward."""
        self._replay("forward_backward", super().forward_backward)

    def is_replayed(self, mode: str) -> bool:
        return mode in self._captured

    def _replay(self, mode: str, run: Callable[[], None]) -> None:
        if mode not in self._captured:
            self._captured[mode] = _capture(run)
        self._captured[mode].replay()


def _capture(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Captures ``run()`` in a CUDA graph, after three runs on the same stream, which make what a first call makes.

    As long as any autograd graph with a leaf is alive, autograd waits on the stream on which the leaf was first used.
    If that is the default stream, a capture fails. So unreferenced autograd graphs are collected first, cycles too.
    """
    graph, side, current = torch.cuda.CUDAGraph(), torch.cuda.Stream(), torch.cuda.current_stream()
    gc.collect()
    side.wait_stream(current)
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    current.wait_stream(side)
    with torch.cuda.graph(graph, stream=side):
        run()
    return graph


@dataclass
class EngineWork(GraphedWork):
    """The same work on an engine, forward and backward. Short runs on CUDA are replayed, since otherwise the host would
    be timed and not the engine.
    """

    engine: str = "auto"
    waits: bool = False  # whether the engine waits for the GPU, so that a capture would use another engine
    _is_short: dict[str, bool] = field(default_factory=dict, init=False)

    def forward(self) -> None:
        """The forward on the engine."""
        self._run("forward", functools.partial(Work.forward, self))

    def forward_backward(self) -> None:
        """The forward and the backward on the engine."""
        self._run("forward_backward", functools.partial(Work.forward_backward, self))

    def _run(self, mode: str, run: Callable[[], None]) -> None:
        with edgeless.engine(self.engine):
            if mode not in self._is_short:
                self._is_short[mode] = not self.waits and self.inputs[0].is_cuda and _milliseconds(run) < SHORT_MS
            if self._is_short[mode]:
                self._replay(mode, run)
            else:
                run()


def _milliseconds(run: Callable[[], None]) -> float:
    """The shortest of three runs on the GPU after two others; the host's time counts if it is longer."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    found = []
    for _ in range(5):
        begin.record()
        run()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end))
    return min(found[2:])


@dataclass
class CapturedWork(Work):
    """The same work by a layer that :func:`edgeless.capture` replays; only replays are timed."""

    handle: Optional[edgeless.Capture] = None
    _replayed: set[str] = field(default_factory=set, init=False)

    def forward(self) -> None:
        """Calls the layer, whose forward is replayed."""
        self._call("forward", super().forward)

    def forward_backward(self) -> None:
        """Calls the layer, whose forward and backward are replayed."""
        self._call("forward_backward", super().forward_backward)

    def is_replayed(self, mode: str) -> bool:
        return mode in self._replayed

    def _call(self, mode: str, run: Callable[[], None]) -> None:
        if mode not in self._replayed:
            before = self.handle.num_replays
            for _ in range(5):  # the layer is captured after three
                run()
            if self.handle.num_replays == before:
                raise UsageError(f"--peers edgeless-pyg-captured: {self.handle.report()}")
            self._replayed.add(mode)
        run()

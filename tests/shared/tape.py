"""Fakes of CUDA graphs on the CPU: a recording notes every op that runs, and a replay runs the ops again and writes to
the memory of their first results.
"""

import contextlib
import random

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from edgeless import Capture


class Tape(TorchDispatchMode):
    """Records the ops that run under it, in their order."""

    def __init__(self):
        super().__init__()
        self.ops, self.before = [], {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for t in tree_leaves((args, kwargs)):
            if isinstance(t, torch.Tensor):
                self.before.setdefault(t.untyped_storage()._cdata, (t.detach(), t.clone()))
        out = func(*args, **(kwargs or {}))
        self.ops.append((func, args, kwargs or {}, out))
        return out

    def undo(self):
        """Restores the tensors that were written: recording a CUDA graph runs nothing."""
        for t, before in self.before.values():
            if not torch.equal(t, before):
                t.copy_(before)

    def replay(self):
        """Runs the recorded ops again."""
        for func, args, kwargs, out in self.ops:
            given = {id(t) for t in tree_leaves((args, kwargs))}
            for first, again in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(first, torch.Tensor) and id(first) not in given and not shares_memory(first, again):
                    first.copy_(again)


def shares_memory(a, b):
    """True if two tensors are views of one memory."""
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


class TapeGraphs:
    """Replaces ``CudaGraphs``."""

    kind = "cpu"

    def __init__(self):
        self.capturing = False

    def device(self):
        return -1

    def stream(self, device):
        return 0

    def is_capturing(self):
        return self.capturing

    def generator(self):
        return torch.default_generator

    def host_states(self):
        return [(random.getstate(), random.setstate)]

    def recorder(self):
        return self

    def warming(self):
        return contextlib.nullcontext()

    def not_waiting(self):
        return contextlib.nullcontext()

    def record(self, function):
        tape, state = Tape(), torch.get_rng_state()
        try:
            with tape:
                result = function()
        finally:
            torch.set_rng_state(state)
            with torch.no_grad():
                tape.undo()
        return result, tape.replay


X, ENDS = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([[0, 1, 5], [1, 2, 0]])


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.5)
        self.scale = 1.0
        self.register_buffer("shift", torch.zeros(4))

    def forward(self, x, ends):
        return self.linear(x) * self.scale + self.shift + ends.sum()


def taped(model, warmup=1, most=8):
    """The handle of a model whose calls are replayed from tapes."""
    return Capture(model, warmup, most, TapeGraphs())


def captured(model=None, **options):
    """A model that replays the call ``(X, ENDS)``, and its handle."""
    torch.manual_seed(0)
    model = Layer() if model is None else model
    handle = taped(model, **options)
    model(X, ENDS), model(X, ENDS)
    assert handle.num_captured == handle.num_replays == 1, handle.report()
    return model, handle


def eager(model, *args):
    """The model's result without its handle."""
    return type(model).forward(model, *args)

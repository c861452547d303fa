"""The devices that a test runs on, and checks that an op on CUDA does not synchronize the host, stays on the current
stream, and can be captured.
"""

import os
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from edgeless import _C, Graph

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
EVERY_DEVICE = pytest.mark.parametrize("device", DEVICES)
MEMORY_FOR_2_TO_THE_31 = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_properties(0).total_memory < 60 << 30, reason="needs 60 GB"
)


@contextmanager
def narrowed(capability):
    """A context in which CPU kernels use no more than ``"baseline"``, ``"avx2"`` or ``"avx512"``."""
    _C.limit_cpu_capability(capability)
    try:
        yield
    finally:
        _C.limit_cpu_capability(os.environ.get("EDGELESS_CPU_CAPABILITY", ""))


def leaves_on(device, tensors):
    """New leaves on the device, which require a gradient if the given tensors do."""
    return [None if t is None else t.detach().to(device).requires_grad_(t.requires_grad) for t in tensors]


def moved(value, device):
    """``value``, a tensor or a nested tuple or list of tensors, on a device."""
    if isinstance(value, (tuple, list)):
        return type(value)(moved(v, device) for v in value)
    return value.to(device) if isinstance(value, Tensor) else value


def moved_options(options, device):
    return {name: moved(value, device) for name, value in options.items()}


class OnGPU:
    """A layer on the GPU that takes and returns tensors on the CPU, as the helpers that draw gradients expect."""

    device = "cuda"

    def __init__(self, layer):
        self.layer = layer.to(self.device)

    def __call__(self, *inputs, **kwargs):
        return moved(self.layer(*moved(inputs, self.device), **moved_options(kwargs, self.device)), "cpu")

    def named_parameters(self):
        return self.layer.named_parameters()


def arrays_of(graph):
    """The arrays of CSR and CSC as ops take them."""
    return tuple([t for t in direction if t is not None] for direction in (graph.csr, graph.csc))


def with_wide_indices(graph):
    """The same graph with int64 arrays, as those of more than 2**31 edges have."""
    wide = (type(c)(*[None if t is None else t.long() for t in c]) for c in (graph.csr, graph.csc))
    return Graph(*wide, graph.num_src, graph.num_dst)


def star(edges=300_000, leaves=5000):
    """A graph with a hub among the destinations and one among the sources: several thread blocks share each."""
    gen = torch.Generator().manual_seed(1)
    src = torch.randint(0, leaves, (edges,), generator=gen)
    dst = torch.where(torch.rand(edges, generator=gen) < 0.7, 3, torch.randint(0, leaves, (edges,), generator=gen))
    src = torch.where(torch.rand(edges, generator=gen) < 0.2, 17, src)
    return Graph.from_edge_index(torch.stack([src, dst]), leaves, leaves)


def poison(device):
    """Fills freed memory of a GPU with NaN, so that a result that was never written shows."""
    if device != "cpu":
        blocks = [torch.full((n,), float("nan"), device=device) for n in (1 << 8, 1 << 12, 1 << 16, 1 << 20, 1 << 23)]
        del blocks


def without_waiting(step):
    """``step()``, which raises if the host waits for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        return step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def on_a_late_stream(call, *tensors):
    """Runs ``call`` on a side stream, with copies of the tensors that require gradients and are written there late."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        late = [torch.full_like(t, float("nan")) for t in tensors]
        torch.cuda._sleep(20_000_000)  # work on any other stream reads NaN
        for t, value in zip(late, tensors, strict=True):
            t.copy_(value.detach())
        found = call(*(t.requires_grad_() for t in late))
    torch.cuda.current_stream().wait_stream(stream)
    return found


def captured(step):
    """Captures ``step`` in a CUDA graph and returns its results and the function that replays it.

    ``step`` must detach its results: autograd nodes that outlive their call tie the capture to that call's stream.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    return found, graph.replay


def replayed(step):
    """The results that a replay of ``step``'s CUDA graph writes over NaN."""
    found, replay = captured(step)
    for t in found:
        t.detach().fill_(float("nan"))
    replay()
    torch.cuda.synchronize()  # the graph ends with this function
    return found


_WAYS = {
    "without waiting for the GPU": lambda step, args: without_waiting(lambda: step(*args)),
    "on a late stream": lambda step, args: on_a_late_stream(step, *args),
    "replayed": lambda step, args: replayed(lambda: step(*args)),
}
EVERY_WAY = pytest.mark.parametrize("way", _WAYS)


def assert_same_bits(way, step, args):
    """Asserts that ``step(*args)``, a list of tensors, has the same bits in one of these ways as in a plain call, which
    comes first and may build formats.
    """
    expected = step(*args)
    assert all(torch.equal(a, b) for a, b in zip(_WAYS[way](step, args), expected, strict=True))

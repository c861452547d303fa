"""Attention over pairs, whose backward writes gradients where the values were, if nobody can tell."""

import pytest
import torch
from devices import EVERY_DEVICE
from test_pair_attention import GRAPHS, SLOPE, gradients, operands, typed

from edgeless.functional.pair_attention import edge_ids, pair_attention, walks


def of_backward(graph, depth, width, dtype, bias, p):
    """What pair_attention_backward is given but for its needs, behind which stand the last three."""
    x, weight, query, key, bias, grad = operands(graph, depth, width, dtype, bias)
    arrays, degrees = walks(graph)
    seed, ids = torch.tensor([5], device=x.device), edge_ids(graph) if p else []
    call = (x, weight, query, key, bias, arrays, ids, SLOPE)
    with torch.no_grad():
        out, *kept, sums = torch.ops.edgeless.pair_attention(*call, degrees, bias is not None, seed, p)
    return (grad, out if bias is None else sums, *kept, *call), (degrees, seed, p)


@EVERY_DEVICE
@pytest.mark.parametrize("p", [0.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("widths", [(64, 64), (8, 8), (24, 8), (40, 128), (128, 128)])
@pytest.mark.parametrize("kind", GRAPHS)
def test_gradients_in_the_place_of_values(kind, widths, dtype, p, device):
    if kind == "a hub of many blocks" and (widths != (64, 64) or device == "cpu"):
        pytest.skip("takes the CPU long, which has no blocks")
    graph = GRAPHS[kind](device)
    args, more = of_backward(graph, *widths, dtype, True, p)
    values = args[2].clone()
    for needs in ([True] * 5, [False, True, True, False, False], [True, False, False, False, True]):
        want = torch.ops.edgeless.pair_attention_backward(*args, needs, *more)
        assert torch.equal(args[2], values)
        found = torch.ops.edgeless.pair_attention_backward_over(*args, needs, *more)
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
        assert torch.equal(args[2], values) is (device == "cpu")
        args[2].copy_(values)


@pytest.mark.cuda
def test_a_backward_needs_no_more_memory_for_pairs():
    graph = typed(3000, 200_000, 90, device="cuda")
    args, more = of_backward(graph, 64, 64, torch.float32, True, 0.0)
    peaks = []
    for op in ("pair_attention_backward", "pair_attention_backward_over"):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        getattr(torch.ops.edgeless, op)(*args, [True] * 5, *more)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    values = args[2].numel() * 4
    assert values > 20_000_000 and peaks[0] > 2 * values and peaks[1] < values / 2


@EVERY_DEVICE
def test_values_that_somebody_needs_stay_as_they_are(device):
    graph = GRAPHS["hubs"](device)
    given = operands(graph, 64, 64, torch.float32)
    want = gradients(graph, given)[1:]
    arrays, degrees = walks(graph)

    def writes_over():
        leaves = [t.detach().requires_grad_() for t in given[:5]]
        out, values, *_ = torch.ops.edgeless.pair_attention(*leaves, arrays, [], SLOPE, degrees)
        assert values.numel() == 0
        with torch.profiler.profile() as profile:
            found = torch.autograd.grad(out, leaves, given[5])
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
        return "edgeless::pair_attention_backward_over" in {event.key for event in profile.key_averages()}

    assert writes_over()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        assert not writes_over()
    leaves = [t.detach().requires_grad_() for t in given[:5]]
    out = pair_attention(graph, *leaves, SLOPE)
    for retained in (True, True, False):
        found = torch.autograd.grad(out, leaves, given[5], retain_graph=retained)
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


@EVERY_DEVICE
@pytest.mark.skipif(not hasattr(torch.library, "opcheck"), reason="torch.library.opcheck came with torch 2.4")
@pytest.mark.parametrize("p", [0.0, 0.5])
def test_opcheck_of_the_backward(p, device):
    args, more = of_backward(GRAPHS["random"](device), 64, 64, torch.float32, True, p)
    for op in ("pair_attention_backward", "pair_attention_backward_over"):
        torch.library.opcheck(getattr(torch.ops.edgeless, op), (*args, [True, False, True, True, False], *more))

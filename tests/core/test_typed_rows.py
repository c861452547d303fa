"""Linear maps, sums and blends of rows by type against plain PyTorch: widths, dtypes, gradients, bad input."""

import pytest
import torch
from attention_cases import assert_close, error
from test_typed_mm import LENGTHS, device, leaf, on_cpu  # noqa: F401  device: where all tensors here are made

ops = torch.ops.edgeless
EXACT = [(torch.float32, 1e-5), (torch.float64, 1e-10)]
HALF = [torch.bfloat16, torch.float16]


def offsets_of(kind, dtype=torch.int64):
    lengths = torch.tensor(LENGTHS[kind])
    return torch.cat((lengths.new_zeros(1), lengths.cumsum(0))).to(dtype)


def types_of(offsets):
    return torch.arange(len(offsets) - 1).repeat_interleave(offsets.diff().long())


def shuffled(offsets):
    """Where the entries lie, and the type of every row."""
    num_rows = int(offsets[-1])
    rows = torch.randperm(num_rows, generator=torch.Generator("cpu").manual_seed(2), device="cpu").to(offsets)
    types = torch.empty(num_rows, dtype=torch.int64)
    types[rows.long()] = types_of(offsets)
    return rows, types


def plain_linear(x, weight, bias, types):
    out = torch.einsum("nk,nmk->nm", x, weight[types])
    return out if bias is None else out + bias[types]


def plain_blend(y, x, alpha, types):
    alpha = alpha[types].unsqueeze(1)
    return alpha * y + (1 - alpha) * x


def with_grads(out, inputs):
    given = [t for t in inputs if t is not None]
    return [out, *torch.autograd.grad(out, given, leaf(*out.shape, dtype=out.dtype, seed=9).detach())]


def exact(tensors):
    return [t if t is None else t.detach().double().requires_grad_() for t in tensors]


def linear_inputs(offsets, shape, dtype, bias=True):
    types = len(offsets) - 1
    x, weight = leaf(int(offsets[-1]), shape[0], dtype=dtype), leaf(types, *reversed(shape), dtype=dtype, seed=1)
    return x, weight, leaf(types, shape[1], dtype=dtype, seed=2) if bias else None


def blend_inputs(offsets, width, dtype):
    num_rows, types = int(offsets[-1]), len(offsets) - 1
    return leaf(num_rows, width, dtype=dtype), leaf(num_rows, width, dtype=dtype, seed=1), leaf(types, dtype=dtype)


@pytest.mark.parametrize("kind", LENGTHS)
@pytest.mark.parametrize("shape", [(64, 64), (64, 192), (7, 5), (16, 100), (130, 8), (1, 1), (0, 3)])
@pytest.mark.parametrize("dtype,tolerance", EXACT)
@pytest.mark.parametrize("bias", [False, True])
def test_maps_of_every_width(kind, shape, dtype, tolerance, bias):
    offsets = offsets_of(kind)
    inputs = linear_inputs(offsets, shape, dtype, bias)
    wide = exact(inputs)
    expected = with_grads(plain_linear(*wide, types_of(offsets)), wide)
    for given in (offsets, offsets.int()):
        assert_close(with_grads(ops.typed_linear(*inputs, given), inputs), expected, tolerance)


@pytest.mark.parametrize("dtype", HALF)
def test_maps_of_halves_are_rounded_once(dtype):
    offsets = offsets_of("plain")
    inputs = linear_inputs(offsets, (64, 64), dtype)
    wide = exact(inputs)
    expected = with_grads(plain_linear(*wide, types_of(offsets)), wide)
    for found, want in zip(with_grads(ops.typed_linear(*inputs, offsets), inputs), expected, strict=True):
        assert found.dtype == dtype and error(found, want) < torch.finfo(dtype).eps


def test_wide_maps():
    """Of which the CPU leaves products to torch."""
    offsets = offsets_of("plain")
    inputs = linear_inputs(offsets, (520, 1030), torch.float32)
    wide = exact(inputs)
    expected = with_grads(plain_linear(*wide, types_of(offsets)), wide)
    assert_close(with_grads(ops.typed_linear(*inputs, offsets), inputs), expected, 1e-5)


@pytest.mark.parametrize("kind", LENGTHS)
@pytest.mark.parametrize("width", [64, 5, 1, 48, 300])
@pytest.mark.parametrize("dtype,tolerance", EXACT)
def test_sums_and_blends_of_every_width(kind, width, dtype, tolerance):
    offsets = offsets_of(kind)
    x = leaf(int(offsets[-1]), width, dtype=dtype)
    wide = x.detach().double().requires_grad_()
    sums = torch.zeros(len(offsets) - 1, width, dtype=torch.float64).index_add(0, types_of(offsets), wide)
    assert_close(with_grads(ops.typed_sums(x, offsets), [x]), with_grads(sums, [wide]), tolerance)
    inputs = blend_inputs(offsets, width, dtype)
    wide = exact(inputs)
    rows, types = shuffled(offsets)
    expected = with_grads(plain_blend(*wide, types), wide)
    assert_close(with_grads(ops.typed_blend(*inputs, offsets, rows), inputs), expected, tolerance)
    assert_close(with_grads(ops.typed_blend(*inputs, offsets.int(), rows.int()), inputs), expected, tolerance)
    expected = with_grads(plain_blend(*wide, types_of(offsets)), wide)
    assert_close(with_grads(ops.typed_blend(*inputs, offsets, None), inputs), expected, tolerance)


@pytest.mark.parametrize("dtype", HALF)
def test_blends_of_halves_are_rounded_once(dtype):
    offsets = offsets_of("long")
    inputs = blend_inputs(offsets, 64, dtype)
    wide = exact(inputs)
    expected = with_grads(plain_blend(*wide, types_of(offsets)), wide)
    for found, want in zip(with_grads(ops.typed_blend(*inputs, offsets, None), inputs), expected, strict=True):
        assert found.dtype == dtype and error(found, want) < torch.finfo(dtype).eps


def test_rows_that_do_not_lie_side_by_side():
    offsets = offsets_of("plain")
    wide, alpha = leaf(51, 24), leaf(4)
    y, x = wide[:, 3:11], wide[:, 13:21]
    assert_close(
        with_grads(ops.typed_blend(y, x, alpha, offsets, None), [wide, alpha]),
        with_grads(plain_blend(y, x, alpha, types_of(offsets)), [wide, alpha]),
        1e-10,
    )
    summed = torch.zeros(4, 8, dtype=y.dtype).index_add(0, types_of(offsets), y)
    assert_close([ops.typed_sums(y, offsets)], [summed], 1e-10)


def test_only_the_gradients_that_are_needed():
    offsets = offsets_of("plain")
    for one in range(3):
        inputs = [t.detach() for t in blend_inputs(offsets, 6, torch.float64)]
        inputs[one].requires_grad_()
        out = with_grads(ops.typed_blend(*inputs, offsets, None), [inputs[one]])
        assert_close(out, with_grads(plain_blend(*inputs, types_of(offsets)), [inputs[one]]), 1e-10)
        inputs = [t.detach() for t in linear_inputs(offsets, (3, 6), torch.float64)]
        inputs[one].requires_grad_()
        out = with_grads(ops.typed_linear(*inputs, offsets), [inputs[one]])
        assert_close(out, with_grads(plain_linear(*inputs, types_of(offsets)), [inputs[one]]), 1e-10)


@on_cpu
def test_gradcheck_and_opcheck():
    offsets = torch.tensor([0, 3, 3, 7])
    x, weight, bias = linear_inputs(offsets, (4, 3), torch.float64)
    torch.autograd.gradcheck(lambda *a: ops.typed_linear(*a, offsets), (x, weight, bias))
    torch.autograd.gradgradcheck(lambda *a: ops.typed_linear(*a, offsets), (x, weight, bias))
    torch.autograd.gradgradcheck(lambda x: ops.typed_sums(x, offsets).square(), (x,))
    y, x, alpha = blend_inputs(offsets, 3, torch.float64)
    rows, _ = shuffled(offsets)
    torch.autograd.gradcheck(lambda *a: ops.typed_blend(*a, offsets, rows), (y, x, alpha))
    torch.autograd.gradgradcheck(lambda *a: ops.typed_blend(*a, offsets, rows), (y, x, alpha))
    for given in (None, bias):
        torch.library.opcheck(ops.typed_linear, (leaf(7, 4), weight, given, offsets))
    torch.library.opcheck(ops.typed_sums, (x, offsets))
    torch.library.opcheck(ops.typed_blend, (y, x, alpha, offsets, rows))
    grads = torch.randn(7, 3, dtype=torch.float64), *(t.detach() for t in (y, x, alpha))
    for needs in ([True] * 3, [False, True, False]):
        torch.library.opcheck(ops.typed_blend_backward, (*grads, offsets, None, needs))


def test_bitwise_the_same_from_run_to_run():
    offsets = offsets_of("long")
    runs = []
    for _ in range(2):
        inputs, blended = linear_inputs(offsets, (64, 64), torch.float32), blend_inputs(offsets, 64, torch.float32)
        runs.append(with_grads(ops.typed_linear(*inputs, offsets), inputs))
        runs[-1] += with_grads(ops.typed_blend(*blended, offsets, None), blended)
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@on_cpu
def test_errors_say_what_was_expected():
    offsets = offsets_of("plain")
    x, weight, bias = (t.detach() for t in linear_inputs(offsets, (4, 3), torch.float32))
    y, z, alpha = (t.detach() for t in blend_inputs(offsets, 3, torch.float32))
    for function, words in (
        (lambda: ops.typed_linear(x, weight[:, :, 1:], bias, offsets), "weight"),
        (lambda: ops.typed_linear(x, weight, bias[1:], offsets), "bias"),
        (lambda: ops.typed_linear(x, weight, bias.double(), offsets), "bias"),
        (lambda: ops.typed_linear(x, weight, bias, offsets[1:]), "offsets"),
        (lambda: ops.typed_linear(x[1:], weight, bias, offsets), "offsets must run from 0 to N = 50, got 0 to 51"),
        (lambda: ops.typed_sums(x, offsets[:-1]), "offsets must run from 0 to N = 51, got 0 to 44"),
        (lambda: ops.typed_blend(y, z[:, 1:], alpha, offsets, None), "x"),
        (lambda: ops.typed_blend(y, z.double(), alpha, offsets, None), "x"),
        (lambda: ops.typed_blend(y, z, alpha[1:], offsets, None), "offsets"),
        (lambda: ops.typed_blend(y, z, alpha, offsets, torch.arange(50)), "rows"),
    ):
        with pytest.raises(ValueError, match=words):
            function()


def test_batches_of_gradients():
    offsets = offsets_of("plain")
    for function, inputs in (
        (lambda *a: ops.typed_linear(*a, offsets), linear_inputs(offsets, (3, 6), torch.float64)),
        (lambda *a: ops.typed_blend(*a, offsets, None), blend_inputs(offsets, 6, torch.float64)),
    ):
        out = function(*inputs)
        batch = torch.stack([leaf(*out.shape, seed=seed).detach() for seed in range(3)])
        found = torch.autograd.grad(out, inputs, batch, is_grads_batched=True, retain_graph=True)
        for i, grad in enumerate(batch):
            expected = torch.autograd.grad(out, inputs, grad, retain_graph=True)
            assert_close([t[i] for t in found], expected, 1e-10)

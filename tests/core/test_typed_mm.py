"""segment_mm and gather_mm against plain PyTorch: widths, empty types, dtypes, gradients, bad input."""

import subprocess
import sys

import pytest
import torch
from attention_cases import assert_close, error
from devices import DEVICES

import edgeless
from edgeless import functional
from edgeless.checks import INTEGERS as EVERY_INTEGER
from edgeless.choices.backends import kernel_refusal

LENGTHS = {
    "plain": [3, 40, 1, 7],
    "empty types": [0, 5, 0, 0, 200, 0],
    "no rows": [0, 0, 0],
    "one type": [100],
    "long": [5000, 3, 900],
    "many types": [1, 2, 0] * 60,
}
INTEGERS = sorted(EVERY_INTEGER, key=str)
SHAPES = [(1, 1), (7, 5), (64, 64), (33, 48), (48, 33), (16, 100), (130, 8)]


on_cpu = pytest.mark.parametrize("device", ["cpu"], indirect=True)


@pytest.fixture(autouse=True, params=DEVICES)
def device(request):
    """Where tensors are made, unless said otherwise."""
    reason = request.param == "cuda" and kernel_refusal(torch.device("cuda"), "relational_sum")
    if reason:
        pytest.skip(reason)
    with torch.device(request.param):
        yield request.param


def leaf(*shape, dtype=torch.float64, seed=0):
    gen = torch.Generator("cpu").manual_seed(seed)
    made = torch.randn(*shape, dtype=torch.float64, generator=gen, device="cpu")
    return made.to(torch.get_default_device(), dtype).requires_grad_()


def both_ways(function, x, w, *rest, **kwargs):
    results = []
    for name in ("fused", "reference"):
        with edgeless.backend(name):
            out = function(x, w, *rest, **kwargs)
        grad = leaf(*out.shape, dtype=out.dtype, seed=9).detach()
        results.append([out, *torch.autograd.grad(out, [x, w], grad)])
    return results


@pytest.mark.parametrize("kind", LENGTHS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_segments_of_every_width(kind, shape, dtype, tolerance):
    lengths = torch.tensor(LENGTHS[kind])
    num_rows = int(lengths.sum())
    x, w = leaf(num_rows, shape[0], dtype=dtype), leaf(len(lengths), *shape, dtype=dtype, seed=1)
    assert_close(*both_ways(functional.segment_mm, x, w, lengths), tolerance)
    types = torch.arange(len(lengths)).repeat_interleave(lengths)
    types = types[
        torch.randperm(num_rows, generator=torch.Generator("cpu").manual_seed(2), device="cpu").to(types.device)
    ]
    assert_close(*both_ways(functional.gather_mm, x, w, types), tolerance)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_every_dtype_of_lengths_offsets_and_index(dtype):
    x, w = leaf(51, 6), leaf(4, 6, 3)
    lengths = torch.tensor(LENGTHS["plain"])
    expected = torch.cat([part @ m for part, m in zip(x.split(lengths.tolist()), w, strict=True)])
    offsets = torch.tensor([0, 3, 43, 44, 51])
    index = torch.arange(4).repeat_interleave(lengths)
    for found in (
        functional.segment_mm(x, w, lengths.to(dtype)),
        functional.segment_mm(x, w, offsets=offsets.to(dtype)),
        functional.gather_mm(x, w, index.to(dtype)),
    ):
        assert_close([found], [expected], 1e-12)


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("backend", ["fused", "reference"])
def test_numbers_of_blocks_are_not_numbered_in_the_dtype_of_types(dtype, backend):
    """Of 100 types with 4 blocks there are more than a narrow dtype has numbers."""
    x, w, bias = leaf(100, 8), leaf(100, 4, 2, 3), leaf(100, 12)
    index = torch.arange(99, -1, -1)
    expected = torch.einsum("nbk,nbkm->nbm", x.view(100, 4, 2), w[index]).reshape(100, 12) + bias[index]
    with edgeless.backend(backend):
        assert_close([functional.gather_mm(x, w, index.to(dtype), bias)], [expected], 1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_errs_at_most_twice_as_much_as_torch(dtype):
    lengths = torch.tensor([30, 0, 170])
    x, w = leaf(200, 40, dtype=dtype), leaf(3, 40, 24, dtype=dtype, seed=1)

    def plain(x, w):
        out = torch.cat([part @ m for part, m in zip(x.split(lengths.tolist()), w, strict=True)])
        return [out, *torch.autograd.grad(out, [x, w], torch.ones_like(out))]

    out = functional.segment_mm(x, w, lengths)
    assert out.dtype == dtype
    found = [out, *torch.autograd.grad(out, [x, w], torch.ones_like(out))]
    exact = plain(*(t.detach().double().requires_grad_() for t in (x, w)))
    for a, b, c in zip(found, plain(x, w), exact, strict=True):
        assert error(a, c) <= 2 * error(b, c)


def test_weights_too_large_for_the_caches():
    lengths = torch.tensor([5, 0, 40])
    x, w = leaf(45, 800, dtype=torch.float32), leaf(3, 800, 700, dtype=torch.float32)
    assert_close(*both_ways(functional.segment_mm, x, w, lengths), 1e-5)
    index = torch.tensor([0, 2, 2]).repeat(15)
    assert_close(*both_ways(functional.gather_mm, x, w, index), 1e-5)


def test_block_diagonal_matrices():
    x, w, index = leaf(30, 12), leaf(5, 3, 4, 2), torch.arange(30) % 5
    dense = torch.stack([torch.block_diag(*blocks) for blocks in w])
    found, expected = functional.gather_mm(x, w, index), functional.gather_mm(x, dense, index)
    grads = [torch.autograd.grad(out.square().sum(), [x, w]) for out in (found, expected)]
    assert_close([found, *grads[0]], [expected, *grads[1]], 1e-12)


@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("blocks", [(), (2,)])
def test_a_bias_of_every_type(dtype, tolerance, blocks):
    x, w = leaf(60, 6, dtype=dtype), leaf(4, *blocks, 6 // (len(blocks) + 1), 3, dtype=dtype, seed=1)
    width = 3 * (len(blocks) + 1)
    bias, index = leaf(4, width, dtype=dtype, seed=2), torch.arange(60) % 3
    for ids in (index, index.int()):
        found, expected = functional.gather_mm(x, w, ids, bias), functional.gather_mm(x, w, ids) + bias[index]
        grads = [torch.autograd.grad(out.square().sum(), [x, w, bias]) for out in (found, expected)]
        with edgeless.backend("reference"):
            plain = functional.gather_mm(x, w, ids, bias)
        assert_close([found, *grads[0], plain], [expected, *grads[1], expected], tolerance)
        assert not grads[0][2][3].any()


@pytest.mark.cuda
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_the_gradient_of_a_bias_is_bitwise_the_same_from_run_to_run():
    x, w, bias = leaf(50_000, 8, dtype=torch.float32), leaf(3, 8, 16, dtype=torch.float32), leaf(3, 16).float()
    index, grad = torch.arange(50_000) % 3, leaf(50_000, 16, dtype=torch.float32, seed=4).detach()
    runs = [torch.autograd.grad(functional.gather_mm(x, w, index, bias), bias, grad)[0] for _ in range(5)]
    assert all(torch.equal(runs[0], other) for other in runs[1:])


def test_strided_operands():
    wide = torch.randn(40, 30, dtype=torch.float64)
    w = torch.randn(3, 10, 16, dtype=torch.float64)
    lengths = torch.tensor([20, 5, 15])
    for x in (wide[:, 5:15], wide.t()[:10].t(), torch.randn(1, 10, dtype=torch.float64).expand(40, 10)):
        for weight in (w, torch.randn(3, 16, 10, dtype=torch.float64).mT, w[:1].expand(3, 10, 16)):
            expected = functional.segment_mm(x.contiguous(), weight.contiguous(), lengths)
            assert_close([functional.segment_mm(x, weight, lengths)], [expected], 1e-12)


def test_gradcheck_and_gradgradcheck():
    x, w, index = leaf(9, 4), leaf(3, 4, 5), torch.tensor([2, 0, 0, 2, 2, 0, 2, 2, 0])
    for function, inputs in (
        (lambda x, w: functional.gather_mm(x, w, index), [x, w]),
        (lambda x, w, b: functional.gather_mm(x, w, index, b), [x, w, leaf(3, 5, seed=2)]),
        (lambda x, w: functional.segment_mm(x, w, torch.tensor([4, 0, 5])), [x, w]),
    ):
        assert torch.autograd.gradcheck(function, inputs)
        assert torch.autograd.gradgradcheck(function, inputs)


@on_cpu
def test_bitwise_the_same_for_any_number_of_threads():
    x, w = leaf(30_000, 50, dtype=torch.float32), leaf(3, 50, 70, dtype=torch.float32)
    index = torch.randint(3, (30_000,), generator=torch.Generator().manual_seed(1))
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            out = functional.gather_mm(x, w, index)
            results.append([out, *torch.autograd.grad(out.square().sum(), [x, w])])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.skipif(not hasattr(torch.library, "opcheck"), reason="torch.library.opcheck came with torch 2.4")
def test_opcheck():
    ops, offsets = torch.ops.edgeless, torch.tensor([0, 4, 4, 9])
    x, y, w, rows = leaf(9, 4), leaf(9, 5), leaf(3, 4, 5), torch.randperm(9)
    torch.library.opcheck(ops.typed_mm, (x, w, offsets, rows))
    torch.library.opcheck(ops.typed_mm, (x.detach().bfloat16(), w.detach().bfloat16(), offsets, None))
    torch.library.opcheck(ops.typed_outer, (x, y, offsets, rows))
    torch.library.opcheck(ops.typed_outer, (x, y, offsets.int(), None))
    index, indptr, members = torch.tensor([2, 0, 2]), torch.tensor([0, 1, 1, 3]), torch.tensor([1, 0, 2])
    torch.library.opcheck(ops.gather_rows, (leaf(3, 5), index, indptr, members))


def test_batches_of_gradients():
    x, w, b, index = leaf(9, 4), leaf(3, 4, 5), leaf(3, 5), torch.arange(9) % 3
    out = functional.gather_mm(x, w, index, b)
    batch = torch.randn(3, *out.shape, dtype=torch.float64)
    found = torch.autograd.grad(out, [x, w, b], batch, is_grads_batched=True, retain_graph=True)
    for i, grad in enumerate(batch):
        one = torch.autograd.grad(out, [x, w, b], grad, retain_graph=True)
        assert all(torch.equal(a[i], b) for a, b in zip(found, one, strict=True))


def test_compiles_whole():
    x, w, index, lengths = leaf(50, 12), leaf(4, 12, 8), torch.arange(50) % 4, torch.tensor([20, 0, 5, 25])
    torch._dynamo.reset()

    def both(x, w, index, lengths):
        return functional.gather_mm(x, w, index, w[:, 0]) + functional.segment_mm(x, w, lengths)

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    out, expected = compiled(x, w, index, lengths), both(x, w, index, lengths)
    assert_close([out], [expected], 1e-12)
    assert_close(*[torch.autograd.grad(o.square().sum(), [x, w]) for o in (out, expected)], 1e-12)


X, W3 = torch.zeros(5, 3), torch.zeros(2, 3, 4)


@on_cpu
@pytest.mark.parametrize("args,kwargs,kind,message", [
    ((X[0], W3, torch.tensor([2, 3])), {}, ValueError, r"x must have shape \[N, K\] = \[\*, \*\], got \[3\]"),
    ((X, W3[0], torch.tensor([2, 3])), {}, ValueError, r"w must have shape \[R, K, M\] = \[\*, 3, \*\], got \[3, 4\]"),
    ((X, W3, torch.tensor([2, 2])), {}, ValueError, "lengths must add up to N = 5, got 4"),
    ((X, W3, torch.tensor([7, -2])), {}, ValueError, "lengths must not be negative, got -2"),
    ((X, W3, torch.tensor([5])), {}, ValueError, r"lengths must have shape \[R\] = \[2\], got \[1\]"),
    ((X, W3, torch.tensor([2.0, 3.0])), {}, ValueError, "lengths must have an integer dtype, got torch.float32"),
    ((X, W3, [2, 3]), {}, TypeError, "lengths must be a Tensor"),
    ((X, W3), {}, TypeError, "either lengths or offsets must be given, got neither"),
    ((X, W3), {"offsets": torch.tensor([0, 5])}, ValueError, r"offsets must have shape \[R \+ 1\] = \[3\], got \[2\]"),
    ((X, W3), {"offsets": torch.tensor([0, 2, 4])}, ValueError, "offsets must run from 0 to N = 5, got 0 to 4"),
    ((X, W3), {"offsets": torch.tensor([0, 6, 5])}, ValueError, "offsets must not fall, got 6 then 5"),
    ((X.long(), W3, torch.tensor([2, 3])), {}, ValueError, "x must be float32"),
    ((X, W3.to("meta"), torch.tensor([2, 3])), {}, ValueError, "w must be on x's device cpu, got meta"),
])  # fmt: skip
def test_bad_segments_are_named(args, kwargs, kind, message):
    with pytest.raises(kind, match="segment_mm: |typed_mm: ") as raised:
        functional.segment_mm(*args, **kwargs)
    assert raised.match(message)


@pytest.mark.parametrize("lengths,said", [
    ([2, 2], "lengths_add_up_to_the_rows"), ([7, -2], "lengths_are_not_negative"),
])  # fmt: skip
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.cuda)], indirect=True)
def test_lengths_that_do_not_fit_stop_a_gpu(device, lengths, said):
    program = (
        "import torch; from edgeless import functional\n"
        f"lengths = torch.tensor({lengths}, device='cuda')\n"
        "functional.segment_mm(torch.zeros(5, 3, device='cuda'), torch.zeros(2, 3, 4, device='cuda'), lengths).cpu()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode != 0 and said in done.stderr


@on_cpu
@pytest.mark.parametrize("args,kind,message", [
    ((X, W3, torch.tensor([0, 1, 2, 0, 0])), IndexError, "index has id 2 at position 2, expected 0 <= id < R = 2"),
    ((X, W3, torch.tensor([0, -1, 1, 0, 0])), IndexError, "index has id -1 at position 1"),
    ((X, W3, torch.tensor([0, 1])), ValueError, r"index must have shape \[N\] = \[5\], got \[2\]"),
    ((X, torch.zeros(2, 2, 2, 2), torch.zeros(5).long()), ValueError, r"x must have shape \[N, K\] = \[\*, 4\]"),
    ((X, torch.zeros(2, 3, 1, 4), torch.tensor([0, 1, 2, 0, 0])), IndexError, "id 2 at position 2, .* < R = 2"),
    ((X, torch.zeros(2, 3, 1, 4), torch.tensor([0, -1, 1, 0, 0])), IndexError, "id -1 at position 1, .* < R = 2"),
])  # fmt: skip
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_bad_indices_are_named(args, kind, message, backend):
    with pytest.raises(kind, match=message), edgeless.backend(backend):
        functional.gather_mm(*args)

"""The linear maps of one input on CUDA: against the modules, under autocast, strides, launches, graph capture."""

from itertools import product

import pytest
import torch
from devices import captured
from torch import nn
from torch.profiler import ProfilerActivity, profile

from edgeless.functional import projection

pytestmark = pytest.mark.cuda
DEVICE = "cuda"
ops = torch.ops.edgeless
# Few rows and many: see kLaunchBoundRows.
SHAPES = [
    (0, 3, (4,)),
    (1, 3, (4, 1)),
    (700, 16, (8, 24)),
    (40_000, 33, (128, 7, 300)),
    (129, 70, (1,) * 20),
    (300, 64, (33, 70, 132)),  # float32: what the tensor cores take, and what they do not
    (40_001, 100, (33, 100, 46, 64)),
    (1000, 2052, (68,)),
    (2708, 128, (128, 40, 200)),  # 16 bits: what our kernel takes of few rows, with tiles that are not full
    (1000, 1024, (256,)),
    (31, 24, (32, 48)),
    (20_000, 8, (64,)),
]


def maps(features, widths, dtype=torch.float32):
    torch.manual_seed(len(widths))
    return [nn.Linear(features, w, bias=k != 1, dtype=dtype, device=DEVICE) for k, w in enumerate(widths)]


def rows(count, features, dtype=torch.float32):
    return torch.randn(count, features, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype).requires_grad_()


def leaves_of(x, linears):
    return [x, *(p for lin in linears for p in lin.parameters())]


def error(found, exact):
    return float((found.double() - exact).norm() / exact.norm().clamp(min=1e-30))


def in_float64(x, linears, grads):
    wide = x.detach().double().requires_grad_()
    copies = [nn.Linear(lin.in_features, lin.out_features, lin.bias is not None).to(DEVICE).double() for lin in linears]
    for copy, lin in zip(copies, linears, strict=True):
        copy.load_state_dict(lin.state_dict())
    outs = [lin(wide) for lin in copies]
    return [*outs, *torch.autograd.grad(outs, leaves_of(wide, copies), [g.double() for g in grads])]


@pytest.mark.parametrize("count,features,widths", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_errs_at_most_twice_as_much_as_the_modules(count, features, widths, dtype):
    x, linears = rows(count, features, dtype), maps(features, widths, dtype)
    outs, stock = projection.project(x, *linears), [lin(x) for lin in linears]
    grads = [torch.randn_like(out) for out in outs]
    leaves = leaves_of(x, linears)
    found = [*outs, *torch.autograd.grad(outs, leaves, grads)]
    stock = [*stock, *torch.autograd.grad(stock, leaves, grads)]
    exact = in_float64(x, linears, grads)
    for a, b, c in zip(found, stock, exact, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        bound = 1e-12 if dtype == torch.float64 else 2 * error(b, c) + 2 * torch.finfo(dtype).eps
        assert error(a, c) <= bound


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [3000, 40_001])  # few rows and many
def test_autocast(dtype, rows_dtype, count):
    x, linears = rows(count, 40, rows_dtype), maps(40, (64, 24, 8))
    with torch.autocast(DEVICE, dtype):
        outs, stock = projection.project(x, *linears), [lin(x) for lin in linears]
        added = projection.product(x, linears[1].weight.t())
    if count == 40_001:  # the libraries' products
        assert all(torch.equal(a, b) for a, b in zip((*outs, added), (*stock, stock[1]), strict=True))
    assert added.dtype == dtype and error(added, stock[1].double()) <= torch.finfo(dtype).eps
    grads = [torch.randn_like(out) for out in outs]
    leaves = leaves_of(x, linears)
    found = [*outs, *torch.autograd.grad(outs, leaves, grads)]
    expected = [*stock, *torch.autograd.grad(stock, leaves, grads)]
    for a, b, c in zip(found, expected, in_float64(x, linears, grads), strict=True):
        assert a.dtype == b.dtype and error(a, c) <= 2 * error(b, c) + torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_few_rows_of_16_bits_are_products_of_ours(dtype):
    x, linears = rows(3000, 64, dtype), maps(64, (64, 128, 64), dtype)
    leaves = leaves_of(x, linears)

    def step():
        outs = projection.project(x, *linears, joined=3)
        torch.autograd.grad([*outs, projection.project_sum((x, x), (linears[1], linears[1]))], leaves, [*outs, outs[1]])

    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        step()
        torch.cuda.synchronize()
    kernels = [e.key for e in found.events() if "product" in e.key or "gemm" in e.key or "nvjet" in e.key]
    assert len(kernels) == 6 and all("half_gemm_kernel" in key for key in kernels), kernels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_that_is_given_transposed_takes_products_of_ours(dtype):
    x = rows(3000, 64, dtype)
    weight = torch.randn(64, 128, device=DEVICE, dtype=dtype, requires_grad=True)  # [F, C], as DGL's GraphConv has it
    bias = torch.randn(128, device=DEVICE, dtype=dtype, requires_grad=True)
    leaves = [x, weight, bias]

    def step():
        out = projection.product(x, weight, bias)
        return [out, *torch.autograd.grad(out, leaves, torch.ones_like(out))]

    wide = [t.detach().double().requires_grad_() for t in leaves]
    exact = torch.addmm(wide[2], wide[0], wide[1])
    exact = [exact, *torch.autograd.grad(exact, wide, torch.ones_like(exact))]
    stock = torch.addmm(bias, x, weight)
    stock = [stock, *torch.autograd.grad(stock, leaves, torch.ones_like(stock))]
    for a, b, c in zip(step(), stock, exact, strict=True):
        assert a.shape == b.shape and error(a, c) <= 2 * error(b, c) + 2 * torch.finfo(dtype).eps
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        step()
        torch.cuda.synchronize()
    kernels = [e.key for e in found.events() if "product" in e.key or "gemm" in e.key or "nvjet" in e.key]
    assert len(kernels) == 3 and all("cuda::projection::" in key for key in kernels), kernels


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_of_ours_keep_infinities(dtype):
    x, linears = rows(300, 64, dtype), maps(64, (64,), dtype)
    with torch.no_grad():
        x[3, 5], x[7, 7] = float("inf"), float("nan")
    out, stock = projection.project(x, *linears)[0], linears[0](x)
    assert torch.equal(out.isnan(), stock.isnan()) and torch.equal(out.isinf(), stock.isinf())


def test_float64_is_left_alone_by_autocast():
    x, linears = rows(30, 4, torch.float64), maps(4, (3,), torch.float64)
    with torch.autocast(DEVICE, torch.bfloat16):
        assert torch.equal(projection.project(x, *linears)[0], linears[0](x))
        with pytest.raises(RuntimeError):
            projection.project(x, *maps(4, (3,)))  # torch's own error


@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (127, 33), (128, 128), (100_001, 3), (33_000, 257), (5, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_sums_of_columns(shape, dtype):
    wide = (torch.randn(shape[0], 2 * shape[1] + 1, device=DEVICE) / 8).to(dtype)
    for x in (wide[:, : shape[1]], wide[:, 1::2], wide[:, :1].expand(shape), wide[:1, : shape[1]].expand(shape)):
        if x.shape != shape:
            continue
        exact = x.double().sum(0)
        found = ops.column_sums(x)
        assert found.dtype == dtype and found.shape == exact.shape
        arithmetic = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32)
        bound = torch.finfo(dtype).eps * exact.abs() + 32 * arithmetic.eps * x.double().abs().sum(0)
        assert ((found.double() - exact).abs() <= bound).all()
        assert torch.equal(found, ops.column_sums(x))


@pytest.mark.parametrize("to", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_copies_in_another_dtype(to):
    gen = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(shape, generator=gen).to(DEVICE, dtype)
        for shape in ((7,), (130, 9), (0, 4), (5, 4, 3), (40_001,))
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    ]
    tensors += [tensors[16][1:], tensors[4].t(), tensors[4][:, ::2]]
    for found, t in zip(ops.cast_all(tensors, to), tensors, strict=True):
        assert found.is_contiguous() and torch.equal(found, t.to(to))
    for found, t in zip(ops.cast_all(tensors, to, True), tensors, strict=True):
        assert found.is_contiguous() and torch.equal(found, t.to(to)) and found.data_ptr() % 16 == 0


def test_copies_side_by_side_leave_no_gap_between_whole_vectors():
    tensors = [torch.randn(shape, device=DEVICE) for shape in ((5, 8), (3, 8), (2, 4), (16,))]
    with torch.no_grad():
        copies = ops.cast_all(tensors, torch.bfloat16, True)
    assert [t.storage_offset() for t in copies] == [0, 40, 64, 72]
    assert len({t.untyped_storage().data_ptr() for t in copies}) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [300, 40_001])  # few rows and many
def test_gradients_in_the_dtype_that_is_asked_for(dtype, count):
    x, weights = rows(count, 40, dtype).detach(), [torch.randn(n, 40, device=DEVICE, dtype=dtype) for n in (64, 24, 8)]
    grads = [None, *(torch.randn(count, len(w), device=DEVICE, dtype=dtype) for w in weights[1:])]
    exact = ops.project_backward(
        [g if g is None else g.double() for g in grads], x.double(), [w.double() for w in weights], [True] * 7
    )
    for to_x, to_maps in ((torch.float32, torch.float32), (None, torch.float32), (torch.float32, torch.float64)):
        found = ops.project_backward(grads, x, weights, [True] * 7, to_x, to_maps)
        assert [t.dtype for t in found] == [to_x or dtype, *[to_maps] * 6]
        for i, (a, b) in enumerate(zip(found, exact, strict=True)):
            rounded = 1e-5 if a.dtype == torch.float32 and i > 0 else torch.finfo(dtype).eps
            assert error(a, b) <= 2 * rounded, i


@pytest.mark.parametrize("shape", [(0, 2, 3), (5, 1, 7), (3000, 8, 8), (20_001, 4, 32), (700, 3, 40), (90, 2, 300)])
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize(
    "dtype,vectors_dtype",
    [(torch.float32,) * 2, (torch.float64,) * 2, (torch.bfloat16,) * 2, (torch.bfloat16, torch.float32)],
)
def test_logits_of_nodes(shape, count, dtype, vectors_dtype):
    gen = torch.Generator().manual_seed(1)
    wide = torch.randn(*shape[:2], 2 * shape[2], generator=gen).to(DEVICE, dtype)
    vectors = [
        torch.randn(1, *shape[1:], generator=gen).to(DEVICE, vectors_dtype).requires_grad_() for _ in range(count)
    ]
    for x in (wide[:, :, : shape[2]].contiguous(), wide[:, :, shape[2] :], wide[:, :, ::2]):
        x = x.detach().requires_grad_()
        found, stock = projection.node_logits(x, *vectors), [(x * a).sum(-1) for a in vectors]
        exact_leaves = [t.detach().double().requires_grad_() for t in (x, *vectors)]
        exact = [(exact_leaves[0] * a).sum(-1) for a in exact_leaves[1:]]
        grads = [torch.randn_like(t) for t in found]
        results = [
            [*outs, *torch.autograd.grad(outs, leaves, [g.to(outs[0].dtype) for g in grads])]
            for outs, leaves in ((found, [x, *vectors]), (stock, [x, *vectors]), (exact, exact_leaves))
        ]
        for a, b, c in zip(*results, strict=True):
            assert a.shape == b.shape and a.dtype == b.dtype
            assert error(a, c) <= (1e-12 if dtype == torch.float64 else 2 * error(b, c) + 2 * torch.finfo(b.dtype).eps)
    (alone,) = torch.autograd.grad(projection.node_logits(x, *vectors)[-1].sum(), [vectors[-1]])
    assert error(alone, x.double().sum(0)) <= (1e-2 if dtype == torch.bfloat16 else 1e-3)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("count", [300, 40_000])
def test_joined_results_are_parts_of_one_tensor(count, bias):
    x, linears = rows(count, 33), [nn.Linear(33, w, bias=bias and w != 24, device=DEVICE) for w in (8, 24, 16, 12)]
    leaves = leaves_of(x, linears)
    outs, stock = projection.project(x, *linears, joined=3), [lin(x) for lin in linears]
    assert len({out.untyped_storage().data_ptr() for out in outs}) == 2 and outs[3].is_contiguous()
    grads = [torch.randn_like(out) for out in stock]
    found = [*outs, *torch.autograd.grad(outs, leaves, grads)]
    assert all(error(a, c) <= 1e-5 for a, c in zip(found, in_float64(x, linears, grads), strict=True))
    odd = [nn.Linear(33, w, device=DEVICE) for w in (7, 5)]  # no whole vectors side by side
    assert all(out.is_contiguous() for out in projection.project(x, *odd, joined=2))


@pytest.mark.parametrize("count", [300, 40_000])
@pytest.mark.parametrize("parts", [(0, 3), (0, 2), (1, 3)])
def test_gradients_side_by_side_take_one_product(count, parts):
    """Of three maps, the gradients of those from parts[0] to parts[1] are parts of one tensor."""
    x, linears = rows(count, 32), maps(32, (96, 128, 104))
    leaves = leaves_of(x, linears)
    grads = [torch.randn(count, lin.out_features, device=DEVICE) for lin in linears]
    joined = torch.cat(grads[slice(*parts)], 1)
    widths = [lin.out_features for lin in linears]
    given = list(grads)
    given[slice(*parts)] = joined.split(widths[slice(*parts)], 1)
    outs = projection.project(x, *linears)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        results = torch.autograd.grad(outs, leaves, given)
        torch.cuda.synchronize()
    exact = in_float64(x, linears, grads)[len(linears) :]
    assert all(error(a, c) <= 1e-5 for a, c in zip(results, exact, strict=True))
    products = sum("product_kernel" in e.key for e in found.events())
    assert products == 2 * (1 if count == 300 else 3 - (parts[1] - parts[0]) + 1)


@pytest.mark.parametrize("count", [300, 40_000])
def test_infinities_and_nan_stay_what_they_are(count):
    x, linears = rows(count, 64), maps(64, (128,))
    with torch.no_grad():
        x[3, 5], x[4, 6], x[7, 1] = float("inf"), -float("inf"), float("nan")
    leaves = leaves_of(x, linears)
    out, stock = projection.project(x, *linears)[0], linears[0](x)
    assert torch.equal(out.isnan(), stock.isnan()) and torch.equal(out.isinf(), stock.isinf()) and stock.isinf().any()
    torch.testing.assert_close(out, stock, equal_nan=True, rtol=1e-4, atol=1e-4)
    grad = torch.randn_like(out)
    with torch.no_grad():
        grad[5, 5] = float("inf")
    for a, b in zip(*(torch.autograd.grad(o, leaves, grad) for o in (out, stock)), strict=True):
        assert torch.equal(a.isnan(), b.isnan()) and torch.equal(a.isinf(), b.isinf())


def test_tf32_is_the_libraries_where_it_is_allowed():
    x, linears = rows(3000, 64), maps(64, (128,))
    settings = torch.backends.cuda.matmul  # whose attributes monkeypatch cannot restore: there is nothing to delete
    before = settings.allow_tf32
    settings.allow_tf32 = True
    try:
        with torch.no_grad():
            assert torch.equal(projection.project(x, *linears)[0], linears[0](x))
    finally:
        settings.allow_tf32 = before


def test_launches():
    x, linears = rows(40_000, 64), maps(64, (64, 64, 64))
    leaves = leaves_of(x, linears)

    def step():
        with torch.autocast(DEVICE, torch.bfloat16):
            outs = projection.project(x, *linears, joined=3)
        torch.autograd.grad(outs, leaves, outs)

    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        step()
        torch.cuda.synchronize()
    own = [e.key for e in found.events() if "cuda::projection::" in e.key]
    assert len(own) == 3, own  # one cast, two for the biases; products write floats


@pytest.mark.parametrize(
    "count,features,columns",
    [
        (0, (3, 4), 5),
        (700, (16, 40), 64),
        (40_001, (33, 70), 46),
        (0, (8, 8), 32),
        (700, (64, 64), 96),
        (9_001, (128, 128), 40),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_sums_of_maps(count, features, columns, dtype, autocast):
    torch.manual_seed(0)
    xs = [torch.randn(count, n, device=DEVICE).to(dtype).requires_grad_() for n in features]
    parameters = torch.float32 if autocast and dtype != torch.float64 else dtype
    linears = [nn.Linear(n, columns, bias=k == 0, device=DEVICE, dtype=parameters) for k, n in enumerate(features)]
    leaves = [*xs, *(p for lin in linears for p in lin.parameters())]
    with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
        found, stock = projection.project_sum(xs, linears), linears[0](xs[0]) + linears[1](xs[1])
    assert "ProjectSum" in type(found.grad_fn).__name__ or "ProjectSum" in found.grad_fn.name()
    assert found.dtype == stock.dtype
    grad = torch.randn_like(found)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    exact = torch.nn.functional.linear(wide[0], wide[2], wide[3]) + torch.nn.functional.linear(wide[1], wide[4])
    results = [
        [out, *torch.autograd.grad(out, of, grad.to(out.dtype))]
        for out, of in ((found, leaves), (stock, leaves), (exact, wide))
    ]
    for i, (a, b, c) in enumerate(zip(*results, strict=True)):
        assert a.shape == b.shape and a.dtype == b.dtype
        bound = 1e-12 if dtype == torch.float64 else 2 * error(b, c) + torch.finfo(dtype).eps
        assert error(a, c) <= bound, i


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("features", [(64, 64), (64, 40)])
def test_gradients_of_a_sum_do_not_depend_on_what_else_is_asked_for(dtype, features):
    torch.manual_seed(0)
    grad, *tensors = (
        torch.randn(n, k, device=DEVICE).to(dtype) for n, k in ((3000, 96), *product((3000, 96), features))
    )
    everything = ops.project_sum_backward(grad, tensors[:2], tensors[2:], [True] * 5)
    for k in range(5):
        alone = ops.project_sum_backward(grad, tensors[:2], tensors[2:], [i == k for i in range(5)])
        assert [t.numel() for i, t in enumerate(alone) if i != k] == [0] * 4
        if k < 4:  # a bias alone takes another kernel
            assert torch.equal(alone[k], everything[k]), k


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("which", [0, 1])
def test_sums_of_maps_keep_infinities(dtype, which):
    xs, linears = [rows(300, 64, dtype), rows(300, 40, dtype)], [maps(n, (48,), dtype)[0] for n in (64, 40)]
    linears[1].bias = None
    with torch.no_grad():
        xs[which][3, 5], xs[which][7, 7] = float("inf"), float("nan")
        found, stock = projection.project_sum(xs, linears), linears[0](xs[0]) + linears[1](xs[1])
    assert torch.equal(found.isnan(), stock.isnan()) and torch.equal(found.isinf(), stock.isinf())
    assert stock.isnan().any() and stock.isinf().any()


def test_a_sum_and_its_gradients_take_one_launch_each():
    xs, linears = [rows(3000, 64), rows(3000, 64)], maps(64, (96, 96))
    leaves = [*xs, *(lin.weight for lin in linears)]
    linears[1].bias = None
    out = projection.project_sum(xs, linears)
    grad = torch.randn_like(out)
    torch.autograd.grad(out, leaves, grad)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        torch.autograd.grad(projection.project_sum(xs, linears), leaves, grad)
        torch.cuda.synchronize()
    kernels = [e.key for e in found.events() if "product_kernel" in e.key]
    assert len(kernels) == 3, kernels


def test_captured_in_a_cuda_graph():
    x, linears = rows(500, 16), maps(16, (8, 8))
    leaves = leaves_of(x, linears)

    def step():
        with torch.autocast(DEVICE, torch.bfloat16):
            outs = projection.project(x, *linears)
        return torch.autograd.grad(
            [ops.add_row(outs[0], outs[0][0]).float()], leaves, [outs[0].float()], allow_unused=True
        )

    found, replay = captured(step)
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
    replay()
    for a, b in zip(found, step(), strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


def test_two_runs_are_the_same_bits():
    x, linears = rows(50_000, 64), maps(64, (128, 128))
    leaves = leaves_of(x, linears)

    def once():
        outs = projection.project(x, *linears)
        return [*outs, *torch.autograd.grad(outs, leaves, [out.detach().cos() for out in outs])]

    assert all(torch.equal(a, b) for a, b in zip(once(), once(), strict=True))

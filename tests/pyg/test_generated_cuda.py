"""Generated kernels: their texts compile without a GPU; on one they agree with the stock layers and the interpreter."""

from __future__ import annotations

import copy
import struct

import on_host as host
import pytest
import torch
import torch_geometric.nn as stock
from generated_cases import CASES, Inputs, error, pair_of_layers, tensors
from test_compiled_walks import NODES, gated, inputs, per_edge, program_of, repeats
from test_programs import BY_ROUNDING, error_of_gated_maxima
from torch import nn

import edgeless
from edgeless import _C, Graph
from edgeless.kernels import NvrtcError, Store, compiled, compiler, headers
from edgeless.kernels.nvrtc import installed_nvrtc
from edgeless.kernels.provider import kernel_named
from edgeless.programs.lowering.items import NotLowered
from edgeless.programs.run import compiled as compiled_walks
from edgeless.programs.run import cuda_walks, interpreter
from edgeless.programs.run.cuda_walks import CudaWalk
from edgeless.programs.scheduling import own_factors
from edgeless.programs.scheduling.schedule import Walk
from edgeless.pyg.generated.calls import PROGRAMS


def _missing():
    try:
        return None if headers.cuda_headers() and max(installed_nvrtc().architectures()) >= 90 else "NVRTC is too old"
    except NvrtcError as error:
        return str(error)


NEEDS_NVRTC = pytest.mark.skipif(_missing() is not None, reason=f"{_missing()}")


@pytest.fixture(autouse=True)
def every_size(monkeypatch):
    monkeypatch.setenv("EDGELESS_GENERATE", "on")


def cast(value, device, dtype, made=None):
    """A nested value whose numbers have another device and dtype, as new leaves; equal tensors stay one."""
    made = {} if made is None else made
    if isinstance(value, torch.Tensor):
        if id(value) not in made:
            made[id(value)] = value.detach().to(device, dtype if value.is_floating_point() else value.dtype)
            made[id(value)].requires_grad_(value.requires_grad)
        return made[id(value)]
    if isinstance(value, dict):
        return {key: cast(v, device, dtype, made) for key, v in value.items()}
    return type(value)(cast(v, device, dtype, made) for v in value) if isinstance(value, (tuple, list)) else value


def call_of(name):
    make, inputs, *names = CASES[name]
    given = Inputs()
    return make, inputs(given), {key: getattr(given, value) for key, value in (names[0] if names else {}).items()}


def results(module, args, kwargs):
    """Outputs and all gradients, for the same cotangents on every device."""
    torch.manual_seed(2)
    out = [t for t in tensors(module(*args, **kwargs)) if t.is_floating_point()]
    inputs = [t for t in tensors([list(args), list(kwargs.values())]) if t.requires_grad]
    inputs += [p for p in module.parameters() if p.requires_grad]
    outputs = [t for t in out if t.requires_grad]
    generator = torch.Generator().manual_seed(3)
    weights = [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t) for t in outputs]
    grads = torch.autograd.grad(outputs, inputs, weights, allow_unused=True) if inputs else []
    return [*out, *(torch.zeros_like(t) if g is None else g for t, g in zip(inputs, grads, strict=True))]


def walks_of(monkeypatch, make, dtype, args, kwargs):
    """The walks of all programs that a call of a layer makes, each with what is lowered with it."""
    found = []
    write = interpreter.Interpreter.__init__

    def record(self, plan, receiving, backward):
        write(self, plan, receiving, backward)
        found.extend((step, plan.sizes, self.needed) for step in plan.steps if isinstance(step, Walk))

    monkeypatch.setattr(interpreter.Interpreter, "__init__", record)
    monkeypatch.setattr(own_factors, "DEVICES", ())  # programs are those of CUDA
    PROGRAMS.clear()
    _, ours = pair_of_layers(make, dtype)
    ours(*cast(args, "cpu", dtype), **cast(kwargs, "cpu", dtype))
    assert found
    return found


COMPILED = ["ResGatedGraphConv", "GINEConv", "GENConv softmax", "CGConv", "EdgeConv", "GeneralConv dot", "GMMConv"]


@NEEDS_NVRTC
@pytest.mark.parametrize("name, dtype", [(n, torch.float32) for n in COMPILED] + [(COMPILED[0], torch.bfloat16)])
def test_texts_compile_for_the_oldest_and_for_hopper(monkeypatch, name, dtype):
    make, args, kwargs = call_of(name)
    if installed_nvrtc().version >= (13, 0):
        monkeypatch.setattr(compiler, "OPTIONS", (*compiler.OPTIONS, "--Ofast-compile=max"))
    kernels = {}
    for walk, sizes, needed in walks_of(monkeypatch, make, dtype, args, kwargs)[-3:]:
        for each in CudaWalk(walk, sizes, needed).passes:
            for wide, (first, merge) in each.kernels.items():
                kernels[each.header, first] = 90 if wide else 80
                if each.text.carry > 1 and not wide:
                    kernels[each.header, merge] = 90
    for (header, expression), architecture in kernels.items():
        image = compiled(kernel_named(header, expression), architecture, store=Store(None), packs=[])
        assert image.kind == "cubin" and image.code


def walk_plan(vectors, rows, edges, has_totals=False, carry=64, longest=-1):
    """The plan of a walk: blocks, slices, slots, then sub_warp_log2, slice_vectors, range_units and segment."""
    blocks, slices, slots, packed = _C.walk_plan(
        vectors=vectors, carry_bytes=carry, has_totals=has_totals, num_rows=rows, num_edges=edges, max_degree=longest,
        multiprocessors=132,
    )  # fmt: skip
    sub_warp, width, of_plan, units, ranges, segment, hubs, of_slots = struct.unpack("=iii4xqqq?7xq", packed)
    assert (of_plan, ranges) == (slices, blocks) and slots == (of_slots if hubs else 0)
    return blocks, slices, slots, sub_warp, width, units, segment


@pytest.mark.parametrize("vectors", [1, 3, 8, 16, 17, 32, 40, 100])
@pytest.mark.parametrize("rows, edges", [(10, 50), (47_000, 21_500_000), (1_600_000, 30_600_000), (169_000, 1_170_000)])
def test_walks_are_divided_as_sums_are(vectors, rows, edges):
    blocks, slices, slots, sub_warp, width, units, segment = walk_plan(vectors, rows, edges)
    plan = _C.reduce_plan(
        vectors=vectors, vector_bytes=16, num_rows=rows, num_edges=edges, num_gathered=1 << 40, max_degree=-1,
        carry_bytes=0, carry_budget=1, narrow_sub_warps=True, number_bytes=0, weighed=False, wide_index=False,
        multiprocessors=132, l2_bytes=50 << 20,
    )  # fmt: skip
    assert units * blocks >= edges + 2 * rows > units * (blocks - 1)
    assert segment >= units and slots == (edges // segment + 1 if edges > segment else 0)
    assert slices * width >= vectors and width <= 1 << sub_warp <= 32
    if plan["slices"] == slices and plan["lanes"] == 1 << sub_warp:
        assert plan["blocks"] == blocks


def test_rows_are_cut_where_a_row_may_be_long_and_leaves_a_result():
    assert walk_plan(16, 1000, 100_000, longest=200)[2] == 0
    assert walk_plan(16, 1000, 100_000, longest=90_000)[2] > 0
    assert walk_plan(16, 1000, 100_000, longest=90_000, carry=0)[2] == 0


def test_sums_over_all_edges_leave_few_parts():
    assert walk_plan(16, 47_000, 21_500_000, has_totals=True)[0] <= 8 * 132 < walk_plan(16, 47_000, 21_500_000)[0]


@pytest.mark.cuda
def test_plans_say_that_kernels_run(monkeypatch):
    monkeypatch.setenv("EDGELESS_GENERATE", "on")
    layer = edgeless.pyg.nn.ResGatedGraphConv(8, 8).cuda()
    x, edge_index = torch.rand(20, 8, device="cuda"), torch.randint(20, (2, 90), device="cuda")
    text = str(edgeless.explain(layer, x, edge_index, plan=True))
    assert text.count("; a generated kernel") == text.count("walk by ") == 3 and "interpreted" not in text


def test_a_walk_says_what_runs_it_on_a_gpu():
    code = compiled_walks.Code.__new__(compiled_walks.Code)
    code.on_cuda = "numbers of torch.complex64"
    assert code.text() == "interpreted (numbers of torch.complex64)"
    code.on_cuda = CudaWalk.__new__(CudaWalk)
    for passes, text in (([None], "a generated kernel"), ([None] * 3, "3 generated kernels")):
        code.on_cuda.passes = passes
        assert code.text() == text


def runs(monkeypatch):
    """Records for each walk on CUDA whether a generated kernel ran."""
    ran = []
    run = interpreter.Interpreter.run_on_cuda

    def record(self, *args):
        found = run(self, *args)
        ran.append(found is not None)
        return found

    monkeypatch.setattr(interpreter.Interpreter, "run_on_cuda", record)
    return ran


# Of several loops of a node, PyG keeps the weight of any one on CUDA.
ANY_LOOP = {"APPNP", "DNAConv", "GCN2Conv", "MixHopConv", "PDNConv", "SGConv", "SSGConv"}


@pytest.mark.cuda
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("name", sorted(CASES.keys() - ANY_LOOP))
def test_parity_on_cuda(name, dtype, tolerance):
    make, args, kwargs = call_of(name)
    layer, ours = pair_of_layers(make)
    expected = results(layer, args, kwargs)
    args, kwargs = cast(args, "cuda", dtype), cast(kwargs, "cuda", dtype)
    mine, theirs = (
        [error(a.cpu().double(), b) for a, b in zip(results(m.to("cuda", dtype), args, kwargs), expected, strict=True)]
        for m in (ours, layer)
    )
    # Gradients of a bias before a norm are 0, and those of a power's exponent cancel, in the stock layer as well.
    beyond = {i: (a, b) for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a >= max(tolerance, 2 * b)}
    assert not beyond


def agree_on_the_host(layer, args, dtype):
    """Compares generated kernels that the CPU runs with float64, allowing twice the stock layer's error."""
    expected = results(layer, args, {})
    theirs, ours = (copy.deepcopy(layer).to(dtype) for _ in range(2))
    edgeless.accelerate(ours)
    PROGRAMS.clear()
    with host.on_host() as interpreted:
        found = results(ours, cast(args, "cpu", dtype), {})
    PROGRAMS.clear()
    assert not interpreted
    for mine, other, exact in zip(found, results(theirs, cast(args, "cpu", dtype), {}), expected, strict=True):
        assert error(mine.double(), exact) < max(1e-5, 2 * error(other.double(), exact))


def skewed(nodes=3000, edges=60_000, hub=9000):
    """Edges of which one node receives and one sends many."""
    g = torch.Generator().manual_seed(0)
    ends = torch.randint(nodes - 1, (2, edges), generator=g)
    ends[1, :hub], ends[0, hub : 2 * hub] = 5, 7
    return ends[:, torch.randperm(edges, generator=g)]


WIDE = {
    "ResGatedGraphConv": lambda f: stock.ResGatedGraphConv(f, f),
    "GINEConv": lambda f: stock.GINEConv(nn.Linear(f, f), edge_dim=16),
    "GENConv": lambda f: stock.GENConv(f, f, learn_t=True, edge_dim=16),
    "CGConv": lambda f: stock.CGConv(f, 16),
    "EdgeConv": lambda f: stock.EdgeConv(nn.Sequential(nn.Linear(2 * f, f), nn.ReLU(), nn.Linear(f, f)), aggr="add"),
    "SimpleConv max": lambda f: stock.SimpleConv("max"),
}


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [64, 160])
@pytest.mark.parametrize("name", WIDE)
def test_rows_of_many_edges(monkeypatch, name, width, dtype):
    """In 16 bits errors are medians over draws: the terms of a gradient of one number, GENConv's t, may cancel."""
    ran = runs(monkeypatch)
    drawn = [errors_of_many_edges(name, width, dtype, seed) for seed in range(1 if dtype is torch.float32 else 5)]
    assert all(ran) if (name, width) != ("CGConv", 160) else any(ran)  # whose backward takes too many registers
    mine, theirs = torch.tensor(drawn).median(0).values
    # In float32 a ReLU's argument may be a rounding from 0, for the stock layer as well.
    bounds = (2 * theirs).clamp(min=1e-5) if dtype is torch.float32 else 2 * theirs + 1e-2
    assert (mine < bounds).all(), mine / bounds


def errors_of_many_edges(name, width, dtype, seed):
    """Our and the stock layer's errors of every result against float64. A second run of ours has the same bits."""
    torch.manual_seed(seed)
    layer = WIDE[name](width).double()
    ends = skewed()
    x = torch.randn(3000, width, dtype=torch.float64, requires_grad=True)
    e = torch.randn(ends.size(1), 16, dtype=torch.float64, requires_grad=True)
    args = (x, ends, e) if name in ("GINEConv", "GENConv", "CGConv") else (x, ends)
    expected = results(layer, args, {})
    theirs = copy.deepcopy(layer).to("cuda", dtype)
    ours = copy.deepcopy(theirs)
    edgeless.accelerate(ours)
    first, second, stock_ones = (results(m, cast(args, "cuda", dtype), {}) for m in (ours, ours, theirs))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    return [[error(a.cpu().double(), b) for a, b in zip(r, expected, strict=True)] for r in (first, stock_ones)]


@pytest.mark.skipif(host.missing() is not None, reason=f"{host.missing()}")
def test_the_kernel_that_merges_is_loaded_before_a_row_needs_it(monkeypatch):
    torch.manual_seed(1)
    ours, launched = stock.ResGatedGraphConv(4, 4), []
    edgeless.accelerate(ours)
    x, ends = torch.randn(20, 4), torch.randint(20, (2, 60))
    with host.on_host(), torch.no_grad():
        launch = cuda_walks._launch

        def note(header, expression, grid, *rest):
            launched.append((expression.split("kernel<")[0].split("::")[-1], grid[0]))
            launch(header, expression, grid, *rest)

        monkeypatch.setattr(cuda_walks, "_launch", note)
        first, second = ours(x, ends), ours(x, ends)
    assert [name for name, blocks in launched] == ["walk_", "merge_reduced_", "walk_"] and torch.equal(first, second)
    assert [blocks > 0 for _, blocks in launched] == [True, False, True]


@pytest.mark.cuda
def test_a_captured_step_is_replayed():
    torch.manual_seed(1)
    ours = stock.ResGatedGraphConv(32, 32).cuda()
    edgeless.accelerate(ours)
    graph = Graph.from_edge_index(skewed().cuda(), 3000, 3000)
    x = torch.randn(3000, 32, device="cuda")
    ends = graph.edge_index()
    side = torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(side):
        ours(x, ends)
        side.synchronize()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, stream=side):
            out = ours(x, ends)
        x.add_(1)
        captured.replay()
        side.synchronize()
        torch.testing.assert_close(out, ours(x, ends), rtol=0, atol=0)


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["GINEConv", "GENConv", "EdgeConv", "SimpleConv max"])
def test_a_captured_step_with_gradients_is_replayed(name):
    torch.manual_seed(1)
    ours = WIDE[name](32).cuda()
    edgeless.accelerate(ours)
    ends = skewed().cuda()
    x = torch.randn(3000, 32, device="cuda", requires_grad=True)
    e = torch.randn(ends.size(1), 16, device="cuda", requires_grad=True)
    args = (x, ends, e) if name in ("GINEConv", "GENConv") else (x, ends)
    wanted = [t for t in (*args, *ours.parameters()) if t.requires_grad]

    def step():
        out = ours(*args)
        return [out, *torch.autograd.grad(out.square().mean(), wanted)]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
        side.synchronize()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, stream=side):
            found = step()
        with torch.no_grad():
            for tensor in wanted:
                tensor.add_(0.1)
        captured.replay()
        side.synchronize()
        for a, b in zip(found, step(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize(
    "error, said",
    [(NotLowered("no reason"), "no reason"), (KeyError("x"), "it cannot be compiled, KeyError: 'x'")],
)
def test_a_walk_without_kernels_says_why(monkeypatch, error, said):
    monkeypatch.setattr(cuda_walks, "write", lambda *args: (_ for _ in ()).throw(error))
    monkeypatch.setattr(cuda_walks, "gpu_refusal", lambda device: None)
    make, args, kwargs = call_of("ResGatedGraphConv")
    walk, sizes, needed = walks_of(monkeypatch, make, torch.float32, args, kwargs)[-1]
    assert cuda_walks.cuda_walk(walk, sizes, needed, torch.device("cuda")) == said


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", BY_ROUNDING)
def test_shares_of_messages_that_are_almost_equal_sum_to_one(dtype):
    assert error_of_gated_maxima(dtype, "cuda") < BY_ROUNDING[dtype]


@pytest.mark.cuda
@pytest.mark.parametrize("function", [gated, repeats, per_edge])
def test_a_walk_as_a_kernel_is_right_and_its_result_no_view(function):
    program, (ends, tensors) = program_of(function), inputs()
    graph = Graph.from_edge_index(ends, NODES, NODES)
    found = program(graph.to("cuda"), [t.cuda() for t in tensors])
    assert program.text().count("a generated kernel") >= 1
    for a, b in zip(found, program(graph, tensors), strict=True):
        assert not a._is_view()
        torch.testing.assert_close(a.cpu(), b, rtol=1e-11, atol=1e-11)

"""Walks that run as compiled code: when they are compiled, what they are compared with, and what they compute."""

from __future__ import annotations

import os

import pytest
import torch
from test_programs import BY_ROUNDING, arguments, error_of_gated_maxima

from edgeless import Graph
from edgeless.graph.formats import CSR
from edgeless.programs import EDGE, NODE, Sizes, Space
from edgeless.programs.c.driver import parts_of
from edgeless.programs.checking import check
from edgeless.programs.program import Program
from edgeless.programs.run import c_compiler, compiled

NODES, EDGES, WIDTH = 40, 900, 24


def reduced(out, index, rows, how="sum"):
    whole = index.view(-1, *[1] * (out.dim() - 1)).expand(out.shape)
    shape = (rows, *out.shape[1:])
    if how == "sum":
        return out.new_zeros(shape).scatter_add(0, whole, out)
    return out.new_zeros(shape).scatter_reduce(0, whole, out, how, include_self=False)


def gated(sizes, ends, ids, seed, x, e, w, kind):
    return (reduced(torch.sigmoid(x[ends[1]] + x[ends[0]]) * x[ends[0]], ends[1], sizes.destinations),)


def narrow_features(sizes, ends, ids, seed, x, e, w, kind):
    return (reduced(torch.relu(x[ends[0]] + e @ w[:4]) * x[ends[1]], ends[1], sizes.destinations),)


def attention(sizes, ends, ids, seed, x, e, w, kind):
    score = (torch.tanh(x[ends[0]] + e @ w[:4]) * x[ends[1]]).sum(-1)
    best = reduced(score.detach(), ends[1], sizes.destinations, "amax")
    power = (score - best[ends[1]]).exp()
    total = reduced(power, ends[1], sizes.destinations)
    return (reduced((power / total[ends[1]]).unsqueeze(1) * x[ends[0]], ends[1], sizes.destinations),)


def largest(sizes, ends, ids, seed, x, e, w, kind):
    return (reduced(torch.relu(x[ends[0]] + x[ends[1]]) @ w, ends[1], sizes.destinations, "amax"),)


def smallest_and_parts(sizes, ends, ids, seed, x, e, w, kind):
    parts = torch.cat([x[ends[0]][:, 1:], e, x[ends[1]][:, :1]], -1)
    return (reduced(parts.softmax(-1), ends[1], sizes.destinations, "amin"),)


def by_type(sizes, ends, ids, seed, x, e, w, kind):
    return (reduced(torch.nn.functional.embedding(kind, w) * x[ends[0]], ends[1], sizes.destinations),)


def batches(sizes, ends, ids, seed, x, e, w, kind):
    both = torch.stack([x, 2 * x]).index_select(1, ends[0]) * e[:, :1]
    out = both.new_zeros(2, sizes.destinations, WIDTH).index_add(1, ends[1], torch.nn.functional.silu(both))
    return (out[0] + out[1],)


def per_edge(sizes, ends, ids, seed, x, e, w, kind):
    return (torch.nn.functional.softplus(x[ends[0]] @ w - x[ends[1]]).view(-1, 4, WIDTH // 4).sum(1),)


def repeats(sizes, ends, ids, seed, x, e, w, kind):
    """Rows of which every number stands there several times in a row and in turn."""
    few = x[ends[0]][:, :2] * e[:, :2]
    both = few.repeat(1, WIDTH // 2) + (e[:, :1] + x[ends[1]][:, :1]).repeat(1, WIDTH)
    return (reduced(both, ends[1], sizes.destinations), few.repeat(2, 1, 1).sum(0))


FUNCTIONS = [gated, narrow_features, attention, largest, smallest_and_parts, by_type, batches, per_edge, repeats]


def inputs(dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    ends = torch.randint(NODES - 1, (2, EDGES), generator=g)
    ends[:, 5] = ends[:, 4]
    ends[1, :300] = 3  # a row of several tiles
    shapes = ((NODES, WIDTH), (EDGES, 4), (WIDTH, WIDTH))
    tensors = [torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for shape in shapes]
    return ends, [*tensors, torch.randint(WIDTH, (EDGES,), generator=g)]


def program_of(function, dtype=torch.float64, checked=True):
    _, (x, e, w, kind) = inputs(dtype)
    node, edge = Space(NODE, 0), Space(EDGE, 0)
    args = arguments(("x", x, node), ("e", e, edge), ("w", w, Space()), ("kind", kind, edge))
    program = Program(function, args, True, 1, (3, 4, 5))
    if checked:
        check(program, function, args, True)
    return program


def results(program, dtype=torch.float64):
    ends, tensors = inputs(dtype)
    graph = Graph.from_edge_index(ends, NODES, NODES)
    given = [t.requires_grad_() if t.is_floating_point() else t for t in tensors]
    out = program(graph, given)[0]
    wanted = [t for t in given if t.requires_grad]
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    found = torch.autograd.grad(out, wanted, weight, allow_unused=True)
    return [out.detach(), *(g for g in found if g is not None)]


def texts(program):
    return {walk.code.text() for plan in (program.plan, program.backward_plan) for walk in plan.walks()}


@pytest.fixture
def now():
    with compiled.compiling("now"):
        yield


@pytest.fixture(autouse=True)
def compiler():
    try:
        c_compiler.compiler()
    except c_compiler.NoCompiler as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_same_as_the_interpreter(function, now):
    program = program_of(function)
    found = results(program)
    assert texts(program) == {"compiled"}
    with compiled.compiling("off"):
        expected = results(program)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_float32_is_as_exact_as_the_interpreter(function, now):
    exact = results(program_of(function, checked=False))
    program = program_of(function, torch.float32)
    found = results(program, torch.float32)
    assert texts(program) == {"compiled"}
    for a, b in zip(found, exact, strict=True):
        assert float((a - b).norm()) <= 3e-6 * float(b.norm())


@pytest.mark.parametrize("function", FUNCTIONS)
def test_threads_and_runs_change_no_bit(function, now, monkeypatch):
    program, runs = program_of(function, torch.float32), []
    for threads in (1, 1, 2, 4):
        monkeypatch.setattr(compiled, "_threads", lambda edges, parts, threads=threads: threads)
        runs.append(results(program, torch.float32))
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))


def test_wide_ids(now):
    program = program_of(attention)
    expected = results(program)
    ends, tensors = inputs()
    graph = Graph.from_edge_index(ends, NODES, NODES)
    graph._formats[CSR] = type(graph.csr)(*(t.long() for t in graph.csr))
    torch.testing.assert_close(program(graph, tensors)[0], expected[0])
    assert all((False, True) in walk.code._variants for walk in program.plan.walks())


def test_equal_messages_share_a_gradient(now):
    def function(sizes, ends, ids, seed, x, e, w, kind):
        return (reduced(torch.relu(x[ends[0]]), ends[1], sizes.destinations, "amax"),)

    program = program_of(function)
    found = results(program)
    with compiled.compiling("off"):
        expected = results(program)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_shares_of_messages_that_are_almost_equal_sum_to_one(dtype, now):
    assert error_of_gated_maxima(dtype) < BY_ROUNDING[dtype]


@pytest.mark.parametrize("function", [gated, per_edge])
def test_results_are_no_views(function, now):
    ends, tensors = inputs()
    found = program_of(function)(Graph.from_edge_index(ends, NODES, NODES), tensors)[0]
    assert not found._is_view()  # else nobody could write over it


def test_nan_and_infinities_stay(now):
    program = program_of(largest, checked=False)
    ends, tensors = inputs()
    tensors[0][0, 0], tensors[0][1, 1] = float("nan"), float("inf")
    graph = Graph.from_edge_index(ends, NODES, NODES)
    found = program(graph, tensors)[0]
    with compiled.compiling("off"):
        expected = program(graph, tensors)[0]
    assert found.isnan().any()
    torch.testing.assert_close(found, expected, equal_nan=True, rtol=1e-11, atol=1e-11)


def by_place(sizes, ends, ids, seed, x, e, w, kind):
    return (reduced(w[kind - WIDTH // 2] * (x[ends[0]] + x[ends[1]]), ends[1], sizes.destinations),)


def result_by_place():
    """The result of a program whose places are partly counted from the end, and what it should be."""
    ends, (x, e, w, kind) = inputs()
    node, edge = Space(NODE, 0), Space(EDGE, 0)
    args = arguments(("x", x, node), ("e", e, edge), ("w", w, Space()), ("kind", kind, edge))
    program = Program(by_place, args, True, 1, ())
    found = program(Graph.from_edge_index(ends, NODES, NODES), [x, e, w, kind])[0]
    return found, by_place(Sizes(NODES, NODES, EDGES), ends, None, None, x, e, w, kind)[0], program.walks()


def test_places_from_the_end(now):
    found, right, walks = result_by_place()
    assert {walk.code.text() for walk in walks} == {"compiled"}
    torch.testing.assert_close(found, right)


def test_an_index_outside_of_a_table_is_an_error(now):
    program = program_of(by_type)
    ends, tensors = inputs()
    tensors[3][7] = WIDTH
    with pytest.raises(IndexError, match="index out of range"):
        program(Graph.from_edge_index(ends, NODES, NODES), tensors)


def test_compiling_in_the_background():
    with compiled.compiling("background"):
        program = program_of(gated)
        first = results(program)
        compiled.wait()
        assert texts(program) == {"compiled"}
        for a, b in zip(results(program), first, strict=True):
            torch.testing.assert_close(a, b)


def test_large_sums_have_fewer_parts():
    assert parts_of(0) == parts_of(1 << 20) == 64
    assert parts_of(1 << 22) == 16 and parts_of(1 << 30) == 1


def test_off_and_unknown_modes(monkeypatch):
    with compiled.compiling("off"):
        program = program_of(gated)
        results(program)
        assert texts(program) == {"interpreted"}
    monkeypatch.setenv("EDGELESS_COMPILE_WALKS", "sometimes")
    with pytest.raises(ValueError, match="EDGELESS_COMPILE_WALKS must be one of background, now, off, got 'sometimes'"):
        results(program)


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """Nothing is compiled yet, and the disk cache is in a folder of its own."""
    from edgeless.kernels import store

    folder = tmp_path / "cache"
    monkeypatch.setattr(c_compiler, "_loaded", {})
    monkeypatch.setattr(c_compiler, "default_store", lambda: store.Store(folder))
    return folder


def test_without_a_compiler_the_interpreter_runs(now, monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    c_compiler.compiler.cache_clear()
    try:
        program = program_of(gated)
        results(program)
        assert texts(program) == {"interpreted (there is no C compiler (no-such-compiler))"}
    finally:
        monkeypatch.undo()
        c_compiler.compiler.cache_clear()


def test_an_error_of_the_compiler_is_said(now, monkeypatch, fresh):
    monkeypatch.setattr(compiled, "c_code", lambda *args: compiled.CText("int walk(void) { return }", None, 0))
    program = program_of(gated, checked=False)
    results(program)
    (text,) = texts(program)
    assert "fails: " in text and "error" in text


def test_code_that_differs_is_never_used(now, monkeypatch):
    write = compiled.c_code

    def wrong(*args):
        code = write(*args)
        code.text = code.text.replace("b0[k] = 0x0.0p+0;", "b0[k] = 1;")
        return code

    monkeypatch.setattr(compiled, "c_code", wrong)
    program = program_of(gated)
    results(program)
    assert all("differs from the interpreter" in text for text in texts(program))


def test_code_is_kept_on_disk_and_altered_files_are_not_loaded(now, monkeypatch, fresh):
    compiles = []
    compile_ = c_compiler._compile
    monkeypatch.setattr(c_compiler, "_compile", lambda *args: compiles.append(1) or compile_(*args))
    expected = results(program_of(gated))
    files = list(fresh.glob("*.kernel"))
    assert len(files) == len(compiles) > 0
    c_compiler._loaded.clear()
    results(program_of(gated))
    assert len(compiles) == len(files)
    for file in files:
        code = bytearray(file.read_bytes())
        code[-100] ^= 1
        file.write_bytes(code)
    c_compiler._loaded.clear()
    found = results(program_of(gated))
    assert len(compiles) == 2 * len(files)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written(now, monkeypatch, fresh):
    fresh.mkdir(mode=0o500)
    program = program_of(gated)
    results(program)
    assert texts(program) == {"compiled"}

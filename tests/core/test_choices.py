"""What is chosen for a block of code holds for its thread, and for what the threads of autograd do for that one."""

import concurrent.futures
import gc
import threading

import pytest
import torch
from devices import EVERY_DEVICE, arrays_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import edgeless
from edgeless import Graph, TypedGraph, functional
from edgeless.choices import backends, engines
from edgeless.plan.recording import record

EDGES = torch.tensor([[0, 0, 1, 2, 3, 2, 1], [1, 2, 2, 0, 1, 3, 3]])
KINDS = {
    "backend": (edgeless.backend, backends.current_backend, ("reference", "fused")),
    "engine": (edgeless.engine, engines.current_engine, ("cusparse", "rowsplit")),
}
every_kind = pytest.mark.parametrize("block,current,names", KINDS.values(), ids=KINDS)


def in_thread(work):
    """What ``work()`` returns in a thread of its own."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


@every_kind
def test_a_choice_is_the_threads_own(block, current, names):
    def other():
        found = [current()]
        with block(names[1]):
            found.append(current())
        return [*found, current()]

    with block(names[0]):
        assert in_thread(other) == ["auto", names[1], "auto"]
        assert current() == names[0]
    assert current() == in_thread(current) == "auto"


@every_kind
def test_blocks_that_overlap_take_away_themselves_alone(block, current, names):
    def inside(name):
        with block(name):
            yield

    first, second = inside(names[0]), inside(names[1])
    for step, expected in ((first, names[0]), (second, names[1]), (first, names[1]), (second, "auto")):
        next(step, None)
        assert current() == expected
    for _ in range(1000):  # blocks whose end comes with that of an outer one are not kept
        with block(names[0]):
            first = inside(names[1])
            next(first)
            del first
    gc.collect()
    assert current() == "auto"


# The threads of autograd ---------------------------------------------------------------------------------------------


class Deep(torch.autograd.Function):
    """Its backward calls backward() again, so often that autograd goes on in a thread of its own."""

    @staticmethod
    def forward(ctx, x, depth, work):
        ctx.depth, ctx.work = depth, work
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.depth == 0:
            ctx.work()
        else:
            with torch.enable_grad():
                x = torch.ones(1, requires_grad=True)
                Deep.apply(x, ctx.depth - 1, ctx.work).sum().backward()
        return grad, None, None


def in_a_thread_of_autograd(work):
    """What ``work()`` returns where autograd runs it for a ``backward()`` of this thread."""
    found = []

    def watched():
        found.append((threading.get_ident(), work()))

    Deep.apply(torch.ones(1, requires_grad=True), 100, watched).sum().backward()
    ((thread, result),) = found
    assert thread != threading.get_ident()
    return result


@every_kind
def test_threads_of_autograd_take_the_choice_over(block, current, names):
    with block(names[0]):
        assert in_a_thread_of_autograd(current) == names[0]
        with block(names[1]):
            assert in_a_thread_of_autograd(current) == names[1]

        def choose():
            with block(names[1]):
                return current()

        assert in_a_thread_of_autograd(choose) == names[1]
        assert current() == names[0]
    assert in_a_thread_of_autograd(current) == "auto"


def choice_as_a_number(x):
    return x * (1 + backends.BACKENDS.index(backends.current_backend()))


def test_compiled_programs_follow_it_in_threads_of_autograd():
    torch._dynamo.reset()
    compiled = torch.compile(choice_as_a_number, backend="eager", fullgraph=True)

    def run():
        return int(compiled(torch.ones(())))

    assert run() == 1
    with edgeless.backend("reference"):
        assert run() == in_a_thread_of_autograd(run) == 3
        assert in_thread(run) == 1


@EVERY_DEVICE
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_checkpoints_run_again_as_their_thread_chose(device, reentrant, compiled):
    torch._dynamo.reset()
    body = torch.compile(choice_as_a_number, backend="eager", fullgraph=True) if compiled else choice_as_a_number
    seen, entered, left = [], threading.Event(), threading.Event()

    def other():
        with edgeless.backend("fused"):
            entered.set()
            left.wait(30)

    def watched(x):
        seen.append(backends.current_backend())
        return body(x).sin()

    thread = threading.Thread(target=other)
    with edgeless.backend("reference"):
        thread.start()  # whose block is the newer one
        entered.wait(30)
        x = torch.ones(3, device=device, requires_grad=True)
        checkpoint(watched, x, use_reentrant=reentrant).sum().backward()
    left.set()
    thread.join()
    assert seen == ["reference", "reference"]
    torch.testing.assert_close(x.grad, 3 * (3 * x.detach()).cos())


# The engine of a gradient --------------------------------------------------------------------------------------------


class Noted(TorchDispatchMode):
    """Notes the ops of edgeless that run and the engine that they find."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "edgeless":
            self.found.append((func._schema.name, engines.current_engine()))
        return func(*args, **(kwargs or {}))


def _attention(graph, x):
    heads = x.view(4, 2, 4)
    return functional.dot_attention(graph, heads, heads, heads)


def _attention_weights(graph, x):
    heads = x.view(4, 2, 4)
    return functional.dot_attention(graph, heads, heads, heads, return_weights="softmax")[1]


def _attention_layer(graph, x):
    arrays, maps = arrays_of(graph), [torch.ones(8, 8, device=x.device) / 8] * 3
    return torch.ops.edgeless.attention_layer(
        x, maps, [None] * 3, [], None, *arrays, None, "dot", 2, 0.5, 0.0, None, None, [], False
    )


def _sum_layer(graph, x):
    maps = [torch.ones(8, 8, device=x.device) / 8] * 2
    return torch.ops.edgeless.sum_layer(x, maps, None, None, None, None, *arrays_of(graph), None, [])


def _relations(graph, x):
    types = torch.tensor([0, 1, 0, 1, 1, 0, 1], device=x.device)
    return functional.relational_sum(TypedGraph(graph, types, 2), x, torch.ones(2, 8, 8, device=x.device) / 8)


CALLS = {
    "spmm": functional.spmm,
    "sddmm": lambda graph, x: functional.sddmm_dot(graph, x, x),
    "neighbor_reduce": lambda graph, x: functional.neighbor_reduce(graph, x, "max"),
    "dot_attention": _attention,
    "attention_weights": _attention_weights,
    "gatv2_attention": lambda graph, x: functional.gatv2_attention(
        graph, *[x.view(4, 2, 4)] * 2, torch.ones(2, 4, device=x.device)
    ),
    "attention_layer": _attention_layer,
    "sum_layer": _sum_layer,
    "relational_sum": _relations,
}


@EVERY_DEVICE
@pytest.mark.parametrize("name", CALLS)
def test_a_gradient_is_computed_by_the_engine_of_its_forward(device, name):
    graph = Graph.from_edge_index(EDGES.to(device), 4, 4)
    for forward, backward in (("cusparse", "auto"), ("auto", "cusparse"), ("rowsplit", "cusparse")):
        x = torch.randn(4, 8, device=device, requires_grad=True)
        with edgeless.engine(forward), Noted() as there:
            out = CALLS[name](graph, x)
        with edgeless.engine(backward), Noted() as back:
            out.sum().backward()
            assert engines.current_engine() == backward
        assert {engine for _, engine in there.found} == {engine for _, engine in back.found} == {forward}


def test_a_plan_names_the_engine_that_an_op_found():
    graph, x = Graph.from_edge_index(EDGES, 4, 4), torch.randn(4, 8, requires_grad=True)

    def call():
        with edgeless.engine("cusparse"):
            return functional.spmm(graph, x)

    steps = record(call, [x])
    assert [step.refused for step in steps] == ["cusparse: the tensors are not on a GPU"] * 2
    assert {step.origin for step in steps} == {'edgeless.engine("cusparse")'}

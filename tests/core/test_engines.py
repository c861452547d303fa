"""The choice of an engine, what is refused in whose words, and what a graph keeps for cuSPARSE: without a GPU."""

import copy
import gc
import importlib
import pickle
import threading
import weakref

import pytest
import torch

import edgeless
from edgeless import _C, Graph, functional
from edgeless.choices import engines
from edgeless.plan.recording import record
from edgeless.plan.steps import DEVICES, spmm_step, table
from edgeless.tools.bench import graphs, peers
from edgeless.tools.bench.work import op_case

EDGES = torch.tensor([[0, 0, 1, 2, 3], [1, 2, 2, 0, 1]])


def graph_and_rows():
    return Graph.from_edge_index(EDGES, 4, 4), torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def test_blocks_nest_and_end():
    assert engines.current_engine() == "auto"
    with edgeless.engine("cusparse"):
        assert engines.current_engine() == "cusparse"
        with edgeless.engine("rowsplit"):
            assert engines.current_engine() == "rowsplit"
        assert engines.current_engine() == "cusparse"
        with pytest.raises(ZeroDivisionError), edgeless.engine("cusparse-alg2"):
            assert engines.current_engine() == "cusparse-alg2"
            _ = 1 / 0
        assert engines.current_engine() == "cusparse"
    assert engines.current_engine() == "auto"


def test_a_block_that_ends_in_another_thread_is_that_of_its_beginning():
    def inside():
        with edgeless.engine("cusparse"):
            yield

    begun = inside()
    next(begun)
    thread = threading.Thread(target=lambda: next(begun, None))
    thread.start()
    thread.join()
    assert engines.current_engine() == "auto"


def test_a_wrong_name_is_refused():
    with pytest.raises(
        ValueError, match="engine: name must be one of 'auto', 'rowsplit', 'cusparse', .* got 'cusprase'"
    ):
        edgeless.engine("cusprase").__enter__()
    assert engines.current_engine() == "auto"


@pytest.mark.parametrize("name", engines.ENGINES)
def test_results_on_the_cpu_do_not_depend_on_the_engine(name):
    graph, x = graph_and_rows()
    results = []
    for engine in ("auto", name):
        leaf, weight = x.clone().requires_grad_(), torch.linspace(-1, 1, 5).requires_grad_()
        with edgeless.engine(engine):
            out = functional.spmm(graph, leaf, weight, norm="both")
            results.append([out, *torch.autograd.grad(out.square().sum(), [leaf, weight])])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert engines.cusparse_info(graph) is None  # kept for CUDA alone


def test_the_plan_says_who_runs_and_why_not_another():
    graph, x = graph_and_rows()
    x.requires_grad_()
    assert {(step.engine, step.refused) for step in record(lambda: functional.spmm(graph, x), [x])} == {
        ("rowsplit", "")
    }
    with edgeless.engine("cusparse"):
        steps = record(lambda: functional.spmm(graph, x), [x])
        sampled = record(lambda: functional.sddmm_dot(graph, x, x), [])
        attended = record(lambda: functional.dot_attention(graph, *[x.view(4, 2, 4)] * 3), [])
    assert len(steps) == 2 and {step.refused for step in [*steps, *sampled]} == {
        "cusparse: the tensors are not on a GPU"
    }
    assert [step.refused for step in attended] == ["cusparse: it computes sums and sampled products only"]
    assert "(cusparse: the tensors are not on a GPU)" in table(steps)


def test_explain_names_the_refusal():
    pytest.importorskip("torch_geometric", reason="needs PyG")
    nn = importlib.import_module("edgeless.pyg.nn")
    layer = nn.GraphConv(8, 4)
    with edgeless.engine("cusparse"):
        said = str(edgeless.explain(layer, torch.randn(4, 8), EDGES, plan=True))
    assert "cusparse: the tensors are not on a GPU" in said


def test_a_step_counts_the_values_that_cusparse_reads():
    sizes = {"num_src": 100, "num_dst": 100, "num_edges": 1000, "device": DEVICES["h200"]}
    ours = spmm_step(torch.float32, 64, **sizes)
    theirs = spmm_step(torch.float32, 64, engine=engines.named("cusparse"), **sizes)
    assert (ours.engine, theirs.engine, theirs.kernel) == ("rowsplit", "cusparse", "CSR_ALG3")
    assert theirs.bytes == ours.bytes + 4 * 1000 and theirs.slices == 1


def test_a_traced_function_may_not_choose(monkeypatch):
    def inside(x):
        with edgeless.engine("cusparse"):
            return x + 1

    def outside(x):
        return x + 1

    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="RuntimeError|engine: the block must be opened outside"):
        torch.compile(inside, fullgraph=True, backend="eager")(torch.ones(2))
    assert engines.current_engine() == "auto"
    with edgeless.engine("cusparse"):
        assert torch.compile(outside, fullgraph=True, backend="eager")(torch.ones(2)).tolist() == [2, 2]
    monkeypatch.setattr(engines, "compiling", lambda: True)
    with pytest.raises(RuntimeError, match="engine: the block must be opened outside of the function"):
        inside(torch.ones(2))


# What a graph keeps --------------------------------------------------------------------------------------------------


def learnt(graph):
    kept = graph.format("cusparse", lambda _: engines.CusparseFormat())
    kept.learn(graph)
    return kept


def test_what_is_kept_dies_with_the_graph():
    graph, _ = graph_and_rows()
    kept = learnt(graph)
    assert kept.info() == {"plans": 0, "values": 0, "hits": 0, "misses": 0}
    assert engines.cusparse_info(graph) == kept.info() and kept.kept_tensors() == []
    plans, indices = weakref.ref(kept), weakref.ref(graph.csr.indices)
    del graph, kept
    gc.collect()
    assert plans() is None and indices() is None


def test_a_graph_that_keeps_plans_is_weighed_moved_and_pickled():
    graph, _ = graph_and_rows()
    before, entries = graph.memory_bytes(), graph.num_formats()
    learnt(graph)
    assert graph.memory_bytes() == before and graph.num_formats() == entries + 1
    assert graph.memory_bytes_at_most() >= before
    for other in (copy.deepcopy(graph), pickle.loads(pickle.dumps(graph)), graph.reverse()):
        assert "cusparse" not in other._formats


def test_learning_twice_and_after_the_transpose():
    graph, _ = graph_and_rows()
    kept = learnt(graph)
    assert kept.knows(graph)
    graph.csc_arrays(False)
    assert not kept.knows(graph)
    learnt(graph)
    graph.degree_scale("dst", -1.0, torch.float32)
    assert not kept.knows(graph)
    assert learnt(graph) is kept and kept.knows(graph)
    reverse = graph.reverse()
    learnt(reverse)
    del reverse
    gc.collect()
    learnt(graph)


def test_what_grows_in_the_store_is_counted():
    class Growing:
        def __init__(self):
            self.parts = []

        def kept_tensors(self):
            return self.parts

        def num_formats(self):
            return len(self.parts)

        def _missing_bytes(self):
            return 0

    graph, _ = graph_and_rows()
    growing = graph.format("growing", lambda _: Growing())
    bytes_before, entries = graph.memory_bytes(), graph.num_formats()
    growing.parts.append(torch.zeros(10))
    assert graph.memory_bytes() == bytes_before + 40 and graph.num_formats() == entries + 1


def test_the_bench_refuses_an_engine_that_does_not_compute_a_case():
    graph = graphs.load("tiny", None, torch.device("cpu"))
    case = op_case("spmm_none_F8", "fp32")
    assert set(peers.ENGINE_PEERS) < set(peers.known(case)) and not set(peers.ENGINE_PEERS) & set(peers.default(case))
    assert "edgeless-cusparse" not in peers.known(op_case("min_F8", "fp32"))
    with pytest.raises(peers.Refused, match="cusparse: the tensors are not on a GPU"):
        peers.build(case, "edgeless-cusparse", graph)


def test_engines_whose_sums_wait_for_the_gpu():
    floats = [torch.float32, torch.float64]
    cases = [(name, dtype) for name in engines.ENGINES for dtype in (*floats, torch.bfloat16)]
    waiting = [case for case in cases if engines.waits_for_gpu(*case)]
    assert waiting == [("cusparse", dtype) for dtype in floats]
    assert not engines.waits_for_gpu("segments", torch.float32)


def test_what_edges_must_share_falls_where_l2_keeps_no_rows():
    def needed(gathered_bytes, edges):
        return [_C.reuse_that_pays(dim, gathered_bytes, rows=1000, edges=edges) for dim in (0, 32, 64, 128)]

    assert needed(2**30 - 1, edges=8000) == [1.5, 2.5, 1.5, 1.3]
    assert needed(2**30, edges=8000) == [1.03, 2.5, 1.5, 1.03]
    assert needed(2**30, edges=7999) == [1.5, 2.5, 1.5, 1.3]  # windows of few edges cost more than they save


def test_auto_asks_for_blocks_of_large_graphs(monkeypatch):
    """For sums and dot product attention of 16 bits, each from its own reuse on; not for what blocks do not compute."""
    asked = []
    monkeypatch.setattr("edgeless.choices.engines._keep", lambda graph, key, *how: asked.append((key, *how)))
    monkeypatch.setattr("edgeless.choices.engines._is_large", lambda graph, x: True)
    graph = Graph.from_edge_index(torch.randint(50, (2, 400)), 50, 50)
    x, heads = torch.randn(50, 8).bfloat16(), torch.randn(50, 2, 64).bfloat16()
    for call, expected in (
        (lambda: functional.spmm(graph, x), [("wsb", 1.5)]),
        (lambda: functional.spmm(graph, x.float()), []),
        (lambda: functional.spmm(graph, x, torch.rand(400).bfloat16()), []),
        (lambda: functional.sddmm_dot(graph, x, x), []),
        (lambda: functional.dot_attention(graph, heads, heads, heads), [("wsb", 1.5)]),
        (lambda: functional.dot_attention(graph, *[heads.view(50, 1, 128)] * 3), [("wsb", 1.3)]),
        (lambda: functional.dot_attention(graph, *[heads.view(50, 4, 32)] * 3), [("wsb", 2.5)]),
        (lambda: functional.dot_attention(graph, *[heads.view(50, 8, 16)] * 3), []),
        (lambda: functional.dot_attention(graph, *[heads.float()] * 3), []),
        (lambda: functional.dot_attention(graph, heads, heads, heads, dropout=0.5, seed=1), []),
    ):
        asked.clear()
        call()
        assert asked == expected

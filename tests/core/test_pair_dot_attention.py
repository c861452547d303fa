"""Attention over pairs whose keys and values are made one after the other, and the softmax of given logits."""

import pytest
import torch
from attention_cases import GRAPHS, assert_close, error
from devices import EVERY_WAY, assert_same_bits
from test_pair_maps import LAYOUTS, inputs, plain, sides
from test_relational_sum import typed
from test_typed_mm import device, leaf, on_cpu  # noqa: F401  device: where all tensors here are made

import edgeless
from edgeless import _C, reference
from edgeless.functional import pair_maps
from edgeless.plan.recording import record

ops = torch.ops.edgeless


@pytest.fixture
def in_turn(monkeypatch):
    """Small graphs are taken as large ones, on the CPU too; what came of the choice."""
    taken = []

    def takes_turns(*_):
        if not torch.is_grad_enabled():
            taken.append(1)
        return not torch.is_grad_enabled()

    monkeypatch.setattr(pair_maps, "_takes_turns", takes_turns)
    return taken


def arguments(graph, layout="with queries between", heads=2, width=16, out=24, **options):
    """A call's, all of q the same however wide keys and values are."""
    given = inputs(graph, heads, width, out, layout, **options)
    k, v = sides(given.pop("rows").detach(), layout, heads * width)
    weights = [given[name].detach() for name in ("k_weight", "v_weight", "k_scale")]
    return leaf(graph.num_dst, heads * out, dtype=k.dtype, seed=5).detach(), k, v, *weights


def of_parts(graph, q, k, v, k_weight, v_weight, k_scale, scale=0.3):
    keys, values = plain(graph.compact.pairs, k, v, k_weight, v_weight, k_scale)
    q, keys, values = (t.unflatten(1, (k_weight.size(1), -1)) for t in (q, keys, values))
    return reference.dot_attention(graph.compact.edges, q, keys, values, scale=scale).flatten(1)


def found_of(graph, *given, scale=0.3):
    with torch.no_grad():
        return pair_maps.pair_dot_attention(graph.compact, *given, scale)


def doubled(given):
    return [t.double() for t in given]


@pytest.mark.parametrize("kind", GRAPHS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values(kind, layout, in_turn):
    for index in (torch.int32, torch.int64):
        graph = typed(kind, dtype=index)
        for heads, dtype, tolerance in ((1, torch.float32, 1e-5), (2, torch.float32, 1e-5), (2, torch.float64, 1e-10)):
            given = arguments(graph, layout, heads, dtype=dtype)
            assert_close([found_of(graph, *given)], [of_parts(graph, *doubled(given))], tolerance)
    assert len(in_turn) == 6


@pytest.mark.parametrize("width,out", [(64, 64), (7, 5), (8, 7), (4, 160), (136, 8)])
def test_every_width(width, out, in_turn):
    graph = typed("hub")
    given = arguments(graph, heads=1, width=width, out=out, dtype=torch.float32)
    assert_close([found_of(graph, *given)], [of_parts(graph, *doubled(given))], 1e-5)
    assert in_turn


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_half_precision_errs_at_most_twice_as_much_as_torch(dtype, wide, layout, in_turn):
    graph = typed("hub")
    given = arguments(graph, layout, dtype=dtype, weights=torch.float32 if wide else None)
    truth, stock = of_parts(graph, *doubled(given)), of_parts(graph, *given)
    found = found_of(graph, *given)
    assert found.dtype == dtype and in_turn
    assert error(found, truth) <= 2 * error(stock, truth)


def test_with_gradients_keys_and_values_are_made_together(in_turn):
    graph = typed("square")
    q, *rest = arguments(graph, dtype=torch.float32)
    out = pair_maps.pair_dot_attention(graph.compact, q.requires_grad_(), *rest, 0.3)
    assert out.requires_grad and not in_turn
    assert_close([found_of(graph, q.detach(), *rest)], [out.detach()], 1e-6)
    assert in_turn


@pytest.mark.cuda
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.cuda)], indirect=True)
def test_large_ones_take_half_the_memory(device):  # noqa: F811
    count, edges, width, types = 1 << 16, 1 << 20, 64, 16
    graph = edgeless.Graph.from_edge_index(torch.randint(count, (2, edges)), count, count)
    graph = edgeless.TypedGraph(graph, torch.arange(edges) % types, types)
    k, q, v = torch.randn(count, 3 * width).split(width, 1)
    weights = [torch.randn(types, 1, width, width) for _ in range(2)]
    given = (q, k, v, *weights, torch.randn(types, 1))
    both = 2 * graph.compact.edges.num_src * width * 4
    assert _C.one_buffer_pays(both)

    def peak(run):
        run()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out = run()
        torch.cuda.synchronize()
        return out, torch.cuda.max_memory_allocated() - before

    found, in_turn = peak(lambda: found_of(graph, *given))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pair_maps, "_takes_turns", lambda *_: False)
        want, together = peak(lambda: found_of(graph, *given))
    assert_close([found], [want], 1e-5)
    assert together >= both and in_turn <= 0.6 * together
    compact, rest = graph.compact, given[1:]
    with torch.no_grad():
        assert pair_maps._takes_turns(compact, *rest)
        halves = [t[..., : width // 8] for t in weights]  # of fewer bytes
        assert not pair_maps._takes_turns(compact, k, v, *halves, given[5])
        with edgeless.backend("reference"):
            assert not pair_maps._takes_turns(compact, *rest)
        with edgeless.engine("wsb"):
            assert not pair_maps._takes_turns(compact, *rest)
    assert not pair_maps._takes_turns(compact, *rest)


def test_queries_of_another_dtype_are_promoted(in_turn):
    graph = typed("hub")
    q, *rest = arguments(graph, dtype=torch.float32)
    found = found_of(graph, q.double(), *rest)
    assert found.dtype == torch.float64 and not in_turn
    assert_close([found], [of_parts(graph, *doubled((q, *rest)))], 1e-5)


def test_small_ones_and_those_on_the_cpu_do_not_take_turns():
    graph = typed("hub")
    _, *rest = arguments(graph, dtype=torch.float32)
    with torch.no_grad():
        assert not pair_maps._takes_turns(graph.compact, *rest)


def test_the_same_bits_every_time(in_turn):
    graph = typed("hub")
    given = arguments(graph, dtype=torch.float32)
    assert torch.equal(found_of(graph, *given), found_of(graph, *given)) and in_turn


@pytest.mark.cuda
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.cuda)], indirect=True)
@EVERY_WAY
def test_streams_and_graphs(device, way, in_turn):  # noqa: F811
    graph = typed("hub")
    given = inputs(graph, dtype=torch.float32)
    q = leaf(graph.num_dst, 48, dtype=torch.float32, seed=5)

    def step(q, rows, *weights):
        return [found_of(graph, q, *sides(rows, "with queries between", 32), *weights)]

    assert_same_bits(way, step, [q, *given.values()])
    assert in_turn


def test_its_steps_are_told(in_turn):
    graph = typed("square")
    given = arguments(graph, dtype=torch.float32)
    with torch.no_grad():
        steps = record(lambda: pair_maps.pair_dot_attention(graph.compact, *given, 0.3), given)
    assert [step.op for step in steps] == ["pair_dot_attention"] * 4
    keys, logits, values, sums = steps
    assert keys.bytes == values.bytes > 0
    assert (logits.step, sums.step) == ("products", "forward") and min(logits.bytes, sums.bytes) > 0


# softmax_sum ---------------------------------------------------------------------------------------------------------


def logits_and_rows(graph, heads=3, channels=20, dtype=torch.float32):
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    logits = 3 * leaf(graph.num_edges, heads, dtype=wide, seed=1).detach()
    return logits, leaf(graph.num_src, heads, channels, dtype=dtype, seed=2).detach()


def softmax_sum(graph, logits, value):
    """A row at a time."""
    indptr, indices = (t.long() for t in graph.csr[:2])
    out = value.new_zeros(graph.num_dst, *value.shape[1:])
    for row in range(graph.num_dst):
        edges = slice(indptr[row], indptr[row + 1])
        weights = logits[edges].softmax(0).to(value.dtype)
        out[row] = (weights.unsqueeze(2) * value[indices[edges]]).sum(0)
    return out


@pytest.mark.parametrize("kind", GRAPHS)
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_softmax_of_given_logits(kind, index):
    graph = typed(kind, dtype=index).graph
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-10)):
        for heads, channels in ((1, 64), (3, 20), (2, 7)):
            given = logits_and_rows(graph, heads, channels, dtype)
            found = ops.softmax_sum(*given, list(graph.csr[:2]), [])
            assert found.dtype == dtype
            assert_close([found], [softmax_sum(graph, *doubled(given))], tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_softmax_of_given_logits_in_half_precision(dtype):
    graph = typed("hub").graph
    given = logits_and_rows(graph, dtype=dtype)
    truth, stock = softmax_sum(graph, *doubled(given)), softmax_sum(graph, *given)
    found = ops.softmax_sum(*given, list(graph.csr[:2]), [])
    assert error(found, truth) <= 2 * error(stock, truth)


@on_cpu
@pytest.mark.parametrize("changed,message", [
    ({"logits": torch.zeros(7, 3)}, "logits must have shape"),
    ({"logits": torch.zeros(300, 3, dtype=torch.float64)}, "logits must"),
    ({"value": torch.zeros(40, 60)}, r"value must be \[Ns, H, C\], got shape \[40, 60\]"),
    ({"csr": []}, r"csr must hold \[indptr, indices\], got 0 tensors"),
])  # fmt: skip
def test_bad_input_of_softmax_sum_is_named(changed, message):
    graph = typed("square").graph
    logits, value = logits_and_rows(graph)
    given = {"logits": logits, "value": value, "csr": list(graph.csr[:2]), **changed}
    with pytest.raises(ValueError, match=f"softmax_sum: {message}"):
        ops.softmax_sum(*given.values())


@on_cpu
@pytest.mark.parametrize("changed,message", [
    ({0: torch.zeros(40, 5)}, r"q must have shape \[40, 48\], got \[40, 5\]"),
    ({0: torch.zeros(40, 48, dtype=torch.float64)}, "q must be"),
    ({1: torch.zeros(40, 5)}, r"k must have shape \[40, 32\], got \[40, 5\]"),
    ({4: torch.zeros(4, 2, 16, 24)}, r"v_weight must have shape \[5, 2, 16, 24\], got \[4, 2, 16, 24\]"),
    ({7: []}, r"csr must hold \[indptr, indices\], got 0 tensors"),
])  # fmt: skip
def test_bad_input_is_named(changed, message):
    graph = typed("square")
    given = [*arguments(graph, dtype=torch.float32), graph.compact.pairs.by_dst, list(graph.compact.edges.csr[:2]), 0.3]
    for i, value in changed.items():
        given[i] = value
    with pytest.raises(ValueError, match=f"pair_dot_attention: {message}"):
        ops.pair_dot_attention(*given)


@pytest.mark.skipif(not hasattr(torch.library, "opcheck"), reason="torch.library.opcheck came with torch 2.4")
def test_opcheck():
    graph = typed("bipartite")
    csr = list(graph.compact.edges.csr[:2])
    given = arguments(graph, dtype=torch.float32)
    torch.library.opcheck(ops.pair_dot_attention, (*given, graph.compact.pairs.by_dst, csr, 0.3))
    torch.library.opcheck(ops.softmax_sum, (*logits_and_rows(graph.graph), list(graph.graph.csr[:2])))

"""The cache of graphs: found again, never stale, never kept alive, bounded."""

import weakref

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import edgeless
from edgeless import Graph
from edgeless.cache import GraphCache, graph_for, graph_from_edge_index, graph_from_object


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch):
    monkeypatch.delenv("EDGELESS_CACHE", raising=False)
    limit = edgeless.cache_info().limit
    edgeless.clear_cache()
    yield
    edgeless.set_cache_limit(limit)
    edgeless.clear_cache()


def new_edges():
    return torch.tensor([[0, 1, 1, 2], [1, 1, 2, 0]])


def lookup(edge_index, **options):
    return graph_from_edge_index(edge_index, 4, 4, **options)


def stamp(tensor, whole):
    return edgeless._C.stamps([tensor], whole)


def counts():
    info = edgeless.cache_info()
    return info.hits, info.misses, info.graphs


# Found again ---------------------------------------------------------------------------------------------------------


def test_the_second_call_builds_nothing():
    edge_index = new_edges()
    graph = lookup(edge_index)
    assert lookup(edge_index) is graph
    assert torch.equal(graph.edge_index(), edge_index)
    assert counts() == (1, 1, 1)


def test_an_equal_tensor_is_another_graph():
    kept = new_edges(), new_edges()
    assert lookup(kept[0]) is not lookup(kept[1])
    assert counts() == (0, 2, 2)


def test_what_tells_the_graphs_of_one_tensor_apart():
    edge_index = new_edges()
    variants = [
        lambda: graph_from_edge_index(edge_index, 4, 4),
        lambda: graph_from_edge_index(edge_index, 5, 4),
        lambda: graph_from_edge_index(edge_index, 4, 5),
        lambda: graph_from_edge_index(edge_index, 4, 4, flow="target_to_source"),
        lambda: graph_from_edge_index(edge_index, 4, 4, self_loops=True),
        lambda: graph_from_edge_index(edge_index),
        lambda: graph_from_object(edge_index, "mine", lambda: Graph.from_edge_index(edge_index)),
    ]
    graphs = [build() for build in variants]
    assert len(set(map(id, graphs))) == len(graphs)
    assert [build() for build in variants] == graphs
    assert counts() == (len(graphs), len(graphs), len(graphs))


def test_flow_says_which_row_sends():
    edge_index = torch.tensor([[0, 1], [5, 5]])
    assert torch.equal(graph_from_edge_index(edge_index, 2, 6).edge_index(), edge_index)
    backward = graph_from_edge_index(edge_index, 6, 2, flow="target_to_source")
    assert torch.equal(backward.edge_index(), edge_index.flip(0))
    assert (backward.num_src, backward.num_dst) == (6, 2)
    with pytest.raises(ValueError, match="flow must be one of .*source_to_target.*, got 'sideways'"):
        graph_from_edge_index(edge_index, 2, 6, flow="sideways")


@pytest.mark.parametrize("edges", [new_edges(), new_edges()[:, [0, 2, 3]]], ids=["loops", "no loops"])
@pytest.mark.parametrize("sizes", [(3, 3), (3, 5), (6, 4)])
def test_self_loops_as_the_graph_itself_replaces_them(edges, sizes):
    graph = graph_from_edge_index(edges, *sizes, self_loops=True)
    want = Graph.from_edge_index(edges, *sizes).with_self_loops()
    assert torch.equal(graph.edge_index(), want.edge_index())
    assert graph._kept is want._kept is None or torch.equal(graph._kept, want._kept)


def test_errors_speak_of_the_users_tensor_and_nothing_is_kept():
    edge_index = torch.tensor([[0, 0, 1], [0, 9, 1]])
    for options in ({}, {"self_loops": True}):
        with pytest.raises(IndexError, match=r"edge_index\[1\] has id 9 at position 1, .* num_dst = 4"):
            lookup(edge_index, **options)
        with pytest.raises(IndexError, match=r"edge_index\[1\] has id 9 at position 1, .* num_src = 4"):
            lookup(edge_index, flow="target_to_source", **options)
    with pytest.raises(TypeError, match="edge_index must be a Tensor"):
        lookup([[0], [1]])
    assert edgeless.cache_info().graphs == 0


# Never stale ---------------------------------------------------------------------------------------------------------


def through_numpy(edge_index):
    edge_index.numpy()[0, 0] = 3


EDITS = {
    "setitem": lambda e: e.__setitem__((0, 0), 3),
    "in-place method": lambda e: e.add_(1),
    "view": lambda e: e[0].fill_(3),
    "view of a view": lambda e: e.t()[:2].unsqueeze(0).__setitem__((0, 0, 0), 3),
    "detached": lambda e: e.detach().__setitem__((0, 0), 3),
    "copy_": lambda e: e.copy_(e.flip(1)),
    "set_": lambda e: e.set_(new_edges().flip(0)),
    "resize": lambda e: e.resize_(2, 3),
    "out=": lambda e: torch.add(new_edges(), 1, out=e),
    "under inference mode": lambda e: _edit_under_inference_mode(e),
    "data replaced": lambda e: setattr(e, "data", new_edges().flip(0)),
    "data narrowed": lambda e: setattr(e, "data", e.data[:, :3]),
    "data restrided": lambda e: setattr(e, "data", e.data.as_strided((2, 4), (1, 1))),
    "transposed": lambda e: e.set_(e.untyped_storage(), 0, (2, 2), (1, 2)),
}
UNCOUNTED_EDITS = {  # past PyTorch's version counter
    "data edited": lambda e: e.data.__setitem__((0, 0), 3),
    "numpy": through_numpy,
    "dlpack": lambda e: torch.from_dlpack(e.numpy()).__setitem__((0, 0), 3),
}


def _edit_under_inference_mode(edge_index):
    with torch.inference_mode():
        edge_index[0, 0] = 3


@pytest.mark.parametrize("self_loops", [False, True])
@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS.keys())
def test_an_edited_tensor_is_a_new_graph(edit, self_loops):
    edge_index = new_edges()
    lookup(edge_index, self_loops=self_loops)
    before = lookup(edge_index, self_loops=self_loops).edge_index()
    edit(edge_index)
    after = lookup(edge_index, self_loops=self_loops)
    want = Graph.from_edge_index(edge_index, 4, 4)
    want = want.with_self_loops() if self_loops else want
    assert torch.equal(after.edge_index(), want.edge_index())
    assert not torch.equal(before, want.edge_index())  # the edit was one
    assert lookup(edge_index, self_loops=self_loops) is after
    assert edgeless.cache_info().graphs == 1  # the stale one is gone


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8])
@pytest.mark.parametrize("edit", UNCOUNTED_EDITS.values(), ids=UNCOUNTED_EDITS.keys())
def test_uncounted_edits_of_a_small_graph_are_seen(edit, dtype):
    edge_index = new_edges().to(dtype)
    graph = lookup(edge_index)
    assert lookup(edge_index) is graph
    edit(edge_index)
    assert torch.equal(lookup(edge_index).edge_index(), edge_index.long())


def large_edges(num_edges=200_000):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 1000, (2, num_edges), generator=generator)


LAYOUTS = {
    "contiguous": lambda e: e,
    "transposed": lambda e: e.t().contiguous().t(),
    "part of a wider one": lambda e: torch.cat((e, e), 1)[:, 3 : 3 + e.size(1)],
    "int32": lambda e: e.int(),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_a_new_graph_in_the_memory_of_an_old_one_is_seen(layout):
    edge_index = layout(large_edges())
    graph = graph_from_edge_index(edge_index, 1000, 1000)
    assert graph_from_edge_index(edge_index, 1000, 1000) is graph
    edge_index.data.copy_(edge_index.flip(0))  # what a collective does, without raising the version
    assert torch.equal(graph_from_edge_index(edge_index, 1000, 1000).edge_index(), edge_index.long())


@pytest.mark.parametrize("part", [slice(0, 1), slice(-1, None), slice(5_000, 9_000)])
@pytest.mark.parametrize("row", [0, 1])
def test_edited_stretches_of_a_large_graph_are_seen(row, part):
    edge_index = large_edges()
    graph_from_edge_index(edge_index, 1000, 1000)
    edge_index.data[row, part] = (edge_index[row, part] + 1) % 1000
    assert torch.equal(graph_from_edge_index(edge_index, 1000, 1000).edge_index(), edge_index)


@pytest.mark.parametrize("place", [(0, 0), (1, 77_777), (0, 199_999), (1, 100_003)])
@pytest.mark.parametrize("moved", [torch.Tensor.share_memory_, pytest.param("several processes")])
def test_one_edited_id_is_seen_where_others_can_write(moved, place, monkeypatch):
    edge_index = large_edges()
    if moved == "several processes":
        for module in (edgeless.graph.graph_cache, edgeless.graph.weak_cache):
            monkeypatch.setattr(module, "several_processes", lambda: True)
    else:
        moved(edge_index)
    graph = graph_from_edge_index(edge_index, 1000, 1000)
    assert graph_from_edge_index(edge_index, 1000, 1000) is graph
    edge_index.data[place] = (edge_index[place] + 1) % 1000
    assert torch.equal(graph_from_edge_index(edge_index, 1000, 1000).edge_index(), edge_index)


def test_what_escapes_the_sample_is_seen_after_its_version_was_raised():
    """As the documents advise."""
    edge_index = large_edges()
    graph = graph_from_edge_index(edge_index, 1000, 1000)
    edge_index.data[0, 100_003] += 1
    torch.autograd.graph.increment_version(edge_index)
    assert graph_from_edge_index(edge_index, 1000, 1000) is not graph


def test_other_strategies_of_sharing_are_known():
    """The file system is the other way of torch.multiprocessing; its memory is of another kind."""
    strategy = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        edge_index = large_edges().share_memory_()
    finally:
        torch.multiprocessing.set_sharing_strategy(strategy)
    assert stamp(edge_index, False) == stamp(edge_index, True)
    for other in (large_edges(), torch.from_numpy(large_edges().numpy()), torch.from_dlpack(large_edges().numpy())):
        assert stamp(other, False) != stamp(other, True)  # a sample is enough


def test_every_field_of_a_stamp():
    """Of a tensor whose contents are not looked at, as on a GPU."""

    def empty(*sizes, strides=None, dtype=torch.long):
        strides = strides or torch.empty(sizes).stride()
        return torch.empty_strided(sizes, strides, dtype=dtype, device="meta")

    written, inferred = empty(2, 6), None
    written.zero_()
    with torch.inference_mode():
        inferred = empty(2, 6)
    others = [
        empty(2, 7), empty(3, 6), empty(12), empty(2, 6, 1), empty(2, 6, dtype=torch.int32),
        empty(2, 6, strides=(1, 2)), empty(2, 6, strides=(7, 1)), written, inferred,
    ]  # fmt: skip
    assert stamp(empty(2, 6), False) == stamp(empty(2, 6), False)
    assert len({stamp(tensor, False) for tensor in (empty(2, 6), *others)}) == 1 + len(others)
    assert stamp(torch.zeros(2, 0, dtype=torch.long), False) != stamp(empty(2, 0), False)


def test_empty_and_odd_tensors_have_a_stamp():
    for tensor in (
        torch.empty(2, 0, dtype=torch.long),
        torch.zeros(3, dtype=torch.long)[::2],
        torch.zeros((), dtype=torch.long),
        torch.zeros(2, 1, dtype=torch.long).expand(2, 9000),
        torch.empty(2, 3, dtype=torch.long, device="meta"),
    ):
        assert stamp(tensor, False) == stamp(tensor, False)
    freed = torch.zeros(2, 9000, dtype=torch.long)
    freed.untyped_storage().resize_(0)
    assert stamp(freed, True) == stamp(freed, True)


@pytest.mark.parametrize("refer", [weakref.ref, torch._C._WeakTensorRef])
def test_torch_swaps_no_tensor_with_a_weak_reference(refer):
    """Whoever holds it, in Python or in C++: so no cache that lets its tensors die can do without clear_cache()."""
    edge_index, other = new_edges(), new_edges()
    reference = refer(edge_index)
    with pytest.raises(RuntimeError, match="weakref"):
        torch.utils.swap_tensors(edge_index, other)
    del reference
    torch.utils.swap_tensors(edge_index, other)


def test_tensors_can_be_swapped_when_the_cache_was_cleared():
    edge_index, other = new_edges(), new_edges().flip(0)
    lookup(edge_index)
    edgeless.clear_cache()
    torch.utils.swap_tensors(edge_index, other)
    assert torch.equal(lookup(edge_index).edge_index(), new_edges().flip(0))


@pytest.mark.parametrize("edit", [*EDITS.values(), *UNCOUNTED_EDITS.values()], ids=[*EDITS, *UNCOUNTED_EDITS])
def test_verify_sees_every_edit(edit, monkeypatch):
    monkeypatch.setenv("EDGELESS_CACHE", "verify")
    edge_index = new_edges()
    graph = lookup(edge_index)
    assert lookup(edge_index) is graph
    edit(edge_index)
    assert torch.equal(lookup(edge_index).edge_index(), edge_index)


def test_what_verify_compares_with_is_counted(monkeypatch):
    edge_index = new_edges()
    lookup(edge_index)
    without = edgeless.cache_info().bytes
    edgeless.clear_cache()
    monkeypatch.setenv("EDGELESS_CACHE", "verify")
    lookup(edge_index)
    assert edgeless.cache_info().bytes == without + edge_index.numel() * edge_index.element_size()


def test_verify_does_not_trust_what_was_cached_without(monkeypatch):
    edge_index = new_edges()
    lookup(edge_index)
    edge_index.data[0, 0] = 3
    monkeypatch.setenv("EDGELESS_CACHE", "verify")
    assert torch.equal(lookup(edge_index).edge_index(), edge_index)


def test_all_graphs_of_an_edited_tensor_are_forgotten():
    edge_index = new_edges()
    lookup(edge_index), lookup(edge_index, self_loops=True)
    edge_index[0, 0] = 3
    lookup(edge_index)
    assert edgeless.cache_info().graphs == 1


def test_what_is_built_in_inference_mode_can_be_saved_for_a_backward():
    """As by a model that is validated before it is trained."""
    anchor = torch.arange(3)

    def build():
        indptr, indices = torch.tensor([0, 1, 3]), torch.tensor([0, 1, 2])
        assert not indptr.is_inference()
        return Graph.from_csr(indptr, indices, num_src=3)

    with torch.inference_mode():
        graph = graph_for(anchor, "key", build)
    assert graph_for(anchor, "key", build) is graph
    assert not any(t.is_inference() for t in graph.csr if t is not None)


def test_what_is_built_under_a_transform_is_not_kept():
    """Its arrays may be wrapped by the transform, which ends before the tensor dies."""
    edge_index, built = new_edges(), []

    def loss(x):
        built.append(lookup(edge_index))
        return x.square().sum()

    for _ in range(2):
        torch.func.grad(loss)(torch.ones(4))
    assert built[0] is not built[1] and edgeless.cache_info().graphs == 0
    kept = lookup(edge_index)
    torch.func.grad(loss)(torch.ones(4))
    assert built[2] is kept


@pytest.mark.parametrize("edit", [EDITS["setitem"], EDITS["view"], EDITS["copy_"]])
def test_inference_tensors_are_compared(edit):
    with torch.inference_mode():
        edge_index = new_edges()
        assert edge_index.is_inference()
        graph = lookup(edge_index)
        assert lookup(edge_index) is graph
        edit(edge_index)
        assert torch.equal(lookup(edge_index).edge_index(), edge_index)
    assert torch.equal(lookup(edge_index).edge_index(), edge_index)


def test_what_is_concrete():
    """Tensors themselves and parameters, and whether one of them was made in inference mode."""
    plain, parameter = torch.ones(2), torch.nn.Parameter(torch.ones(2))
    with torch.inference_mode():
        inference = torch.ones(2)
    other = torch.ones(2).as_subclass(type("Other", (torch.Tensor,), {}))
    for given, want in (
        ((), (True, False)),
        ((plain, parameter), (True, False)),
        ([plain, inference, parameter], (True, True)),
        ((plain, other), (False, False)),
        ((plain, 3), (False, False)),
        ((inference, None), (False, True)),
    ):
        assert edgeless._C.are_concrete(given) == want


def test_a_graph_cached_under_inference_mode_serves_training():
    edge_index = new_edges()
    with torch.inference_mode():
        graph = lookup(edge_index, self_loops=True)
    assert lookup(edge_index, self_loops=True) is graph
    assert not any(t.is_inference() for t in (*graph.csr, graph._kept))


def test_a_reused_address_is_a_new_graph():
    memory = new_edges().numpy()
    seen = set()
    for step in range(20):
        memory[0, 0] = step % 4  # while no tensor looks at it
        edge_index = torch.from_numpy(memory)
        assert edge_index._version == 0
        assert torch.equal(lookup(edge_index).edge_index(), edge_index)
        seen.add((id(edge_index), edge_index.data_ptr()))
        del edge_index
    assert len(seen) < 20  # the interpreter gave ids again too


def test_a_reused_id_before_its_death_was_noticed():
    class Anchor:
        pass

    class Forgetful(GraphCache):
        def _anchor_died(self, reference):
            pass  # as if the callback had not come yet

    cache = Forgetful()
    for step in range(50):
        anchor = Anchor()
        graph = Graph.from_edge_index(torch.tensor([[step], [0]]))
        assert cache.get(anchor, "key", lambda graph=graph: graph) is graph
        del anchor


# Off, and while tracing ----------------------------------------------------------------------------------------------


def test_switched_off(monkeypatch):
    monkeypatch.setenv("EDGELESS_CACHE", "0")
    edge_index = new_edges()
    assert lookup(edge_index) is not lookup(edge_index)
    assert counts() == (0, 0, 0)
    monkeypatch.setenv("EDGELESS_CACHE", "1")
    assert lookup(edge_index) is lookup(edge_index)


def test_an_unknown_setting_is_named(monkeypatch):
    monkeypatch.setenv("EDGELESS_CACHE", "maybe")
    with pytest.raises(ValueError, match="EDGELESS_CACHE must be 0, 1 or verify, got 'maybe'"):
        lookup(new_edges())


def degrees(edge_index):
    return lookup(edge_index).csr.indptr.diff()


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace", "ignore:Converting a tensor:torch.jit.TracerWarning")
def test_jit_trace_records_the_ops():
    edge_index = new_edges()
    lookup(edge_index)
    traced = torch.jit.trace(degrees, (edge_index,), check_trace=False)
    assert torch.equal(traced(edge_index.flip(0)), degrees(edge_index.flip(0)))


@pytest.mark.skipif(not hasattr(torch.library, "register_fake"), reason="needs torch 2.4")
@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_make_fx_records_the_ops(mode):
    traced = make_fx(degrees, tracing_mode=mode)(new_edges())
    assert edgeless.cache_info().graphs == 0
    assert torch.equal(traced(new_edges().flip(0)), degrees(new_edges().flip(0)))


# Life and death ------------------------------------------------------------------------------------------------------


def test_a_graph_dies_with_its_tensor():
    edge_index = new_edges()
    graph = weakref.ref(lookup(edge_index))
    looped = weakref.ref(lookup(edge_index, self_loops=True))
    derived = weakref.ref(graph().with_self_loops())
    assert graph() is not None
    del edge_index
    assert graph() is looped() is derived() is None  # at once, without a garbage collection
    assert counts()[2] == 0
    assert edgeless.cache_info().bytes == 0


def test_the_tensor_is_not_kept_by_its_graph():
    edge_index = new_edges()
    graph = lookup(edge_index)
    tensor = weakref.ref(edge_index)
    del edge_index
    assert tensor() is None
    assert graph.csc.indices.numel() == 4  # who holds a graph can go on using it


def test_clear_cache():
    edge_index = new_edges()
    graph = lookup(edge_index)
    lookup(edge_index)
    edgeless.clear_cache()
    assert edgeless.cache_info()[:4] == (0, 0, 0, 0)
    assert lookup(edge_index) is not graph
    del edge_index
    assert counts()[2] == 0


# Bounds --------------------------------------------------------------------------------------------------------------


def bytes_of_one():
    return Graph.from_edge_index(new_edges(), 4, 4).memory_bytes_at_most()


def test_the_least_recently_used_goes_first():
    edgeless.set_cache_limit(2 * bytes_of_one())
    first, second, third = new_edges(), new_edges(), new_edges()
    graphs = [lookup(first), lookup(second)]
    lookup(first)
    lookup(third)
    assert lookup(first) is graphs[0]
    assert counts()[2] == 2
    assert lookup(second) is not graphs[1]


def test_the_limit_holds_after_transposes_were_built():
    edgeless.set_cache_limit(3 * bytes_of_one())
    tensors = [new_edges() for _ in range(8)]
    for edge_index in tensors:
        lookup(edge_index).csc  # noqa: B018
        assert edgeless.cache_info().bytes <= 3 * bytes_of_one()
    assert counts()[2] == 3


def test_the_graph_in_use_stays_even_when_it_is_too_large():
    edgeless.set_cache_limit(10)
    edge_index, other = new_edges(), new_edges()
    assert lookup(edge_index) is lookup(edge_index)
    lookup(other)
    assert counts()[2] == 1


def test_a_lower_limit_evicts_at_once_and_zero_keeps_nothing():
    tensors = [new_edges() for _ in range(4)]
    for edge_index in tensors:
        lookup(edge_index)
    edgeless.set_cache_limit(2 * bytes_of_one())
    assert counts()[2] == 2
    edgeless.set_cache_limit(0)
    assert counts()[2] == 0
    assert lookup(tensors[0]) is not lookup(tensors[0])
    with pytest.raises(ValueError, match="bytes must not be negative, got -1"):
        edgeless.set_cache_limit(-1)


def test_derived_graphs_count():
    edge_index, other = new_edges(), new_edges()
    graph = lookup(edge_index)
    edgeless.set_cache_limit(2 * bytes_of_one())
    graph.with_self_loops()
    lookup(edge_index)
    lookup(other)
    assert counts()[2] == 1  # the first has grown too large to stay beside the second


def test_bytes_are_those_of_the_graphs_and_the_copies(monkeypatch):
    edge_index = new_edges()
    graph = lookup(edge_index)
    assert edgeless.cache_info().bytes == graph.memory_bytes()
    graph.csc  # noqa: B018
    assert edgeless.cache_info().bytes == graph.memory_bytes()
    graph_from_object(edge_index, "again", lambda: graph)
    assert edgeless.cache_info().bytes == graph.memory_bytes()
    edgeless.clear_cache()
    monkeypatch.setenv("EDGELESS_CACHE", "verify")
    graph = lookup(edge_index)
    assert edgeless.cache_info().bytes == graph.memory_bytes() + edge_index.numel() * 8


# Any object ----------------------------------------------------------------------------------------------------------


class Unhashable:
    """Like a DGL graph index under some versions: equal to nothing, not hashable, but weakly referenceable."""

    __hash__ = None

    def __eq__(self, other):
        raise AssertionError("anchors must not be compared")


def test_objects_are_told_apart_by_identity():
    anchor, other = Unhashable(), Unhashable()
    graphs = [graph_from_object(a, 0, lambda: Graph.from_edge_index(new_edges())) for a in (anchor, other, anchor)]
    assert graphs[0] is graphs[2] is not graphs[1]
    del anchor
    assert counts()[2] == 1


def test_an_object_that_changes_names_its_tensors():
    anchor, edges = Unhashable(), new_edges()

    def build():
        return Graph.from_edge_index(edges, 4, 4)

    graph = graph_from_object(anchor, 0, build, tensors=(edges,))
    assert graph_from_object(anchor, 0, build, tensors=(edges,)) is graph
    edges[0, 0] = 3
    assert torch.equal(graph_from_object(anchor, 0, build, tensors=(edges,)).edge_index(), edges)
    edges = new_edges().flip(0)
    assert torch.equal(graph_from_object(anchor, 0, build, tensors=(edges,)).edge_index(), edges)


def test_an_anchor_without_weak_references_is_refused():
    with pytest.raises(TypeError, match="weak reference"):
        graph_for((1, 2), 0, lambda: Graph.from_edge_index(new_edges()))

"""HeteroGraphConv over the layers of edgeless: one sum over relations where it can be, and else a call for each."""

import dgl
import dgl.nn as stock
import pytest
import torch
from dgl_cases import assert_close

import edgeless
import edgeless.dgl.nn as fused
from edgeless.layers import hetero_sum

SIZES = {"a": 20, "b": 13, "c": 7}
TYPES = [("a", "leads", "b"), ("b", "back", "a"), ("a", "same", "a"), ("c", "by", "a"), ("a", "of", "c")]
IN, OUT = 6, 4
LAYERS = {
    **{f"GraphConv {norm}": ("GraphConv", {"norm": norm}) for norm in ("none", "left", "right", "both")},
    "GraphConv to more": ("GraphConv", {"norm": "right", "out": 9, "bias": False}),
    "SAGEConv mean": ("SAGEConv", {"aggregator_type": "mean"}),
    "SAGEConv without bias": ("SAGEConv", {"aggregator_type": "mean", "bias": False}),
}
OTHERS = {
    "SAGEConv pool": ("SAGEConv", {"aggregator_type": "pool"}),
    "SAGEConv gcn": ("SAGEConv", {"aggregator_type": "gcn"}),
    "activation": ("GraphConv", {"activation": torch.tanh}),
    "GATv2Conv": ("GATv2Conv", {"num_heads": 2}),
}


def hetero(idtype=torch.int64, empty=False):
    """``empty``: whether a relation has no edges; DGL makes gradients of nothing for its maximum then."""
    edges = {}
    for i, (source, etype, destination) in enumerate(TYPES):
        generator = torch.Generator().manual_seed(i)
        ends = [torch.randint(SIZES[t] - 1, (50,), generator=generator) for t in (source, destination)]
        edges[source, etype, destination] = tuple(ends)
    if empty:
        edges[TYPES[3]] = (torch.tensor([], dtype=torch.int64),) * 2
    return dgl.heterograph(edges, SIZES, idtype=idtype)


def nodes_of(graph, dtype=torch.float32):
    generator = torch.Generator().manual_seed(4)
    sizes = {key: graph.num_src_nodes(key) for key in SIZES}
    return {
        key: torch.randn(size, IN, generator=generator, dtype=torch.float64).to(dtype) for key, size in sizes.items()
    }


def pair_of(name, dtype=torch.float32, aggregate="sum", out=OUT, types=TYPES, **options):
    """(stock HeteroGraphConv of stock layers, ours of ours)."""
    pairs = []
    for package in (stock, fused):
        convs = {etype: getattr(package, name)(IN, out, **options) for _, etype, _ in types}
        pairs.append(package.HeteroGraphConv(convs, aggregate=aggregate).to(dtype))
    pairs[1].load_state_dict(pairs[0].state_dict())
    return pairs


def run(layer, graph, inputs, **kwargs):
    leaves = {key: x.detach().clone().requires_grad_() for key, x in inputs.items()}
    outs = layer(graph, dict(leaves), **kwargs)
    generator = torch.Generator().manual_seed(23)
    loss = sum((out.double() * torch.randn(out.shape, generator=generator)).sum() for out in outs.values())
    named = {**leaves, **dict(layer.named_parameters())}
    grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {
        **{f"out {k}": v.detach() for k, v in outs.items()},
        **{f"grad {k}": g for k, g in zip(named, grads, strict=True)},
    }


def run_fused(*args, **kwargs):
    with edgeless.backend("fused"):
        return run(*args, **kwargs)


@pytest.fixture
def sums(monkeypatch):
    """Counts the sums over relations."""
    found, function = [], hetero_sum.relational_sum
    monkeypatch.setattr(hetero_sum, "relational_sum", lambda *a, **k: (found.append(1), function(*a, **k))[1])
    return found


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("aggregate", ["sum", "mean"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_and_means_are_one_sum_over_relations(sums, kind, aggregate, dtype):
    name, options = LAYERS[kind]
    theirs, ours = pair_of(name, dtype, aggregate, **options)
    for idtype in (torch.int64, torch.int32):
        graph = hetero(idtype, empty=idtype == torch.int64)
        inputs = nodes_of(graph, dtype)
        want, have = run(theirs, graph, inputs), run_fused(ours, graph, inputs)
        assert_close(have, want)
        assert list(have) == list(want)
    assert len(sums) == 2


def my_sum(tensors, ntype):
    return torch.stack(tensors).sum(0) * (2 if ntype == "a" else 1)


@pytest.mark.parametrize("kind", [*LAYERS, *OTHERS])
@pytest.mark.parametrize("aggregate", ["sum", "mean", "max", "min", "stack", my_sum])
def test_every_aggregate(sums, kind, aggregate):
    name, options = {**LAYERS, **OTHERS}[kind]
    graph = hetero()
    theirs, ours = pair_of(name, aggregate=aggregate, **options)
    assert_close(run_fused(ours, graph, nodes_of(graph)), run(theirs, graph, nodes_of(graph)))
    assert len(sums) == (aggregate in ("sum", "mean") and kind in LAYERS)
    assert edgeless.explain(ours, graph, nodes_of(graph))


@pytest.mark.parametrize("kind", ["GraphConv right", "GraphConv both", "SAGEConv mean"])
@pytest.mark.parametrize("pair", [False, True])
def test_blocks(sums, kind, pair):
    seeds = {"a": torch.tensor([1, 2, 5]), "b": torch.tensor([0, 4]), "c": torch.tensor([3])}
    block = dgl.to_block(dgl.in_subgraph(hetero(), seeds), seeds)
    name, options = LAYERS[kind]
    theirs, ours = pair_of(name, **options)
    inputs = nodes_of(block)
    if not pair:
        assert_close(run_fused(ours, block, inputs), run(theirs, block, inputs))
    else:
        targets = {key: x[: block.num_dst_nodes(key)] for key, x in inputs.items()}
        with edgeless.backend("fused"):
            found = ours(block, (inputs, targets))
        assert_close(found, theirs(block, (inputs, targets)))
    assert len(sums) == 1


def test_weights_of_the_call(sums):
    """As in DGL's own examples of RGCN, whose layers share bases."""
    graph = hetero()
    theirs, ours = pair_of("GraphConv", norm="right", weight=False, bias=False)
    weights = {etype: {"weight": torch.randn(IN, OUT)} for _, etype, _ in TYPES}
    kwargs = {"mod_kwargs": weights}
    assert_close(run_fused(ours, graph, nodes_of(graph), **kwargs), run(theirs, graph, nodes_of(graph), **kwargs))
    assert len(sums) == 1


def test_edge_weights_missing_types_hooks_and_few_relations_call_every_layer(sums):
    graph = hetero()
    inputs = nodes_of(graph)
    theirs, ours = pair_of("GraphConv", norm="right")
    kwargs = {"mod_kwargs": {"leads": {"edge_weight": torch.rand(50)}}}
    assert_close(run_fused(ours, graph, inputs, **kwargs), run(theirs, graph, inputs, **kwargs))
    few = dgl.edge_type_subgraph(graph, TYPES[:3])
    some = {key: x for key, x in inputs.items() if key != "c"}
    assert_close(run_fused(ours, few, some), run(theirs, few, some))
    for layer in (theirs, ours):
        layer.mods["leads"].register_forward_hook(lambda module, inputs, out: out * 2)
    assert_close(run_fused(ours, graph, inputs), run(theirs, graph, inputs))
    assert not sums


def test_relations_from_a_type_without_features_are_left_out():
    theirs, ours = pair_of("GraphConv", allow_zero_in_degree=True)
    graph = dgl.edge_type_subgraph(hetero(), TYPES[:4])
    inputs = {key: x for key, x in nodes_of(hetero()).items() if key != "c"}
    assert_close(run_fused(ours, graph, inputs), run(theirs, graph, inputs))


def test_the_graph_is_kept_and_a_change_of_it_is_seen():
    graph = hetero()
    theirs, ours = pair_of("GraphConv", norm="right")
    for _ in range(2):
        assert_close(run_fused(ours, graph, nodes_of(graph)), run(theirs, graph, nodes_of(graph)))
    assert edgeless.cache_info().hits == 1
    graph.add_edges(torch.tensor([3]), torch.tensor([4]), etype="leads")
    assert_close(run_fused(ours, graph, nodes_of(graph)), run(theirs, graph, nodes_of(graph)))


def test_errors_are_the_stock_ones():
    graph = hetero()
    theirs, ours = pair_of("GraphConv", norm="right")
    inputs = {key: x for key, x in nodes_of(graph).items() if key != "b"}
    narrow = {key: x[:, :5] for key, x in nodes_of(graph).items()}
    for layer in (theirs, ours):
        with pytest.raises(KeyError, match="b"):
            layer(graph, inputs)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            layer(graph, narrow)


def test_reasons_name_the_relation():
    graph = hetero()
    ours = pair_of("SAGEConv", aggregator_type="lstm")[1]
    found = edgeless.explain(ours, graph, nodes_of(graph))
    assert not found
    assert "of ('a', 'leads', 'b'), SAGEConv: aggregator_type is lstm" in str(found)


def test_autocast_calls_every_layer(sums):
    graph = hetero()
    theirs, ours = pair_of("GraphConv", norm="right")
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = run_fused(ours, graph, nodes_of(graph)), run(theirs, graph, nodes_of(graph))
    assert not sums
    assert {key: t.dtype for key, t in found.items()} == {key: t.dtype for key, t in expected.items()}


def test_accelerate_swaps_the_container_and_its_layers(sums):
    theirs, _ = pair_of("GraphConv", norm="right")
    graph = hetero()
    want = run(theirs, graph, nodes_of(graph))
    report = edgeless.accelerate(theirs)
    assert {new for _, _, new in report.swapped} == {fused.HeteroGraphConv, fused.GraphConv}
    assert_close(run_fused(theirs, graph, nodes_of(graph)), want)
    assert len(sums) == 1


def test_bitwise_the_same_from_run_to_run():
    graph = hetero()
    ours = pair_of("GraphConv", norm="both")[1]
    first, second = (run_fused(ours, graph, nodes_of(graph)) for _ in range(2))
    assert all(torch.equal(first[key], second[key]) for key in first if first[key] is not None)

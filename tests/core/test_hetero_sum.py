"""Edges of a heterogeneous graph as one typed graph: tensors at once, or a graph for each relation."""

import pytest
import torch
from devices import EVERY_DEVICE

from edgeless.graph.handle import Graph
from edgeless.layers.hetero_sum import Relation, join_edges, join_relations

SIZES = {"paper": 30, "author": 20, "venue": 4}
KEYS = [
    ("author", "writes", "paper"),
    ("paper", "cites", "paper"),
    ("venue", "prints", "paper"),
    ("paper", "of", "author"),
    ("author", "knows", "author"),
]
NUMBERS = {key: number for number, key in enumerate(reversed(KEYS))}


def edges_of(device, dtype=torch.int64, counts=(50, 70, 0, 40, 1)):
    gen = torch.Generator().manual_seed(2)
    draw = [
        [torch.randint(SIZES[key[end]], (count,), generator=gen) for end in (0, -1)]
        for key, count in zip(KEYS, counts, strict=True)
    ]
    return {key: torch.stack(ends).to(device, dtype) for key, ends in zip(KEYS, draw, strict=True)}


def joined(edges, targets=SIZES):
    return join_edges("Layer", edges, NUMBERS, SIZES, targets, len(KEYS))


@EVERY_DEVICE
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("counts", [(50, 70, 0, 40, 1), (0, 0, 0, 0, 0)])
def test_tensors_at_once_are_what_a_graph_for_each_gives(dtype, counts, device):
    edges = edges_of(device, dtype, counts)
    edges[KEYS[1]] = edges[KEYS[1]].t().contiguous().t()  # of other strides
    targets = {"paper": 30, "author": 20}  # no edge leads to a venue
    before = [e.clone() for e in edges.values()]
    relations = [
        Relation(Graph.from_edge_index(e, SIZES[key[0]], SIZES[key[-1]]), key[0], key[-1], NUMBERS[key])
        for key, e in edges.items()
    ]
    found, expected = joined(edges, targets), join_relations(relations, SIZES, targets, len(KEYS))
    assert (found.graph.num_src, found.graph.num_dst, found.num_types) == (54, 50, 5)
    assert torch.equal(found.graph.edge_index(), expected.graph.edge_index())
    assert torch.equal(found.edge_type, expected.edge_type)
    assert all(map(torch.equal, edges.values(), before))


@EVERY_DEVICE
def test_int32_ids_behind_two_billion_nodes_of_another_type(device):
    edges = {key: ends.clamp(max=1) for key, ends in edges_of(device, torch.int32).items()}
    sizes = {"paper": 2**31, "author": 2, "venue": 2}
    graph = join_edges("Layer", edges, NUMBERS, sizes, {"paper": 2, "author": 2}, len(KEYS)).graph
    first = {"paper": 0, "author": 2**31, "venue": 2**31 + 2}
    expected = torch.cat([ends[0].long() + first[key[0]] for key, ends in edges.items()])
    assert torch.equal(graph.edge_index()[0], expected)


@EVERY_DEVICE
def test_one_relation_alone_is_left_as_it_is(device):
    edges = {KEYS[3]: edges_of(device)[KEYS[3]]}
    before = edges[KEYS[3]].clone()
    graph = joined(edges).graph
    assert torch.equal(edges[KEYS[3]], before)
    assert torch.equal(graph.edge_index(), before + torch.tensor([[0], [SIZES["paper"]]], device=device))


@EVERY_DEVICE
@pytest.mark.parametrize("bad", [-1, 20])
def test_an_id_of_no_node_of_its_type_is_named(bad, device):
    """20 is a paper, but no author."""
    edges = edges_of(device)
    edges[KEYS[3]][1, 7] = bad
    message = rf"Layer: the destinations of \('paper', 'of', 'author'\) has id {bad} at position 7, expected .* = 20"
    with pytest.raises(IndexError, match=message):
        joined(edges)

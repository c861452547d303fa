"""What a report says of layers over relations and of attention over pairs, counted by hand."""

import pytest
import torch
from plan_cases import DEVICES, ENDS, H200, ID, NUMBERS, D, E, S, graph, ids, leaf, on_meta, said, said_to_be_on

import edgeless
from edgeless import TypedGraph, functional
from edgeless.functional.relational_layer import relational_layer
from edgeless.plan.recording import _steps_of

TYPES = torch.tensor([0, 0, 1, 1, 1, 0, 0])


def typed():
    return TypedGraph.from_edge_index(ENDS, TYPES, 2, S, D)


def test_sums_over_relations():
    """An edge reads its row and its id; a segment its row and where it begins; results are written, weights read."""
    graph, x, weight = typed(), leaf(S, 6), leaf(2, 6, 9)
    assert (graph.by_dst[1].numel(), graph.by_src[1].numel()) == (4, 6)
    weights = 2 * 6 * 9 * 4
    forward = E * (6 * 4 + ID) + 2 * 4 * ID + D * 9 * 4 + weights
    of_features = E * (9 * 4 + ID) + 2 * 6 * ID + S * 6 * 4 + weights
    of_weights = E * (9 * 4 + ID) + 2 * 6 * ID + 6 * 6 * 4 + weights  # and the row of every segment
    assert said(lambda: functional.relational_sum(graph, x, weight, order="aggregate"), x, weight) == [
        ("relational_sum", "forward", forward),
        ("relational_sum", "of features", of_features),
        ("relational_sum", "of weights", of_weights),
    ]
    x.requires_grad_(False)
    found = said(lambda: functional.relational_sum(graph, x, weight, order="aggregate"), weight)
    assert [step for _, step, _ in found] == ["forward", "of weights"]


def relational_steps(dtype, k, m, backward, cut=False, mean=None, **given):
    """Of 70 edges in 40 segments of 2 types, between 20 sources and 12 destinations; ``cut``: into no tiles."""
    by = ids(3, 40, 41, 70, 70, 61) + ([] if cut else ids(3, 9, 5, 0, 0))
    by += [] if mean is None else [on_meta(mean)]
    args = {"x": on_meta(20, k, dtype=dtype), "weight": on_meta(2, k, m, dtype=dtype)}
    if backward:
        args |= {"grad": on_meta(12, m, dtype=dtype), "by_src": by, "needs": [True, True, False], **given}
        return _steps_of("relational_sum_backward", args)
    return _steps_of("relational_sum", {**args, "by_dst": by, "num_dst": 12, **given})


@pytest.mark.parametrize("dtype,k,m", [(torch.float32, 64, 8), (torch.bfloat16, 8, 128)])
def test_sums_over_relations_on_cuda(dtype, k, m, monkeypatch):
    """Multiplied while they are kept, products alone are written and read again; else sums are too. Both gradients
    are made of one sum.
    """
    said_to_be_on(monkeypatch, H200)
    size = NUMBERS[dtype]
    weights, segments = 2 * k * m * size, 2 * 40 * ID
    of_k, of_m = 40 * k * size, 40 * m * size  # a row of either width for every segment
    forward = 70 * (k * size + ID) + segments + 12 * m * size + weights
    edges = 70 * (m * size + ID) + segments
    features = 20 * k * size + weights

    def moved(*given, **more):
        steps = relational_steps(dtype, k, m, *given, **more)
        assert [step.seconds for step in steps] == [step.bytes / H200.hbm_roof for step in steps]
        return [step.bytes for step in steps]

    alone = {"needs": [False, True, False]}
    assert moved(False) == [forward + 2 * of_m]
    assert moved(True) == [edges + features + 2 * of_k, weights + of_k]  # and the rows of the segments' nodes
    assert moved(True, **alone) == [edges + weights + of_k]
    assert moved(False, cut=True) == [forward + 2 * of_k + 2 * of_m]
    assert moved(True, cut=True) == [edges + features + 2 * of_m + 2 * of_k, weights + of_k + of_m]
    assert moved(True, cut=True, **alone) == [edges + weights + of_k + 2 * of_m]


def test_weights_of_edges_are_read_with_them(monkeypatch):
    """By edge 4 bytes, of a mean the segments' by destination and the edges' by source."""
    said_to_be_on(monkeypatch, H200)
    by_edge = {"edge_weight": on_meta(70)}

    def moved(backward, **more):
        return [step.bytes for step in relational_steps(torch.float32, 64, 8, backward, **more)]

    forward, (features, of_weights) = moved(False), moved(True)
    assert moved(False, **by_edge) == [forward[0] + 70 * 4]
    assert moved(True, **by_edge) == [features + 70 * 4, of_weights]  # whose sums are there
    assert moved(False, mean=40) == [forward[0] + 40 * 4]
    assert moved(True, mean=70) == [features + 70 * 4, of_weights]


def test_the_gradient_of_weights_of_edges(monkeypatch):
    """A segment reads its row of the gradient, for which its matrix is multiplied; an edge reads its source's row and
    writes a number. On CUDA the products of segments are in memory.
    """
    graph, x, weight, by_edge = typed(), leaf(S, 6), leaf(2, 6, 9), leaf(E)
    found = said(lambda: functional.relational_sum(graph, x, weight, by_edge, order="aggregate"), by_edge)
    forward = E * (24 + ID + 4) + 2 * 4 * ID + D * 36 + 2 * 6 * 9 * 4
    of_edges = 4 * (36 + 2 * ID) + 2 * 6 * 9 * 4 + E * (24 + ID + 4)
    assert found == [("relational_sum", "forward", forward), ("relational_sum", "of edge weights", of_edges)]
    said_to_be_on(monkeypatch, H200)
    given = {"needs": [False, False, True], "edge_weight": on_meta(70), "by_dst": ids(3, 45, 46, 70, 70, 58)}
    (step,) = relational_steps(torch.bfloat16, 64, 8, True, **given)
    of_edges = 45 * (16 + 2 * ID) + 2 * 64 * 8 * 2 + 70 * (128 + ID + 4) + 2 * 45 * 128
    assert (step.step, step.bytes, step.seconds) == ("of edge weights", of_edges, of_edges / 4.7e12)


def test_a_wider_gradient_is_cast_first_on_cuda_alone(monkeypatch):
    """Rows of 16 bits whose sum was asked for in floats."""
    graph, x, weight = typed(), leaf(S, 6, dtype=torch.bfloat16), leaf(2, 6, 9, dtype=torch.bfloat16)
    found = said(lambda: functional.relational_sum(graph, x, weight, order="aggregate", out_dtype=torch.float32), x)
    assert found[1:] == [("relational_sum", "of features", E * (36 + ID) + 2 * 6 * ID + S * 12 + 2 * 6 * 9 * 2)]
    said_to_be_on(monkeypatch, H200)
    of_floats = {"grad": on_meta(12, 8)}
    found = [[s.bytes for s in relational_steps(torch.bfloat16, 64, 8, True, **g)] for g in ({}, of_floats)]
    assert found[0] == found[1]


def test_segments_of_one_edge_on_cuda(monkeypatch):
    """Nothing is summed, unless edges have weights: a product reads the rows, and its own are added up by node."""
    said_to_be_on(monkeypatch, H200)
    x, weight, grad = on_meta(S, 6), on_meta(2, 6, 9), on_meta(6, 9)
    args = {"x": x, "weight": weight, "by_dst": ids(3, 6, 0, 6, 6, 0), "by_src": ids(3, 6, 0, 6, 6, 12), "num_dst": 6}
    weights, edges = 2 * 6 * 9 * 4, 2 * 6 * ID

    def moved(name, **more):
        return [step.bytes for step in _steps_of(name, {**args, **more})]

    forward = 6 * (24 + ID) + edges + 6 * 36 + weights
    assert moved("relational_sum") == [forward]
    assert moved("relational_sum", edge_weight=on_meta(6)) == [forward + 6 * 4 + 2 * 6 * 24]
    back = {"grad": grad, "needs": [True, True, False]}
    gathered = 6 * (36 + ID) + edges
    features, of_weights = gathered + S * 24 + weights + 2 * 6 * 24, gathered + weights + 6 * 24
    assert moved("relational_sum_backward", **back) == [features, of_weights]


def test_a_device_without_such_kernels_moves_sums_too(monkeypatch):
    """96 floats a row, which an A100's blocks have no memory for: as segments that are no tiles."""
    fused = {}
    for name in ("h200", "a100"):
        said_to_be_on(monkeypatch, DEVICES[name])
        tiled, plain = ([s.bytes for s in relational_steps(torch.float32, 96, 64, False, cut=c)] for c in (False, True))
        fused[name] = tiled != plain
    assert fused == {"h200": True, "a100": False}


@pytest.mark.parametrize("device,own,says", [("h200", 96, False), ("h200", 64, True), ("a100", 96, True)])
def test_a_map_that_is_added_by_itself_says_nothing_of_the_sums(device, own, says, monkeypatch):
    """On an A100 the map of 96 floats is a product of its own, so rows of 64 are added up by themselves."""
    said_to_be_on(monkeypatch, DEVICES[device])
    by = ids(3, 300, 301, 400, 400, 30_301, 3, 9, 5, 0, 0)
    args = {"x": on_meta(30_000, 64), "weight": on_meta(2, 64, 64), "by_dst": by, "num_dst": 30_000}
    given = {"own": on_meta(30_000, own), "root": on_meta(own, 64)}
    (step,) = _steps_of("relational_sum", {**args, **given})
    assert ("adds up sixteen rows" in step.kernel) is says
    # The gradient of rows of their own is a product of its own on every device.
    back = {**args, "by_src": by, "grad": on_meta(30_000, 64), "needs": [True, False]}
    (step,) = _steps_of("relational_sum_backward", {**back, **given})
    assert "adds up sixteen rows" in step.kernel


def test_a_layer_over_relations(monkeypatch):
    """Its sum and the product of its own rows; or a product for each pair, and the sum of these."""
    graph, given = typed(), {"x": leaf(S, 6), "weight": leaf(2, 6, 9), "own": leaf(D, 5), "root": leaf(5, 9)}
    weights, product = 2 * 6 * 9 * 4, (D * 5 + D * 9) * 4

    def steps(order):
        monkeypatch.setattr(edgeless.functional.relational_layer, "transforms", lambda *_: order == "transform")
        return said(lambda: relational_layer(graph, **given, out_dtype=torch.float32), *given.values())

    assert steps("aggregate") == [
        ("relational_sum", "forward", E * (24 + ID) + 2 * 4 * ID + D * 36 + weights),
        ("project", "forward", product),
        ("relational_sum", "of features", E * (36 + ID) + 2 * 6 * ID + S * 24 + weights),
        ("relational_sum", "of weights", E * (36 + ID) + 2 * 6 * ID + 6 * 24 + weights),
    ]
    pairs = 6  # of a source and a type, each an edge of its own
    assert steps("transform") == [
        ("relational_sum", "forward", pairs * (24 + ID) + 2 * pairs * ID + pairs * 36 + weights),
        ("spmm", "forward", E * (36 + ID) + D * 36),
        ("project", "forward", product),
        ("spmm", "backward", E * (36 + ID) + pairs * 36),
        ("relational_sum", "of features", pairs * (36 + ID) + 2 * pairs * ID + S * 24 + weights),
        ("relational_sum", "of weights", pairs * (36 + ID) + 2 * pairs * ID + pairs * 24 + weights),
    ]


def test_the_first_sources_are_the_destinations_of_a_layer():
    """Where no rows of their own are given, and these alone are multiplied."""
    given = {"x": leaf(S, 6), "weight": leaf(2, 6, 9), "root": leaf(6, 9)}
    with torch.no_grad():
        found = said(lambda: relational_layer(typed(), **given, out_dtype=torch.float32))
    assert found[-1] == ("project", "forward", (D * 6 + D * 9) * 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_attention_over_pairs(dtype, dropout):
    """Nodes of 6 numbers, values of 10, for two types, 4 pairs, 7 edges, 5 segments."""
    size = NUMBERS[dtype]
    counts = {0: 3, 1: 4, 3: E, 9: 5}
    walked = ids(*(counts.get(i, 1) for i in range(18)))
    args = {"x": on_meta(S, 6, dtype=dtype), "weight": on_meta(2, 6, 10, dtype=dtype), "walks": walked}
    args["dropout"] = dropout
    # A pair reads its source's row and id and writes its value; matrices are read once.
    products = 4 * (6 * size + ID + 10 * size) + 2 * 6 * 10 * size
    # A segment has its row, a number that is made of it, and its id.
    queries = 5 * (6 * size + 4 + ID)
    # An edge reads its value, where that is and of which segment it is, that one's number and, of the mask, its own id.
    edge = 10 * size + 2 * ID + 4 + ID * (dropout > 0)
    result = 10 * size
    forward = _steps_of("pair_attention", args)
    assert [(step.step, step.bytes) for step in forward] == [
        ("products of pairs", products),
        ("queries of segments", queries),
        ("forward", E * edge + S * (result + 4)),
    ]
    back = {
        "statistics of rows": S * (2 * result + 8),
        "by pair": E * (edge + 12) + 2 * 4 * result,
        "of features": products + 4 * 6 * size + queries + S * 6 * size,
        "of weights": products + queries,
    }
    for of_x, of_weight in ((True, True), (True, False), (False, True)):
        needs = [of_x, of_weight, False, True, False]
        steps = _steps_of("pair_attention_backward", {**args, "needs": needs})
        skipped = {"of features": not of_x, "of weights": not of_weight}
        assert {step.step: step.bytes for step in steps} == {k: v for k, v in back.items() if not skipped.get(k)}
    only_query = _steps_of("pair_attention_backward", {**args, "needs": [False, False, True, False, False]})
    assert [step.step for step in only_query] == ["statistics of rows", "by pair", "of weights"]


def pair_map_args():
    """Five nodes, six pairs, each an edge of its own; two types and heads: keys of 2 x 3 to 2 x 4, values to 2 x 5."""
    by_dst, by_src = ids(3, 6, 0, 6, 6, 0), ids(3, 6, 0, 6, 6, 12)
    by_dst[5] = by_src[5] = torch.zeros(4, 1)  # the parts that threads of the CPU take
    maps = {"k_weight": torch.empty(2, 2, 3, 4), "v_weight": torch.empty(2, 2, 3, 5)}
    return {"k": torch.empty(S, 6), "v": torch.empty(S, 6), "by_dst": by_dst, "by_src": by_src, **maps}


def test_maps_of_pairs():
    """A pair reads its source's row and id, its own number and place, and is written; the gradient is turned round."""
    args = pair_map_args()

    def moved(gathered, result, rows, matrices, own=0):
        return 6 * (gathered * 4 + ID) + 2 * 6 * ID + rows * result * 4 + matrices * 4 + own * 4

    forward = [moved(6, 8, 6, 2 * 2 * 3 * 4), moved(6, 10, 6, 2 * 2 * 3 * 5)]
    steps = _steps_of("pair_maps", args)
    assert [(step.op, step.step, step.bytes) for step in steps] == [
        ("pair_maps", f"{what}, forward", f) for what, f in zip(("keys", "values"), forward, strict=True)
    ]
    grads = {"grad_keys": torch.empty(6, 8), "grad_values": torch.empty(6, 10), "needs": [True] * 5}
    steps = _steps_of("pair_maps_backward", {**args, **grads})
    assert [(step.step, step.bytes) for step in steps] == [
        ("keys, of features", moved(8, 6, S, 48)),
        ("keys, of weights", moved(8, 6, 0, 48, own=6 * 6)),
        ("values, of features", moved(10, 6, S, 60)),
        ("values, of weights", moved(10, 6, 0, 60, own=6 * 6)),
    ]
    # The scale of keys is made with their matrices.
    steps = _steps_of("pair_maps_backward", {**args, **grads, "needs": [False, False, False, True, True]})
    assert [step.bytes for step in steps] == [moved(8, 6, 0, 48, own=36), moved(10, 6, 0, 60, own=36)]


def test_keys_and_values_of_pairs_in_turn():
    """Keys, their products with the queries at both ends of the edges, values, and the sum of these by the softmax."""
    maps = {**pair_map_args(), "v_weight": torch.empty(2, 2, 3, 4)}
    csr = list(graph().csr[:2])
    args = {**maps, "q": torch.empty(D, 8), "csr": csr, "max_degrees": []}
    keys = 6 * (6 * 4 + ID) + 2 * 6 * ID + 6 * 8 * 4 + 48 * 4
    row, logits = 2 * 4 * 4, 2 * 4
    assert [(step.op, step.bytes) for step in _steps_of("pair_dot_attention", args)] == [
        ("pair_dot_attention", keys),
        ("pair_dot_attention", E * (row + ID) + D * row + E * logits),
        ("pair_dot_attention", keys),
        ("pair_dot_attention", E * (logits + row + ID) + D * (logits + row + logits)),
    ]

"""Arguments of a wrong type or beyond 64 bits: every public function names itself, the argument and what came."""

import re

import numpy as np
import pytest
import torch

import edgeless
from edgeless import Graph, cache
from edgeless import functional as F

EDGE_INDEX = torch.tensor([[0, 1, 2], [1, 2, 0]])
GRAPH = Graph.from_edge_index(EDGE_INDEX)
INDPTR, INDICES, _ = GRAPH.csr
FAR = torch.tensor([[0, 1, 2**63 - 1], [1, 2, 0]])  # one more than this id is negative

NODES, HEADS, LOGITS = torch.ones(3, 2, 4), torch.ones(2, 4), torch.ones(3, 2)
COMMON = {"edge_scale": torch.ones(3), "dropout": 0.5, "seed": 3, "return_weights": None, "out_dtype": None}
EDGES = {"edge_attr": torch.ones(3, 5), "edge_proj": torch.ones(2, 4, 5)}
FUNCTIONS = {
    "gatv2_attention": {"x_l": NODES, "x_r": NODES, "att": HEADS, "negative_slope": 0.2, **EDGES, **COMMON},
    "gat_attention": {
        "x": NODES, "a_l": LOGITS, "a_r": LOGITS, "negative_slope": 0.2,
        **EDGES, "edge_proj": torch.ones(2, 5), **COMMON,
    },
    "dot_attention": {"q": NODES, "k": NODES, "v": NODES, "scale": 0.5, **EDGES, **COMMON},
    "cosine_attention": {"x": NODES, "x_dst": NODES, "beta": 1.0, "eps": 1e-6, **COMMON},
    "spmm": {
        "x": NODES, "weight": torch.ones(3), "norm": "none", "reduce": "sum",
        "src_scale": torch.ones(3), "dst_scale": torch.ones(3), "out_dtype": None,
    },
    "sddmm_dot": {"x_dst": NODES, "x_src": NODES, "out_dtype": None},
    "neighbor_reduce": {"x": NODES[:, 0], "reduce": "max", "ties": "shared", "fill": 0.0},
}  # fmt: skip
GRADED = torch.tensor(0.5, requires_grad=True)  # as a number it would have no gradient
NUMBERS = ("a", None, [1.0], 1j, np.ones(3), torch.ones(3), GRADED, torch.float32)
WRONG = {
    "graph": ("a", None, 3, EDGE_INDEX),
    "negative_slope": NUMBERS,
    "scale": tuple(value for value in NUMBERS if value is not None),
    "eps": NUMBERS,
    "fill": NUMBERS,
    "dropout": (*NUMBERS, -0.1, float("nan")),
    "seed": ("a", 1.5, [1], 2**63, 2**70, torch.tensor([1.0]), torch.tensor([1, 2])),
    "out_dtype": ("a", 3, 1.5, [1], torch.int64),
    "norm": (3, None, np.ones(3), "a"),
    "reduce": (3, None, np.ones(3), "a"),
    "ties": (3, None, np.ones(3), "a"),
    "return_weights": (3, np.ones(3), True, "a"),
    "beta": ("a", None, [1.0], torch.ones(5)),
}
TENSORS = ("a", 3, [[1.0]], np.ones(3), torch.ones(3, dtype=torch.int64))

FUNCTION_CASES = [
    pytest.param(function, name, value, id=f"{function}-{name}-{type(value).__name__}-{i}")
    for function, arguments in FUNCTIONS.items()
    for name in ("graph", *arguments)
    for i, value in enumerate(WRONG.get(name, TENSORS))
]


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize(("function", "name", "value"), FUNCTION_CASES)
def test_functions_name_the_argument(function, name, value, backend):
    arguments = {"graph": GRAPH, **FUNCTIONS[function], name: value}
    with edgeless.backend(backend), pytest.raises((TypeError, ValueError), match=rf"^{function}: {name} must "):
        getattr(F, function)(**arguments)


@pytest.mark.parametrize("value", [1, np.float32(0.5), np.int64(1), torch.tensor(0.5), True])
def test_numbers_come_in_many_types(value):
    options = {"dropout": 0.0, "edge_scale": None}
    for function, name in (("gatv2_attention", "negative_slope"), ("dot_attention", "scale")):
        arguments = {**FUNCTIONS[function], **options}
        got = getattr(F, function)(GRAPH, **{**arguments, name: value})
        assert torch.equal(got, getattr(F, function)(GRAPH, **{**arguments, name: float(value)}))
    F.dot_attention(GRAPH, NODES, NODES, NODES, dropout=0.5, seed=np.int64(3))


CALLS = [
    (Graph.from_edge_index, (FAR,), {}, "Graph.from_edge_index: edge_index[0] has id 9223372036854775807"),
    (Graph.from_edge_index, (FAR.flip(0),), {}, "Graph.from_edge_index: edge_index[1] has id 9223372036854775807"),
    (Graph.from_edge_index, (FAR, None, 3), {}, "Graph.from_edge_index: edge_index[0] has id 9223372036854775807"),
    (
        Graph.from_edge_index,
        (FAR,),
        {"validate": False},
        "Graph.from_edge_index: edge_index[0] has id 9223372036854775807",
    ),
    (Graph.from_edge_index, (FAR, 5, 5), {}, "Graph.from_edge_index: edge_index[0] has id 9223372036854775807"),
    (Graph.from_edge_index, (EDGE_INDEX, "5"), {}, "Graph.from_edge_index: num_src must be an int, got str"),
    (Graph.from_edge_index, (EDGE_INDEX, 3, 3.0), {}, "Graph.from_edge_index: num_dst must be an int, got float"),
    (Graph.from_edge_index, (EDGE_INDEX, 2**63 - 1), {}, "Graph.from_edge_index: num_src must be at most 2**60 - 2"),
    (Graph.from_edge_index, (EDGE_INDEX, 3, 2**70), {}, "Graph.from_edge_index: num_dst must be at most 2**60 - 2"),
    (
        Graph.from_edge_index,
        (EDGE_INDEX,),
        {"is_symmetric": "no"},
        "Graph.from_edge_index: is_symmetric must be True, False or None, got str",
    ),
    (Graph.from_edge_index, ([[0], [1]],), {}, "Graph.from_edge_index: edge_index must be a Tensor"),
    (Graph.from_csr, ("a", INDICES), {}, "Graph.from_csr: indptr must be a Tensor"),
    (Graph.from_csr, (INDPTR, FAR[0]), {}, "Graph.from_csr: indices has id 9223372036854775807"),
    (Graph.from_csr, (INDPTR, INDICES, 2**70), {}, "Graph.from_csr: num_src must be at most 2**60 - 2"),
    (Graph.from_csc, (INDPTR, [1]), {}, "Graph.from_csc: indices must be a Tensor"),
    (Graph.from_csc, (INDPTR, INDICES, "3"), {}, "Graph.from_csc: num_dst must be an int, got str"),
    (Graph.from_csc, (INDPTR, INDICES), {"edge_ids": [0]}, "Graph.from_csc: edge_ids must be a Tensor"),
    (Graph.from_dgl, ("a",), {}, "Graph.from_dgl: g must be a DGLGraph, got str"),
    (Graph.from_pyg, (EDGE_INDEX,), {}, "Graph.from_pyg: edge_index must be a torch_geometric.EdgeIndex, got Tensor"),
    (Graph.from_sparse_tensor, (3,), {}, "Graph.from_sparse_tensor: adj_t must be a torch_sparse.SparseTensor, got"),
    (Graph.from_torch_sparse, (3,), {}, "Graph.from_torch_sparse: adj_t must be a sparse Tensor, got int"),
    (GRAPH.to, ("nowhere",), {}, "Graph.to: device must be one that torch knows, got 'nowhere'"),
    (GRAPH.to, (torch.float32,), {}, "Graph.to: device must be a torch.device, a str or an int, got dtype"),
    (GRAPH.degree_scale, ("up", 1.0, torch.float32), {}, "Graph.degree_scale: side must be one of 'src', 'dst'"),
    (GRAPH.degree_scale, ("src", "a", torch.float32), {}, "Graph.degree_scale: power must be a number, got str"),
    (edgeless.set_cache_limit, ("a",), {}, "set_cache_limit: bytes must be a number, got str"),
    (edgeless.set_cache_limit, (float("nan"),), {}, "set_cache_limit: bytes must not be negative, got nan"),
    (cache.graph_from_edge_index, (FAR,), {}, "graph_from_edge_index: edge_index[0] has id 9223372036854775807"),
    (cache.graph_from_edge_index, (EDGE_INDEX, [3]), {}, "graph_from_edge_index: num_src must be an int, got list"),
    (cache.graph_from_edge_index, (EDGE_INDEX, 3, "3"), {}, "graph_from_edge_index: num_dst must be an int, got str"),
    (cache.graph_for, (3, "key", lambda: GRAPH), {}, "graph_for: anchor must allow weak references, got int"),
    (cache.graph_for, (EDGE_INDEX, [], Graph), {}, "graph_for: key must be hashable, got []"),
    (cache.graph_for, (EDGE_INDEX, "key", 3), {}, "graph_for: build must be a function, got int"),
    (cache.graph_for, (EDGE_INDEX, "key", Graph), {"tensors": 3}, "graph_for: tensors must be a tuple of Tensors"),
    (cache.graph_for, (EDGE_INDEX, "key", Graph), {"tensors": (3,)}, "graph_for: tensors must be Tensors, got int"),
    (edgeless.explain, ("a",), {}, "explain: layer must be a torch.nn.Module or a function, got str"),
    (edgeless.accelerate, ("a",), {}, "accelerate: model must be a torch.nn.Module, got str"),
]


@pytest.mark.parametrize(("call", "arguments", "options", "message"), CALLS, ids=[case[-1] for case in CALLS])
def test_calls_name_the_argument(call, arguments, options, message):
    with pytest.raises((TypeError, ValueError, IndexError), match="^" + re.escape(message)):
        call(*arguments, **options)


def test_a_backend_is_called_by_its_name():
    message = r"^backend: name must be one of 'auto', 'fused', 'reference', got 3"
    with pytest.raises(ValueError, match=message), edgeless.backend(3):
        pass


def test_explain_says_which_argument_of_a_layer_is_missing():
    class Layer(edgeless.FusedLayer, torch.nn.Module):
        def forward(self, x, edge_index):
            return x

        def _fusion_refusals(self, x, edge_index):
            return []

    with pytest.raises(
        TypeError, match=r"^explain: Layer cannot be called .*: missing a required argument: 'edge_index'"
    ):
        edgeless.explain(Layer(), NODES)


# Calls with a number -> the numbers at the bounds of what they take, and those beyond.
BOUNDS = {
    **{
        f"{function}: {name}": (
            lambda value, of=(function, name): getattr(F, of[0])(GRAPH, **{**FUNCTIONS[of[0]], of[1]: value}),
            *bounds,
        )
        for function in ("gatv2_attention", "gat_attention", "dot_attention", "cosine_attention")
        for name, bounds in (
            ("dropout", ((0.0, 1.0), (-1e-9, 1 + 1e-9))),
            ("seed", ((-(2**63), 2**63 - 1), (-(2**63) - 1, 2**63))),
        )
    },
    "cosine_attention: eps": (
        lambda value: F.cosine_attention(GRAPH, **{**FUNCTIONS["cosine_attention"], "eps": value}), (0, 0.0), (-1e-9,)
    ),
    "set_cache_limit": (cache.set_cache_limit, (0, 4 * 2**30), (-1,)),
    "from_edge_index": (lambda value: Graph.from_edge_index(EDGE_INDEX[:, :0], value, value), (0,), (-1, 2**60 - 1)),
    "reuse": (lambda value: edgeless.reordering.reuse(GRAPH, value), (1,), (0,)),
    "reorder: seed": (lambda value: GRAPH.reorder("degree", seed=value), (0, 2**31 - 1), (-1, 2**31)),
    "capture: warmup": (lambda value: edgeless.capture(torch.nn.Linear(1, 1), warmup=value), (1,), (0,)),
    "capture: most": (lambda value: edgeless.capture(torch.nn.Linear(1, 1), most=value), (1,), (0,)),
}  # fmt: skip


@pytest.mark.parametrize("name", BOUNDS)
def test_numbers_at_their_bounds_are_taken_and_those_beyond_are_not(name):
    call, taken, refused = BOUNDS[name]
    for value in taken:
        call(value)
    for value in refused:
        with pytest.raises(ValueError):
            call(value)


@pytest.mark.parametrize("function", [name for name in FUNCTIONS if name.endswith("attention")])
@pytest.mark.parametrize("heads,width", [(2, 0), (0, 4)])
def test_attention_over_nothing(function, heads, width):
    """No features or no heads: an empty result, as in plain PyTorch."""

    def resized(tensor):
        return torch.ones([{2: heads, 4: width}.get(size, size) for size in tensor.shape])

    tensors = {name: resized(t) for name, t in FUNCTIONS[function].items() if isinstance(t, torch.Tensor)}
    del tensors["edge_scale"]
    found = []
    for backend in ("fused", "reference"):
        with edgeless.backend(backend):
            found.append(getattr(F, function)(GRAPH, **tensors))
    assert found[0].shape == found[1].shape == (3, heads, width)


@pytest.mark.parametrize("function,name", [
    (name, tensor) for name, given in FUNCTIONS.items() for tensor, t in given.items() if isinstance(t, torch.Tensor)
])  # fmt: skip
def test_every_tensor_takes_part_in_the_promotion_of_dtypes_as_in_plain_pytorch(function, name):
    given = {**FUNCTIONS[function], name: FUNCTIONS[function][name].double()}
    found = []
    for backend in ("fused", "reference"):
        with edgeless.backend(backend):
            found.append(getattr(F, function)(GRAPH, **given))
    torch.testing.assert_close(*found)
    promoted = torch.float64 if name not in ("src_scale", "dst_scale") else torch.float32
    assert found[0].dtype == promoted  # the reference asks the same function for it

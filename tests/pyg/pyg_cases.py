"""Graphs, layers and the comparison that the PyG tests share."""

from __future__ import annotations

import copy

import devices
import torch
import torch_geometric.nn as stock
from torch import Tensor

import edgeless
import edgeless.pyg.nn as fused

LAYERS = ("GATv2Conv", "GATConv", "TransformerConv")
IN, OUT, HEADS, EDGE_DIM = 5, 4, 3, 2


# Graphs: (edge_index, number of sources, number of destinations) -------------------------------------------------


def random_edges(num_src, num_dst, num_edges, seed=7):
    generator = torch.Generator().manual_seed(seed)
    src = torch.randint(num_src, (num_edges,), generator=generator)
    return torch.stack((src, torch.randint(num_dst, (num_edges,), generator=generator)))


def _square(edges, num_nodes):
    return torch.tensor(edges, dtype=torch.int64).reshape(-1, 2).t().contiguous(), num_nodes, num_nodes


GRAPHS = {
    "no_nodes": _square([], 0),
    "no_sources": (torch.zeros(2, 0, dtype=torch.int64), 0, 3),
    "no_targets": (torch.zeros(2, 0, dtype=torch.int64), 3, 0),
    "no_edges": _square([], 4),
    "one_node": _square([], 1),
    "one_edge": _square([[2, 1]], 4),
    "isolated": _square([[0, 2], [5, 2], [5, 7], [0, 7]], 10),
    "hub": _square([[i, 0] for i in range(300)] + [[0, 1], [0, 2]], 300),
    "out_hub": _square([[0, i] for i in range(300)] + [[1, 0], [2, 0]], 300),
    "multi_edges": _square([[0, 1], [0, 1], [0, 1], [1, 2], [1, 2], [2, 0], [0, 1]], 3),
    "self_loops": _square([[0, 0], [1, 1], [0, 1], [2, 2], [0, 0], [2, 1]], 3),
    "random": (random_edges(40, 40, 300), 40, 40),
    "bipartite": (random_edges(20, 11, 90), 20, 11),
    "bipartite_more_targets": (random_edges(6, 17, 60), 6, 17),
    "non_contiguous": (random_edges(30, 30, 200).t().contiguous().t()[:, ::2], 30, 30),
    "expanded": (torch.tensor([[1], [3]]).expand(2, 12), 5, 5),
}


def features(rows, width=IN, dtype=torch.float32, seed=11):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, generator=generator, dtype=torch.float64).to(dtype)


def node_features(graph, dtype=torch.float32, pair=None):
    """One tensor for a square graph, a pair for a bipartite one."""
    _, num_src, num_dst = graph
    if pair is None:
        pair = num_src != num_dst
    x = features(num_src, dtype=dtype)
    return (x, features(num_dst, dtype=dtype, seed=13)) if pair else x


def edge_features(graph, width=EDGE_DIM, dtype=torch.float32):
    return features(graph[0].size(1), width, dtype, seed=17)


# Layers ----------------------------------------------------------------------------------------------------------


def layer_pair(name, in_channels=IN, out_channels=OUT, heads=HEADS, dtype=torch.float32, seed=5, **options):
    """(upstream layer, fused layer) with equal parameters, none of them zero."""
    theirs = getattr(stock, name)(in_channels, out_channels, heads, **options)
    ours = getattr(fused, name)(in_channels, out_channels, heads, **options)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.4)
    ours.load_state_dict(theirs.state_dict())
    return theirs.to(dtype), ours.to(dtype)


# Comparison ------------------------------------------------------------------------------------------------------


def _leaves(value, name, found):
    """``value`` with a leaf of its own for every floating tensor; the leaves go to ``found``."""
    if isinstance(value, (tuple, list)):
        return type(value)(_leaves(v, f"{name}[{i}]", found) for i, v in enumerate(value))
    if isinstance(value, Tensor) and value.layout == torch.strided and value.is_floating_point():
        found[name] = value = value.detach().requires_grad_()
    return value


def tensors_of(value):
    """The floating tensors of a layer's result, flattened in order."""
    if isinstance(value, (tuple, list)):
        return [t for v in value for t in tensors_of(v)]
    if not isinstance(value, Tensor):  # torch_sparse.SparseTensor
        return [value.storage.value()]
    if value.layout != torch.strided:
        return [value.values().detach()]
    return [value] if value.is_floating_point() else []


def run(call, layer, *inputs, **kwargs):
    """Outputs, and the gradients of all inputs and parameters for a loss that weights every output differently."""
    leaves: dict[str, Tensor] = {}
    inputs = _leaves(inputs, "input", leaves)
    kwargs = {name: _leaves(value, name, leaves) for name, value in kwargs.items()}
    result = call(*inputs, **kwargs)
    outputs = tensors_of(result)
    leaves.update(layer.named_parameters())
    generator = torch.Generator().manual_seed(23)
    loss = sum((o.double() * torch.randn(o.shape, generator=generator, dtype=torch.float64)).sum() for o in outputs)
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    found = {f"output {i}": o.detach() for i, o in enumerate(outputs)}
    found.update({f"grad of {name}": grad for name, grad in zip(leaves, grads, strict=True)})
    return found


def run_exact(layer, *inputs, **kwargs):
    """:func:`run` of an upstream layer with float32 parameters and inputs in float64, rounded at the end.

    Where sums cancel, a float32 result is off by more than 1e-5; this is the exact result to compare with.
    """

    def double(value):
        if isinstance(value, (tuple, list)):
            return type(value)(double(v) for v in value)
        return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value

    layer = copy.deepcopy(layer).double()
    kwargs = {name: double(value) for name, value in kwargs.items()}
    found = run(layer, layer, *double(inputs), **kwargs)
    return {name: None if t is None else t.float() for name, t in found.items()}


def run_fused(layer, *inputs, **kwargs):
    """:func:`run` on the kernels, which raises if the call is not fused."""
    with edgeless.backend("fused"):
        return run(layer, layer, *inputs, **kwargs)


def run_over_reference(layer, *inputs):
    """:func:`run` of the layer's own forward with plain PyTorch in place of the kernels; all arguments positional."""
    with edgeless.backend("reference"):
        return run(layer._fused_forward, layer, *inputs)


class OnGPU(devices.OnGPU):
    """A layer of PyG on the GPU."""

    def run_fused(self, *inputs, **kwargs):
        """:func:`run_fused`, with inputs and results on the CPU."""
        found = run_fused(self, *inputs, **kwargs)
        return {key: None if t is None else t.cpu() for key, t in found.items()}


TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


def assert_close(ours, theirs, tolerance=None):
    """Equal tensor by tensor: same shape and dtype, and ``|ours - theirs| <= tolerance * |theirs|`` in the 2-norm.

    A gradient whose terms cancel to zero (softmax over one edge) is rounding noise in both; its error is relative to
    the largest gradient of the run instead.
    """
    assert ours.keys() == theirs.keys()
    largest = max((float(t.double().norm()) for t in theirs.values() if t is not None), default=0.0)
    for name, want in theirs.items():
        have = ours[name]
        if want is None or have is None:
            present = want if have is None else have
            assert present is None or not present.any(), f"{name}: {have} instead of {want}"
            continue
        assert have.shape == want.shape and have.dtype == want.dtype, f"{name}: {have.shape} {have.dtype}"
        limit = TOLERANCE[want.dtype] if tolerance is None else tolerance
        size = float(want.double().norm())
        allowed = limit * size if size > 1e-4 * largest else 0.1 * limit * largest
        error = float((have.double() - want.double()).norm())
        assert error <= allowed, f"{name}: error {error:.2e} is over {allowed:.2e}, {limit:.0e} of {size:.2e}"


def assert_parity(name, graph, *, dtype=torch.float32, edge_dim=None, pair=None, index=None, attention=None, **options):
    """Asserts that the fused layer gives the upstream layer's outputs and gradients (in float32 or float64)."""
    x = node_features(graph, dtype, pair)
    in_channels = options.pop("in_channels", IN)
    theirs, ours = layer_pair(name, in_channels, dtype=dtype, edge_dim=edge_dim, **options)
    inputs = [x, graph[0] if index is None else index]
    inputs.append(None if edge_dim is None else edge_features(graph, edge_dim, dtype))
    kwargs = {} if attention is None else {"return_attention_weights": attention}
    ours.train(theirs.training)
    assert_close(run_fused(ours, *inputs, **kwargs), run(theirs, theirs, *inputs, **kwargs))

"""Graphs, inputs, scores and options of the attention tests, and the comparison of their results."""

import torch
from devices import leaves_on, poison

from edgeless import _C, Graph, functional, reference

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10, torch.bfloat16: 0.02, torch.float16: 0.003}
SCORES = _C.SCORES  # from core_cuda/common/score.h: a score without kernel or reference fails
OPTIONS = {
    "plain": (),
    "edges": ("edges",),
    "scale": ("scale",),
    "dropout": ("dropout",),
    "weights": ("weights",),
    "all": ("edges", "scale", "dropout", "weights"),
}


def graph_of(kind: str, index_dtype=torch.int64) -> Graph:
    gen = torch.Generator().manual_seed(3)

    def draw(high, n):
        return torch.randint(0, high, (n,), generator=gen)

    src_nodes, dst_nodes = 50, 40
    if kind == "bipartite":  # with multi-edges and isolated nodes
        src, dst = draw(50, 400), draw(30, 400)
    elif kind == "square":  # with self loops
        src_nodes = dst_nodes = 40
        src, dst = draw(40, 300), draw(40, 300)
        dst[:20] = src[:20]
    elif kind == "hub":  # one row in many segments
        src, dst = draw(50, 9000), draw(40, 9000)
        dst[torch.rand(9000, generator=gen) < 0.8] = 7
    elif kind == "no edges":
        src = dst = torch.empty(0, dtype=torch.int64)
    elif kind == "no nodes":
        src_nodes = dst_nodes = 0
        src = dst = torch.empty(0, dtype=torch.int64)
    elif kind == "many empty rows":
        src_nodes, dst_nodes = 5000, 6000
        src, dst = draw(5000, 40), draw(6000, 40)
    return Graph.from_edge_index(torch.stack([src, dst]).to(index_dtype), src_nodes, dst_nodes)


GRAPHS = ("bipartite", "square", "hub", "no edges", "no nodes", "many empty rows")


def inputs_of(score, graph, heads, channels, options, dtype):
    """Positional inputs and tensor options as leaves of ``dtype``, and the options that are no tensors."""
    gen = torch.Generator().manual_seed(5)

    def leaf(*shape, scale=1.0):
        return (scale * torch.randn(*shape, dtype=torch.float64, generator=gen)).to(dtype).requires_grad_()

    ns, nd, e = graph.num_src, graph.num_dst, graph.num_edges
    if score == "gatv2":
        args = [leaf(ns, heads, channels), leaf(nd, heads, channels), leaf(heads, channels, scale=channels**-0.5)]
    elif score == "gat":
        args = [leaf(ns, heads, channels), leaf(ns, heads), leaf(nd, heads)]
    elif score == "cosine":
        args = [leaf(ns, heads, channels), leaf(nd, heads, channels), leaf(heads, scale=2.0)]
    else:
        args = [leaf(nd, heads, channels), leaf(ns, heads, channels), leaf(ns, heads, channels)]
    tensors, rest = {}, {}
    if "edges" in options and score != "cosine":  # cosine has no edge features
        tensors["edge_attr"] = leaf(e, 5)
        tensors["edge_proj"] = leaf(heads, 5, scale=0.5) if score == "gat" else leaf(heads, channels, 5, scale=0.5)
    if "scale" in options:
        tensors["edge_scale"] = leaf(e, heads)
    if "dropout" in options:
        rest.update(dropout=0.4, seed=123)
    if "weights" in options:
        rest["return_weights"] = "dropped" if "dropout" in options else "softmax"
    return args, tensors, rest


def leaves_of(device, score, graph, heads, channels, options, dtype):
    """:func:`inputs_of` on a device."""
    args, tensors, rest = inputs_of(score, graph, heads, channels, options, dtype)
    return leaves_on(device, args), dict(zip(tensors, leaves_on(device, tensors.values()), strict=True)), rest


def function_of(score, module=functional):
    return getattr(module, f"{score}_attention")


def run(module, score, graph, args, tensors, rest, *, device="cpu"):
    """Outputs, and gradients of all leaves for random output gradients: computed on ``device``, one list on the CPU."""
    moved, named = leaves_on(device, args), dict(zip(tensors, leaves_on(device, tensors.values()), strict=True))
    outs = function_of(score, module)(graph.to(device), *moved, **named, **rest)
    outs = outs if isinstance(outs, tuple) else (outs,)
    gen = torch.Generator().manual_seed(11)
    grads = [torch.randn(o.shape, dtype=torch.float64, generator=gen).to(device, o.dtype) for o in outs]
    leaves = [*moved, *named.values()]
    found = torch.autograd.grad(outs, leaves, grads, allow_unused=True)
    found = [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(found, leaves, strict=True)]
    return [t.detach().cpu() for t in (*outs, *found)]


def raised(tensors, dtype=torch.float64):
    return [t.detach().to(dtype).requires_grad_() for t in tensors]


def exact(score, graph, args, tensors, rest, **options):
    """The results of :func:`run` by plain PyTorch in float64."""
    named = dict(zip(tensors, raised(tensors.values()), strict=True))
    return run(reference, score, graph, raised(args), named, rest, **options)


def error(a, b):
    scale = b.double().norm()
    return ((a.double() - b.double()).norm() / scale).item() if scale > 1e-12 else a.double().norm().item()


def assert_close(found, expected, tolerance):
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert a.shape == b.shape
        assert error(a, b) <= tolerance, f"tensor {i}: relative error {error(a, b):.2e} over {tolerance:.0e}"


def compare(device, score, graph, heads, channels, options, dtype):
    """Asserts that results and gradients on the device are those of plain PyTorch, to the dtype's tolerance."""
    given = inputs_of(score, graph, heads, channels, options, dtype)
    poison(device)
    found, expected = run(functional, score, graph, *given, device=device), exact(score, graph, *given)
    if score == "cosine":
        # The gradient of beta, one number per head, is a sum over rows whose terms may cancel, even to zero: its error
        # is relative to the sum of the terms' magnitudes.
        at, size = len(found) - len(given[1]) - 1, size_of_beta_gradient(graph, *given)
        found[at], expected[at] = (torch.cat([t[at].double(), size]) for t in (found, expected))
    assert all(torch.isfinite(t).all() for t in found)
    assert_close(found, expected, TOLERANCE[dtype])


def size_of_beta_gradient(graph, args, tensors, rest):
    """``[H]``: the sum over rows of the magnitudes of their terms in the gradient of the cosine's beta."""
    x, x_dst, beta = raised(args)
    keys, query = (torch.nn.functional.normalize(t.detach(), dim=-1) for t in (x, x_dst))
    leaves = [query * beta.detach().unsqueeze(-1), keys, x]
    found = exact("dot", graph, leaves, tensors, {**rest, "scale": 1.0})
    grad_query = found[2 if "return_weights" in rest else 1]
    return (grad_query * query).sum(-1).abs().sum(0)


def in_its_own_precision(nodes, options):
    """Replaces reference._prepare, so that the reference computes in the dtype of its inputs."""
    return nodes, options._replace(out_dtype=options.out_dtype or nodes[0].dtype)

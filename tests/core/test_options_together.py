"""Options that change one number together: the normalisation and the mean of a sum, and what is known of a graph whose
sides get other numbers. The truth is a dense matrix.
"""

import pytest
import torch
from devices import EVERY_DEVICE, leaves_on

from edgeless import Graph, functional


def edges(num_nodes=12, count=60):
    return torch.randint(num_nodes, (2, count), generator=torch.Generator().manual_seed(4))


def matrix_of(ends, num_src, num_dst):
    """``[num_dst, num_src]``: how many edges there are."""
    return torch.zeros(num_dst, num_src, dtype=torch.float64).index_put(
        (ends[1], ends[0]), torch.ones(1).double(), True
    )


def draw(*sizes, seed=0):
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def assert_sums_by(matrix, graph, device, **options):
    """Result and gradient are those of the product with the matrix."""
    (x,) = leaves_on(device, [draw(graph.num_src, 5).requires_grad_()])
    out = functional.spmm(graph, x, **options)
    grad = draw(graph.num_dst, 5, seed=1)
    torch.testing.assert_close(out.detach().cpu(), matrix @ x.detach().cpu())
    torch.testing.assert_close(torch.autograd.grad(out, x, grad.to(device))[0].cpu(), matrix.t() @ grad)


@EVERY_DEVICE
@pytest.mark.parametrize("norm", ["none", "left", "right", "both"])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_a_norm_and_a_mean_both_divide(norm, reduce, device):
    ends = edges()
    matrix = matrix_of(ends, 14, 13)
    degrees = [matrix.sum(axis).clamp(min=1) for axis in (0, 1)]
    src, dst = {"none": (0, 0), "left": (-1, 0), "right": (0, -1), "both": (-0.5, -0.5)}[norm]
    weighed = degrees[1].pow(dst).unsqueeze(1) * matrix * degrees[0].pow(src)
    if reduce == "mean":
        weighed = weighed / degrees[1].unsqueeze(1)
    assert_sums_by(weighed, Graph.from_edge_index(ends, 14, 13).to(device), device, norm=norm, reduce=reduce)


@EVERY_DEVICE
@pytest.mark.parametrize("bipartite", [False, True])
@pytest.mark.parametrize("then", [lambda graph: graph, Graph.reverse, Graph.with_self_loops])
def test_a_symmetric_graph_in_another_order(then, bipartite, device):
    """Where sources and destinations get other numbers, an edge's reverse is no edge, and the gradient needs both
    directions.
    """
    ends = edges()
    ends = torch.cat((ends, ends.flip(0)), 1)
    graph = Graph.from_edge_index(ends, 12, 12, is_symmetric=True).to(device)
    orders = [torch.randperm(12, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]
    orders = orders if bipartite else orders[:1] * 2
    graph, _ = graph.reorder(tuple(orders) if bipartite else orders[0], bipartite=bipartite)
    matrix = matrix_of(ends, 12, 12)[orders[1]][:, orders[0]]
    if then is Graph.reverse:
        matrix = matrix.t()
    elif then is Graph.with_self_loops:
        matrix = matrix.clone().fill_diagonal_(1)
    assert_sums_by(matrix, then(graph), device)

"""DGL's twin of PaddedLoader: outputs and gradients of real graphs are those of batches without padding."""

import copy
from typing import NamedTuple

import numpy as np
import pytest
import torch

pytest.importorskip("dgl")

import dgl
from torch import nn

from edgeless.dgl.dataloading import GraphDataLoader, PaddedLoader
from edgeless.dgl.nn import GATv2Conv, GraphConv
from edgeless.padding import convert_batchnorm, real_rows


def molecules(count=40, labels=True, idtype=torch.int64):
    made, found = torch.Generator().manual_seed(0), []
    for _ in range(count):
        nodes = int(torch.randint(4, 20, (1,), generator=made))
        ring = torch.arange(nodes)
        ends = torch.cat((ring, (ring + 1) % nodes)), torch.cat(((ring + 1) % nodes, ring))
        graph = dgl.graph(ends, num_nodes=nodes, idtype=idtype)
        graph.ndata["x"] = torch.randn(nodes, 6, generator=made, dtype=torch.float64)
        graph.edata["w"] = torch.rand(2 * nodes, generator=made, dtype=torch.float64)
        label = torch.randn(2, generator=made, dtype=torch.float64)
        found.append((graph, label, 3) if labels else graph)
    return found


def test_batches_have_few_shapes_and_masks():
    loader, shapes = PaddedLoader(molecules(), 8, shuffle=True), set()
    for _ in range(3):
        for graph, label, number, real in loader:
            shapes.add((graph.num_nodes(), graph.num_edges(), *label.shape))
            (size,) = [size for size in loader.sizes.sizes if size[:2] == (graph.num_nodes(), graph.num_edges())]
            assert graph.batch_size == 8 + size.graphs == len(label) == len(number) == len(real)
            assert real.tolist() == [True] * 8 + [False] * size.graphs
            assert graph.batch_num_nodes().max() <= 19
            nodes = int(graph.batch_num_nodes()[:8].sum())
            assert graph.ndata["node_mask"].sum() == nodes and graph.ndata["node_mask"][:nodes].all()
            assert graph.edata["edge_mask"].sum() == graph.batch_num_edges()[:8].sum()
            assert not graph.ndata["x"][nodes:].any() and not label[8:].any() and not number[8:].any()
    assert len(shapes) <= len(loader.sizes.sizes) <= 8


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
def test_graphs_alone_and_a_last_batch_of_fewer(idtype):
    graphs = molecules(11, labels=False, idtype=idtype)
    (first, real), (last, fewer) = PaddedLoader(graphs, 8)
    assert first.batch_size == len(real) and last.batch_size == len(fewer)
    assert real.sum() == 8 and real[:8].all() and fewer.sum() == 3 and fewer[:3].all()
    assert torch.equal(last.ndata["x"][last.ndata["node_mask"]], dgl.batch(graphs[8:]).ndata["x"])


class Net(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.first, self.second = layer(6), layer(4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, graph):
        with graph.local_scope():
            x = self.norm(self.first(graph, graph.ndata["x"]).flatten(1)).relu()
            graph.ndata["h"] = self.second(graph, x).flatten(1)
            return dgl.mean_nodes(graph, "h")


@pytest.mark.parametrize(
    "layer",
    [lambda width: GATv2Conv(width, 4, 1, allow_zero_in_degree=True), lambda width: GraphConv(width, 4)],
    ids=["GATv2Conv", "GraphConv"],
)
def test_results_and_gradients_are_those_without_padding(layer):
    torch.manual_seed(0)
    model = Net(layer).double()
    twin, data = convert_batchnorm(copy.deepcopy(model)), molecules(20)
    pairs = zip(GraphDataLoader(data, batch_size=8), PaddedLoader(data, 8), strict=True)
    for (plain, label, _), (graph, padded, _, real) in pairs:
        model.zero_grad(), twin.zero_grad()
        out = model(plain)
        (out[:, :2] - label).square().mean().backward()
        with real_rows(nodes=graph.ndata["node_mask"], edges=graph.edata["edge_mask"], graphs=real):
            found = twin(graph)
        (found[real][:, :2] - padded[real]).square().mean().backward()
        assert torch.allclose(found[real], out, rtol=1e-10, atol=1e-13)
        for mine, theirs in zip(twin.parameters(), model.parameters(), strict=True):
            assert torch.allclose(mine.grad, theirs.grad, rtol=1e-9, atol=1e-12)


def test_bad_arguments():
    with pytest.raises(TypeError, match="homogeneous graphs, or tuples that begin with one, got int"):
        PaddedLoader([3], 1)
    with pytest.raises(TypeError, match="got NoneType"):
        PaddedLoader([], 1)
    with pytest.raises(TypeError, match="collate_fn cannot be given"):
        PaddedLoader(molecules(3), 1, collate_fn=list)
    with pytest.raises(TypeError, match="labels must be tensors, .* got NoneType"):
        PaddedLoader([(g, None) for g, *_ in molecules(3)], 1)


class Pair(NamedTuple):
    one: int
    two: np.ndarray


@pytest.mark.parametrize(
    "label", [{"y": torch.ones(2), "n": [1.5]}, (3, np.float32(2)), np.ones((2, 3)), Pair(4, np.ones(3))], ids=str
)
def test_labels_of_padding_have_the_form_of_others(label):
    """Labels that DGL collates, in containers and of NumPy, are not packed, and are zero in the padding."""
    items = [(g, label) for g, *_ in molecules(8)]
    loader = PaddedLoader(items, 8)
    _, mine, mask = next(iter(loader))
    _, theirs = next(iter(GraphDataLoader(items, batch_size=8)))
    assert "labels 1 are of" in loader.not_packed and mask.sum() == 8

    def tensors(found):
        if isinstance(found, torch.Tensor):
            return [found]
        found = found.values() if isinstance(found, dict) else found
        return [x for each in found for x in tensors(each)]

    for one, other in zip(tensors(mine), tensors(theirs), strict=True):
        assert one.dtype == other.dtype and torch.equal(one[:8], other) and not one[8:].any() and len(one) == len(mask)


def test_other_loaders_are_dgls_own():
    import dgl.dataloading

    import edgeless.dgl.dataloading

    assert edgeless.dgl.dataloading.NeighborSampler is dgl.dataloading.NeighborSampler


# Packed arrays -------------------------------------------------------------------------------------------------------


def assert_same(mine, theirs):
    """All parts of two batches, bit by bit."""
    graph, like = mine[0], theirs[0]
    assert len(mine) == len(theirs) and graph.idtype == like.idtype
    assert graph.formats() == like.formats() and graph.num_nodes() == like.num_nodes()
    pairs = [*zip(graph.edges(order="eid"), like.edges(order="eid"), strict=True)]
    pairs += [(graph.batch_num_nodes(), like.batch_num_nodes()), (graph.batch_num_edges(), like.batch_num_edges())]
    for one, other in ((graph.ndata, like.ndata), (graph.edata, like.edata)):
        assert list(one) == list(other)
        pairs += [(one[name], other[name]) for name in other]
    for one, other in [*pairs, *zip(mine[1:], theirs[1:], strict=True)]:
        assert type(one) is type(other)
        assert one == other if isinstance(other, tuple) else one.dtype == other.dtype and torch.equal(one, other)


DATA_SETS = {
    "items": lambda: molecules(22),
    "graphs": lambda: molecules(22, labels=False),
    "int32": lambda: molecules(22, labels=False, idtype=torch.int32),
    "a part": lambda: torch.utils.data.Subset(molecules(22), range(3, 20)),
    "labels": lambda: [(g, torch.tensor(i), i / 3, i, f"C{i}", i > 3) for i, (g, *_) in enumerate(molecules(22))],
    "lists": lambda: [list(item) for item in molecules(22)],
}


@pytest.mark.parametrize("name", DATA_SETS)
@pytest.mark.parametrize("options", [{"shuffle": True}, {"drop_last": True}, {"sizes": [(20, 30), (90, 200)]}])
def test_packed_batches_are_those_of_dgls_collation(name, options):
    dataset, batches = DATA_SETS[name](), []
    for packed in (True, False):
        torch.manual_seed(0)
        loader = PaddedLoader(dataset, 4, packed=packed, **options)
        assert loader.not_packed == (None if packed else "packed=False")
        batches.append([batch for _ in range(2) for batch in loader])
    for mine, theirs in zip(*batches, strict=True):
        assert_same(mine, theirs)


class Made(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, place):
        return molecules(8)[place]


def wider(items):
    items[3][0].ndata["x"] = torch.ones(items[3][0].num_nodes(), 7, dtype=torch.float64)
    return items


def with_gradient(items):
    items[0][0].ndata["x"] = items[0][0].ndata["x"].requires_grad_()
    return items


def with_more(items):
    items[5][0].ndata["z"] = torch.ones(items[5][0].num_nodes())
    return items


@pytest.mark.parametrize(
    "make,why",
    [
        (lambda: Made(), "a Made may make its graphs"),
        (lambda: wider(molecules(8)), "x differs between graphs"),
        (lambda: with_gradient(molecules(8)), "x is no plain tensor"),
        (lambda: with_more(molecules(8)), "graphs differ in their data"),
        (lambda: [dgl.batch([g, g]) for g in molecules(8, labels=False)], "a graph is heterogeneous, a batch"),
        (lambda: [(g, (1, i)[i > 3]) if i < 4 else (g, 0.5) for i, (g, *_) in enumerate(molecules(8))], "labels 1"),
    ],
    ids=["a class", "widths", "gradients", "data", "batches", "labels"],
)
def test_what_is_not_packed_says_why(make, why):
    loader = PaddedLoader(make(), 3)
    assert why in loader.not_packed
    if "differ" not in why and "labels" not in why:
        assert len(list(loader)) == 3


def test_a_data_set_that_changes_is_packed_again():
    items = molecules(12)
    loader = PaddedLoader(items, 4)
    kept = loader._kept
    list(loader)
    assert loader._kept is kept
    for graph, *_ in items:
        graph.ndata["x"] = graph.ndata["x"] + 1
    for mine, theirs in zip(loader, PaddedLoader(items, 4, packed=False, sizes=loader.sizes.sizes), strict=True):
        assert_same(mine, theirs)
    assert loader._kept is not kept

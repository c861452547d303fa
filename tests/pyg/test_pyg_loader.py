"""PaddedLoader: outputs, losses and gradients of real graphs are those of batches without padding."""

import copy

import pytest
import torch

pytest.importorskip("torch_geometric")

import torch_geometric.nn as stock
from torch import nn
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.loader import DataLoader

import edgeless
import edgeless.pyg.nn as ours
from edgeless.padding import BatchNorm1d, Size, Sizes, choose_sizes, convert_batchnorm, pad_edges, real_rows
from edgeless.pyg.loader import PaddedLoader
from edgeless.tools.bench.training import OnMolecules


def molecules(count=60, seed=0, least=6, most=30):
    made, found = torch.Generator().manual_seed(seed), []
    for number in range(count):
        nodes = int(torch.randint(least, most, (1,), generator=made))
        ring = torch.arange(nodes)
        extra = torch.randint(nodes, (2, nodes // 4), generator=made)
        ends = torch.cat((torch.stack((ring, (ring + 1) % nodes)), extra[:, extra[0] != extra[1]]), 1)
        ends = torch.cat((ends, ends.flip(0)), 1)
        x = torch.randn(nodes, 8, generator=made, dtype=torch.float64)
        edge_attr = torch.randn(ends.size(1), 4, generator=made, dtype=torch.float64)
        y = torch.randn(1, 2, generator=made, dtype=torch.float64)
        found.append(Data(x=x, edge_index=ends, edge_attr=edge_attr, y=y, smiles=f"C{number}"))
    return found


GRAPHS = molecules()


def bench_step(name, device="cpu"):
    """A model of the bench for molecules, its optimizer, and a training step on padded batches."""
    torch.manual_seed(0)
    net = convert_batchnorm(OnMolecules(name, 28)).to(device)
    edgeless.accelerate(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

    def step(batch):
        optimizer.zero_grad()
        with real_rows(batch):
            errors = (net(batch) - batch.y).abs()
        loss = torch.where(batch.graph_mask, errors, 0).sum() / batch.graph_mask.sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return net, optimizer, step


# The layout ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [True, False])
def test_batches_have_few_shapes_and_masks(packed):
    torch.manual_seed(0)
    loader = PaddedLoader(GRAPHS, batch_size=16, shuffle=True, packed=packed)
    shapes, largest = set(), max(graph.num_nodes for graph in GRAPHS)
    for _ in range(5):
        for batch in loader:
            shapes.add((*batch.x.shape, *batch.edge_index.shape, *batch.y.shape, batch.max_num_nodes))
            (size,) = [size for size in loader.sizes.sizes if size[:2] == (batch.num_nodes, batch.num_edges)]
            graphs = 16 + size.graphs
            assert batch.num_graphs == graphs and batch.batch.max() < graphs and batch.ptr.numel() == graphs + 1
            real = int(batch.graph_mask.sum())
            assert real == (16 if real == 16 else 12) and batch.graph_mask[:real].all()
            assert batch.node_mask.sum() == batch.ptr[real] and batch.node_mask[: batch.ptr[real]].all()
            assert batch.edge_mask.sum() == batch.edge_index[0].lt(batch.ptr[real]).sum()
            padded = ~batch.node_mask
            assert not batch.x[padded].any() and not batch.edge_attr[~batch.edge_mask].any()
            ends = batch.edge_index[:, ~batch.edge_mask]
            assert (ends >= batch.ptr[real]).all() and (ends[0] != ends[1]).all()
            assert torch.equal(*batch.batch[ends])  # the edges are within graphs
            assert (batch.batch[padded] >= real).all() and not batch.y[~batch.graph_mask].any()
            assert batch.max_num_nodes == largest >= batch.ptr.diff().max()
            of_padding = batch.ptr[real:].diff()
            assert of_padding.max() - of_padding[of_padding > 0].min() <= 1
    assert len(shapes) <= len(loader.sizes.sizes) <= 8


def test_the_most_nodes_of_a_graph_are_one_of_few_numbers():
    graphs = [*molecules(200), *molecules(1, least=90, most=91)]
    sizes = choose_sizes([g.num_nodes for g in graphs], [g.num_edges for g in graphs], 16)
    assert sizes.most_nodes == (29, 90)
    loader, found = PaddedLoader(graphs, 16, shuffle=True), set()
    for batch in loader:
        assert batch.ptr.diff().max() <= batch.max_num_nodes
        found.add(batch.max_num_nodes)
    assert found == {29, 90}
    rare = Sizes([Size(100, 200, 2)], most_nodes=(12,))
    assert rare.padding(80, 160, 12) == ([10, 10], [20, 20], 12)
    assert rare.padding(90, 160, 25) == ([5, 5], [20, 20], 36)  # a graph that was not in the sample
    assert rare.padding(20, 160, 12) == ([40, 40], [20, 20], 48)  # fewer nodes than any batch that was drawn
    assert rare.padding(20, 160, 12, missing=6) == ([10] * 8, [5] * 8, 12)
    assert rare.padding(98, 200, 12, missing=1) == ([0, 0, 2], [0, 0, 0], 12)
    assert rare.padding(99, 200, 12, missing=1) == ([0, 0], [0, 0], 12) and rare.too_large == 1


def test_real_graphs_are_the_loaders():
    plain, padded = DataLoader(GRAPHS, batch_size=16), PaddedLoader(DataLoader(GRAPHS, batch_size=16))
    for one, other in zip(plain, padded, strict=True):
        assert torch.equal(one.x, other.x[other.node_mask]) and torch.equal(one.y, other.y[other.graph_mask])
        assert torch.equal(one.edge_index, other.edge_index[:, other.edge_mask])
        assert torch.equal(one.edge_attr, other.edge_attr[other.edge_mask])
        assert other.smiles[: len(one.smiles)] == one.smiles


def test_a_loader_passes_its_settings_on():
    torch.manual_seed(3)
    plain = DataLoader(GRAPHS, batch_size=7, shuffle=True, drop_last=True, follow_batch=["x"], exclude_keys=["smiles"])
    padded = PaddedLoader(plain)
    assert len(padded) == len(plain) == 8
    batch = next(iter(padded))
    assert "x_batch" in batch and "smiles" not in batch
    with pytest.raises(TypeError, match="a loader has settings of its own"):
        PaddedLoader(plain, batch_size=3)
    with pytest.raises(TypeError, match="must have a batch_size"):
        PaddedLoader(DataLoader(GRAPHS, batch_sampler=[[0, 1]]))


def test_workers_give_the_same():
    alone, workers = PaddedLoader(GRAPHS[:20], 8), PaddedLoader(GRAPHS[:20], 8, num_workers=1)
    for one, other in zip(alone, workers, strict=True):
        assert torch.equal(one.x, other.x) and torch.equal(one.edge_index, other.edge_index)


def test_labels_of_nodes_edges_and_graphs():
    graphs = []
    for graph in molecules(12):
        graph = graph.clone()
        graph.pos, graph.kind = torch.ones(graph.num_nodes, 3), torch.ones(graph.num_nodes, dtype=torch.int64)
        graph.bond, graph.target, graph.scalar = torch.ones(graph.num_edges), torch.ones(3), 1.5
        graphs.append(graph)
    batch = next(iter(PaddedLoader(graphs, 4)))
    assert batch.pos.shape[0] == batch.kind.shape[0] == batch.num_nodes and batch.bond.shape == (batch.num_edges,)
    assert (
        batch.target.shape == (3 * batch.num_graphs,)
        and batch.scalar.shape == (batch.num_graphs,)
        and not batch.kind[~batch.node_mask].any()
    )


def test_graphs_without_node_attributes():
    graphs = [Data(edge_index=pad_edges(n, 2 * n), num_nodes=n, y=torch.ones(1)) for n in range(3, 20)]
    for batch in PaddedLoader(graphs, 5):
        assert batch.num_nodes == batch.node_mask.numel() == batch.batch.numel()
    with pytest.raises(TypeError, match="node attribute or num_nodes"):
        PaddedLoader([Data(edge_index=pad_edges(3, 6))], 1)


def test_what_cannot_be_padded_is_refused():
    graphs = [graph.clone() for graph in GRAPHS[:10]]
    for number, graph in enumerate(graphs):
        graph.ring_index = torch.zeros(number + 1)
    with pytest.raises(ValueError, match="ring_index must belong to nodes, edges or graphs"):
        PaddedLoader(graphs, 4)
    for dataset, kind in (([HeteroData()], "HeteroData"), ([3], "int"), ([], "nothing")):
        with pytest.raises(TypeError, match=f"graphs of class Data, got {kind}"):
            PaddedLoader(dataset, 4)


# Sizes ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [32, 128, 512])
@pytest.mark.parametrize("mean,spread", [(23.2, 4.5), (18.0, 2.9), (25.5, 12.1), (39.1, 60.0)])
def test_at_most_12_percent_is_padding(mean, spread, batch_size):
    """Numbers of nodes as in ZINC, QM9, ogbg-molhiv and peptides, with a tail of large graphs in the last."""
    made = torch.Generator().manual_seed(1)
    nodes = (mean + spread * torch.randn(20_000, generator=made)).clamp(min=3).round()
    edges = (nodes * (2.1 + 0.1 * torch.randn(20_000, generator=made))).round()
    sizes = choose_sizes(nodes.tolist(), edges.tolist(), batch_size)
    assert len(sizes.sizes) <= 8
    for _ in range(200):
        pick = torch.randint(20_000, (batch_size,), generator=made)
        sizes.fit(int(nodes[pick].sum()), int(edges[pick].sum()))
    assert max(sizes.waste) <= 0.12 and sizes.too_large <= 4, str(sizes)


def test_sizes_are_geometric_distinct_and_reported():
    nodes = list(range(5, 105))
    sizes = choose_sizes(nodes, [2 * n for n in nodes], 4, most=5, waste=0.01)
    assert len(sizes.sizes) == 5 and "5 sizes" in str(sizes) and "expected" in str(sizes)
    ratios = [b.nodes / a.nodes for a, b in zip(sizes.sizes[:-1], sizes.sizes[1:], strict=True)]
    assert max(ratios) / min(ratios) < 1.1
    assert all(size.nodes not in (size.edges, 5) and size.edges != 5 for size in sizes.sizes)
    small = sizes.fit(20, 40)
    assert small == sizes.sizes[0] and sizes.waste == (1 - 20 / small.nodes, 1 - 40 / small.edges)
    assert sizes.fit(10**6, 1) is None and sizes.too_large == 1 and "1 batches were larger" in str(sizes)
    assert sizes.fit(small.nodes - 2, 1) is small and sizes.fit(small.nodes - 1, 1) is sizes.sizes[1]
    assert sizes.fit(1, small.edges) is small and sizes.fit(1, small.edges + 1) is sizes.sizes[1]


def test_one_graph_and_bad_numbers():
    assert choose_sizes([5], [8], 1).sizes[0] >= (7, 8)
    for arguments in (([], [], 1), ([1], [], 1), ([1], [1], 0)):
        with pytest.raises(ValueError, match="choose_sizes"):
            choose_sizes(*arguments)
    assert Sizes([]).waste == (0.0, 0.0)


@pytest.mark.parametrize("nodes,edges", [(2, 9), (3, 100), (7, 5), (5, 0)])
def test_edges_of_padding(nodes, edges):
    src, dst = pad_edges(nodes, edges)
    assert src.numel() == edges and (src != dst).all()
    if edges:
        degrees = torch.bincount(dst, minlength=nodes)
        assert int(src.max()) < nodes and int(dst.max()) < nodes and int(degrees.max() - degrees.min()) <= 1
    with pytest.raises(ValueError, match="at least 2"):
        pad_edges(1, 1)


def test_edges_of_several_graphs_of_padding():
    nodes, edges = [5, 2, 0, 7], [30, 3, 0, 5]
    found, first = pad_edges(nodes, edges), 0
    parts = found.split(edges, 1)
    for room, count, part in zip(nodes, edges, parts, strict=True):
        assert torch.equal(part, pad_edges(room, count) + first)
        first += room


def test_a_batch_larger_than_all_sizes_has_masks():
    batch = next(iter(PaddedLoader(GRAPHS, 8, sizes=[(20, 40)])))
    assert batch.node_mask.all() and batch.edge_mask.all() and batch.graph_mask.tolist() == [True] * 8 + [False]


# Models --------------------------------------------------------------------------------------------------------------


def mlp(inside, out):
    return nn.Sequential(nn.Linear(inside, out), nn.BatchNorm1d(out), nn.ReLU(), nn.Linear(out, out))


DEGREES = torch.tensor([0, 1, 20, 10, 5, 2, 1, 1, 1, 1, 1])
LAYERS = {
    "GINE": lambda width: ours.GINEConv(mlp(width, 6), edge_dim=4),
    "GATv2": lambda width: ours.GATv2Conv(width, 6, edge_dim=4),
    "GATv2 without loops": lambda width: ours.GATv2Conv(width, 6, edge_dim=4, add_self_loops=False),
    "PNA": lambda width: stock.PNAConv(
        width, 6, ["mean", "min", "max", "std"], ["identity", "amplification"], DEGREES, edge_dim=4
    ),
}
POOLS = {"sum": stock.global_add_pool, "mean": stock.global_mean_pool, "max": stock.global_max_pool}


class Net(nn.Module):
    def __init__(self, layer, pool):
        super().__init__()
        self.layers = nn.ModuleList([layer(8), layer(6)])
        self.norms = nn.ModuleList([stock.BatchNorm(6), nn.BatchNorm1d(6)])
        self.edges = nn.BatchNorm1d(4)
        self.pool, self.head = pool, nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))

    def forward(self, batch):
        x, edge_attr = batch.x, self.edges(batch.edge_attr)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = norm(layer(x, batch.edge_index, edge_attr)).relu()
        return self.head(self.pool(x, batch.batch, batch.num_graphs))


def close(a, b):
    return float((a - b).norm()) <= 1e-10 * float(b.norm()) + 1e-14


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("layer", LAYERS)
def test_results_and_gradients_are_those_without_padding(layer, pool, training):
    torch.manual_seed(0)
    model = Net(LAYERS[layer], POOLS[pool]).double().train(training)
    twin = copy.deepcopy(model)
    assert convert_batchnorm(twin) is twin and list(twin.state_dict()) == list(model.state_dict())
    loader = PaddedLoader(GRAPHS, 16)
    for graphs, batch in zip((GRAPHS[:16], GRAPHS[16:32], GRAPHS[32:48], GRAPHS[48:]), loader, strict=True):
        plain = Batch.from_data_list(graphs)
        plain.x.requires_grad_(), batch.x.requires_grad_()
        model.zero_grad(), twin.zero_grad()
        out = model(plain)
        loss = (out - plain.y).square().mean()
        loss.backward()
        with real_rows(batch):
            found = twin(batch)
        errors = (found - batch.y).square()
        other = torch.where(batch.graph_mask[:, None], errors, 0).sum() / (batch.graph_mask.sum() * 2)
        other.backward()
        assert close(found[batch.graph_mask], out) and close(other, loss)
        assert close(batch.x.grad[batch.node_mask], plain.x.grad)
        for (name, mine), theirs in zip(twin.named_parameters(), model.parameters(), strict=True):
            assert close(mine.grad, theirs.grad), name
    for mine, theirs in zip(twin.buffers(), model.buffers(), strict=True):
        assert close(mine.double(), theirs.double())


def test_norms_that_are_not_told_see_the_padding():
    batch = next(iter(PaddedLoader(GRAPHS, 16)))
    norm = convert_batchnorm(nn.BatchNorm1d(8).double())
    real = nn.BatchNorm1d(8).double()(batch.x[batch.node_mask])
    assert not close(norm(batch.x)[batch.node_mask], real)
    with real_rows(nodes=batch.node_mask):
        assert close(norm(batch.x)[batch.node_mask], real)
        for wrong in (torch.ones(3, 8), torch.ones(2, 8, 3)):
            with pytest.raises(ValueError, match="BatchNorm1d: input must"):
                norm(wrong.double())
    with pytest.raises(TypeError, match="a batch or a mask must be given"), real_rows():
        pass


@pytest.mark.parametrize("options", [{"momentum": None}, {"affine": False}, {"track_running_stats": False}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_options_of_the_norm(options, dtype):
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(5, **options)
    masked, rows, mask = convert_batchnorm(copy.deepcopy(norm)), torch.randn(40, 5), torch.rand(40) < 0.7
    norm, masked, rows = norm.to(dtype), masked.to(dtype), rows.to(dtype)
    if dtype is torch.bfloat16:
        norm, masked = norm.float(), masked.float()
    for _ in range(3):
        with real_rows(nodes=mask):
            found, expected = masked(rows)[mask], norm(rows[mask])
        assert found.dtype == expected.dtype
        least = {torch.float32: 1e-5, torch.float64: 1e-10, torch.bfloat16: 1e-2}[dtype]
        assert float((found - expected).float().norm()) <= least * float(expected.float().norm())
    for mine, theirs in zip(masked.buffers(), norm.buffers(), strict=True):
        assert torch.allclose(mine.double(), theirs.double(), rtol=1e-5)
    masked.eval(), norm.eval()
    if options.get("track_running_stats", True):
        with real_rows(nodes=mask):
            assert torch.allclose(masked(rows), norm(rows), rtol=1e-4)


@pytest.mark.parametrize("first", [True, False], ids=["real rows first", "mixed"])
def test_on_the_cpu_a_norm_is_torchs_own_of_the_real_rows(first):
    torch.manual_seed(0)
    norm, rows = nn.BatchNorm1d(5, momentum=None), torch.randn(40, 5)
    mask = torch.arange(40) < 29 if first else torch.rand(40) < 0.7
    masked = convert_batchnorm(copy.deepcopy(norm))
    for _ in range(2):
        mine, theirs = rows.clone().requires_grad_(), rows[mask].requires_grad_()
        with real_rows(nodes=mask):
            found = masked(mine)
        expected = norm(theirs)
        assert torch.equal(found[mask], expected)
        (found[mask] * rows[mask]).sum().backward()
        (expected * rows[mask]).sum().backward()
        assert torch.equal(mine.grad[mask], theirs.grad) and not mine.grad[~mask].any()
    assert all(map(torch.equal, masked.buffers(), norm.buffers()))
    scale = torch.rsqrt(rows[mask].var(0, unbiased=False) + norm.eps)
    assert torch.allclose(found[~mask], (rows[~mask] - rows[mask].mean(0)) * scale, rtol=1e-4, atol=1e-5)


def test_norms_that_cannot_be_converted_are_refused():
    class Own(nn.BatchNorm1d):
        pass

    for norm, words in (
        (stock.PairNorm(), "centres all nodes"),
        (stock.InstanceNorm(4, track_running_stats=True), "averages statistics"),
        (nn.SyncBatchNorm(4), "several processes"),
        (Own(4), "a subclass with changes of its own"),
    ):
        model = nn.Sequential(nn.BatchNorm1d(4), norm)
        with pytest.raises(ValueError, match=words):
            convert_batchnorm(model)
        assert type(model[0]) is nn.BatchNorm1d
    kept = nn.Sequential(stock.GraphNorm(4), stock.LayerNorm(4), nn.LayerNorm(4), stock.InstanceNorm(4))
    kinds = [type(module) for module in kept]
    assert [type(module) for module in convert_batchnorm(kept)] == kinds
    inside = convert_batchnorm(convert_batchnorm(stock.BatchNorm(4)))
    assert type(inside.module) is BatchNorm1d
    with pytest.raises(TypeError, match="model must be a torch.nn.Module"):
        convert_batchnorm(3)


def test_other_loaders_are_pygs_own():
    import torch_geometric.loader

    import edgeless.pyg.loader

    assert edgeless.pyg.loader.NeighborLoader is torch_geometric.loader.NeighborLoader
    assert edgeless.pyg.loader.DataLoader is torch_geometric.loader.DataLoader

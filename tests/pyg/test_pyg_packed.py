"""Batches gathered from packed arrays: bit by bit those of PyG's collation."""

import copy

import pytest
import torch

pytest.importorskip("torch_geometric")

from drawn import drawn
from torch_geometric.data import Batch, Data, InMemoryDataset
from torch_geometric.loader import DataLoader

from edgeless.padding import pad_edges
from edgeless.pyg.loader import PaddedLoader


def assert_same(mine, theirs):
    """All that a batch holds: attributes in their order, and what it takes to get its graphs back."""
    assert type(mine) is type(theirs) and mine.num_graphs == theirs.num_graphs
    assert list(mine._store._mapping) == list(theirs._store._mapping)
    assert vars(mine._store).keys() == vars(theirs._store).keys()
    for name, value in theirs._store._mapping.items():
        assert_equal(mine[name], value)
    for name in ("_slice_dict", "_inc_dict"):
        one, other = (vars(batch._store)[name] for batch in (mine, theirs))
        assert one.keys() == other.keys()
        for key, table in other.items():
            assert_equal(one[key], table)
    assert vars(mine._store).get("_num_nodes") == vars(theirs._store).get("_num_nodes")


def assert_equal(mine, value):
    assert type(mine) is type(value)
    if isinstance(value, torch.Tensor):
        assert mine.dtype == value.dtype and mine.stride() == value.stride() and mine.device == value.device
        assert mine.shape == value.shape
        assert torch.equal(*(one.flatten().view(torch.uint8) for one in (mine, value)))
    else:
        assert mine == value


def follow(dataset, batch_size, epochs=2, **options):
    """Compares the epochs of two loaders, and returns that of packed arrays and its last batch."""
    packed, plain = (PaddedLoader(dataset, batch_size, packed=which, **options) for which in (True, False))
    assert packed.not_packed is None and plain.not_packed == "packed=False", packed.not_packed
    for epoch in range(epochs):
        pairs = []
        for loader in (packed, plain):
            torch.manual_seed(epoch)
            pairs.append(list(loader))
        for mine, theirs in zip(*pairs, strict=True):
            assert_same(mine, theirs)
    assert str(packed.sizes) == str(plain.sizes)
    return packed, mine


# What is drawn -------------------------------------------------------------------------------------------------------


class Own(Data):
    """With increments and dimensions of its own."""

    def __inc__(self, key, value, *args, **kwargs):
        if key == "ring":
            return self.rings
        return torch.tensor(2) if key == "pair" else super().__inc__(key, value, *args, **kwargs)

    def __cat_dim__(self, key, value, *args, **kwargs):
        if key in ("table", "target"):
            return None
        return 1 if key == "wide" else super().__cat_dim__(key, value, *args, **kwargs)


FLOATS, INTEGERS = (torch.float32, torch.float64, torch.bfloat16, torch.bool), (torch.int64, torch.int32, torch.int8)


def rows(pick, dtype, *shape):
    made = torch.randint(-5, 6, shape, generator=torch.Generator().manual_seed(pick.randrange(10**6)))
    return (made > 0) if dtype is torch.bool else made.to(dtype)


ATTRIBUTES = {
    "edge_attr": lambda pick, n, e: lambda kind: rows(pick, kind, e, 3),
    "pos": lambda pick, n, e: lambda kind: rows(pick, kind, n, 2, 2),
    "charge": lambda pick, n, e: lambda kind: rows(pick, kind, n),
    "wide": lambda pick, n, e: lambda kind: rows(pick, kind, 2, n),
    "y": lambda pick, n, e: lambda kind: rows(pick, kind, 1, 4),
    "target": lambda pick, n, e: lambda kind: rows(pick, kind, 3),
    "several": lambda pick, n, e: lambda kind: rows(pick, kind, 2, 2),
    "alone": lambda pick, n, e: lambda kind: rows(pick, kind),
    "table": lambda pick, n, e: lambda kind: rows(pick, kind, 2, 3),
    "none": lambda pick, n, e: lambda kind: rows(pick, kind, 0, 3),
    "weight": lambda pick, n, e: lambda kind: pick.random(),
    "count": lambda pick, n, e: lambda kind: pick.randrange(9),
    "flag": lambda pick, n, e: lambda kind: pick.random() < 0.5,
    "smiles": lambda pick, n, e: lambda kind: f"C{n}",
    "parts": lambda pick, n, e: lambda kind: [n, e],
    "nothing": lambda pick, n, e: lambda kind: None,
}
IDS = {  # of integers that are increased from graph to graph
    "root_index": lambda pick, n, e: lambda kind: rows(pick, kind, 1),
    "pair_index": lambda pick, n, e: lambda kind: rows(pick, kind, 2, 1),
    "first_index": lambda pick, n, e: lambda kind: pick.randrange(n),
    "ring": lambda pick, n, e: lambda kind: rows(pick, kind, 2),
    "pair": lambda pick, n, e: lambda kind: rows(pick, kind, e, 2),
    "x_batch": lambda pick, n, e: lambda kind: rows(pick, kind, n).abs(),
}


def data_set(pick):
    """Graphs with attributes of all kinds; every attribute has one dtype."""
    names = pick.sample([*ATTRIBUTES], pick.randrange(len(ATTRIBUTES)))
    chosen = {name: (ATTRIBUTES[name], pick.choice((*FLOATS, *INTEGERS))) for name in names}
    for name in pick.sample([*IDS], pick.randrange(len(IDS))):
        chosen[name] = IDS[name], pick.choice(INTEGERS)
    of_nodes, dtype = pick.random() < 0.7, pick.choice((torch.int64, torch.int32))
    cls, found = pick.choice((Data, Own)), []
    if cls is Data:
        chosen.pop("wide", None), chosen.pop("pair", None), chosen.pop("target", None)
    for _ in range(pick.randrange(3, 14)):
        n, e = pick.randrange(2, 7), pick.randrange(0, 12)
        ends = torch.stack((rows(pick, torch.int64, e).abs() % n, rows(pick, torch.int64, e).abs() % n)).to(dtype)
        graph = cls(edge_index=ends)
        if of_nodes:
            graph.x = rows(pick, torch.float32, n, 3)
        else:
            graph.num_nodes = n
        graph.rings = 3
        for name, (make, kind) in chosen.items():
            graph[name] = make(pick, n, e)(kind)
        found.append(graph)
    return found


@drawn(60)
def test_batches_are_those_of_pygs_collation(pick):
    graphs = data_set(pick)
    names = [name for name in graphs[0].to_dict() if name != "num_nodes"]
    options = {"follow_batch": pick.sample(names, min(2, len(names))), "shuffle": pick.random() < 0.7}
    if pick.random() < 0.3:
        options["exclude_keys"] = [name for name in pick.sample(names, 1) if name not in ("x", "edge_index", "rings")]
    drop = pick.random() < 0.3 and len(graphs) > 4
    whole = len(graphs) % 4 == 0 or drop
    if "x_batch" in names:  # PyG's collation fails on graphs of no nodes, which fill a last batch and a large one
        graphs = graphs if whole else graphs[: len(graphs) // 4 * 4]
        options["sizes"] = [(40, 60)]
    if not graphs:
        return
    _, batch = follow(graphs, 4, drop_last=drop, **options)
    if not set(names) & {"none", "wide"}:
        assert torch.equal(Batch.from_data_list(batch.to_data_list()).edge_index, batch.edge_index)


# Data sets -----------------------------------------------------------------------------------------------------------


def molecules(count=30):
    made, found = torch.Generator().manual_seed(0), []
    for _ in range(count):
        nodes = int(torch.randint(3, 9, (1,), generator=made))
        ends = pad_edges(nodes, 2 * nodes)
        found.append(Data(x=torch.randn(nodes, 3, generator=made), edge_index=ends, y=torch.randn(1, generator=made)))
    return found


class InMemory(InMemoryDataset):
    def __init__(self, graphs, transform=None):
        super().__init__(None, transform)
        self.data, self.slices = self.collate(graphs)


def test_data_sets_in_memory_and_parts_of_data_sets():
    graphs = molecules()
    for dataset in (
        tuple(graphs),
        InMemory(graphs),
        InMemory(graphs)[5:20],
        torch.utils.data.Subset(graphs, [3, 1, 4, 1, 5]),
        torch.utils.data.Subset(InMemory(graphs), range(7)),
        torch.utils.data.ConcatDataset([graphs, InMemory(graphs)]),
        DataLoader(graphs, 4, shuffle=True, drop_last=True),
    ):
        if isinstance(dataset, DataLoader):
            follow(dataset, 1)
        else:
            follow(dataset, 4, shuffle=True)


def test_graphs_larger_than_all_sizes_and_choices_of_graphs():
    follow(molecules(), 4, sizes=[(12, 20), (30, 60)])
    follow(molecules(), 3, sampler=[-1, -30, 3, 3, 3])
    follow(molecules(), batch_size=1, batch_sampler=[[0, 1], [5], [2, 3, 4]])
    with pytest.raises(IndexError, match="has graph 30, expected an id below 30"):
        list(PaddedLoader(molecules(), 2, sampler=[30]))
    with torch.device("cpu"):
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            graphs = molecules()
            for number, graph in enumerate(graphs):
                graph.weight = 0.1 * number
            loader, _ = follow(graphs, 4)
        finally:
            torch.set_default_dtype(before)
    assert next(iter(loader)).weight.dtype == before


class Bipartite(Data):
    def __inc__(self, key, value, *args, **kwargs):
        return torch.tensor([[2], [3]]) if key == "pair_index" else super().__inc__(key, value, *args, **kwargs)


class Made(torch.utils.data.Dataset):
    def __init__(self, graphs):
        self.graphs = graphs

    def __len__(self):
        return len(self.graphs)

    def __getitem__(self, place):
        return copy.copy(self.graphs[place])


class Elsewhere(InMemory):
    def get(self, place):
        return super().get(place)


def changed(change, cls=Data):
    graphs = [cls(**graph.to_dict()) for graph in molecules(8)]
    for number, graph in enumerate(graphs):
        change(graph, number)
    return graphs


def sets(name, make):
    return lambda graph, number: graph.__setitem__(name, make(graph, number))


NOT_PACKED = {
    "a dictionary": (changed(sets("kept", lambda g, i: {"a": torch.ones(1)})), "kept is of dict"),
    "a list of tensors": (changed(sets("kept", lambda g, i: [torch.ones(2)])), "kept is of list"),
    "dtypes": (changed(sets("y", lambda g, i: torch.ones(1, dtype=(torch.int32, torch.int64)[i % 2]))), "y is torch."),
    "widths": (changed(sets("y", lambda g, i: torch.ones(1, 2 + i % 2))), "y has the shapes"),
    "gradients": (changed(sets("x", lambda g, i: g.x.clone().requires_grad_())), "x requires a gradient"),
    "numbers": (changed(sets("y", lambda g, i: (1, 0.5)[i % 2])), "y is of float, int"),
    "parameters": (changed(sets("y", lambda g, i: torch.nn.Parameter(torch.ones(1)))), "y is of Parameter"),
    "attributes": (changed(lambda g, i: i == 3 and setattr(g, "z", 1)), "graphs differ in attributes: z"),
    "increments": (changed(sets("pair_index", lambda g, i: torch.ones(2, 1).long()), Bipartite), "several numbers"),
    "a class of data": ([*molecules(7), *changed(lambda g, i: None, Bipartite)], "graphs are of Data and Bipartite"),
    "a transform": (InMemory(molecules(8), lambda graph: graph), "the data set has a transform"),
    "a class of data sets": (Made(molecules(8)), "a Made may make its graphs when they are read"),
    "a way of its own": (Elsewhere(molecules(8)), "Elsewhere reads its graphs in a way of its own"),
    "part of one": (torch.utils.data.Subset(Made(molecules(8)), range(8)), "a Made may make"),
}


@pytest.mark.parametrize("name", NOT_PACKED)
def test_what_is_not_packed_says_why_and_is_collated_by_pyg(name):
    dataset, why = NOT_PACKED[name]
    loader = PaddedLoader(dataset, 7, device="cpu")
    assert why in loader.not_packed
    if name in ("attributes", "widths", "a class of data"):  # which PyG refuses or not by the graphs of a batch
        return
    for mine, theirs in zip(loader, PaddedLoader(dataset, 7, packed=False), strict=True):
        assert list(mine.keys()) == list(theirs.keys()) and torch.equal(mine.x, theirs.x)
        assert torch.equal(mine.edge_index, theirs.edge_index) and mine.num_graphs == theirs.num_graphs


def test_exclude_keys_leaves_out_what_cannot_be_packed_or_padded():
    graphs = molecules(9)
    for number, graph in enumerate(graphs):
        graph.ring_index, graph.kept = torch.zeros(number + 1), {"a": 1}
    loader, batch = follow(graphs, 4, exclude_keys=["ring_index", "kept"])
    assert "kept" not in batch and "ring_index" not in batch


def test_padding_has_no_nodes_of_attributes_that_are_left_out():
    """PyG counts the nodes of a graph by all its attributes, also by those that batches leave out."""
    graphs = molecules(9)
    for graph in graphs:
        graph.pos = torch.ones(graph.num_nodes, 2)
    _, batch = follow(graphs, 4, exclude_keys=["x"])
    assert batch.batch.numel() == batch.pos.size(0) == batch.node_mask.numel()


def test_sparse_attributes_are_refused():
    with pytest.raises(ValueError, match="adj must be a dense tensor, got torch.sparse_coo"):
        PaddedLoader(changed(sets("adj", lambda g, i: torch.eye(g.num_nodes).to_sparse())), 4)


def test_workers_have_no_packed_arrays():
    loader = PaddedLoader(molecules(8), 4, num_workers=1)
    assert loader.not_packed == "num_workers" and len(list(loader)) == 2
    with pytest.raises(ValueError, match="device must be None with num_workers"):
        PaddedLoader(molecules(8), 4, num_workers=1, device="cpu")


# Changes -------------------------------------------------------------------------------------------------------------


def in_place(graphs):
    for graph in graphs:
        graph.x.mul_(2)


def replaced(graphs):
    for graph in graphs:
        graph.y = graph.y + 1


def one_graph(graphs):
    graphs[3] = molecules(12)[-1]


def longer(graphs):
    graphs.append(molecules(12)[-1])


def unpackable(graphs):
    for graph in graphs:
        graph.kept = {"a": torch.ones(1)}


def unseen(graphs):
    graphs[0].x.numpy()[:] = 7  # raises no version


@pytest.mark.parametrize("change", [in_place, replaced, one_graph, longer, unpackable, unseen])
def test_a_data_set_that_changes_is_packed_again(change):
    graphs = molecules(10)
    loader = PaddedLoader(graphs, 5)
    kept = loader._kept
    list(loader)
    assert loader._kept is kept
    change(graphs)
    for mine, theirs in zip(loader, PaddedLoader(graphs, 5, packed=False, sizes=loader.sizes.sizes), strict=True):
        assert list(mine._store._mapping) == list(theirs._store._mapping)
        assert torch.equal(mine.x, theirs.x) and torch.equal(mine.y, theirs.y)
    assert (loader.not_packed is not None) == (change is unpackable)


def test_tensors_that_require_a_gradient_from_now_on_are_not_packed():
    graphs = molecules(8)
    loader = PaddedLoader(graphs, 4)
    list(loader)
    for graph in graphs:
        graph.x.requires_grad_()
    next(iter(loader)).x.sum().backward()
    assert loader.not_packed == "x requires a gradient" and graphs[0].x.grad is not None


def test_batches_do_not_share_memory_with_the_packed_arrays():
    loader = PaddedLoader(molecules(), 4)
    batches = list(loader)
    before = [copy.deepcopy(batch) for batch in batches]
    for batch in loader:
        for value in filter(torch.is_tensor, batch._store._mapping.values()):
            value.zero_()
    for mine, theirs, again in zip(batches, before, loader, strict=True):
        assert_same(mine, theirs)
        assert_same(again, theirs)


def test_a_device_may_be_named():
    loader, plain = PaddedLoader(molecules(), 4, device="cpu"), PaddedLoader(molecules(), 4, pin_memory=False)
    for mine, theirs in zip(loader, plain, strict=True):
        assert_same(mine, theirs)
    with pytest.raises(TypeError, match="device must be"):
        PaddedLoader(molecules(), 4, device=1.5)

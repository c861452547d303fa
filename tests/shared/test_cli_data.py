"""The graphs of the demo: made by a seed, or read from files that may be wrong."""

import os
import pickle
import shutil

import numpy as np
import pytest
import torch

from edgeless.tools.cli.devices import UsageError
from edgeless.tools.demo.data import community_graph, read_npz, read_planetoid
from edgeless.tools.demo.relational import read_wn18rr, relational_graph
from edgeless.tools.demo.tasks import _ranks

SMALL = {"num_nodes": 500, "num_edges": 8000, "num_classes": 5, "num_features": 8}


def test_the_community_graph_is_a_function_of_its_seed():
    one, two, other = (community_graph(**SMALL, seed=seed) for seed in (3, 3, 4))
    for a, b in zip(one[1:7], two[1:7], strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(one.edge_index, other.edge_index)


def test_the_community_graph_is_simple_undirected_and_as_large_as_asked():
    data = community_graph(**SMALL)
    u, v = data.edge_index
    assert data.edge_index.shape == (2, 8000)
    assert int((u == v).sum()) == 0
    keys = set((u * 500 + v).tolist())
    assert len(keys) == 8000
    assert keys == set((v * 500 + u).tolist())


def test_the_community_graph_has_learnable_labels_and_a_split():
    data = community_graph(**SMALL)
    assert torch.bincount(data.y).tolist() == [100] * 5
    u, v = data.edge_index
    inside = (data.y[u] == data.y[v]).double().mean()
    assert inside > 0.35  # one fifth if the edges knew nothing of the labels
    assert torch.equal(data.train.int() + data.val.int() + data.test.int(), torch.ones(500, dtype=torch.int))


RELATIONAL = {"num_nodes": 600, "num_edges": 12_000, "num_relations": 8, "num_classes": 5, "num_features": 8}


def test_the_graph_with_relations_is_a_function_of_its_seed():
    one, two, other = (relational_graph(**RELATIONAL, seed=seed) for seed in (3, 3, 4))
    for a, b in zip(one[1:7], two[1:7], strict=True):
        assert torch.equal(a, b)
    assert torch.equal(one.relations.edge_type, two.relations.edge_type)
    assert not torch.equal(one.edge_index, other.edge_index)


def test_relations_join_one_type_of_nodes_to_one_and_lead_to_the_label():
    data = relational_graph(**RELATIONAL)
    relations = data.relations
    assert data.edge_index.shape == (2, 12_000)
    assert relations.sizes == [300, 150, 150]
    assert bool((relations.node_type.diff() >= 0).all())
    assert {dst for _, dst in relations.ends} == {0, 1, 2}  # a layer that takes dictionaries has a result for all
    for relation, ends in enumerate(relations.ends):
        src, dst = data.edge_index[:, relations.edge_type == relation]
        assert (relations.node_type[src].unique().item(), relations.node_type[dst].unique().item()) == ends
        shifts = torch.bincount((data.y[dst] - data.y[src]) % 5, minlength=5) / len(src)
        assert shifts.max() > 0.6  # one fifth if relations knew nothing of the labels
    assert not bool((data.train | data.val | data.test)[300:].any())
    assert bool((data.train | data.val | data.test)[:300].all())


def wn18rr(folder, **changes):
    files = {
        "entities.dict": "0\tcat\n1\tdog\n2\tanimal\n",
        "relations.dict": "0\tis\n",
        "train.txt": "cat\tis\tanimal\n",
        "valid.txt": "dog\tis\tanimal\n",
        "test.txt": "animal\tis\tdog\n",
    }
    for name, text in {**files, **changes}.items():
        (folder / name).write_text(text)
    return folder


def test_wn18rr_is_read_and_its_graph_runs_both_ways(tmp_path):
    data = read_wn18rr(wn18rr(tmp_path))
    assert (data.train.tolist(), data.test.tolist()) == ([[0, 0, 2]], [[2, 0, 1]])
    edge_index, relations = data.edges()
    assert edge_index.tolist() == [[0, 2], [2, 0]]
    assert (relations.edge_type.tolist(), relations.num_types) == ([0, 1], 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train.txt": "cat is"}, "train.txt has a line of 2 words, not 3"),
        ({"train.txt": "cat is bird"}, "bird"),
        ({"entities.dict": "0 cat\n1 dog\n5 animal"}, "does not number its names from 0"),
    ],
)
def test_what_is_no_wn18rr_is_refused(tmp_path, changes, message):
    with pytest.raises(UsageError, match=message):
        read_wn18rr(wn18rr(tmp_path, **changes))


def test_wn18rr_that_is_not_there_is_said(tmp_path):
    with pytest.raises(UsageError, match=r"WN18RR has the files entities\.dict, .* they are not all in it"):
        read_wn18rr(tmp_path)


def test_ranks_leave_out_what_is_known_to_hold():
    rows, relations = torch.tensor([[1.0], [2.0], [3.0], [4.0]]), torch.ones(1, 1)
    asked = torch.tensor([[0, 0, 1]])
    assert _ranks(rows, relations, asked, asked).tolist() == [3.0]
    known = torch.tensor([[0, 0, 1], [0, 0, 3], [1, 0, 2]])
    assert _ranks(rows, relations, asked, known).tolist() == [2.0]
    assert _ranks(torch.ones(4, 1), relations, asked, asked).tolist() == [2.5]  # ties stand halfway


def arrays(**changes):
    good = {
        "node_features": np.ones((3, 2), np.float32),
        "node_labels": np.array([0, 1, 1]),
        "edges": np.array([[0, 1], [1, 2]]),
        "train_masks": np.array([[True, False, False], [False, True, False]]),
        "val_masks": np.array([False, True, False]),
        "test_masks": np.array([False, False, True]),
    }
    return {**good, **changes}


def test_npz_is_read_in_both_directions_with_the_first_split(tmp_path):
    np.savez(tmp_path / "g.npz", **arrays())
    data = read_npz(tmp_path / "g.npz")
    assert data.name == "g (each edge in both directions)"
    assert sorted(data.edge_index.t().tolist()) == [[0, 1], [1, 0], [1, 2], [2, 1]]
    assert data.train.tolist() == [True, False, False]
    assert data.val.tolist() == [False, True, False]
    assert (data.x.dtype, data.y.dtype, data.num_classes) == (torch.float32, torch.int64, 2)


def test_edges_that_are_there_in_both_directions_are_not_doubled(tmp_path):
    both = [[0, 1], [1, 2], [2, 1], [1, 0]]
    np.savez(tmp_path / "g.npz", **arrays(edges=np.array(both)))
    data = read_npz(tmp_path / "g.npz")
    assert data.name == "g" and data.edge_index.t().tolist() == both
    np.savez(tmp_path / "g.npz", **arrays(edges=np.array(both[:3])))  # one has no reverse
    assert read_npz(tmp_path / "g.npz").edge_index.size(1) == 6


def pyg_arrays():
    """As PyG's Data names them, directed."""
    edges = np.array([[0, 1, 2], [1, 2, 0]])
    masks = {"train_mask": [True, False, False], "val_mask": [False, True, False], "test_mask": [False, False, True]}
    return {
        "x": np.ones((3, 2), np.float32),
        "y": np.array([0, 1, 1]),
        "edge_index": edges,
        **{name: np.array(mask) for name, mask in masks.items()},
    }


def test_npz_with_the_names_of_pyg_is_read_as_it_stands(tmp_path):
    np.savez(tmp_path / "g.npz", **pyg_arrays())
    data = read_npz(tmp_path / "g.npz")
    assert data.name == "g" and data.edge_index.tolist() == [[0, 1, 2], [1, 2, 0]]
    assert data.train.tolist() == [True, False, False]
    many = pyg_arrays()
    many["train_mask"] = np.array([[False, True], [True, False], [False, False]])  # [N, S]: the first split
    np.savez(tmp_path / "g.npz", **many)
    assert read_npz(tmp_path / "g.npz").train.tolist() == [False, True, False]


@pytest.mark.parametrize("changes", ({"edge_index": np.zeros((3, 2), int)}, {"edge_index": np.array([[0], [3]])}))
def test_npz_with_the_names_of_pyg_is_checked(tmp_path, changes):
    np.savez(tmp_path / "g.npz", **{**pyg_arrays(), **changes})
    with pytest.raises(UsageError, match="edge_index must"):
        read_npz(tmp_path / "g.npz")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"edges": np.array([[0, 3]])}, r"edges must be node ids in \[0, 3\), got 0 to 3"),
        ({"edges": np.array([[-1, 2]])}, r"edges must be node ids in \[0, 3\), got -1 to 2"),
        ({"edges": np.zeros((2, 5), int)}, r"edges must have shape \[E, 2\], got \[2, 5\]"),
    ],
)
def test_npz_with_wrong_edges_is_refused(tmp_path, changes, message):
    np.savez(tmp_path / "g.npz", **arrays(**changes))
    with pytest.raises(UsageError, match=message):
        read_npz(tmp_path / "g.npz")


def test_npz_without_an_array_names_it(tmp_path):
    rest = arrays()
    del rest["val_masks"]
    np.savez(tmp_path / "g.npz", **rest)
    with pytest.raises(UsageError, match="val_masks missing"):
        read_npz(tmp_path / "g.npz")


def test_a_file_that_is_no_npz_is_refused(tmp_path):
    (tmp_path / "g.npz").write_text("hello")
    with pytest.raises(UsageError, match="cannot be read"):
        read_npz(tmp_path / "g.npz")
    with pytest.raises(UsageError, match="cannot be read"):
        read_npz(tmp_path / "missing.npz")


def test_planetoid_without_files_says_where_they_belong(tmp_path):
    with pytest.raises(UsageError, match=r"CiteSeer/raw/ind\.citeseer\.graph"):
        read_planetoid(tmp_path, "citeseer")


def test_a_planetoid_pickle_that_runs_code_is_not_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "owned"),)

    for part in ("x", "tx", "allx", "y", "ty", "ally", "graph"):
        (tmp_path / f"ind.cora.{part}").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(UsageError, match=r"asks for \w+\.mkdir, which is no array"):
        read_planetoid(tmp_path, "cora")
    assert not (tmp_path / "owned").exists()


def test_cora_has_the_standard_split(shared_data):
    data = read_planetoid(shared_data / "planetoid", "cora")
    assert data.x.shape == (2708, 1433)
    assert torch.bincount(data.y[data.train]).tolist() == [20] * 7
    assert (int(data.val.sum()), int(data.test.sum())) == (500, 1000)


def test_cora_is_the_same_as_read_by_pyg(shared_data, tmp_path):
    datasets = pytest.importorskip("torch_geometric.datasets")
    transforms = pytest.importorskip("torch_geometric.transforms")
    pytest.importorskip("scipy")
    shutil.copytree(shared_data / "planetoid", tmp_path / "root")  # PyG writes beside the raw files
    theirs = datasets.Planetoid(str(tmp_path / "root"), "Cora", transform=transforms.NormalizeFeatures())[0]
    ours = read_planetoid(shared_data / "planetoid", "cora")
    torch.testing.assert_close(ours.x, theirs.x)
    assert torch.equal(ours.y, theirs.y)
    for mine, his in ((ours.train, theirs.train_mask), (ours.val, theirs.val_mask), (ours.test, theirs.test_mask)):
        assert torch.equal(mine, his)
    assert set(map(tuple, ours.edge_index.t().tolist())) == set(map(tuple, theirs.edge_index.t().tolist()))

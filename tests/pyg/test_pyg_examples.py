"""The examples for PyTorch Geometric."""

import importlib.util

import example_scripts


def test_node_classification(tmp_path):
    *_, last = example_scripts.run("pyg_node_classification.py", tmp_path).splitlines()
    assert float(last.split()[2]) > 70  # four classes


def test_neighbor_sampling(tmp_path):
    printed = example_scripts.run("pyg_neighbor_sampling.py", tmp_path)
    if any(map(importlib.util.find_spec, ("pyg_lib", "torch_sparse"))):
        assert printed.count("epoch") == 3
    else:
        assert printed.startswith("skipped: NeighborLoader needs pyg-lib or torch_sparse")


def test_accelerate(tmp_path):
    printed = example_scripts.run("accelerate_model.py", tmp_path)
    assert "swapped 3, kept 0" in printed
    assert "GATv2Conv runs fused" in printed

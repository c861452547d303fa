"""The examples for DGL."""

import example_scripts


def test_node_classification(tmp_path):
    *_, last = example_scripts.run("dgl_node_classification.py", tmp_path).splitlines()
    assert float(last.split()[2]) > 70  # four classes


def test_neighbor_sampling(tmp_path):
    assert example_scripts.run("dgl_neighbor_sampling.py", tmp_path).count("epoch") == 3

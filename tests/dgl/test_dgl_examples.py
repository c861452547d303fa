"""The examples for DGL."""

import example_scripts
import pytest
import torch.distributed as dist

import edgeless


def test_node_classification(tmp_path):
    *_, last = example_scripts.run("dgl_node_classification.py", tmp_path).splitlines()
    assert float(last.split()[2]) > 70  # four classes


def test_neighbor_sampling(tmp_path):
    assert example_scripts.run("dgl_neighbor_sampling.py", tmp_path).count("epoch") == 3


@pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo")
@pytest.mark.slow
def test_minibatches_under_ddp(tmp_path):
    assert example_scripts.run("dgl_minibatch_ddp.py", tmp_path, 2).count("on 2 processes") == 3


def test_the_page_of_tasks_runs(fresh_dynamo):
    edgeless.report(reset=True)
    assert example_scripts.run_page("how-to/dgl.md") >= 7

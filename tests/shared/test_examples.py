"""The examples that need neither PyG nor DGL."""

import example_scripts
import pytest
import torch


def test_own_attention_learns(tmp_path):
    losses = [line.split()[3] for line in example_scripts.run("own_attention.py", tmp_path).splitlines()]
    assert len(losses) == 3
    assert losses == sorted(losses, reverse=True)


def test_cuda_graph_says_that_it_needs_a_gpu(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert example_scripts.run("cuda_graph.py", tmp_path) == "skipped: torch sees no GPU\n"


@pytest.mark.cuda
def test_cuda_graph_is_captured_and_replayed(tmp_path):
    assert "ms replayed" in example_scripts.run("cuda_graph.py", tmp_path)

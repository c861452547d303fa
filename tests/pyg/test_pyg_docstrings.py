"""The examples in docstrings that need PyG run and print what they say."""

import pytest
from docstrings import check_examples, public

from edgeless import Graph
from edgeless.pyg import loader, transforms


@pytest.mark.parametrize("value", [*public(loader), *public(transforms)], ids=lambda value: value.__name__)
def test_examples(value):
    check_examples(value)


def test_examples_of_graphs():
    check_examples(Graph.from_pyg)


def test_examples_of_sparse_tensors():
    pytest.importorskip("torch_sparse", exc_type=ImportError)
    check_examples(Graph.from_sparse_tensor)

"""The examples in docstrings that need DGL run and print what they say."""

import pytest
from docstrings import check_examples, public

from edgeless import Graph
from edgeless.dgl import dataloading, graphbolt, ops, to_graph, transforms

MODULES = (dataloading, ops, transforms)
FUNCTIONS = [*(value for module in MODULES for value in public(module)), to_graph, graphbolt.stub, Graph.from_dgl]


@pytest.mark.parametrize("value", FUNCTIONS, ids=lambda value: f"{value.__module__}.{value.__name__}")
def test_examples(value):
    check_examples(value)

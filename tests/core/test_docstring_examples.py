"""The examples in the docstrings of public functions and classes run and print what they say."""

import pytest
from docstrings import check_examples, needs_example, public

import edgeless
from edgeless import Graph, blocks, functional, kernels, padding, reference, reordering

# edgeless.distributed needs a library of its own: tests/shared/test_part_examples.py.
MODULES = (edgeless, functional, reference, reordering, blocks, padding)
FUNCTIONS = list(dict.fromkeys(value for module in MODULES for value in public(module)))
OF_GRAPHS = ("from_edge_index", "from_csr", "from_csc", "from_torch_sparse", "edge_index", "reverse", "reorder")


@pytest.mark.parametrize("value", FUNCTIONS, ids=lambda value: f"{value.__module__}.{value.__name__}")
def test_examples(value):
    if value.__module__ == "edgeless.blocks":
        pytest.importorskip("safetensors")
    check_examples(value, needs_example(value))


@pytest.mark.parametrize("name", [*OF_GRAPHS, "with_self_loops"])
def test_examples_of_graphs(name):
    check_examples(getattr(Graph, name))


def test_examples_of_kernels():
    check_examples(kernels)

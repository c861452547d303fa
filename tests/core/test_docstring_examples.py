"""The examples in the docstrings of public functions and classes run and print what they say."""

import doctest

import pytest

import edgeless
from edgeless import functional, reference

# Of the package itself, those that need no GPU and no second process to show anything.
OWN = ("Graph", "TypedGraph", "accelerate", "backend", "cache_info", "engine", "explain", "report")

FUNCTIONS = [
    *(getattr(edgeless, name) for name in OWN),
    *(getattr(functional, name) for name in functional.__all__),
    *(getattr(reference, name) for name in reference.__all__),
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: f"{function.__module__}.{function.__name__}")
def test_examples(function):
    edgeless.report(reset=True)
    (found,) = doctest.DocTestFinder(recurse=False).find(function)
    assert found.examples
    printed = []
    failed, _ = doctest.DocTestRunner().run(found, out=printed.append)
    assert not failed, "".join(printed)

"""The examples in the docstrings of attention and of its reference run and print what they say."""

import doctest

import pytest

from edgeless import functional, reference

FUNCTIONS = [
    *(getattr(functional, name) for name in functional.__all__ if name.endswith("attention")),
    *(getattr(reference, name) for name in reference.__all__),
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: f"{function.__module__}.{function.__name__}")
def test_examples(function):
    (found,) = doctest.DocTestFinder(recurse=False).find(function)
    assert found.examples
    printed = []
    failed, _ = doctest.DocTestRunner().run(found, out=printed.append)
    assert not failed, "".join(printed)

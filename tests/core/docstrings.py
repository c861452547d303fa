"""Runs the examples in docstrings, and finds those of a module."""

import doctest
import inspect

import edgeless


def public(module):
    """The functions and classes of edgeless that ``module.__all__`` names, by name."""
    named = ((name, getattr(module, name)) for name in module.__all__)
    found = ((name, value) for name, value in named if callable(value))
    return [value for _, value in found if str(getattr(value, "__module__", "")).startswith("edgeless")]


def needs_example(value) -> bool:
    """Every function does; a class may be the answer of a function that has one."""
    return inspect.isfunction(value)


def check_examples(value, needed: bool = True) -> None:
    """Fails where an example prints something else than it says, or where there is none and ``needed`` is true."""
    edgeless.report(reset=True)
    function = getattr(value, "__func__", value)  # a class method, too
    (found,) = doctest.DocTestFinder(recurse=False).find(function, function.__name__)
    assert found.examples or not needed, f"{function.__name__} has no example"
    printed = []
    failed, _ = doctest.DocTestRunner().run(found, out=printed.append)
    assert not failed, "".join(printed)

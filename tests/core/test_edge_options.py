"""The options that all attention functions share are the fields of EdgeOptions."""

import inspect

import pytest

from edgeless import functional, reference
from edgeless.functional.edge_options import EdgeOptions

FIELDS = EdgeOptions._field_defaults
FUNCTIONS = [
    getattr(module, name) for module in (functional, reference) for name in functional.__all__ if "attention" in name
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: f"{function.__module__}.{function.__name__}")
def test_public_functions_have_the_fields_as_keywords_with_their_defaults(function):
    parameters = inspect.signature(function).parameters
    expected = {
        name: default
        for name, default in FIELDS.items()
        if not ("cosine" in function.__name__ and name in ("edge_attr", "edge_proj"))
    }
    assert {name: parameters[name].default for name in expected} == expected
    assert all(parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in expected)
    assert [name for name in parameters if name in FIELDS] == list(expected)


def test_options_do_not_change():
    assert list(FIELDS) == list(EdgeOptions._fields)
    with pytest.raises(AttributeError):
        EdgeOptions().dropout = 0.5

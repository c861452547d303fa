"""The examples in the docstrings of edgeless.distributed run, in one process without a process group."""

import pytest
from docstrings import check_examples, public

pytest.importorskip("safetensors")
import edgeless.distributed


@pytest.mark.parametrize("value", public(edgeless.distributed), ids=lambda value: value.__name__)
def test_examples(value):
    check_examples(value)

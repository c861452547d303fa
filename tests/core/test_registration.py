"""One schema and one implementation for each device: what torch's dispatcher has of every op."""

import pytest
import torch

import edgeless  # noqa: F401  registers the ops

OPS = sorted(name for name in torch._C._dispatch_get_all_op_names() if name.startswith("edgeless::"))


def has_kernel(op, key):
    return torch._C._dispatch_has_computed_kernel_for_dispatch_key(op, key)


def test_there_are_ops():
    assert {"edgeless::attention", "edgeless::spmm", "edgeless::pair_attention"} <= set(OPS)


@pytest.mark.parametrize("op", OPS)
def test_every_op_runs_on_every_device(op):
    assert has_kernel(op, "CPU")
    assert has_kernel(op, "CUDA")

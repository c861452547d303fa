"""Of which instruction set the CPU's kernels are chosen."""

import os
import subprocess
import sys

import pytest
from devices import narrowed

from edgeless import _C

NAMES = {"baseline": "baseline", "avx2": "AVX2", "avx512": "AVX-512"}


@pytest.mark.parametrize("capability", NAMES)
def test_kernels_are_of_no_more_than_is_asked_for(capability):
    widest = _C.cpu_capability()
    order = list(NAMES.values())
    with narrowed(capability):
        assert _C.cpu_capability() == min(NAMES[capability], widest, key=order.index)
    assert _C.cpu_capability() == widest


def test_the_environment_limits_them_too():
    command = [sys.executable, "-c", "from edgeless import _C; print(_C.cpu_capability())"]
    env = os.environ | {"EDGELESS_CPU_CAPABILITY": "baseline"}
    assert subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.strip() == "baseline"

"""Kernels under compute-sanitizer: what they read and write lies within what was allocated.

Hubs leave segments of rows in scratch memory, whose size is worked out apart from the kernels that write there. Writes
beyond it land in PyTorch's cache of freed memory and are seen by chance at best, hence the tool, and each tensor in
an allocation of its own. Only the kernels of edgeless are looked at: PyTorch's own of 16 bits add to whole words.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from edgeless.kernels.nvrtc import toolkits

HERE = Path(__file__).parent
FOLDERS = [os.environ["PATH"], *(str(home / "bin") for home in toolkits())]
TOOL = shutil.which("compute-sanitizer", path=os.pathsep.join(FOLDERS))
NAMES = "attention", "pair_attention", "reduction", "reduction_cuda_engines", "spmm"


@pytest.mark.cuda
@pytest.mark.skipif(TOOL is None, reason="needs compute-sanitizer of the CUDA toolkit")
def test_hubs_stay_within_their_scratch_memory():
    tests = [str(HERE / f"test_{name}.py") for name in NAMES]
    pytest_options = ["-q", "-m", "cuda", "-p", "no:cacheprovider", "-k", "wide_indices or walks_are_those"]
    tool_options = ["--kernel-regex", "kns=edgeless", "--error-exitcode", "99", "--print-limit", "3"]
    ran = subprocess.run(
        [TOOL, *tool_options, sys.executable, "-m", "pytest", *pytest_options, *tests],
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout[-4000:]
    assert "ERROR SUMMARY: 0 errors" in ran.stdout

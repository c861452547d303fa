"""setup.py explains itself when it cannot build, and links what torch runs with."""

import sys
from pathlib import Path

import pytest


def test_without_torch_it_says_what_to_do(python, root, tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")
    done = python("setup.py", "--version", cwd=root, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("edgeless compiles against the PyTorch that it will run with")
    assert "--no-build-isolation" in last


def test_cuda_by_force_is_refused_where_it_cannot_be(python, root):
    import torch

    if torch.version.cuda is not None:
        pytest.skip("torch is a CUDA build here")
    done = python("setup.py", "--version", cwd=root, EDGELESS_CUDA="1")
    assert done.returncode == 1
    assert "EDGELESS_CUDA=1 asks for the CUDA kernels" in done.stderr


def test_it_says_why_it_builds_for_the_cpu_only(python, root):
    done = python("setup.py", "--version", cwd=root, EDGELESS_CUDA="0")
    assert done.returncode == 0, done.stderr
    assert "edgeless: building the CPU kernels only (EDGELESS_CUDA=0)" in done.stderr
    import edgeless

    assert done.stdout.split() == [edgeless.__version__]


@pytest.mark.skipif(Path("/usr/include/cuda_runtime.h").exists(), reason="every compiler finds CUDA's headers here")
@pytest.mark.parametrize("headers", [False, True], ids=["nvcc alone", "nvcc and headers"])
def test_an_nvcc_without_headers_is_no_toolkit(python, root, tmp_path, headers):
    """What torch takes for CUDA_HOME is where an nvcc on the PATH lies, which may be a script in /usr/local/bin."""
    for there in ["bin/nvcc"] + ["include/cuda_runtime.h"] * headers:
        (tmp_path / there).parent.mkdir()
        (tmp_path / there).touch()
    code = (
        "import runpy, setuptools, torch; from torch.utils import cpp_extension;"
        f"torch.version.cuda = '13.0'; cpp_extension.CUDA_HOME = {str(tmp_path)!r};"
        "setuptools.setup = cpp_extension.CUDAExtension = lambda *args, **options: None; runpy.run_path('setup.py')"
    )
    done = python("-c", code, cwd=root, EDGELESS_CUDA="auto")
    assert done.returncode == 0, done.stderr
    said = "edgeless: building CPU and CUDA kernels for" if headers else "there is an nvcc but no cuda_runtime.h in"
    assert said in done.stderr


def test_no_cuda_source_is_in_a_build_for_the_cpu(python, root):
    """And the other way round: every source of core_cuda belongs to one of the two builds."""
    code = (
        "import setuptools; setuptools.setup = lambda **options: print(*options['ext_modules'][0].sources, sep='\\n');"
        "import runpy; runpy.run_path('setup.py')"
    )
    done = python("-c", code, cwd=root, EDGELESS_CUDA="0")
    assert done.returncode == 0, done.stderr
    built = set(done.stdout.split())
    there = {str(path.relative_to(root)) for path in (root / "core_cuda").rglob("*.cpp")}
    assert built == {name for name in there if not name.endswith("_cuda.cpp")}
    assert "core_cuda/library.cpp" in built


@pytest.mark.skipif(sys.platform != "linux", reason="libstdc++ of Linux")
def test_there_is_one_libstdcxx():
    """With a second, static copy in the extension the first number in an error message ended the process."""
    from edgeless import _C

    assert b"libstdc++.so.6" in Path(_C.__file__).read_bytes()  # among the libraries that the extension needs

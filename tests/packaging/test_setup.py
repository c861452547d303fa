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


REFUSED = {
    "Windows": (
        "import sysconfig; sysconfig.get_config_vars(); sys.platform = 'win32'",
        "edgeless is not built on Windows: install it in WSL 2",
    ),
    "ROCm": ("torch.version.hip = '7.0'", "edgeless has no kernels for AMD GPUs"),
    "free-threaded": (
        "import sysconfig; sysconfig.get_config_vars()['Py_GIL_DISABLED'] = 1",
        "edgeless does not run on a free-threaded Python",
    ),
}


@pytest.mark.parametrize("where", REFUSED)
def test_where_it_cannot_be_built_it_says_so_in_a_sentence(python, root, where):
    change, sentence = REFUSED[where]
    code = f"import runpy, sys, setuptools, torch; {change}; sys.argv[1:] = ['--version']; runpy.run_path('setup.py')"
    done = python("-c", code, cwd=root)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith(sentence)


def test_without_setuptools_it_says_what_to_do(python, root, tmp_path):
    (tmp_path / "setuptools.py").write_text("raise ImportError('no setuptools here')")
    done = python("setup.py", "--version", cwd=root, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith("edgeless is built by setuptools")


@pytest.mark.parametrize(
    "cxx,path,missing", (("", "/nowhere", "c++"), ("no-such -x", None, "no-such"), ("", None, None))
)
def test_without_a_compiler_it_says_what_to_install(root, monkeypatch, cxx, path, missing):
    import runpy

    import setuptools

    monkeypatch.setattr(setuptools, "setup", lambda **options: None)
    monkeypatch.chdir(root)
    compiler_missing = runpy.run_path("setup.py")["compiler_missing"]
    monkeypatch.setenv("CXX", cxx)
    if path is not None:
        monkeypatch.setenv("PATH", path)
    found = compiler_missing()
    assert (found is None) == (missing is None)
    assert found is None or f"needs a C++20 compiler, and {missing} was not found" in found


def test_it_tells_the_version(python, root):
    import edgeless

    done = python("setup.py", "--version", cwd=root)
    assert done.stdout.split() == [edgeless.__version__], done.stderr


def test_every_source_is_in_every_build(python, root, tmp_path):
    """For CUDA as well, whether torch has CUDA or not, and where there is a toolkit; nothing asks for one."""
    code = (
        "import os, setuptools, torch; from torch.utils import cpp_extension;"
        "torch.version.cuda, cpp_extension.CUDA_HOME = os.environ['CUDA'] or None, os.environ['HOME_OF_CUDA'] or None;"
        "setuptools.setup = lambda **options: print(*options['ext_modules'][0].sources, sep='\\n');"
        "import runpy; runpy.run_path('setup.py')"
    )
    there = {str(path.relative_to(root)) for path in (root / "core_cuda").rglob("*.cpp")}
    assert {"core_cuda/library.cpp", "core_cuda/spmm/spmm_cuda.cpp"} <= there
    for cuda, home in (("", ""), ("13.0", ""), ("13.0", str(tmp_path))):
        done = python("-c", code, cwd=root, CUDA=cuda, HOME_OF_CUDA=home)
        assert done.returncode == 0, done.stderr
        assert set(done.stdout.split()) == there


def test_sources_of_the_device_are_headers(root):
    assert [path.name for path in (root / "core_cuda").rglob("*.cu")] == []


@pytest.mark.parametrize("joins", [False, True])
def test_every_source_is_compiled_once(root, tmp_path, monkeypatch, joins):
    import runpy

    import setuptools

    given = {}
    monkeypatch.setattr(setuptools, "setup", lambda **options: given.update(options))
    monkeypatch.chdir(root)
    names = runpy.run_path("setup.py")
    joined, sources = names["joined"], given["ext_modules"][0].sources
    monkeypatch.setitem(joined.__globals__, "JOINS_CUDA_OPS", joins)
    units = joined(sources, tmp_path)
    included = [
        line.split('"')[1]
        for unit in units
        if unit.startswith(str(tmp_path))
        for line in Path(unit).read_text().splitlines()
    ]
    alone = [str(root / unit) for unit in units if not unit.startswith(str(tmp_path))]
    assert sorted([*included, *alone]) == sorted(str(root / source) for source in sources)
    assert any(name.endswith("/spmm_cuda.cpp") for name in alone) != joins
    assert not any("/cuda/" in name or "/cpu/kernels_" in name for name in included)


@pytest.mark.parametrize("inplace", [False, True])
def test_the_version_of_torch_is_recorded_beside_the_extension(root, tmp_path, monkeypatch, inplace):
    import runpy

    import setuptools
    import torch

    monkeypatch.setattr(setuptools, "setup", lambda **options: None)
    monkeypatch.chdir(root)
    build_ext = runpy.run_path("setup.py")["Build"]
    monkeypatch.setitem(build_ext.run.__globals__, "ROOT", tmp_path)
    monkeypatch.setattr(build_ext.__mro__[1], "run", lambda self: setattr(self, "inplace", False))  # as setuptools does
    build = build_ext(setuptools.Distribution({"name": "edgeless"}))
    build.inplace, build.build_lib, build.extensions = inplace, str(tmp_path / "lib"), []
    build.run()
    assert build.joins != inplace
    file = tmp_path / "shared" / "_built.py" if inplace else tmp_path / "lib" / "edgeless" / "_built.py"
    assert list(tmp_path.rglob("_built.py")) == [file]
    assert f'TORCH = "{torch.__version__}"' in file.read_text().splitlines()
    assert str(tmp_path / "lib" / "edgeless" / "_built.py") in build.get_outputs()


@pytest.mark.skipif(sys.platform != "linux", reason="libstdc++ of Linux")
def test_there_is_one_libstdcxx():
    """With a second, static copy in the extension the first number in an error message ended the process."""
    from edgeless import _C

    assert b"libstdc++.so.6" in Path(_C.__file__).read_bytes()  # among the libraries that the extension needs

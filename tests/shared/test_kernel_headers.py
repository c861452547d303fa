"""The compiler and the headers that kernels need: which are taken, and what is told where they are missing."""

import os
import sys
from types import SimpleNamespace

import pytest

from edgeless.kernels import NvrtcError, headers, nvrtc


def test_the_library_says_where_it_is():
    """By the file that was loaded for a name without a folder."""
    try:
        library = nvrtc.installed_nvrtc()
    except NvrtcError as error:
        pytest.skip(str(error))
    assert os.path.isabs(library.file) and "nvrtc" in os.path.basename(library.file)
    assert os.path.samefile(nvrtc.Nvrtc(library.file).file, library.file)


def test_a_missing_compiler_is_an_error_in_words(monkeypatch):
    monkeypatch.setattr(nvrtc, "_candidates", lambda: ["/nowhere/libnvrtc.so.13"])
    with pytest.raises(NvrtcError, match="install nvidia-cuda-nvrtc.* Tried: /nowhere/libnvrtc.so.13"):
        nvrtc.installed_nvrtc.__wrapped__()


def test_a_library_that_is_no_nvrtc_is_passed_over(monkeypatch):
    monkeypatch.setattr(nvrtc, "_candidates", lambda: ["libc.so.6"])
    with pytest.raises(NvrtcError, match="Tried: libc.so.6"):
        nvrtc.installed_nvrtc.__wrapped__()


@pytest.mark.parametrize("major, wanted", [(13, "cu13/include"), (12, "cuda_runtime/include"), (11, "cu13/include")])
def test_headers_are_those_of_the_compilers_major_version(monkeypatch, tmp_path, major, wanted):
    """Of another one only where there are no others. A toolkit of the right version comes after the wheels."""
    for version, folder in ((13, "nvidia/cu13"), (12, "nvidia/cuda_runtime"), (12, "toolkit")):
        (tmp_path / folder / "include").mkdir(parents=True)
        (tmp_path / folder / "include" / "cuda_fp16.h").write_text("")
        (tmp_path / folder / "include" / "cuda_runtime_api.h").write_text(f"#define CUDART_VERSION  {version}020\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(headers, "toolkits", lambda: [tmp_path / "toolkit"])
    monkeypatch.setattr(headers, "installed_nvrtc", lambda: SimpleNamespace(version=(major, 4)))
    assert headers.cuda_headers.__wrapped__() == tmp_path / "nvidia" / wanted


def test_headers_that_do_not_say_their_version_come_last(monkeypatch, tmp_path):
    for folder in ("nvidia/cu13", "toolkit"):
        (tmp_path / folder / "include").mkdir(parents=True)
        (tmp_path / folder / "include" / "cuda_fp16.h").write_text("")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(headers, "toolkits", lambda: [tmp_path / "toolkit"])
    monkeypatch.setattr(headers, "installed_nvrtc", lambda: SimpleNamespace(version=(13, 4)))
    assert headers.cuda_headers.__wrapped__() == tmp_path / "nvidia" / "cu13" / "include"
    (tmp_path / "toolkit" / "include" / "cuda_runtime_api.h").write_text("#define CUDART_VERSION 13040\n")
    assert headers.cuda_headers.__wrapped__() == tmp_path / "toolkit" / "include"


def test_missing_headers_are_errors_in_words(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(headers, "toolkits", lambda: [tmp_path])
    with pytest.raises(NvrtcError, match="cuda_fp16.h was not found.* install nvidia-cuda-runtime.* or set CUDA_HOME"):
        headers.cuda_headers.__wrapped__()
    monkeypatch.setattr(headers, "__file__", str(tmp_path / "a" / "b" / "headers.py"))
    with pytest.raises(NvrtcError, match="the sources of the CUDA kernels are missing from .*: reinstall edgeless"):
        headers.sources.__wrapped__()


@pytest.mark.parametrize("architecture,expected", [
    (75, "sm_75"), (80, "sm_80"), (89, "compute_86"), (90, "sm_90"), (91, "compute_90"), (150, "compute_90"),
])  # fmt: skip
def test_a_gpu_that_the_library_does_not_know_gets_the_ptx_of_the_newest_before_it(architecture, expected):
    library = object.__new__(nvrtc.Nvrtc)
    library.version, library.architectures = (13, 0), lambda: (75, 80, 86, 90)
    assert library.target(architecture) == expected
    with pytest.raises(NvrtcError, match="compiles for sm_75 and later, not for sm_70"):
        library.target(70)

"""Kernels that plans name compile by NVRTC, without a GPU, for every architecture that is supported.

Some kernels of every architecture here; EDGELESS_EVERY_KERNEL=1 compiles all that the plans of the suites name.
"""

import itertools
import os
import re
from pathlib import Path

import kernels_relations_a
import kernels_relations_b
import kernels_rooms
import plan_names
import pytest
import torch

from edgeless import _C
from edgeless.choices import gpus
from edgeless.kernels import (
    CompileError,
    Kernel,
    NvrtcError,
    Store,
    compiled,
    compiled_together,
    compiler,
    headers,
    read_log,
)
from edgeless.kernels.nvrtc import installed_nvrtc
from edgeless.plan.steps import DEVICES, attention_steps

ARCHITECTURES = (80, 86, 90, 100, 120)
EVERY = os.environ.get("EDGELESS_EVERY_KERNEL") == "1"
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
USUAL = Path(__file__).parents[1] / "packaging" / "usual_kernels.log"
PASSES = ("forward", "by_dst", "by_src")
TABLES = (kernels_relations_a, kernels_relations_b, kernels_rooms)
OTHERS = [kernel for table in TABLES for kernel in table.KERNELS]  # of no plan, one instance of each


def _missing():
    try:
        return None if headers.cuda_headers() and max(installed_nvrtc().architectures()) >= 120 else "NVRTC is too old"
    except NvrtcError as error:
        return str(error)


pytestmark = pytest.mark.skipif(_missing() is not None, reason=f"{_missing()}")


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    """Optimises as little as takes the least time, half of the usual one: no error comes of optimising."""
    if not EVERY and installed_nvrtc().version >= (13, 0):
        monkeypatch.setattr(compiler, "OPTIONS", (*compiler.OPTIONS, "--Ofast-compile=max"))


def named(score, dtype, heads, dim, edges=1_166_243, **options):
    """The kernels of a layer, forward and backward, on a graph as large as arxiv."""
    steps = attention_steps(
        score, dtype, heads, 1 if score == "gat" else dim, dim, num_src=169_343, num_dst=169_343, num_edges=edges,
        device=DEVICES["h200"], passes=PASSES, **options,
    )  # fmt: skip
    return [Kernel(step.header, step.expression) for step in steps]


def every():
    """Those of all scores, dtypes and widths of heads, without and with options."""
    widths, options = (1, 4, 8, 20, 32, 40, 64, 96, 128, 200, 256), ({}, {"dropout": True}, {"arrays": True})
    shapes = itertools.product(_C.SCORES, DTYPES, widths, (*options, {"dropout": True, "arrays": True}), (4, 8))
    found = (named(score, dtype, 4, dim, index_bytes=i, **given) for score, dtype, dim, given, i in shapes)
    edge = (named("gatv2", dtype, 4, dim, edge_dim=16) for dtype in DTYPES for dim in (4, 8, 32, 128))
    return sorted({kernel for kernels in (*found, *edge) for kernel in kernels}, key=lambda k: k.expression)


def sample():
    """One of every template, and of each type of rows."""
    found = {}
    for kernel in every():
        template, _, arguments = kernel.expression.partition("<")
        score, storage = arguments.split(", ")[:2]
        found.setdefault((template, storage if "forward" in template else score), kernel)
    return list(found.values())


def test_plans_name_kernels():
    assert [kernel.header for kernel in named("gat", torch.float32, 4, 32)] == [
        "attention/cuda/forward.cuh",
        "attention/cuda/by_dst.cuh",
        "attention/cuda/by_src.cuh",
    ]
    (forward, *_) = named("dot", torch.bfloat16, 4, 128)
    assert forward.header == "attention/cuda/mma_forward.cuh"
    assert forward.expression.startswith("edgeless::cuda::mma_forward_kernel<edgeless::cuda::DotScore, __nv_bfloat16, ")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_compile(architecture, tmp_path):
    kernels = every() if EVERY else sample()[ARCHITECTURES.index(architecture) :: len(ARCHITECTURES)]
    images = compiled_together(kernels, architecture, store=Store(tmp_path / "kernels"), threads=os.cpu_count())
    for kernel, image in zip(kernels, images, strict=True):
        template = kernel.expression.partition("<")[0].rpartition(":")[2]
        assert image.kind == "cubin" and image.code.startswith(b"\x7fELF")
        assert template in image.name and image.name.encode() in image.code


PLANNED = plan_names.every() if EVERY else plan_names.sample()


@pytest.mark.parametrize("number", range(len(PLANNED)), ids=[kernel.expression for kernel in PLANNED])
def test_kernels_that_other_plans_name_compile(number, tmp_path):
    image = compiled(PLANNED[number], ARCHITECTURES[number % len(ARCHITECTURES)], store=Store(tmp_path))
    template = PLANNED[number].expression.partition("<")[0].rpartition(":")[2]
    assert image.kind == "cubin" and template in image.name and image.name.encode() in image.code


@pytest.mark.parametrize("number", range(len(OTHERS)), ids=[kernel.expression for kernel in OTHERS])
def test_other_kernels_compile(number, tmp_path):
    kernel = OTHERS[number]
    for architecture in ARCHITECTURES if EVERY else ARCHITECTURES[number % len(ARCHITECTURES) :][:1]:
        image = compiled(kernel, architecture, store=Store(tmp_path))
        template = kernel.expression.partition("<")[0].rpartition(":")[2]
        assert image.kind == "cubin" and image.code.startswith(b"\x7fELF")
        assert template in image.name and image.name.encode() in image.code


@pytest.mark.skipif(not USUAL.is_file(), reason="needs tests/packaging")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_of_the_pack_of_a_wheel_compile(architecture, tmp_path):
    kernels = list(read_log(USUAL))
    if not EVERY:  # other ones in each architecture
        kernels = kernels[ARCHITECTURES.index(architecture) * 131 :][:2]
    images = compiled_together(kernels, architecture, store=Store(tmp_path / "kernels"), threads=os.cpu_count())
    assert {image.kind for image in images} == {"cubin"}


@pytest.mark.skipif(not USUAL.is_file(), reason="needs tests/packaging")
def test_kernels_for_older_gpus_compile(tmp_path):
    """Those of the ops that shared/choices/gpus.py lists for compute capability 7.5."""
    if 75 not in installed_nvrtc().architectures():
        pytest.skip("this NVRTC compiles for newer GPUs only")
    assert set(gpus.OLDEST_OF.values()) == {75}
    kernels = [k for k in read_log(USUAL) if k.header.split("/")[0] in ("spmm", "graph", "common")]
    images = compiled_together(kernels if EVERY else kernels[::30], 75, store=Store(tmp_path), threads=os.cpu_count())
    assert {image.kind for image in images} == {"cubin"}


def test_every_kernel_of_a_header_is_compiled_here():
    """By its name alone: one that stands in no table and in no plan of attention is missing from these tests. Those of
    programs/ are compiled with texts that are generated (tests/pyg/test_generated_cuda.py).
    """
    named = {kernel.expression.partition("<")[0].rpartition(":")[2] for kernel in (*every(), *OTHERS)}
    written = {
        name
        for file in headers.sources().rglob("*.cuh")
        if file.parent.name != "programs"
        for name in re.findall(r"__global__[^;{]*?\b(\w+_kernel)\(", file.read_text())
    }
    assert len(written) > 50
    assert written - named == set()


def test_an_architecture_that_nvrtc_does_not_know_gets_ptx(tmp_path):
    newest = max(installed_nvrtc().architectures())
    (forward, *_) = named("gat", torch.float32, 4, 32)
    image = compiled(forward, newest + 50, store=Store(tmp_path))
    assert image.kind == "ptx" and f".target sm_{newest}".encode() in image.code


def test_an_architecture_that_is_too_old_is_an_error_in_words(tmp_path):
    (forward, *_) = named("gat", torch.float32, 4, 32)
    with pytest.raises(NvrtcError, match=r"compiles for sm_\d+ and later, not for sm_30: install a PyTorch"):
        compiled(forward, 30, store=Store(tmp_path))


def test_an_error_has_the_kernel_the_architecture_and_the_log(tmp_path):
    broken = Kernel("attention/cuda/forward.cuh", "edgeless::cuda::no_such_kernel<float>")
    with pytest.raises(CompileError, match=r"(?s)^edgeless::cuda::no_such_kernel<float> does not .* sm_90 .*no_such"):
        compiled(broken, 90, store=Store(tmp_path))


def test_a_kernel_is_read_back(tmp_path, monkeypatch):
    (forward, *_) = named("gat", torch.float32, 4, 32)
    first = compiled(forward, 90, store=Store(tmp_path / "kernels"))
    monkeypatch.setattr(compiler, "_images", {})
    monkeypatch.setattr(type(installed_nvrtc()), "compile", None)
    assert compiled(forward, 90, store=Store(tmp_path / "kernels")) == first

"""GPUs that the CUDA kernels cannot run on: the reason, and that it is known before a layer computes."""

import subprocess
import sys
import types

import pytest
import torch

import edgeless
from edgeless import kernels
from edgeless.choices import backends, gpus
from edgeless.kernels import NvrtcError

CUDA = torch.device("cuda", 0)


@pytest.fixture
def machine(monkeypatch):
    """A machine with one GPU, a driver and a compiler, each of which a test can replace."""

    class Nvrtc:
        version = (13, 0)

        @staticmethod
        def target(architecture):
            return f"sm_{architecture}" if architecture <= 121 else "compute_121"

    found = types.SimpleNamespace(
        capability=(9, 0), driver=types.SimpleNamespace(cuLaunchKernelEx=1), cuda=(13, 0), nvrtc=Nvrtc, asked=0
    )

    def capability(index):
        found.asked += 1
        return found.capability

    monkeypatch.setattr(gpus, "_refusals", {})
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Some GPU")
    monkeypatch.setattr(gpus, "_driver", lambda: found.driver)
    monkeypatch.setattr(gpus, "_driver_version", lambda: found.cuda)
    monkeypatch.setattr(kernels, "installed_nvrtc", lambda: found.nvrtc)
    monkeypatch.setattr(kernels.headers, "include_folders", lambda: [])
    for name in ("EDGELESS_KERNEL_PACKS", "EDGELESS_JIT"):
        monkeypatch.delenv(name, raising=False)
    return found


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0), (12, 1)])
@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_a_gpu_is_asked_once(machine, capability, device):
    machine.capability = capability
    assert gpus.gpu_refusal(torch.device(device)) is None
    assert gpus.gpu_refusal(torch.device(device)) is None
    assert machine.asked == 1


@pytest.mark.parametrize("capability, refused, taken", [
    ((7, 5), ["attention", "pair_attention", "relational_sum", "typed_mm", "neighbor_reduce"], ["spmm", "sddmm"]),
    ((7, 0), ["attention", "spmm", "sddmm", "neighbor_reduce", "graph"], []),
])  # fmt: skip
def test_an_old_gpu_has_the_kernels_that_it_can_run(machine, capability, refused, taken):
    machine.capability = capability
    for op in refused:
        assert gpus.gpu_refusal(CUDA, op).startswith(
            f"the GPU (Some GPU) has compute capability {capability[0]}.{capability[1]}, and the kernels of {op} need "
        )
    for op in taken:
        assert gpus.gpu_refusal(CUDA, op) is None


def test_every_op_that_an_old_gpu_can_run_is_one():
    assert set(gpus.OLDEST_OF) - {"graph"} <= {op for _, op in backends._KERNELS}


def test_before_cuda_is_initialized_nothing_is_decided(machine, monkeypatch):
    machine.capability = (7, 5)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert gpus.gpu_refusal(CUDA) is None and gpus.gpu_refusal(torch.device("cuda")) is None
    assert machine.asked == 0
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert gpus.gpu_refusal(CUDA) is not None


def test_without_a_compiler_there_are_words(machine, monkeypatch):
    def missing():
        raise NvrtcError("no NVRTC was found.")

    monkeypatch.setattr(kernels, "installed_nvrtc", missing)
    assert gpus.gpu_refusal(CUDA) == "the CUDA kernels cannot be compiled here: no NVRTC was found"


def test_without_headers_there_are_words(machine, monkeypatch):
    def missing():
        raise NvrtcError("cuda_fp16.h was not found.")

    monkeypatch.setattr(kernels.headers, "include_folders", missing)
    assert gpus.gpu_refusal(CUDA) == "the CUDA kernels cannot be compiled here: cuda_fp16.h was not found"


@pytest.mark.parametrize("name, value", [("EDGELESS_KERNEL_PACKS", "a.pack"), ("EDGELESS_JIT", "cached")])
def test_who_forbids_compiling_needs_no_compiler(machine, monkeypatch, name, value):
    machine.nvrtc = None
    monkeypatch.setenv(name, value)
    assert gpus.gpu_refusal(CUDA) is None


@pytest.mark.parametrize("driver, words", [
    (None, "the CUDA driver cannot be opened"),
    (types.SimpleNamespace(), "the CUDA driver is older than CUDA 11.8, which the kernels need"),
])  # fmt: skip
def test_a_driver_that_cannot_launch_is_refused(machine, driver, words):
    machine.driver = driver
    assert gpus.gpu_refusal(CUDA) == words


@pytest.mark.parametrize("cuda, taken", [((13, 0), True), ((13, 2), True), ((12, 9), False)])
def test_a_gpu_that_nvrtc_does_not_know_needs_a_driver_that_reads_its_ptx(machine, cuda, taken):
    machine.capability, machine.cuda = (15, 0), cuda
    refusal = gpus.gpu_refusal(CUDA)
    assert (refusal is None) == taken
    if not taken:
        assert refusal == (
            "NVRTC 13.0 does not know the GPU (sm_150), and the driver, of CUDA 12.9, is too old for what it would "
            "compile: install a newer driver"
        )


def test_an_older_driver_runs_what_needs_no_ptx(machine):
    """Machine code of a newer minor version of CUDA."""
    machine.cuda = (12, 0)
    assert gpus.gpu_refusal(CUDA) is None


def test_a_layer_is_told(machine, monkeypatch):
    machine.capability = (7, 0)
    words = "the GPU (Some GPU) has compute capability 7.0, and the kernels of spmm need 7.5"
    assert backends.kernel_refusal(CUDA, "spmm") == words
    assert backends.kernel_refusal(torch.device("cpu"), "spmm") is None
    from edgeless.functional import checks as functional_checks

    assert functional_checks.runs_reference("spmm", CUDA, "spmm")  # plain PyTorch, and no error
    with edgeless.backend("fused"), pytest.raises(edgeless.NotFusedError, match=r"^spmm: the GPU \(Some GPU\) has"):
        functional_checks.runs_reference("spmm", CUDA, "spmm")


def test_a_traced_call_takes_the_answer_as_a_constant(machine):
    machine.capability = (7, 0)

    @torch.compile(backend="eager", fullgraph=True)
    def said(x):
        return x + (1 if backends.kernel_refusal(CUDA, "spmm") else 2)

    assert said(torch.zeros(1)).item() == 1


def test_a_layer_on_a_cpu_asks_no_gpu():
    code = """
import sys, torch, edgeless
graph = edgeless.Graph.from_edge_index(torch.tensor([[0, 1], [1, 1]]), 2, 2)
edgeless.functional.spmm(graph, torch.ones(2, 3))
assert edgeless.choices.gpus._refusals == {} and not torch.cuda.is_initialized()
assert "edgeless.kernels" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

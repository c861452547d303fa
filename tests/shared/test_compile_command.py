"""``edgeless compile``: which kernels a pack gets, and what is told where it gets none."""

import pytest

from edgeless.__main__ import main
from edgeless.kernels import CompileError, Image, Kernel, NvrtcError, Pack, identity_of
from edgeless.tools.cli import compile_command


@pytest.fixture
def asked(monkeypatch):
    """The kernels and architectures that the command compiles; the images repeat them."""
    found = []

    def compiled_together(kernels, architecture, packs):
        found.extend((kernel, architecture) for kernel in kernels)
        return [Image("cubin", kernel.expression, str(architecture).encode()) for kernel in kernels]

    class Nvrtc:
        version = (13, 5)

        @staticmethod
        def target(architecture):
            return f"sm_{architecture}" if architecture <= 121 else "compute_121"

    monkeypatch.setattr(compile_command, "compiled_together", compiled_together)
    monkeypatch.setattr(compile_command, "installed_nvrtc", lambda: Nvrtc)
    return found


def test_a_pack_has_the_kernels_of_forward_and_backward(asked, tmp_path, capsys):
    file = tmp_path / "kernels.pack"
    assert main(["compile", "gt_H4_D128", "--dtype", "bf16", "--arch", "sm_80", "sm_90", "--out", str(file)]) == 0
    kernels = {kernel for kernel, _ in asked}
    assert {architecture for _, architecture in asked} == {80, 90}
    assert {kernel.header for kernel in kernels} == {
        f"attention/cuda/mma_{name}.cuh" for name in ("forward", "by_dst", "by_src")
    }
    modes = {kernel.expression[-2] for kernel in kernels}
    assert modes == {"0", "1"}  # without options and with them
    pack = Pack(file)
    assert len(pack) == 2 * len(kernels)
    for kernel in kernels:
        assert pack.get(identity_of(kernel, 90)) == Image("cubin", kernel.expression, b"90")
    said = capsys.readouterr().out
    assert said.startswith(f"{file}: {len(kernels)} kernels for sm_80, sm_90, ") and said.endswith(", by NVRTC 13.5\n")


def test_a_suite_names_its_kernels(asked, tmp_path):
    file = tmp_path / "kernels.pack"
    assert main(["compile", "--suite", "h200", "--arch", "sm_90", "--out", str(file)]) == 0
    headers = {kernel.header for kernel, _ in asked}
    assert {"attention/cuda/forward.cuh", "attention/cuda/mma_by_src.cuh"} <= headers
    assert len(Pack(file)) == len({kernel for kernel, _ in asked}) > 30
    assert all(isinstance(kernel, Kernel) for kernel, _ in asked)


@pytest.mark.parametrize("arguments, words", [
    (["--arch", "sm_90"], "compile needs an op, as in: edgeless compile gatv2_H8_D128"),
    (["gatv2_H1_D4096", "--arch", "sm_90"], "the plans of these ops name no kernel"),
    (["gatv2_H8_D128", "--arch", "90"], "--arch must be names such as sm_90, got '90'"),
    (["gatv2_H8_D128", "--arch", "sm_9\uff10"], "--arch must be names such as sm_90"),
    (["gatv2_H8_D128", "--arch", "sm_9000"], "--arch must be names such as sm_90"),
    (["gatv2_H8_D128", "--arch", "sm_90", "--graph", "nothing"], "--graph must be one of"),
    (["gatv2", "--arch", "sm_90"], "gatv2"),
    (["gatv2_H8_D128"], "--arch is needed, as in: --arch sm_90; a log of --kernels has its own"),
])  # fmt: skip
def test_what_cannot_be_compiled_is_told_in_a_line(asked, tmp_path, capsys, arguments, words):
    with pytest.raises(SystemExit) as left:
        raise SystemExit(main(["compile", *arguments, "--out", str(tmp_path / "pack")]))
    assert left.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("edgeless compile: ") and words in said and said.count("\n") == 1
    assert asked == [] and not (tmp_path / "pack").exists()


@pytest.mark.parametrize("error", [NvrtcError("no NVRTC was found"), CompileError("k does not compile:\nthe log")])
def test_an_error_of_the_compiler_is_told(monkeypatch, tmp_path, capsys, error):
    def compiled_together(kernels, architecture, packs):
        raise error

    monkeypatch.setattr(compile_command, "compiled_together", compiled_together)
    assert main(["compile", "gat_H4_D32", "--arch", "sm_90", "--out", str(tmp_path / "pack")]) == 2
    assert str(error) in capsys.readouterr().err


@pytest.mark.parametrize("name, words", [
    ("no folder/pack", "cannot be written (No such file or directory)"),
    (".", "must be a file, but is a directory"),
])  # fmt: skip
def test_a_file_that_cannot_be_written_is_told_before_anything_is_compiled(asked, tmp_path, capsys, name, words):
    file = tmp_path / name
    assert main(["compile", "gat_H4_D32", "--arch", "sm_90", "--out", str(file)]) == 2
    assert capsys.readouterr().err == f"edgeless compile: --out {file}: {words}\n"
    assert asked == []


def test_a_link_stays_one(asked, tmp_path):
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to("real")
    assert main(["compile", "gat_H4_D32", "--arch", "sm_90", "--out", str(tmp_path / "link")]) == 0
    assert (tmp_path / "link").is_symlink() and len(Pack(tmp_path / "real")) > 0


def test_an_architecture_that_the_compiler_does_not_know_is_told(asked, tmp_path, capsys):
    assert main(["compile", "gat_H4_D32", "--arch", "sm_130", "--out", str(tmp_path / "pack")]) == 0
    assert " kernels for compute_121, " in capsys.readouterr().out


def test_a_wrong_pack_is_told(asked, tmp_path, capsys, monkeypatch):
    def broken():
        raise ValueError("file must be a pack of kernels, but /etc/passwd is not")

    monkeypatch.setattr(compile_command, "default_packs", broken)
    assert main(["compile", "gat_H4_D32", "--arch", "sm_90", "--out", str(tmp_path / "pack")]) == 2
    assert capsys.readouterr().err.startswith("edgeless compile: EDGELESS_KERNEL_PACKS: file must be a pack")


# Kernels of a log -------------------------------------------------------------------------------------------------


@pytest.fixture
def log(tmp_path):
    file = tmp_path / "kernels.log"
    file.write_text("b.cuh\tk<2>\tsm_90\na.cuh\tk<1>\tsm_90\nb.cuh\tk<2>\tsm_80\nb.cuh\tk<2>\tsm_90\n")
    return file


ONE, TWO = Kernel("a.cuh", "k<1>"), Kernel("b.cuh", "k<2>")


def test_a_pack_has_the_kernels_of_a_log_for_its_architectures(asked, log, tmp_path, capsys):
    file = tmp_path / "kernels.pack"
    assert main(["compile", "--kernels", str(log), "--out", str(file)]) == 0
    assert asked == [(TWO, 80), (ONE, 90), (TWO, 90)]
    pack = Pack(file)
    assert len(pack) == 3 and pack.get(identity_of(ONE, 80)) is None
    assert pack.get(identity_of(TWO, 80)) == Image("cubin", "k<2>", b"80")
    assert capsys.readouterr().out.startswith(f"{file}: 2 kernels for sm_80, sm_90, ")


def test_a_log_is_compiled_for_other_architectures(asked, log, tmp_path):
    assert main(["compile", "--kernels", str(log), "--arch", "sm_86", "sm_120", "--out", str(tmp_path / "pack")]) == 0
    assert asked == [(ONE, 86), (TWO, 86), (ONE, 120), (TWO, 120)]


def test_several_logs_are_one_pack(asked, log, tmp_path):
    other = tmp_path / "other.log"
    other.write_text("c.cuh\tk<3>\tsm_90\nb.cuh\tk<2>\tsm_90\n")
    assert main(["compile", "--kernels", str(log), str(other), "--out", str(tmp_path / "pack")]) == 0
    assert asked == [(TWO, 80), (ONE, 90), (TWO, 90), (Kernel("c.cuh", "k<3>"), 90)]


@pytest.mark.parametrize("arguments, words", [
    (["gatv2_H8_D128"], "--kernels names the kernels, so op has no meaning beside it"),
    (["--suite", "h200"], "--kernels names the kernels, so --suite has no meaning beside it"),
    (["--dtype", "bf16"], "--kernels names the kernels, so --dtype has no meaning beside it"),
    (["--nodes", "0"], "--kernels names the kernels, so --nodes has no meaning beside it"),
    (["--arch", "90"], "--arch must be names such as sm_90, got '90'"),
])  # fmt: skip
def test_what_does_not_fit_a_log_is_told_in_a_line(asked, log, tmp_path, capsys, arguments, words):
    assert main(["compile", *arguments, "--kernels", str(log), "--out", str(tmp_path / "pack")]) == 2
    assert capsys.readouterr().err == f"edgeless compile: {words}\n"
    assert asked == [] and not (tmp_path / "pack").exists()


@pytest.mark.parametrize("text, words", [
    (None, "No such file or directory"),
    ("", "there is no kernel in it"),
    ("a.cuh k sm_90\n", "line 1 is not of the form header<TAB>expression<TAB>sm_90: 'a.cuh k sm_90'"),
])  # fmt: skip
def test_a_log_that_cannot_be_read_is_told(asked, tmp_path, capsys, text, words):
    file = tmp_path / "kernels.log"
    if text is not None:
        file.write_text(text)
    assert main(["compile", "--kernels", str(file), "--out", str(tmp_path / "pack")]) == 2
    assert capsys.readouterr().err == f"edgeless compile: --kernels {file}: {words}\n"
    assert asked == []

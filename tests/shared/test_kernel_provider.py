"""What the core gets kernels from, and the log of those that a process needs (EDGELESS_KERNEL_LOG)."""

import os
import subprocess
import sys
import threading
import time

import pytest

from edgeless.kernels import Image, Kernel, Store, identity_of, provider, read_log

KERNEL = ("a.cuh", "edgeless::cuda::k<float, 1>")


@pytest.fixture
def log(monkeypatch, tmp_path):
    """The file that the environment names, of a process that has needed no kernel yet and compiles none."""
    monkeypatch.setattr(provider, "_logged", {})
    monkeypatch.setattr(provider, "compiled", lambda kernel, architecture: Image("cubin", "_Zk", b"code"))
    monkeypatch.setenv("EDGELESS_KERNEL_LOG", str(tmp_path / "kernels.log"))
    return tmp_path / "kernels.log"


def test_every_kernel_is_a_line(log):
    assert provider.provide(*KERNEL, 90) == (b"code", "_Zk")
    provider.provide(*KERNEL, 90)
    provider.provide(*KERNEL, 80)
    provider.provide("b.cuh", "k", 90)
    lines = [
        "a.cuh\tedgeless::cuda::k<float, 1>\tsm_90",
        "a.cuh\tedgeless::cuda::k<float, 1>\tsm_80",
        "b.cuh\tk\tsm_90",
    ]
    assert log.read_text().splitlines() == lines
    assert read_log(log) == {Kernel(*KERNEL): {80, 90}, Kernel("b.cuh", "k"): {90}}


def test_a_text_has_a_name_and_no_line(log, monkeypatch):
    asked = []
    monkeypatch.setattr(provider, "compiled", lambda kernel, _: asked.append(kernel) or Image("cubin", "_Zk", b"code"))
    name, other = provider.named_text("a.cuh", "// one"), provider.named_text("a.cuh", "// two")
    assert name != other and name == provider.named_text("a.cuh", "// one")
    provider.provide(name, "k", 90)
    assert asked == [Kernel("a.cuh", "k", "// one")] and not log.exists()
    assert asked[0].source.endswith('#include "a.cuh"\n// one')
    assert len({identity_of(Kernel("a.cuh", "k", text), 90) for text in ("", "// one", "// two")}) == 3


def test_a_kernel_that_does_not_compile_is_in_it(log, monkeypatch):
    def broken(kernel, architecture):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(provider, "compiled", broken)
    with pytest.raises(RuntimeError, match="no compiler"):
        provider.provide(*KERNEL, 90)
    assert read_log(log) == {Kernel(*KERNEL): {90}}


@pytest.mark.parametrize("name", [None, ""])
def test_without_a_name_nothing_is_written(log, monkeypatch, tmp_path, name):
    monkeypatch.delenv("EDGELESS_KERNEL_LOG") if name is None else monkeypatch.setenv("EDGELESS_KERNEL_LOG", name)
    provider.provide(*KERNEL, 90)
    assert list(tmp_path.iterdir()) == []


def test_a_log_that_cannot_be_written_is_no_error(log, monkeypatch, tmp_path):
    monkeypatch.setenv("EDGELESS_KERNEL_LOG", str(tmp_path))
    with pytest.warns(UserWarning, match="EDGELESS_KERNEL_LOG=.* cannot be written: Is a directory"):
        assert provider.provide(*KERNEL, 90) == (b"code", "_Zk")


PROCESS = """
import sys
from edgeless.kernels import Image, provider
provider.compiled = lambda kernel, architecture: Image("cubin", "k", b"")
for number in range(200):
    provider.provide("a.cuh", f"k<{number}>" + "x" * 500, 90)
"""


def test_processes_append_whole_lines(log):
    children = [subprocess.Popen([sys.executable, "-c", PROCESS], env={**os.environ}) for _ in range(3)]
    assert [child.wait(timeout=120) for child in children] == [0, 0, 0]
    assert len(log.read_text().splitlines()) == 600
    assert read_log(log) == {Kernel("a.cuh", f"k<{number}>" + "x" * 500): {90} for number in range(200)}


@pytest.mark.parametrize(
    "line", ["a.cuh k sm_90", "a.cuh\tk\tsm_9", "a.cuh\tk\t90", "a.cuh\tk\tsm_90\tx", "a.cuh\t\tsm_90", ""]
)
def test_another_file_is_no_log(tmp_path, line):
    file = tmp_path / "kernels.log"
    file.write_text(f"a.cuh\tk\tsm_90\n{line}\n")
    with pytest.raises(ValueError, match=r"line 2 is not of the form header<TAB>expression<TAB>sm_90: "):
        read_log(file)


def test_bytes_that_are_no_text_are_no_log(tmp_path):
    (tmp_path / "kernels.log").write_bytes(bytes(range(128, 256)))
    with pytest.raises(ValueError, match="line 1 is not of the form"):
        read_log(tmp_path / "kernels.log")


# Kernels that are compiled beside each other --------------------------------------------------------------------------


def test_kernels_are_prepared_side_by_side(monkeypatch):
    """And in the background: the caller goes on, to launch the first of them."""
    together, given, told = threading.Barrier(4), [], threading.Event()

    def compiled(kernel, architecture):
        together.wait(timeout=60)
        given.append((kernel, architecture))
        if len(given) == 3:
            told.set()

    monkeypatch.setattr(provider, "compiled", compiled)
    provider.prepare([("a.cuh", "k<1>"), ("a.cuh", "k<2>"), ("b.cuh", "k<3>")], 90)
    assert given == []
    together.wait(timeout=60)
    assert told.wait(timeout=60)
    wanted = {(Kernel("a.cuh", "k<1>"), 90), (Kernel("a.cuh", "k<2>"), 90), (Kernel("b.cuh", "k<3>"), 90)}
    assert set(given) == wanted and len(given) == 3


def test_an_error_waits_for_the_launch(monkeypatch, capfd):
    ran = threading.Event()

    def broken(kernel, architecture):
        ran.set()
        raise RuntimeError("k does not compile")

    monkeypatch.setattr(provider, "compiled", broken)
    before = set(threading.enumerate())
    provider.prepare([("a.cuh", "k")], 90)
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=60)
    assert ran.wait(timeout=60) and capfd.readouterr() == ("", "")
    with pytest.raises(RuntimeError, match="k does not compile"):
        provider.provide("a.cuh", "k", 90)


def test_waits_of_more_than_two_seconds_are_told_once(monkeypatch, capsys, tmp_path):
    now = [0.0]

    def compiled(kernel, architecture):
        now[0] += 0.8
        return Image("cubin", "_Zk", b"code")

    monkeypatch.setattr(provider, "compiled", compiled)
    monkeypatch.setattr(provider, "_waited", 0.0)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(provider, "default_store", lambda: Store(tmp_path / "kernels"))
    for number in range(6):
        provider.provide("a.cuh", f"k<{number}>", 90)
        said = capsys.readouterr().err
        assert (said != "") == (number == 2)
        if said:
            assert said.startswith("edgeless: CUDA kernels are compiled for sm_90 at their first use and kept in ")
            assert str(tmp_path / "kernels") in said and said.count("\n") == 1


def test_kernels_that_are_not_kept_are_told_so(monkeypatch, capsys):
    monkeypatch.setattr(provider, "_waited", 0.0)
    monkeypatch.setattr(provider, "default_store", lambda: Store(None))
    provider._report(3.0, 90)
    assert "at their first use and not kept, since there is no home directory; " in capsys.readouterr().err


def test_the_core_has_its_kernels_from_here():
    """Without importing the compiler before a kernel is needed."""
    code = """
import sys
import edgeless
assert not any(name.startswith("edgeless.kernels") for name in sys.modules)
from edgeless._extension import _prepare, _provide
from edgeless import kernels
kernels.provider.provide = lambda *given: given
kernels.provider.prepare = lambda *given: print(given)
print(_provide("a.cuh", "k", 90))
assert edgeless._extension.provided == 1  # captures count them
_prepare([("a.cuh", "k")], 80)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "('a.cuh', 'k', 90)\n([('a.cuh', 'k')], 80)\n", done.stderr

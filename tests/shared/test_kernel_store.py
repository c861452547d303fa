"""Compiled kernels in memory, in packs and on the disk: a damaged file costs a compilation, never an answer."""

import errno
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from edgeless.kernels import (
    CompileError,
    Image,
    Kernel,
    NvrtcError,
    Store,
    compiler,
    headers,
    launch,
)
from edgeless.kernels import store as store_module
from edgeless.kernels.compiler import compiled, compiled_together, identity_of

KEY, OTHER = "a" * 64, "b" * 64
IMAGE = Image("cubin", "_Z6kernelv", bytes(range(256)) * 4)
KERNEL = Kernel("attention/cuda/forward.cuh", "edgeless::cuda::a_kernel<float>")


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "kernels")


# Files ------------------------------------------------------------------------------------------------------------


def test_an_image_comes_back(store):
    assert store.get(KEY) is None
    store.put(KEY, IMAGE)
    assert store.get(KEY) == IMAGE
    assert store.get(OTHER) is None
    assert Store(store.folder).get(KEY) == IMAGE  # another process


def test_the_folder_is_the_users_alone(store):
    store.put(KEY, IMAGE)
    assert store.folder.stat().st_mode & 0o777 == 0o700


def file_of(store):
    (file,) = store.folder.glob("*.kernel")
    return file


@pytest.mark.parametrize("size", [0, 1, 17, 18, 30, 49, 50, 60, 100, -1])
def test_a_file_that_is_cut_off_is_removed(store, size):
    store.put(KEY, IMAGE)
    file = file_of(store)
    file.write_bytes(file.read_bytes()[:size])
    assert store.get(KEY) is None
    assert not file.exists()


@pytest.mark.parametrize("at", [0, 10, 17, 18, 40, 49, 50, 55, 80, 120, 1000, -1])
def test_a_file_that_is_altered_is_removed(store, at):
    store.put(KEY, IMAGE)
    file = file_of(store)
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)
    assert store.get(KEY) is None
    assert not file.exists()


def test_a_file_of_somebody_else_is_no_image(store):
    store.put(KEY, IMAGE)
    file_of(store).write_bytes(b"\x7fELF" + bytes(1000))
    assert store.get(KEY) is None


def test_what_a_killed_writer_left_is_not_read(store):
    store.put(KEY, IMAGE)
    half = file_of(store)
    half.rename(store.folder / ".edgeless-0123456789abcdef.new.kernel")
    assert store.get(KEY) is None


def test_a_full_disk_is_no_error(store, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store_module, "whole_file", full)
    store.put(KEY, IMAGE)
    assert store.get(KEY) is None


@pytest.mark.parametrize("place", ["a file", "below a file", None])
def test_without_a_folder_nothing_is_kept(tmp_path, place):
    (tmp_path / "file").write_text("")
    folder = {"a file": tmp_path / "file", "below a file": tmp_path / "file" / "kernels", None: None}[place]
    store = Store(folder)
    with store.writing(KEY):
        store.put(KEY, IMAGE)
    assert store.get(KEY) is None


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written_to_is_read(store):
    store.put(KEY, IMAGE)
    store.folder.chmod(0o500)
    found = Store(store.folder)
    found.put(OTHER, IMAGE)
    assert (found.get(KEY), found.get(OTHER)) == (IMAGE, None)


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX permissions")
@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_folder_that_others_may_write_to_is_refused(tmp_path, mode):
    folder = tmp_path / "kernels"
    Store(folder).put(KEY, IMAGE)
    folder.chmod(mode)
    store = Store(folder)
    with pytest.warns(UserWarning, match="others may write to it. Set EDGELESS_KERNEL_CACHE"):
        assert store.get(KEY) is None
    assert store.get(KEY) is None  # and says so once


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX users")
def test_a_folder_of_another_user_is_refused(store, monkeypatch):
    store.put(KEY, IMAGE)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.warns(UserWarning, match="it belongs to another user"):
        assert Store(store.folder).get(KEY) is None


def test_what_was_not_used_for_the_longest_goes_first(tmp_path):
    size = len(store_module.packed(IMAGE))
    store = Store(tmp_path / "kernels", most_bytes=3 * size)
    for number, key in enumerate("abc"):
        store.put(key * 64, IMAGE)
        os.utime(store.folder / f"{key * 64}.kernel", (number, number))
    assert store.get("a" * 64) == IMAGE  # used now
    store.put("d" * 64, IMAGE)
    assert {key for key in "abcd" if store.get(key * 64)} == {"a", "c", "d"}


def test_the_environment_names_the_folder(monkeypatch, tmp_path):
    default = store_module.default_store.__wrapped__
    monkeypatch.setenv("EDGELESS_KERNEL_CACHE", str(tmp_path / "mine"))
    assert default().folder == tmp_path / "mine"
    monkeypatch.delenv("EDGELESS_KERNEL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if sys.platform == "linux":
        assert default().folder == tmp_path / "edgeless" / "kernels"


# Packs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture, other", compiler.RUNS_CODE_OF.items())
def test_packs_need_no_code_that_a_gpu_runs_of_an_older_one(fake, store, architecture, other):
    own, older = Image("cubin", "k", b"own"), Image("cubin", "k", b"older")
    pack = {identity_of(KERNEL, other): older}
    assert compiled(KERNEL, architecture, store=store, packs=[pack]) is older
    compiler._images.clear()
    both = {identity_of(KERNEL, architecture): own}
    assert compiled(KERNEL, architecture, store=store, packs=[pack, both]) is own
    compiler._images.clear()
    assert fake.given == []
    pack[identity_of(KERNEL, other)] = Image("ptx", "k", b"text")  # which the driver would have to compile
    assert compiled(KERNEL, architecture, store=store, packs=[pack]).code not in (b"text", b"older")
    assert len(fake.given) == 1


def test_code_of_another_generation_is_not_taken(fake, store):
    pack = {identity_of(KERNEL, 80): IMAGE, identity_of(KERNEL, 86): IMAGE}
    assert compiled(KERNEL, 90, store=store, packs=[pack]) is not IMAGE
    assert compiled(KERNEL, 80, store=store, packs=[{identity_of(KERNEL, 86): IMAGE}]) is not IMAGE
    for architecture, other in compiler.RUNS_CODE_OF.items():
        assert architecture // 10 == other // 10 and architecture > other


def test_kernels_are_looked_for_in_packs_that_nobody_named(fake, store, monkeypatch):
    monkeypatch.setattr(compiler, "default_packs", lambda: ({identity_of(KERNEL, 90): IMAGE},))
    assert compiled(KERNEL, 90, store=store) is IMAGE
    assert fake.given == []


# Compiling, with a compiler that counts ---------------------------------------------------------------------------


class Compiler:
    """Stands for NVRTC: what it makes tells what it was given."""

    version = (13, 0)

    def __init__(self, seconds=0.0):
        self.given, self._seconds = [], seconds

    def target(self, architecture):
        return f"sm_{architecture}"

    def compile(self, source, expression, target, options):
        self.given.append((source, expression, target, options))
        time.sleep(self._seconds)
        if "broken" in expression:
            raise CompileError(f"{expression} does not compile for {target}")
        return Image("cubin", expression, f"{source} {target}".encode())


@pytest.fixture
def fake(monkeypatch):
    made = Compiler()
    monkeypatch.setattr(compiler, "installed_nvrtc", lambda: made)
    monkeypatch.setattr(compiler, "_images", {})
    monkeypatch.setattr(compiler, "_locks", {})
    monkeypatch.setattr(headers, "digest_of_cuda", lambda: "0")
    monkeypatch.setattr(headers, "include_folders", lambda: ["/include"])
    return made


def forget(monkeypatch):
    monkeypatch.setattr(compiler, "_images", {})


def test_a_kernel_is_compiled_once(fake, store, monkeypatch):
    first = compiled(KERNEL, 90, store=store)
    assert compiled(KERNEL, 90, store=store) is first
    forget(monkeypatch)  # another process
    assert compiled(KERNEL, 90, store=store) == first
    assert [(expression, target) for _, expression, target, _ in fake.given] == [(KERNEL.expression, "sm_90")]
    assert '#include "attention/cuda/forward.cuh"' in fake.given[0][0]
    assert {"--std=c++20", "-default-device", "-I/include"} == set(fake.given[0][3])


CHANGES = {
    "header": lambda patch, made: (Kernel("attention/cuda/by_dst.cuh", KERNEL.expression), 90),
    "expression": lambda patch, made: (Kernel(KERNEL.header, "edgeless::cuda::a_kernel<double>"), 90),
    "architecture": lambda patch, made: (KERNEL, 80),
    "sources": lambda patch, made: patch.setattr(headers, "digest_of_sources", lambda: "1") or (KERNEL, 90),
    "options": lambda patch, made: patch.setattr(compiler, "OPTIONS", ("--std=c++17",)) or (KERNEL, 90),
    "compiler": lambda patch, made: setattr(made, "version", (13, 1)) or (KERNEL, 90),
    "headers of CUDA": lambda patch, made: patch.setattr(headers, "digest_of_cuda", lambda: "1") or (KERNEL, 90),
}


@pytest.mark.parametrize("change", CHANGES)
def test_everything_that_code_depends_on_is_in_its_key(fake, store, monkeypatch, change):
    compiled(KERNEL, 90, store=store)
    forget(monkeypatch)
    compiled(*CHANGES[change](monkeypatch, fake), store=store)
    assert len(fake.given) == 2


def test_memory_and_packs_do_not_ask_which_compiler_there_is(fake, store, monkeypatch):
    """A pack is made on one machine and read on another, whose NVRTC is of another version or missing."""
    identity = identity_of(KERNEL, 90)
    fake.version = (12, 4)
    assert identity_of(KERNEL, 90) == identity
    pack = {identity: IMAGE}

    def missing():
        raise NvrtcError("no NVRTC was found")

    monkeypatch.setattr(compiler, "installed_nvrtc", missing)
    assert compiled(KERNEL, 90, store=store, packs=[{}, pack]) is IMAGE
    assert compiled(KERNEL, 90, store=store) is IMAGE
    with pytest.raises(NvrtcError, match="no NVRTC was found"):
        compiled(KERNEL, 80, store=store, packs=[pack])


def test_cached_forbids_to_compile(fake, store, monkeypatch):
    monkeypatch.setenv("EDGELESS_JIT", "cached")
    with pytest.raises(NvrtcError, match=r"a_kernel<float> is not compiled for sm_90 yet, and EDGELESS_JIT=cached"):
        compiled(KERNEL, 90, store=store)
    monkeypatch.delenv("EDGELESS_JIT")
    image = compiled(KERNEL, 90, store=store)
    forget(monkeypatch)
    monkeypatch.setenv("EDGELESS_JIT", "cached")
    assert compiled(KERNEL, 90, store=store) == image


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_child_does_not_wait_for_a_thread_that_it_does_not_have(fake, store):
    fake._seconds = 1.0
    thread = threading.Thread(target=compiled, args=(KERNEL, 90), kwargs={"store": store})
    thread.start()
    while not fake.given:
        time.sleep(0.001)
    child = os.fork()
    if child == 0:
        fake._seconds = 0.0
        signal.alarm(20)
        os._exit(compiled(KERNEL, 90, store=Store(None)).name != KERNEL.expression)
    assert os.waitpid(child, 0)[1] == 0
    thread.join()


def test_another_value_of_the_environment_is_an_error(fake, store, monkeypatch):
    monkeypatch.setenv("EDGELESS_JIT", "never")
    with pytest.raises(ValueError, match="EDGELESS_JIT must be 'cached' or not be set, got 'never'"):
        compiled(KERNEL, 90, store=store)


@pytest.mark.parametrize("grid, arguments, error", [
    ((1,), [4], TypeError),
    ((1,), [[1, 2]], TypeError),
    ((1, 1, 1, 1), [], ValueError),
    ((), [], ValueError),
])  # fmt: skip
def test_a_launch_checks_what_it_is_given(grid, arguments, error):
    with pytest.raises(error, match="^launch: (arguments|grid) must"):
        launch(KERNEL, grid, 32, arguments)


def test_threads_compile_a_kernel_once(fake, store):
    fake._seconds = 0.1
    found, begin = [], threading.Barrier(8)

    def want():
        begin.wait()
        found.append(compiled(KERNEL, 90, store=store))

    threads = [threading.Thread(target=want) for _ in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len(found) == 8 and len(fake.given) == 1


def test_other_kernels_are_compiled_at_the_same_time(fake, store, capsys):
    fake._seconds = 0.3
    kernels = [Kernel(KERNEL.header, f"k{number}") for number in range(4)]
    begin = time.monotonic()
    images = compiled_together(kernels, 90, store=store, threads=4)
    assert time.monotonic() - begin < 1.0
    assert [image.name for image in images] == ["k0", "k1", "k2", "k3"]
    assert capsys.readouterr().err == ""


def test_a_long_time_is_told_once(fake, store, capsys, monkeypatch):
    monkeypatch.setattr(compiler, "SECONDS_TO_SAY", 0.01)
    fake._seconds = 0.02
    compiled_together([KERNEL], 90, store=store)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert re.match(r"edgeless: compiled CUDA kernels for sm_90 in \d+\.\d s; they are kept in ", said)


def test_an_error_is_not_kept(fake, store):
    broken = Kernel(KERNEL.header, "broken")
    for _ in range(2):
        with pytest.raises(CompileError, match="broken does not compile for sm_90"):
            compiled(broken, 90, store=store)
    assert len(fake.given) == 2


PROCESS = """
    import sys, time
    from pathlib import Path
    from edgeless.kernels import Image, Kernel, Store, compiled, compiler, headers

    class Compiler:
        version = (13, 0)
        target = staticmethod(lambda architecture: f"sm_{architecture}")
        def compile(self, source, expression, target, options):
            with open(sys.argv[1] + "/count", "a") as count:
                count.write("x")
            time.sleep(0.5)
            return Image("cubin", expression, b"code")

    headers.digest_of_cuda = lambda: "0"
    headers.include_folders = lambda: []
    made = Compiler()
    compiler.installed_nvrtc = lambda: made
    while time.time() < float(sys.argv[2]):
        time.sleep(0.001)
    image = compiled(Kernel("a.cuh", "kernel"), 90, store=Store(Path(sys.argv[1]) / "kernels"))
    print(image.code.decode())
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs locks of POSIX")
def test_processes_that_start_together_compile_a_kernel_once(tmp_path):
    script = tmp_path / "process.py"
    script.write_text(textwrap.dedent(PROCESS))
    command = [sys.executable, str(script), str(tmp_path), str(time.time() + 8)]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [child.communicate(timeout=60)[0] for child in children] == ["code\n"] * 3
    assert (tmp_path / "count").read_text() == "x"

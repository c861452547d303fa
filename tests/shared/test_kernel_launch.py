"""Loading and launching kernels without a GPU: a library in the place of the driver writes down what it is told."""

import os
import shutil
import subprocess
import sys
import textwrap

import pytest

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the driver is replaced by way of LD_LIBRARY_PATH"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler"),
]

# Every function appends a line to the file that FAKE_DRIVER_LOG names; FAKE_DRIVER_FAILS names one that fails.
DRIVER = r"""
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int say(const char* name, const char* format, ...) {
  FILE* file = fopen(getenv("FAKE_DRIVER_LOG"), "a");
  va_list rest;
  va_start(rest, format);
  fprintf(file, "%s ", name);
  vfprintf(file, format, rest);
  fprintf(file, "\n");
  fclose(file);
  const char* fails = getenv("FAKE_DRIVER_FAILS");
  return fails && !strcmp(fails, name) ? 2 : 0;
}

int cuGetErrorString(int error, const char** text) { *text = error == 2 ? "out of memory" : "?"; return 0; }
int cuCtxGetDevice(int* device) { *device = atoi(getenv("FAKE_DRIVER_DEVICE")); return 0; }
int cuDeviceGetAttribute(int* value, int which, int device) {
  *value = which == 75 ? 8 + device : which == 76 ? 6 : -1;
  return 0;
}
int cuStreamIsCapturing(void* stream, int* status) { *status = stream == (void*)99; return 0; }
int cuModuleLoadData(void** module, const void* code) {
  *module = (void*)7;
  return say("cuModuleLoadData", "%.5s", (const char*)code);
}
int cuModuleGetFunction(void** function, void* module, const char* name) {
  *function = (void*)11;
  return say("cuModuleGetFunction", "%ld %s", (long)module, name);
}
int cuFuncSetAttribute(void* function, int which, int value) {
  return say("cuFuncSetAttribute", "%ld %d %d", (long)function, which, value);
}
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void* function, int block, size_t bytes) {
  *blocks = 3;
  return 0;
}
#ifndef OLD
struct Attribute { int id; char pad[4]; union { char bytes[64]; unsigned numbers[3]; } value; };
struct Config { unsigned grid[3], block[3], shared; void* stream; struct Attribute* attributes; unsigned count; };
int cuLaunchKernelEx(const struct Config* c, void* function, void** arguments, void** extra) {
  char attributes[200] = "";
  for (unsigned at = 0; at < c->count; ++at) {
    const unsigned* n = c->attributes[at].value.numbers;
    sprintf(attributes + strlen(attributes), " [%d: %u %u %u]", c->attributes[at].id, n[0], n[1], n[2]);
  }
  const char* format = "%ld grid %u %u %u block %u %u %u shared %u stream %ld%s arguments %lld %g";
  return say("cuLaunchKernelEx", format, (long)function, c->grid[0], c->grid[1], c->grid[2], c->block[0],
             c->block[1], c->block[2], c->shared, (long)c->stream, attributes,
             *(long long*)arguments[0], *(double*)arguments[1]);
}
#endif
"""

SCRIPT = """
import ctypes, sys
import torch
from edgeless.kernels import Image, Kernel, compiler, launch, launching

asked = []
def compiled(kernel, architecture):
    asked.append((kernel.expression, architecture))
    return Image("cubin", "_Zmangled", b"CODE" + bytes(3))
launching.compiled = compiled
kernel, other = Kernel("a.cuh", "k<1>"), Kernel("a.cuh", "k<2>")
numbers = [ctypes.c_longlong(42), ctypes.c_double(0.5)]
setenv = ctypes.CDLL(None).setenv  # that the driver sees
"""


@pytest.fixture(scope="module")
def drivers(tmp_path_factory):
    """Folders of a driver, and of one that is too old."""
    out = {}
    for name, flags in (("new", []), ("old", ["-DOLD"])):
        out[name] = tmp_path_factory.mktemp(name)
        source = out[name] / "driver.c"
        source.write_text(DRIVER)
        subprocess.run(["cc", "-shared", "-fPIC", *flags, "-o", out[name] / "libcuda.so.1", source], check=True)
    return out


@pytest.fixture
def told(drivers, tmp_path):
    """Runs Python lines behind SCRIPT with such a driver: (what they print, what the driver was told)."""

    def run(lines, driver="new"):
        log = tmp_path / "log"
        log.write_text("")
        env = {**os.environ, "LD_LIBRARY_PATH": str(drivers.get(driver, tmp_path)), "FAKE_DRIVER_LOG": str(log)}
        env.update(FAKE_DRIVER_FAILS="", FAKE_DRIVER_DEVICE="0")
        code = SCRIPT + textwrap.dedent(lines)
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=100)
        assert done.returncode in (0, 1), done.stderr
        return done.stdout + done.stderr, log.read_text().splitlines()

    return run


def test_a_kernel_is_loaded_once_and_launched(told):
    said, log = told(
        """
        for at in range(2):
            launch(kernel, (5, 6, 7), 128, numbers, stream=13)
        launch(other, (5,), 64, numbers, dynamic_shared_bytes=100_000, cluster=4, cooperative=True)
        print(asked)
        """
    )
    assert said.strip() == "[('k<1>', 86), ('k<2>', 86)]"
    assert log == [
        "cuModuleLoadData CODE",
        "cuModuleGetFunction 7 _Zmangled",
        "cuLaunchKernelEx 11 grid 5 6 7 block 128 1 1 shared 0 stream 13 arguments 42 0.5",
        "cuLaunchKernelEx 11 grid 5 6 7 block 128 1 1 shared 0 stream 13 arguments 42 0.5",
        "cuModuleLoadData CODE",
        "cuModuleGetFunction 7 _Zmangled",
        "cuFuncSetAttribute 11 8 100000",
        "cuLaunchKernelEx 11 grid 5 1 1 block 64 1 1 shared 100000 stream 0 [2: 1 0 0] [4: 4 1 1] arguments 42 0.5",
    ]


def test_a_tensor_is_a_pointer(told):
    said, log = told(
        """
        t = torch.zeros(3)
        launch(kernel, (1,), 32, [t, ctypes.c_double(2)])
        print(t.data_ptr())
        """
    )
    assert log[-1].endswith(f"arguments {said.strip()} 2")


def test_every_device_loads_code_of_its_own_architecture(told):
    said, log = told(
        """
        for device in (b"0", b"1", b"0"):
            setenv(b"FAKE_DRIVER_DEVICE", device, 1)
            launch(kernel, (1,), 32, numbers)
        print(asked)
        """
    )
    assert said.strip() == "[('k<1>', 86), ('k<1>', 96)]"
    assert sum(line.startswith("cuModuleLoadData") for line in log) == 2


def test_nothing_is_loaded_during_a_capture(told):
    said, log = told(
        """
        try:
            launch(kernel, (1,), 32, numbers, stream=99)
        except RuntimeError as error:
            print(error)
        launch(kernel, (1,), 32, numbers)
        launch(kernel, (1,), 32, numbers, stream=99)
        """
    )
    assert said.startswith("edgeless: k<1> is not loaded, and nothing can be loaded while a CUDA graph is captured")
    assert len(said.splitlines()) == 1 and len(log) == 4


def test_what_the_driver_refuses_is_an_error_in_its_words(told):
    said, _ = told(
        """
        for name in (b"cuModuleLoadData", b"cuModuleGetFunction", b"cuLaunchKernelEx", b"cuFuncSetAttribute"):
            setenv(b"FAKE_DRIVER_FAILS", name, 1)
            try:
                launch(kernel, (1,), 32, numbers, dynamic_shared_bytes=50_000)
            except RuntimeError as error:
                print(error)
        setenv(b"FAKE_DRIVER_FAILS", b"", 1)
        launch(kernel, (1,), 32, numbers)
        """
    )
    assert said.splitlines() == [
        "edgeless: to load k<1> failed: out of memory",
        "edgeless: to find the kernel _Zmangled failed: out of memory",
        "edgeless: to launch a kernel failed: out of memory",
        "edgeless: to let a kernel have 50000 bytes of shared memory failed: out of memory",
    ]


def test_without_a_driver_and_with_an_old_one_there_are_words(told):
    said, _ = told("launch(kernel, (1,), 32, numbers)", driver="none")
    assert "the CUDA driver (libcuda.so.1) cannot be opened: is there an NVIDIA GPU?" in said
    said, _ = told("launch(kernel, (1,), 32, numbers)", driver="old")
    assert "the CUDA driver has no cuLaunchKernelEx: it is older than CUDA 11.8; install a newer one" in said


def test_an_error_of_the_compiler_comes_through(told):
    said, log = told(
        """
        from edgeless.kernels import CompileError
        def broken(kernel, architecture):
            raise CompileError("k<1> does not compile")
        launching.compiled = broken
        try:
            launch(kernel, (1,), 32, numbers)
        except CompileError as error:
            print("caught", error)
        """
    )
    assert said.strip() == "caught k<1> does not compile" and log == []


def test_threads_launch_at_the_same_time(told):
    said, log = told(
        """
        import threading
        threads = [threading.Thread(target=launch, args=(kernel, (1,), 32, numbers)) for _ in range(8)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        """
    )
    assert said == ""
    assert sum(line.startswith("cuLaunchKernelEx") for line in log) == 8


def test_importing_opens_no_driver(told):
    said, _ = told("print('libcuda' in open('/proc/self/maps').read())")
    assert said.strip() == "False"

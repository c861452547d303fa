"""Loading and launching kernels without a GPU: a library in the place of the driver writes down what it is told."""

import os
import shutil
import subprocess
import sys
import textwrap

import pytest
import torch

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
int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int* version) { *version = 12090; return 0; }
static __thread void* context;  // of a thread that has one; with FAKE_DRIVER_CONTEXTS all have
static int has_context() { return context || *getenv("FAKE_DRIVER_CONTEXTS"); }
int cuCtxGetCurrent(void** found) { *found = has_context() ? (void*)5 : 0; return 0; }
int cuCtxSetCurrent(void* given) { context = given; return say("cuCtxSetCurrent", "%ld", (long)given); }
int cuDevicePrimaryCtxRetain(void** found, int device) {
  *found = (void*)(20L + device);
  return say("cuDevicePrimaryCtxRetain", "%d", device);
}
int cuCtxGetDevice(int* device) {
  *device = atoi(getenv("FAKE_DRIVER_DEVICE"));
  return has_context() ? 0 : 201;
}
int cuMemsetD8Async(unsigned long long memory, unsigned char value, size_t bytes, void* stream) { return 0; }
#ifndef SILENT
int cuFuncGetParamInfo(void* function, size_t index, size_t* offset, size_t* size) {
  const char* sizes = getenv("FAKE_DRIVER_SIZES");  // a digit for each parameter
  if (index >= strlen(sizes)) return 1;
  *offset = 8 * index;
  *size = sizes[index] - '0';
  return 0;
}
#endif
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
  static long number = 11;
  *function = (void*)number++;
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
from edgeless.kernels import Image, Kernel, compiler, launch, provider

asked = []
def compiled(kernel, architecture):
    asked.append((kernel.expression, architecture))
    return Image("cubin", "_Zmangled", b"CODE" + bytes(3))
provider.compiled = compiled
kernel, other = Kernel("a.cuh", "edgeless::k<1>"), Kernel("a.cuh", "edgeless::k<2>")
numbers = [ctypes.c_longlong(42), ctypes.c_double(0.5)]
setenv = ctypes.CDLL(None).setenv  # that the driver sees
"""


@pytest.fixture(scope="module")
def drivers(tmp_path_factory):
    """Folders of a driver, of one that does not tell parameters, as before CUDA 12.4, and of one that is too old."""
    out = {}
    for name, flags in (("new", []), ("silent", ["-DSILENT"]), ("old", ["-DOLD"])):
        out[name] = tmp_path_factory.mktemp(name)
        source = out[name] / "driver.c"
        source.write_text(DRIVER)
        subprocess.run(["cc", "-shared", "-fPIC", *flags, "-o", out[name] / "libcuda.so.1", source], check=True)
    return out


@pytest.fixture
def told(drivers, tmp_path):
    """Runs Python lines behind SCRIPT with such a driver: (what they print, what the driver was told)."""

    def run(lines, driver="new", **environment):
        log = tmp_path / "log"
        log.write_text("")
        env = {**os.environ, "LD_LIBRARY_PATH": str(drivers.get(driver, tmp_path)), "FAKE_DRIVER_LOG": str(log)}
        env.update(FAKE_DRIVER_FAILS="", FAKE_DRIVER_DEVICE="0", FAKE_DRIVER_CONTEXTS="all", FAKE_DRIVER_SIZES="88")
        env.update(environment)
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
    assert said.strip() == "[('edgeless::k<1>', 86), ('edgeless::k<2>', 86)]"
    assert log == [
        "cuModuleLoadData CODE",
        "cuModuleGetFunction 7 _Zmangled",
        "cuLaunchKernelEx 11 grid 5 6 7 block 128 1 1 shared 0 stream 13 arguments 42 0.5",
        "cuLaunchKernelEx 11 grid 5 6 7 block 128 1 1 shared 0 stream 13 arguments 42 0.5",
        "cuModuleLoadData CODE",
        "cuModuleGetFunction 7 _Zmangled",
        "cuFuncSetAttribute 12 8 100000",
        "cuLaunchKernelEx 12 grid 5 1 1 block 64 1 1 shared 100000 stream 0 [2: 1 0 0] [4: 4 1 1] arguments 42 0.5",
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
    assert said.strip() == "[('edgeless::k<1>', 86), ('edgeless::k<1>', 96)]"
    assert sum(line.startswith("cuModuleLoadData") for line in log) == 2


def launched(log):
    """(kernel, bytes) of each launch, and of each time that a kernel was allowed more shared memory."""
    words = [line.split() for line in log]
    allowed = [(line[1], line[3]) for line in words if line[0] == "cuFuncSetAttribute"]
    return [(line[1], line[11]) for line in words if line[0] == "cuLaunchKernelEx"], allowed


def test_a_kernel_is_allowed_more_shared_memory_once_on_each_device(told):
    _, log = told(
        """
        for device in (b"0", b"1"):
            setenv(b"FAKE_DRIVER_DEVICE", device, 1)
            for size in (0, 50_000, 40_000, 60_000, 50_000):
                launch(kernel, (1,), 32, numbers, dynamic_shared_bytes=size)
        """
    )
    launches, allowed = launched(log)
    sizes = ["0", "50000", "40000", "60000", "50000"]
    assert launches == [(kernel, size) for kernel in ("11", "12") for size in sizes]
    assert allowed == [(kernel, size) for kernel in ("11", "12") for size in ("50000", "60000")]


def test_a_thread_without_a_context_gets_that_of_the_device(told):
    """As the CUDA runtime does: device 0, unless another was chosen."""
    _, log = told(
        """
        import threading
        launch(kernel, (1,), 32, numbers)
        launch(kernel, (1,), 32, numbers)
        thread = threading.Thread(target=launch, args=(kernel, (1,), 32, numbers))
        thread.start()
        thread.join()
        """,
        FAKE_DRIVER_CONTEXTS="",
    )
    calls = [line for line in log if not line.startswith("cuModule")]
    entered = ["cuDevicePrimaryCtxRetain 0", "cuCtxSetCurrent 20"]
    launch = "cuLaunchKernelEx 11 grid 1 1 1 block 32 1 1 shared 0 stream 0 arguments 42 0.5"
    assert calls == [*entered, launch, launch, *entered, launch]
    assert log[:2] == entered  # before code is loaded


def test_a_grid_without_blocks_loads_a_kernel_alone(told):
    said, log = told(
        """
        launch(kernel, (0,), 32, numbers)
        launch(kernel, (3,), 32, numbers, stream=99)
        """
    )
    assert not said and [line.split()[0] for line in log] == [
        "cuModuleLoadData",
        "cuModuleGetFunction",
        "cuLaunchKernelEx",
    ]
    assert log[-1].startswith("cuLaunchKernelEx 11 grid 3 1 1")


@pytest.mark.parametrize("sizes, found", [("84", "[8, 4]"), ("8", "[8]")])
def test_arguments_of_other_sizes_are_refused(told, sizes, found):
    said, log = told(
        """
        try:
            launch(kernel, (1,), 32, numbers)
        except RuntimeError as error:
            print(error)
        """,
        FAKE_DRIVER_SIZES=sizes,
    )
    assert said == f"edgeless: edgeless::k<1> has parameters of {found} bytes, got arguments of [8, 8]\n"
    assert launched(log) == ([], [])


def test_a_driver_that_does_not_tell_sizes_launches(told):
    said, log = told("launch(kernel, (1,), 32, numbers)", driver="silent", FAKE_DRIVER_SIZES="8")
    assert said == "" and len(launched(log)[0]) == 1


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
    assert said.startswith(
        "edgeless: edgeless::k<1> is not loaded, and nothing can be loaded while a CUDA graph is captured"
    )
    assert len(said.splitlines()) == 1 and len(log) == 4


def test_what_the_driver_refuses_is_an_error_in_its_words(told):
    said, _ = told(
        """
        for name in (b"cuModuleLoadData", b"cuModuleGetFunction", b"cuFuncSetAttribute", b"cuLaunchKernelEx"):
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
        "edgeless: to load edgeless::k<1> failed: out of memory",
        "edgeless: to find the kernel _Zmangled failed: out of memory",
        "edgeless: to let a kernel have 50000 bytes of shared memory failed: out of memory",
        "edgeless: to launch edgeless::k<1> failed: out of memory",
    ]


def test_without_a_driver_and_with_an_old_one_there_are_words(told):
    said, _ = told("launch(kernel, (1,), 32, numbers)", driver="none")
    assert "the CUDA driver (libcuda.so.1) cannot be opened: is there an NVIDIA GPU?" in said
    said, _ = told("launch(kernel, (1,), 32, numbers)", driver="old")
    assert "the CUDA driver has no cuLaunchKernelEx: it is older than CUDA 11.8; install a newer one" in said


@pytest.mark.parametrize("driver, words", [
    ("new", "None (12, 9)"),
    ("old", "the CUDA driver is older than CUDA 11.8, which the kernels need (12, 9)"),
    ("none", "the CUDA driver cannot be opened"),
])  # fmt: skip
def test_layers_ask_the_driver_before_they_compute(told, driver, words):
    said, log = told(
        """
        from edgeless.choices import gpus
        print(gpus._driver_refusal(), gpus._driver_version() if gpus._driver() else "")
        """,
        driver=driver,
    )
    assert said.strip() == words and log == []


def test_an_error_of_the_compiler_comes_through(told):
    said, log = told(
        """
        from edgeless.kernels import CompileError
        def broken(kernel, architecture):
            raise CompileError("edgeless::k<1> does not compile")
        provider.compiled = broken
        try:
            launch(kernel, (1,), 32, numbers)
        except CompileError as error:
            print("caught", error)
        """
    )
    assert said.strip() == "caught edgeless::k<1> does not compile" and log == []


def test_an_error_that_python_raises_ends_no_thread(told):
    """Whatever it is, and in a thread of Python as well; the next launch asks again."""
    said, log = told(
        """
        import threading
        def interrupted(kernel, architecture):
            raise KeyboardInterrupt("now")
        def nothing(kernel, architecture):
            return Image("cubin", 3, b"")
        def attempt():
            try:
                launch(kernel, (1,), 32, numbers)
            except BaseException as error:
                print(type(error).__name__, error)
        for function in (interrupted, nothing):
            provider.compiled = function
            attempt()
            thread = threading.Thread(target=attempt)
            thread.start()
            thread.join()
        provider.compiled = compiled
        attempt()
        """
    )
    lines = said.splitlines()
    assert lines[:2] == ["KeyboardInterrupt now"] * 2 and len(lines) == 4
    assert all(line.startswith("RuntimeError ") for line in lines[2:])
    assert len(launched(log)[0]) == 1


def test_a_kernel_that_is_launched_is_logged(told, tmp_path):
    log = tmp_path / "kernels.log"
    told(
        """
        for kernel_ in (kernel, other, kernel):
            launch(kernel_, (1,), 32, numbers)
        """,
        EDGELESS_KERNEL_LOG=str(log),
    )
    assert log.read_text() == "a.cuh\tedgeless::k<1>\tsm_86\na.cuh\tedgeless::k<2>\tsm_86\n"


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


@pytest.mark.skipif(torch.version.cuda is not None, reason="a torch that is built for CUDA opens the driver itself")
def test_importing_opens_no_driver(told):
    said, _ = told("print('libcuda.so' in open('/proc/self/maps').read())")
    assert said.strip() == "False"

"""Every CUDA source compiles for sm_80 and sm_90, so that a change on a machine without a GPU cannot break it.

What has the same code for both is compiled for sm_80, whose instructions sm_90 has too. Of the attention kernels, which
are many of a few templates, every sixteenth one of float32 and every 32nd one of other types: what is left out differs
in a number, and test_kernels.py compiles one of each template and type. Of instances of templates those of float32 are
compiled for sm_80 and the others for sm_90. Instances of one template for other types are compiled as one unit, since
their header takes longest, and code is optimised as little as takes the least time: no error comes of optimising. No
code for the host is made, which takes half of the time: the compiler for the device reads the host's functions too, and
says what is wrong with them.

The CPU build of torch has all headers that the sources may use: c10/cuda is there, the CUDA libraries' own headers
(cuBLAS, cuSPARSE, cuSOLVER), which ATen/cuda/CUDAContext.h asks for, are not. Where the toolkit lacks them too, they
are taken from the PyPI wheels nvidia-cublas, nvidia-cusparse and nvidia-cusolver if those are installed.
"""

import os
import re
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import groupby
from pathlib import Path

import pytest
from torch.utils import cpp_extension

from edgeless import _C

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "core_cuda"
# Relative names, sorted: what setup.py adds to the CUDA build.
SOURCES = sorted(str(p.relative_to(ROOT)) for p in CORE.rglob("*") if p.name.endswith((".cu", "_cuda.cpp")))
NVCC = shutil.which("nvcc")


def _template(source: str) -> tuple:
    """Equal of sources that are compiled as one unit: same folder, same template, same headers. Else the source.

    Those for the host, whose time is that of PyTorch's headers, are two units; the first of each shows that it includes
    what it needs.
    """
    if source.endswith(".cpp"):
        return ("host", "from relational on" if source > "core_cuda/relational" else "up to reduction")
    if "/instances/" not in source or source.endswith("f32.cu"):
        return (source,)
    return re.sub(r"[a-z]*\d+\.cu$", "", source), *re.findall("^#include.*$", (ROOT / source).read_text(), re.MULTILINE)


UNITS = [list(unit) for _, unit in groupby(sorted(SOURCES, key=_template), key=_template)]

pytestmark = pytest.mark.skipif(NVCC is None, reason="nvcc is not installed")


def _toolkit_include() -> Path:
    """The include folder of the toolkit that nvcc belongs to; nvcc on PATH may be a link or a wrapper."""
    dry = subprocess.run([NVCC, "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True)
    for line in dry.stderr.splitlines():
        if line.startswith("#$ _HERE_="):
            return Path(line.split("=", 1)[1]).parent / "include"
    return Path(NVCC).resolve().parents[1] / "include"


def _flags() -> list[str]:
    include = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
    include += map(str, Path(sysconfig.get_paths()["purelib"]).glob("nvidia/cu*/include"))
    return [
        f"-I{CORE}",
        *(flag for path in include for flag in ("-isystem", path)),
        "-std=c++20",
        "-DEDGELESS_WITH_CUDA",
        "-DC10_CUDA_NO_CMAKE_CONFIGURE_FILE",  # the one header of torch's CUDA build that its CPU build lacks
        "-DTORCH_EXTENSION_NAME=_C",
    ]


@cache
def _optimises_little() -> tuple[str, ...]:
    """The flags with which nvcc takes the least time: newer ones know ``-Ofc``, with which it is 0.6 of the others'."""
    known = subprocess.run([NVCC, "--help"], capture_output=True, text=True).stdout
    return ("-Ofc=max",) if "--Ofast-compile" in known else ("-Xcicc", "-O1", "-Xptxas", "-O0")


@cache
def _of_sm_90(file: Path) -> bool:
    """Whether a file, or one that it includes, has code for sm_90 alone."""
    text = file.read_text()
    if "__CUDA_ARCH__ >= 900" in text:
        return True
    included = (file.parent / name for name in re.findall(r'^#include "(.+)"$', text, re.MULTILINE))
    return any(_of_sm_90(other.resolve()) for other in included if other.exists())


def _archs(source: str) -> tuple[int, ...]:
    if "/instances/" in source:
        return (80,) if source.endswith("f32.cu") else (90,)
    return (80, 90) if _of_sm_90(ROOT / source) else (80,)


def _compile(unit: list[str], out: Path) -> subprocess.CompletedProcess:
    source = unit[0]
    written = out / source.replace("/", "_")
    written.write_text("".join(f'#include "{ROOT / file}"\n' for file in unit))
    if source.endswith(".cu"):
        command = [
            NVCC,
            *(flag for arch in _archs(source) for flag in ("-gencode", f"arch=compute_{arch},code=sm_{arch}")),
            f"-DEDGELESS_EVERY_NTH_KERNEL={16 if len(unit) == 1 else 32}",
            *cpp_extension.COMMON_NVCC_FLAGS,  # as the build: some of them forbid conversions
            *_optimises_little(),
            "-fatbin",
            "-o",
            written.with_suffix(".fatbin"),
        ]
    else:
        command = [os.environ.get("CXX", "c++"), "-fsyntax-only", f"-I{_toolkit_include()}"]
    return subprocess.run([*command, *_flags(), written], cwd=ROOT, capture_output=True, text=True)


@pytest.fixture(scope="module")
def compiled(request, tmp_path_factory):
    """Unit -> the running compiler. Started for all selected units at once, one per core, unless a worker of
    pytest-xdist is one of many that each compile what they test.
    """
    out = tmp_path_factory.mktemp("objects")
    if hasattr(request.config, "workerinput"):
        yield lambda unit: _compile(unit, out)
        return
    wanted = (getattr(item, "callspec", None) for item in request.session.items)
    wanted = [spec.params["unit"] for spec in wanted if spec is not None and spec.params.get("unit") in UNITS]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        running = {unit[0]: pool.submit(_compile, unit, out) for unit in wanted}
        yield lambda unit: running[unit[0]].result()


def test_there_are_cuda_sources():
    """Otherwise the test below would pass by testing nothing."""
    assert any(source.endswith(".cu") for source in SOURCES)
    assert any(source.endswith("_cuda.cpp") for source in SOURCES)
    assert sorted(source for unit in UNITS for source in unit) == SOURCES


def test_code_of_every_device_is_compiled_for_it():
    """Code for sm_90 alone stands in templates, of which instances are compiled for sm_90, or its source is."""
    devices = {arch for unit in UNITS for arch in _archs(unit[0])}
    assert devices == {80, 90}
    templates = {unit[0] for unit in UNITS if _of_sm_90(ROOT / unit[0])}
    assert templates, "is sm_90 told apart in other words now?"
    assert all(90 in _archs(source) for source in templates if not source.endswith("f32.cu"))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("unit", UNITS, ids="+".join)
def test_cuda_sources_compile(compiled, unit):
    done = compiled(unit)
    assert done.returncode == 0, f"{' or '.join(unit)} does not compile:\n{done.stderr[-4000:]}"


def test_every_score_has_its_kernels():
    """Without one of these files an extension with CUDA does not load: a score has no kernels for a storage type."""
    wanted = {f"{score}_{storage}.cu" for score in _C.SCORES for storage in ("bf16", "f16", "f32", "f64")}
    assert {file.name for file in (CORE / "attention" / "cuda" / "instances").glob("*.cu")} == wanted


@pytest.mark.parametrize("code,named", [
    ("__global__ void kernel(int* p) { *p = threadIdx.q; }", "q"),
    ("template <class T> T of_host(T x) { return x.nothing(); }\nint host() { return of_host(1); }", "int"),
    ("__global__ void kernel() {}\nvoid host() { kernel<<<1, blocks>>>(); }", "blocks"),
    ('static int f(const char*);\nint host() { return f(3); }', "const char *"),
])  # fmt: skip
def test_a_broken_source_would_be_noticed(tmp_path, code, named):
    broken = tmp_path / "broken.cu"
    broken.write_text(code + "\n")
    done = _compile([str(broken)], tmp_path)
    assert done.returncode != 0 and f'"{named}"' in done.stderr

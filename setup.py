"""Builds ``edgeless._C`` against the torch that is already installed and maps the folders to import names.

``shared/`` is imported as ``edgeless``, ``dgl_plugin/`` as ``edgeless.dgl`` and ``pyg_plugin/`` as ``edgeless.pyg``.

No build needs a CUDA toolkit: the package carries the headers of the CUDA kernels, which NVRTC compiles where they run.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path

try:
    from setuptools import setup
except ImportError as error:  # Python 3.12 and newer bring none
    raise SystemExit("edgeless is built by setuptools: use `pip install setuptools wheel ninja` first.") from error

try:
    import torch
    from torch.utils import cpp_extension
except ImportError as error:  # without this, pip shows a bare traceback
    raise SystemExit(
        "edgeless compiles against the PyTorch that it will run with, and none can be imported here. "
        "Install torch, setuptools and wheel first, then use: pip install --no-build-isolation ."
    ) from error

ROOT = Path(__file__).resolve().parent
CORE = ROOT / "core_cuda"


def version() -> str:
    """The one in shared/__init__.py, read and not imported: the package cannot be imported before it is built."""
    return re.search(r'^__version__ = "(.+)"$', (ROOT / "shared" / "__init__.py").read_text(), re.MULTILINE)[1]


def packages(name: str, folder: str) -> list[str]:
    inner = (p.parent.relative_to(ROOT / folder) for p in (ROOT / folder).rglob("__init__.py"))
    return sorted(".".join((name, *p.parts)) for p in inner)


def sources() -> list[str]:
    return sorted(str(p.relative_to(ROOT)) for p in CORE.rglob("*.cpp"))


def kernel_headers() -> list[str]:
    """What kernels are compiled from where they run, relative to core_cuda (shared/kernels/headers.py)."""
    found = [p.relative_to(CORE).as_posix() for p in CORE.rglob("*") if p.is_file()]
    headers = [f for f in found if f.endswith((".cuh", ".h")) and "/cpu/" not in f]
    return sorted({*headers, *(f for f in found if f.startswith("jit/standard/"))})


def torch_runtime() -> list[str]:
    """The libstdc++ that torch runs with, to be linked before the compiler's own.

    A compiler that brings a static libstdc++ alone (some toolchains outside the system do) puts a second copy into the
    extension. Streams then look up their facets by the numbers of one copy in the tables of the other, and the first
    number in an error message ends the process.
    """
    try:
        maps = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    return sorted({line.split()[-1] for line in maps if re.search(r"/libstdc\+\+\.so\.6[^/]*$", line)})


def extension():
    # Instruction sets are chosen per function inside the sources, so one binary runs on any machine of this kind.
    # -O3: with -O2, GCC leaves arithmetic of 16-bit numbers scalar, and kernels for them take up to 3.3 times as long.
    # Four of its passes (-fipa-cp-clone, -ftree-partial-pre, -fgcse-after-reload, -fsplit-paths) take a fifth of the
    # compiler's time; without them float32 is 4 % slower, and sums of 16 numbers 17 %.
    # -g0: Python's own flags ask for debug information, which makes the build slower and the file ten times larger.
    # -Wno-maybe-uninitialized: GCC 12 and 13 warn of their own AVX-512 intrinsics (GCC bug 105593).
    cxx = ["-O3", "-g0", "-Wno-psabi", "-Wno-maybe-uninitialized", "-fvisibility=hidden"]
    link = []
    if sys.platform == "linux":
        cxx.append("-fopenmp")
        link += ["-fopenmp", "-ldl", *torch_runtime()]
    return cpp_extension.CppExtension(
        "edgeless._C", sources(), include_dirs=[str(CORE)], extra_compile_args=cxx, extra_link_args=link
    )


# Whether ops for CUDA are joined, as ops for the CPU are. Then no two may have helpers of one name.
JOINS_CUDA_OPS = True


def joined(files: list[str], folder: Path) -> list[str]:
    """The same sources with a dozen of those that include PyTorch in one translation unit each.

    To parse PyTorch's headers takes longer than to compile what most of these sources say. Ops for the CPU and for CUDA
    are joined apart from each other and from the rest, since all have functions of the name of the op. Kernels for the
    CPU are not joined, and neither are launches of kernels for CUDA, which include no PyTorch.
    """
    cuda_ops = [f for f in files if f.endswith("_cuda.cpp")]
    apart = [f for f in files if "/cpu/kernels_" in f or "/cuda/" in f]
    if not JOINS_CUDA_OPS:
        apart, cuda_ops = sorted({*apart, *cuda_ops}), []
    cpu_ops = [f for f in files if f.endswith("_cpu.cpp")]
    others = sorted(set(files) - {*apart, *cpu_ops, *cuda_ops})
    units = [group[i : i + 12] for group in (cpu_ops, cuda_ops, others) for i in range(0, len(group), 12)]
    folder.mkdir(parents=True, exist_ok=True)
    names = [folder / f"{Path(unit[0]).stem}_and_{len(unit) - 1}.cpp" for unit in units]
    for name, unit in zip(names, units, strict=True):
        text = "".join(f'#include "{(ROOT / file).as_posix()}"\n' for file in unit)
        if not name.exists() or name.read_text() != text:  # else ninja would compile it again
            name.write_text(text)
    return [*apart, *map(str, names)]


def record(folder: Path) -> Path:
    """Writes the version of torch that the extension in a folder was built for, which shared/_extension.py compares
    with the one that runs before it loads the extension.
    """
    file = folder / "_built.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f'"""Written by setup.py."""\n\nTORCH = "{torch.__version__}"\n')
    return file


class Build(cpp_extension.BuildExtension):
    """Joins sources, but in place: there, files are compiled again one at a time, as they are edited."""

    def run(self):
        inplace = self.inplace  # kept: setuptools clears it while it builds
        self.joins = not inplace
        super().run()
        record(ROOT / "shared" if inplace else Path(self.build_lib) / "edgeless")

    def get_outputs(self):  # what is installed
        return [*super().get_outputs(), str(Path(self.build_lib) / "edgeless" / "_built.py")]

    def build_extensions(self):
        if sentence := compiler_missing():
            raise SystemExit(sentence)
        if self.joins:
            for extension in self.extensions:
                extension.sources = joined(extension.sources, Path(self.build_temp) / "joined")
        super().build_extensions()


FOLDERS = {"edgeless": "shared", "edgeless.dgl": "dgl_plugin", "edgeless.pyg": "pyg_plugin"}


def unsupported() -> str | None:
    """Why edgeless cannot be built or run here, in a sentence that says what to do; None where it can."""
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "edgeless does not run on a free-threaded Python, whose modules would need locks: use one with the GIL."
    if sys.platform == "win32":
        return "edgeless is not built on Windows: install it in WSL 2, where it runs as on Linux."
    if torch.version.hip is not None:
        return "edgeless has no kernels for AMD GPUs, and is not built against ROCm: use another build of torch."
    return None


def compiler_missing() -> str | None:
    """What to install where there is no C++ compiler; None where there is one."""
    named = shlex.split(os.environ.get("CXX", ""))[:1]
    if any(map(shutil.which, named or ("c++", "g++", "clang++"))):
        return None
    install = "xcode-select --install" if sys.platform == "darwin" else "apt-get install g++"
    return f"edgeless needs a C++20 compiler, and {(named or ['c++'])[0]} was not found: `{install}`, or set CXX."


def requirement() -> str:
    """The torch that is needed. A wheel or an installation has an extension, which fits one minor version of torch; an
    sdist has none yet.
    """
    if "sdist" in sys.argv:
        return "torch>=2.11"
    return f"torch=={'.'.join(torch.__version__.split('.')[:2])}.*"


if sentence := unsupported():
    raise SystemExit(sentence)

setup(
    version=version(),
    install_requires=[requirement()],
    license="Apache-2.0",
    license_files=["LICENSE"],
    package_dir={**FOLDERS, "edgeless.kernels.sources": "core_cuda"},
    packages=[
        *(package for name, folder in FOLDERS.items() for package in packages(name, folder)),
        "edgeless.kernels.sources",  # no Python
    ],
    include_package_data=False,  # else what MANIFEST.in lists of core_cuda for the sdist is installed too
    package_data={
        "edgeless": ["py.typed"],
        "edgeless.tools.bench": ["*.json"],
        "edgeless.dgl.nn": ["*.pyi"],
        "edgeless.pyg.nn": ["*.pyi"],
        "edgeless.kernels": ["kernels.pack"],  # of a release: tox -e pack
        "edgeless.kernels.sources": kernel_headers(),
    },
    ext_modules=[extension()],
    cmdclass={"build_ext": Build},
)

"""Compiles and installs torch_scatter and torch_sparse, with which PyG has SparseTensors, for tests on the CPU:

python tests/packaging/compile_sparse.py torch_scatter==2.1.2 torch_sparse==0.6.18

Their own setup.py compiles 36 files, of which each takes 20 seconds and more to parse PyTorch's headers: 15 minutes of
one core. Here each package is two translation units and one library, which takes two minutes; the names of the other
libraries, which the packages load one by one, are links to it.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from pathlib import Path

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
SETUP = """\
from setuptools import find_packages, setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

setup(
    name={name!r},
    version={version!r},
    packages=find_packages(include=["{name}", "{name}.*"]),
    ext_modules=[
        CppExtension(
            "{name}._all_cpu",
            ["of_files.cpp", "of_kernels.cpp"],
            include_dirs=[{root!r} + "/csrc", {root!r} + "/third_party/parallel-hashmap"],
            extra_compile_args=["-O1", "-g0", "-w", "-fopenmp", "-DAT_PARALLEL_OPENMP"],
            extra_link_args=["-fopenmp"],
        )
    ],
    cmdclass={{"build_ext": BuildExtension.with_options(no_python_abi_suffix=True)}},
)
"""


def joined(files: list[Path]) -> str:
    """One translation unit of several, each of which has a static variable called registry."""
    lines = [f'#define registry registry_{i}\n#include "{file}"\n#undef registry\n' for i, file in enumerate(files)]
    return "".join(lines)


def install(requirement: str, folder: Path) -> None:
    """Installs a package, given as ``name==version``, from its sdist."""
    name, version = requirement.split("==")
    fetch = ["download", "-q", "--no-deps", "--no-build-isolation", "--no-binary", ":all:", "-d", str(folder)]
    subprocess.run([*PIP, *fetch, requirement], check=True)
    with tarfile.open(next(folder.glob(f"{name}-*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    root = folder / f"{name}-{version}"
    files = sorted((root / "csrc").glob("*.cpp"))
    (root / "of_files.cpp").write_text(joined(files))
    (root / "of_kernels.cpp").write_text(joined(sorted((root / "csrc" / "cpu").glob("*.cpp"))))
    (root / "setup.py").write_text(SETUP.format(name=name, version=version, root=str(root)))
    subprocess.run([*PIP, "install", "-q", "--no-deps", "--no-build-isolation", str(root)], check=True)
    library = Path(sysconfig.get_path("platlib")) / name / "_all_cpu.so"
    for file in files:
        link = library.with_name(f"_{file.stem}_cpu.so")
        link.unlink(missing_ok=True)
        link.symlink_to(library.name)


def main() -> None:
    """Installs every package that is named."""
    with tempfile.TemporaryDirectory() as folder:
        for requirement in sys.argv[1:]:
            install(requirement, Path(folder))


if __name__ == "__main__":
    main()

"""Makes careless changes to the sources, one at a time, and prints those that every test lets live.

    python tests/mutants --count 100 --seed 7        a sample of all changes
    python tests/mutants --only 'shared/plan/*.py'    those of some files
    python tests/mutants --list                      what would be tried; nothing runs
    python tests/mutants --changes FILE              hand-picked changes from a file (its form: changes.picked)

Each change is made in a copy of the project. The tests that watch its file run first (watchers.py); if these pass, all
tests run (--quick omits them). Changes that no caller can observe are listed in equal.txt, with the reason, and are not
tried.
"""

from __future__ import annotations

import argparse
import glob
import importlib
import importlib.util
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from fnmatch import fnmatch
from multiprocessing import get_context
from pathlib import Path

from changes import Change, changes_to, picked
from watchers import watchers_of

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"shared": "edgeless", "dgl_plugin": "edgeless/dgl", "pyg_plugin": "edgeless/pyg"}
TOOLS = ("shared/tools/*", "shared/__main__.py")  # these compute nothing for a user
# Sources for the CPU; kernels for CUDA need a GPU.
CPP = ("core_cuda/*_cpu.cpp", "core_cuda/*_autograd.cpp", "core_cuda/*/cpu/*.h", "core_cuda/graph/*.h")
WATCHED = ("core", "pyg", "dgl", "shared")  # folders of tests
SECONDS = 900  # time limit of the tests that watch a file; all tests have this much per folder


def sources() -> list[str]:
    """The files that may be changed, relative to the root."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    python = [f for f in tracked if f.endswith(".py") and f.startswith(tuple(PACKAGES))]
    python = [f for f in python if not any(fnmatch(f, tool) for tool in TOOLS)]
    return python + [f for f in tracked if any(fnmatch(f, pattern) for pattern in CPP)]


def parses(change: Change, source: str) -> bool:
    """True if a changed Python file still parses; C++ is left to its compiler."""
    if not change.file.endswith(".py"):
        return True
    try:
        compile(change.applied(source), change.file, "exec")
    except SyntaxError:
        return False
    return True


def equal_ones() -> set[str]:
    """The identities of unobservable changes: the lines of equal.txt without their reasons."""
    lines = (Path(__file__).parent / "equal.txt").read_text().splitlines()
    return {line.rpartition(" # ")[0] for line in lines if line and not line.startswith("#")}


def identity(change: Change) -> str:
    """The name of a change in equal.txt. It has no line number, since every edit moves these."""
    return f"{change.file}: {change.kind}: {change.before} -> {' '.join(change.text.split())}"


def drawn(only: list[str], count: int | None, seed: int) -> list[Change]:
    """A uniform sample of all changes to the selected files; all of them if there are no more than ``count``."""
    generator, equal, pools = random.Random(seed), equal_ones(), {}
    for file in sources():
        if not only or any(fnmatch(file, pattern) for pattern in only):
            source = (ROOT / file).read_text()
            pool = [c for c in changes_to(file, source) if identity(c) not in equal and parses(c, source)]
            if pool:
                pools[file] = pool
    every = [change for pool in pools.values() for change in pool]
    if count is None or count >= len(every):
        return every
    return generator.sample(every, count)


# Running --------------------------------------------------------------------------------------------------------------


class Copy:
    """The project in a folder of its own, laid out as it is installed.

    Args:
        folder: an empty folder.
        compiles: whether C++ may change and is compiled here; else the installed edgeless' extension is copied.
    """

    def __init__(self, folder: Path, compiles: bool):
        self.folder, self.site = folder, folder / "site"
        tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
        for name in filter(None, tracked.decode().split("\0")):
            if (ROOT / name).exists():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        for room, package in PACKAGES.items():
            shutil.copytree(folder / room, self.site / package, dirs_exist_ok=True)
        if not compiles:
            installed = importlib.util.find_spec("edgeless").submodule_search_locations[0]
            for extension in Path(installed).glob("_C*.so"):
                shutil.copy2(extension, self.site / "edgeless")
        elif not self.build():
            raise SystemExit("mutants: the sources do not compile as they are")

    def build(self) -> bool:
        """Compiles what changed; False if that fails."""
        command = [sys.executable, "setup.py", "build_ext", "--inplace"]
        if subprocess.run(command, cwd=self.folder, capture_output=True).returncode:
            return False
        for extension in (self.folder / "shared").glob("_C*.so"):
            shutil.copy2(extension, self.site / "edgeless")
        return True

    def place(self, file: str) -> Path:
        """The path from which the tests read a source."""
        room, _, rest = file.partition("/")
        return self.site / PACKAGES[room] / rest if room in PACKAGES else self.folder / file

    def passes(self, patterns: list[str], seconds: float) -> bool:
        """True if these tests pass, in a forked process in which torch and the frameworks are imported already."""
        files = sorted({f for p in patterns for f in glob.glob(p, root_dir=self.folder / "tests")})
        child = os.fork()
        if child == 0:
            os.setsid()
            os._exit(self._run([f"tests/{file}" for file in files]))
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status) in (0, 5)  # 5: none of them can run here
            time.sleep(0.2)
        os.killpg(child, signal.SIGKILL)  # a change that hangs counts as detected
        os.waitpid(child, 0)
        return False

    def _run(self, files: list[str]) -> int:
        os.chdir(self.folder)
        os.environ.update(PYTHONPATH=str(self.site), PYTHONDONTWRITEBYTECODE="1", PYTEST_ADDOPTS="")
        sys.path.insert(0, str(self.site))
        sys.dont_write_bytecode = True
        for stream in (1, 2):
            os.dup2(os.open(self.folder / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
        import pytest

        try:
            return int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *files]))
        except BaseException:
            return 1


_copy: Copy | None = None


def begin(parent: str, compiles: bool) -> None:
    """Initializes a worker: imports what all tests import, and copies the project."""
    global _copy
    for module in ("torch._dynamo", "torch_geometric.nn", "dgl", "hypothesis", "pytest"):
        try:
            importlib.import_module(module)
        except ImportError:
            print(f"mutants: without {module}, tests that need it are skipped", file=sys.stderr)
    _copy = Copy(Path(tempfile.mkdtemp(dir=parent)), compiles)


def fate(change: Change, quick: bool) -> str:
    """``"died"``, ``"lives"``, or ``"no build"``."""
    place = _copy.place(change.file)
    source, is_cpp = place.read_text(), not change.file.endswith(".py")
    place.write_text(change.applied(source))
    try:
        if is_cpp and not _copy.build():
            return "no build"
        if not _copy.passes(watchers_of(change.file), SECONDS):
            return "died"
        everything = [f"{folder}/test_*.py" for folder in WATCHED]
        return "lives" if quick or _copy.passes(everything, SECONDS * len(WATCHED)) else "died"
    finally:
        place.write_text(source)
        if is_cpp:
            _copy.build()


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python tests/mutants", description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, help="so many, drawn at random (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--only", nargs="+", default=[], metavar="PATTERN", help="of these files alone")
    parser.add_argument("--changes", type=Path, metavar="FILE", help="those that this file lists, instead of a draw")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="at the same time (default: one per core)")
    parser.add_argument("--quick", action="store_true", help="only the tests that watch the changed file")
    parser.add_argument("--list", action="store_true", help="print the changes and run nothing")
    options = parser.parse_args()
    if options.changes is None:
        changes = drawn(options.only, options.count, options.seed)
    else:
        listed = picked(options.changes.read_text(), lambda file: (ROOT / file).read_text())
        changes = [change for change in listed if identity(change) not in equal_ones()]
    if options.list:
        print(*changes, sep="\n")
        return 0
    os.environ.setdefault("DGLBACKEND", "pytorch")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    fates: Counter[str] = Counter()
    context = get_context("fork")
    compiles = any(not change.file.endswith(".py") for change in changes)
    with (
        tempfile.TemporaryDirectory() as parent,
        ProcessPoolExecutor(options.jobs, context, begin, (parent, compiles)) as pool,
    ):
        running = [(change, pool.submit(fate, change, options.quick)) for change in changes]
        for number, (change, found) in enumerate(running, 1):
            fates[found.result()] += 1
            if found.result() == "lives":
                print(f"LIVES  {identity(change)}  (line {change.line})", flush=True)
            print(f"{number} of {len(changes)}: {dict(fates)}", file=sys.stderr, flush=True)
    tried = fates["died"] + fates["lives"]
    print(f"{fates['died']} of {tried} changes died ({fates['died'] / max(tried, 1):.0%})")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

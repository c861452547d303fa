"""Folders of core_cuda include only folders below them, and those of shared/programs import only such folders."""

import ast
import os
import re
from pathlib import Path

import pytest

# From the bottom up. Files that stand in no folder are the module itself, above all.
ROOMS = [
    *("jit", "common", "projection", "wsb", "spmm", "attention", "reduction", "graph", "relational", "pair_attention"),
    *("programs", "capture", "gathers", "packed", "layer", "."),
]
# Folders of shared/programs -> the folders that they may import, and the modules of shared/.
PROGRAM_ROOMS = {
    "front": (set(), {"functional", "graph"}),
    "scheduling": ({"front"}, set()),
    "lowering": ({"front", "scheduling"}, set()),
    "c": ({"front", "lowering"}, set()),
    "cuda": ({"front", "lowering"}, set()),
    "run": (
        {"front", "scheduling", "lowering", "c", "cuda"},
        {"_C", "_extension", "capture", "choices", "functional", "graph", "kernels"},
    ),
    ".": (
        {"front", "scheduling", "run"},
        {"autocast", "capture", "choices", "functional", "graph", "layers"},
    ),
}


def room(file: Path) -> str:
    return file.parts[0] if len(file.parts) > 1 else "."


def upward(files: dict[Path, str]) -> list[str]:
    """The includes that lead to a room above, given the text of every file by its path in core_cuda."""
    found = []
    for file, text in files.items():
        for name in re.findall(r'^#include "([^"]+)"', text, re.MULTILINE):
            places = [Path(os.path.normpath(file.parent / name)), Path(name)]
            included = next((place for place in places if place in files), None)
            assert included is not None, f"{file} includes {name}, which is no file"
            if ROOMS.index(room(included)) > ROOMS.index(room(file)):
                found.append(f"{file} includes {included}")
    return found


def imports(file: Path, text: str) -> set[tuple[str, ...]]:
    """The modules that a file of shared/programs imports from shared/, anywhere in it, as paths in shared/."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            assert not any(alias.name.startswith("edgeless") for alias in node.names), file
        if isinstance(node, ast.ImportFrom):
            package = ("programs", *file.parent.parts)
            module = tuple(node.module.split(".")) if node.module else ()
            if node.level:
                module = package[: len(package) - node.level + 1] + module
            else:
                assert module[0] != "edgeless", file  # which imports itself by relative names
                continue
            found |= {(*module, alias.name) for alias in node.names}
    return found


def strangers(files: dict[Path, str]) -> list[str]:
    """The imports that a room of shared/programs may not have, given the text of every file by its path in there."""
    found = []
    for file, text in files.items():
        rooms, modules = PROGRAM_ROOMS[room(file)]
        for first, *rest in sorted(imports(file, text)):
            if first == "programs":
                imported = rest[0] if rest[0] in PROGRAM_ROOMS else "."
                allowed = imported == room(file) or imported in rooms
            else:
                allowed = first in modules
            if not allowed:
                found.append(f"{file} imports {'.'.join((first, *rest))}")
    return found


@pytest.fixture(scope="module")
def sources(root):
    core = root / "core_cuda"
    files = [f for f in core.rglob("*") if f.suffix in (".h", ".cuh", ".cpp") and "standard" not in f.parts]
    return {f.relative_to(core): f.read_text() for f in files}


@pytest.fixture(scope="module")
def programs(root):
    folder = root / "shared" / "programs"
    return {f.relative_to(folder): f.read_text() for f in folder.rglob("*.py")}


def test_includes_lead_down(sources):
    assert upward(sources) == []


def test_every_folder_has_its_place(sources):
    assert {room(file) for file in sources} == set(ROOMS)


def test_an_include_that_leads_up_is_seen():
    files = {Path("spmm/a.h"): '#include "../layer/b.h"\n', Path("layer/b.h"): '#include "../spmm/a.h"\n'}
    assert upward(files) == ["spmm/a.h includes layer/b.h"]


def test_programs_import_what_their_room_may_know(programs):
    assert strangers(programs) == []


def test_every_room_of_programs_is_listed(programs):
    assert {room(file) for file in programs} == set(PROGRAM_ROOMS)


def test_no_room_of_programs_has_more_than_it_uses(programs):
    used = {name: (set(), set()) for name in PROGRAM_ROOMS}
    for file, text in programs.items():
        for first, *rest in imports(file, text):
            inside = first == "programs"
            used[room(file)][not inside].add(rest[0] if inside else first)
    for name, (rooms, modules) in PROGRAM_ROOMS.items():
        assert rooms <= used[name][0] and modules <= used[name][1], name


@pytest.mark.parametrize(
    ("file", "text", "imported"),
    [
        ("front/a.py", "from ..run.interpreter import Interpreter", "programs.run.interpreter.Interpreter"),
        ("front/a.py", "def f():\n    from .. import worth", "programs.worth"),
        ("c/a.py", "from ..cuda import code", "programs.cuda.code"),
        ("lowering/a.py", "from ...graph.handle import Graph", "graph.handle.Graph"),
        ("run/a.py", "from ..cache import ProgramCache", "programs.cache.ProgramCache"),
    ],
)
def test_an_import_that_a_room_may_not_have_is_seen(file, text, imported):
    assert strangers({Path(file): text}) == [f"{file} imports {imported}"]

"""Folders of core_cuda include only folders below them."""

import os
import re
from pathlib import Path

import pytest

# From the bottom up. Files that stand in no folder are the module itself, above all.
ROOMS = [
    *("jit", "common", "projection", "wsb", "spmm", "attention", "reduction", "graph", "relational", "pair_attention"),
    *("programs", "capture", "gathers", "packed", "layer", "."),
]


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


@pytest.fixture(scope="module")
def sources(root):
    core = root / "core_cuda"
    files = [f for f in core.rglob("*") if f.suffix in (".h", ".cuh", ".cpp") and "standard" not in f.parts]
    return {f.relative_to(core): f.read_text() for f in files}


def test_includes_lead_down(sources):
    assert upward(sources) == []


def test_every_folder_has_its_place(sources):
    assert {room(file) for file in sources} == set(ROOMS)


def test_an_include_that_leads_up_is_seen():
    files = {Path("spmm/a.h"): '#include "../layer/b.h"\n', Path("layer/b.h"): '#include "../spmm/a.h"\n'}
    assert upward(files) == ["spmm/a.h includes layer/b.h"]

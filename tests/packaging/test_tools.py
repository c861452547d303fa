"""The runtime, which is all of edgeless but the tools, neither loads nor names ``edgeless.tools``."""

import ast
import re
from pathlib import Path

import pytest

PACKAGES = {"shared": ("edgeless",), "pyg_plugin": ("edgeless", "pyg"), "dgl_plugin": ("edgeless", "dgl")}
TOOLS = "shared/tools/"
ENTRY_POINT = "shared/__main__.py"  # which imports a command when one is run

LOADED = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
print([name for name in sys.modules if name.startswith("edgeless.tools")])
"""


@pytest.mark.parametrize(
    ("framework", "modules"),
    [
        (None, ["edgeless", "edgeless.distributed", "edgeless.__main__"]),
        ("torch_geometric", ["edgeless.pyg", "edgeless.pyg.nn", "edgeless.pyg.transforms"]),
        ("dgl", ["edgeless.dgl", "edgeless.dgl.nn", "edgeless.dgl.ops", "edgeless.dgl.transforms"]),
    ],
)
def test_the_runtime_loads_no_tool(python, framework, modules):
    if framework:
        pytest.importorskip(framework)
    done = python("-W", "ignore", "-c", LOADED, *modules, DGLBACKEND="pytorch")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def runtime_sources(root: Path) -> list[Path]:
    """Every Python file of the three folders but those of the tools, relative to ``root``."""
    found = (p.relative_to(root) for folder in PACKAGES for p in (root / folder).rglob("*.py*"))
    return sorted(p for p in found if p.suffix in (".py", ".pyi") and not p.as_posix().startswith(TOOLS))


def named_tools(source: str, package: tuple[str, ...]) -> list[int]:
    """Lines of ``source`` that import a tool, or have a string that names one for importlib.

    Args:
        package: the parts of the name of the package that the source is a module of.
    """
    lines = []
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else ()
            module = ".".join([*above, *filter(None, [node.module])])
            names = [f"{module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = re.findall(r"edgeless\.tools\b", node.value)
        if any(f"{name}.".startswith("edgeless.tools.") for name in names):
            lines.append(node.lineno)
    return lines


def test_no_source_of_the_runtime_names_a_tool(root):
    sources = runtime_sources(root)
    assert len(sources) > 100
    found = []
    for path in sources:
        folder, *inner = path.parent.parts
        lines = named_tools((root / path).read_text(), (*PACKAGES[folder], *inner))
        found += [f"{path.as_posix()}:{line}" for line in lines if path.as_posix() != ENTRY_POINT]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "import edgeless.tools",
        "import torch, edgeless.tools.bench.graphs as graphs",
        "from edgeless import Graph, tools",
        "from edgeless.tools.cli import devices",
        "from ..tools import bench",
        "from .. import tools",
        "def late():\n    from ..tools.cli.devices import installed",
        "importlib.import_module('edgeless.tools.cli')",
    ],
)
def test_every_way_to_name_a_tool_is_seen(source):
    assert named_tools(source, ("edgeless", "ops"))


@pytest.mark.parametrize("source", ["import edgeless.toolset", "from .tools import x", "from torch import tools"])
def test_what_is_no_tool_may_be_imported(source):
    assert named_tools(source, ("edgeless", "ops")) == []

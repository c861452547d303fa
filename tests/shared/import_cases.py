"""The results of an import before and after its framework's name is swapped for edgeless'."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import FunctionType, ModuleType

import pytest

import edgeless
from edgeless.choices.backends import LAYERS

SWAPS = {
    "torch_geometric.loader": "edgeless.pyg.loader",
    "torch_geometric.nn": "edgeless.pyg.nn",
    "torch_geometric.transforms": "edgeless.pyg.transforms",
    "dgl.dataloading": "edgeless.dgl.dataloading",
    "dgl.nn": "edgeless.dgl.nn",
    "dgl.ops": "edgeless.dgl.ops",
    "dgl.transforms": "edgeless.dgl.transforms",
}


def swapped(module: str) -> str:
    """The name that a user writes in place of an upstream module's."""
    stock = max((name for name in SWAPS if module == name or module.startswith(name + ".")), key=len)
    return SWAPS[stock] + module[len(stock) :]


def stock_modules(stock: str) -> list[str]:
    """The module and all that are loaded within it."""
    importlib.import_module(stock)
    return sorted(name for name in sys.modules if name == stock or name.startswith(stock + "."))


def stands_for(ours, stock, functions=()) -> bool:
    """True if ``ours`` is what a swapped import should give for ``stock``, an object of the framework.

    Args:
        functions: pairs of an upstream function and its replacement.
    """
    if isinstance(stock, type) and stock in LAYERS:
        return ours is LAYERS[stock]
    if isinstance(stock, FunctionType):
        return ours is dict(functions).get(stock, stock)
    if isinstance(stock, ModuleType) and any(f"{stock.__name__}.".startswith(f"{name}.") for name in SWAPS):
        return isinstance(ours, ModuleType) and ours.__name__ == swapped(stock.__name__)
    return ours is stock


def differences(stock_name: str, functions=()) -> list[str]:
    """The names of an upstream module that the swapped module lacks or binds to a wrong object."""
    stock, ours = sys.modules[stock_name], importlib.import_module(swapped(stock_name))
    names = [name for name in dir(stock) if not (name.startswith("__") and name.endswith("__"))]
    missing = object()
    wrong = [n for n in names if not stands_for(getattr(ours, n, missing), getattr(stock, n), functions)]
    return wrong + [f"{name} in dir()" for name in names if name not in dir(ours)]


def star(module: str) -> dict:
    """What ``from module import *`` gives."""
    names: dict = {}
    exec(f"from {module} import *", names)
    del names["__builtins__"]
    return names


def results(statement: str) -> tuple[dict, dict]:
    """What an import statement binds, as it is and with the framework's name swapped."""
    (node,) = ast.parse(statement).body
    if isinstance(node, ast.ImportFrom):
        node.module = swapped(node.module)
    else:
        node.names[0].name = swapped(node.names[0].name)
    found: tuple[dict, dict] = ({}, {})
    for code, names in zip((statement, ast.unparse(node)), found, strict=True):
        exec(code, names)
        del names["__builtins__"]
    return found


def last_line(code: str, **environment) -> str:
    """Runs ``code`` in a new interpreter and returns the last line that it prints, or that of its error."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        env={**os.environ, "DGLBACKEND": "pytorch", **environment},
        timeout=250,
    )
    return (done.stderr if done.returncode else done.stdout).strip().splitlines()[-1]


def at_once(first: str, statements: list[str], name: str) -> str:
    """The modules that objects of this name come from, imported by as many threads at once, in a new interpreter that
    has run ``first``.
    """
    return last_line(
        f"""
        import threading
        {first}
        statements, found = {statements!r} * 2, set()
        start = threading.Barrier(len(statements))

        def load(statement):
            start.wait()
            scope = {{}}
            try:
                exec(statement, scope)
                found.add(scope[{name!r}].__module__)
            except BaseException as error:
                found.add(statement + " gives " + repr(error))

        threads = [threading.Thread(target=load, args=(statement,)) for statement in statements]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        print("; ".join(sorted(found)))
        """
    )


def type_checked(folder: Path, code: str) -> tuple[str, list[str]]:
    """What mypy says of ``code``, and the types that it reveals there."""
    pytest.importorskip("mypy", reason="needs mypy")
    package = folder / "site" / "edgeless"  # as a wheel lays it out, also where a checkout is imported
    package.mkdir(parents=True)
    for path in Path(edgeless.__file__).parent.iterdir():
        if path.name not in ("dgl", "pyg"):
            (package / path.name).symlink_to(path)
    for name in ("dgl", "pyg"):
        spec = importlib.util.find_spec(f"edgeless.{name}")
        (package / name).symlink_to(Path(spec.origin).parent)
    (folder / "user.py").write_text(textwrap.dedent(code))
    (folder / "mypy.ini").write_text("[mypy]\nmypy_path = site\n[mypy-torch.*]\nfollow_imports = skip\n")  # it is large
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--cache-dir", str(folder / "cache"), "user.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=280,
    )
    said = [line for line in done.stdout.splitlines() if line.startswith("user.py")]
    types = [line.partition("Revealed type is ")[2] for line in said if "Revealed type" in line]
    assert types, done.stdout + done.stderr
    return "\n".join(line for line in said if "Revealed type" not in line), types

"""What is imported when, and the one sentence that a missing or broken DGL gets. Each case is a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import dgl
import pytest


def last_line(code, **env):
    """Runs ``code`` in a new interpreter and returns the last line that it prints, or that of its error."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        env={**os.environ, "DGLBACKEND": "pytorch", **env},
        timeout=120,
    )
    return (done.stderr if done.returncode else done.stdout).strip().splitlines()[-1]


def test_frameworks_are_imported_only_when_asked_for():
    line = last_line(
        """
        import sys
        import edgeless
        before = sorted({"dgl", "torch_geometric"} & set(sys.modules))
        from edgeless.dgl import graphbolt
        graphbolt.stub()
        import edgeless.dgl.nn
        print(before, sorted({"dgl", "torch_geometric"} & set(sys.modules)))
        """
    )
    assert line == "[] ['dgl']"


def test_missing_dgl_gets_one_sentence():
    line = last_line(
        """
        import sys
        sys.modules["dgl"] = None
        import edgeless.dgl.nn
        """
    )
    assert line == "ImportError: edgeless.dgl needs DGL, which is not installed: run `pip install 'edgeless[dgl]'`."


def test_a_folder_named_dgl_is_not_dgl(tmp_path):
    """Such as the one that these tests are in."""
    (tmp_path / "dgl").mkdir()
    line = last_line(
        f"""
        import importlib.util
        from importlib.machinery import PathFinder
        importlib.util.find_spec = lambda name, *a: PathFinder.find_spec(name, [{str(tmp_path)!r}])
        import edgeless.dgl
        """
    )
    assert "which is not installed" in line


@pytest.mark.parametrize(
    "error, remedy",
    [
        ('ImportError("No module named pkg_resources")', "run `pip install 'edgeless[dgl]'`"),
        ('FileNotFoundError("Cannot find graphbolt library")', "edgeless.dgl.graphbolt.stub() before the first import"),
    ],
)
def test_a_dgl_that_cannot_be_imported_gets_its_cause_and_the_remedy(error, remedy, tmp_path):
    (tmp_path / "dgl").mkdir()
    (tmp_path / "dgl" / "__init__.py").write_text(f"raise {error}")
    line = last_line(f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import edgeless.dgl.nn")
    cause = error.split('"')[1]
    assert line.startswith(f"ImportError: edgeless.dgl needs DGL, whose import fails here ({cause}): ")
    assert remedy in line


def test_graphbolt_is_emptied_only_where_it_cannot_be_loaded(tmp_path):
    """With a library for another torch, with one for this torch, and without any."""
    code = f"""
        import sys, torch
        from pathlib import Path
        import importlib.util
        root = Path({str(tmp_path)!r})
        package = root / "dgl"
        package.mkdir(exist_ok=True)
        (package / "__init__.py").write_text("")
        sys.path.insert(0, str(root))
        from edgeless.dgl import graphbolt
        found = [graphbolt.stub()]
        (package / "graphbolt").mkdir()
        library = package / "graphbolt" / "libgraphbolt_pytorch_0.1.so"
        library.write_text("")
        found.append(graphbolt.stub())
        found.append(sys.modules.pop("dgl.graphbolt").__name__)
        library.rename(library.with_name("libgraphbolt_pytorch_" + torch.__version__.split("+")[0] + ".so"))
        found.append(graphbolt.stub())
        import dgl
        found.append(graphbolt.stub())
        print(found)
    """
    assert last_line(code) == "[False, True, 'dgl.graphbolt', False, False]"


def test_dgl_is_not_changed_by_the_import():
    """The stock layers are what they were: nothing is patched."""
    import edgeless.dgl.nn as fused

    assert dgl.nn.GATConv is not fused.GATConv
    assert dgl.nn.GATConv.__module__.startswith("dgl.")


def test_names_of_the_package():
    import edgeless.dgl

    assert {"nn", "to_graph"} <= set(dir(edgeless.dgl))
    assert edgeless.dgl.nn.GATConv.__module__ == "edgeless.dgl.nn.gatconv"
    with pytest.raises(AttributeError, match="module 'edgeless.dgl' has no attribute 'GATConv'"):
        edgeless.dgl.GATConv  # noqa: B018

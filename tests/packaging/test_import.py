"""What ``import edgeless`` does and, above all, does not do."""

import shutil

import pytest

PROBE = """
import sys
import torch

def touched(*args, **kwargs):
    raise AssertionError("CUDA was initialised by the import")

torch.cuda._lazy_init = touched
torch.cuda.is_available = touched
before = set(sys.modules)
import edgeless
assert "torch._dynamo" not in sys.modules.keys() - before, "Dynamo takes as long to import as the rest of torch"
loaded = {name.split(".")[0] for name in sys.modules}
print("edgeless", *sorted(loaded & {"dgl", "torch_geometric", "torch_sparse", "matplotlib", "rich", "shared"}))
"""


def test_import_touches_no_gpu_and_no_framework(python):
    done = python("-c", PROBE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["edgeless"]


def test_import_prints_nothing(python):
    done = python("-W", "error", "-c", "import torch, warnings; warnings.simplefilter('error'); import edgeless")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_shared_in_a_checkout_is_refused(python, root):
    done = python("-c", "import shared", cwd=root)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last == "ImportError: this package is imported as 'edgeless', not as 'shared'"


@pytest.fixture
def without_extension(tmp_path, root):
    """The package as a checkout that nobody has built leaves it."""
    ignore = shutil.ignore_patterns("*.so", "*.pyd", "__pycache__")
    shutil.copytree(root / "shared", tmp_path / "edgeless", ignore=ignore)
    return tmp_path


def test_a_missing_extension_is_one_clear_sentence(python, without_extension):
    # -S: no site-packages, where an editable install would win; torch is found through the path of this process.
    import torch

    site = str(type(without_extension)(torch.__file__).parents[1])
    code = f"import sys; sys.path[:0] = [{str(without_extension)!r}]; sys.path.append({site!r}); import edgeless"
    done = python("-S", "-c", code)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: ")
    assert "edgeless._C" in last
    assert "pip install --no-build-isolation" in last


@pytest.mark.parametrize(("adapter", "package"), [("pyg", "torch_geometric"), ("dgl", "dgl")])
def test_an_adapter_without_its_framework_says_what_to_install(python, adapter, package):
    code = f"import sys; sys.modules[{package!r}] = None; import edgeless.{adapter}.nn"
    done = python("-c", code)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: ")
    assert f"edgeless.{adapter} needs" in last
    assert "pip install" in last


@pytest.mark.parametrize(("adapter", "other"), [("pyg", "dgl"), ("dgl", "torch_geometric")])
def test_an_adapter_does_not_need_the_other_framework(python, adapter, other):
    pytest.importorskip({"pyg": "torch_geometric", "dgl": "dgl"}[adapter])
    done = python("-c", f"import sys; sys.modules[{other!r}] = None; import edgeless.{adapter}.nn")
    assert done.returncode == 0, done.stderr

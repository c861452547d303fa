"""What ``import edgeless`` does and, above all, does not do."""

import os
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
    ignore = shutil.ignore_patterns("*.so", "*.pyd", "_built.py", "__pycache__")
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


VERSIONS = [("2.13.0", "2.14.1", False), ("2.1.0", "2.13.0", False), ("2.13.0+cpu", "2.13.2+cu130", True)]


@pytest.mark.parametrize(("built", "running", "loads"), VERSIONS)
def test_another_torch_than_it_was_built_for_is_one_sentence_before_anything_is_loaded(
    python, without_extension, built, running, loads
):
    """The extension here is a file that no loader takes: its name is not even looked for where the versions differ."""
    import torch

    site = str(type(without_extension)(torch.__file__).parents[1])
    (without_extension / "edgeless" / "_built.py").write_text(f'TORCH = "{built}"\n')
    code = f"""
import sys
sys.path[:0] = [{str(without_extension)!r}]
sys.path.append({site!r})
import torch
torch.__version__ = {running!r}
import edgeless
"""
    done = python("-S", "-c", code)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    words = (
        f"ImportError: edgeless._C, the compiled part of edgeless, was built for torch {built[:4].rstrip('.')} and is"
    )
    assert last.startswith(words) != loads
    if not loads:
        assert f"not loaded with torch {running}: install torch " in last and "--no-build-isolation" in last
        assert "_C.c" not in last and "No module" not in done.stderr


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


CLOSED = """
import ctypes, os, sys, traceback
import torch

def obey_modes():
    \"\"\"Root gives up reading what is closed to it: CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH.\"\"\"
    libc, head, sets = ctypes.CDLL(None), (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    if libc.capget(head, sets) == 0:
        for i in range(2):  # effective and permitted
            sets[i] &= ~0b110
        libc.capset(head, sets)

folder, failed = sys.argv[1], 0
closed, long = folder + "/closed", "/" + "/".join(["x" * 200] * 100)
os.mkdir(closed, 0)
for number, (set_, removed) in enumerate((
    ({"HOME": closed}, ()),
    ({"HOME": closed + "/home"}, ()),
    ({}, ("HOME",)),
    ({"XDG_CACHE_HOME": closed}, ()),
    ({"XDG_CACHE_HOME": long}, ()),
    ({"EDGELESS_TUNING_FILE": closed + "/tuning.json"}, ()),
    ({"EDGELESS_TUNING_FILE": long}, ()),
)):
    child = os.fork()
    if child == 0:
        try:
            for name in ("XDG_CACHE_HOME", "EDGELESS_TUNING_FILE", "EDGELESS_TUNING", *removed):
                os.environ.pop(name, None)
            os.environ.update(set_)
            if removed:  # and a user whom the system does not know
                import pwd
                def unknown(uid): raise KeyError(uid)
                pwd.getpwuid = unknown
            obey_modes()
            try:
                os.listdir(closed)
            except PermissionError:
                pass
            else:
                print("open", flush=True)
                os._exit(0)
            import edgeless
            from edgeless.choices.engines import tuner
            assert tuner.active == ("EDGELESS_TUNING_FILE" in set_), tuner.active
            os._exit(0)
        except BaseException:
            print(set_, removed, flush=True)
            traceback.print_exc()
            os._exit(1)
    failed += os.waitpid(child, 0)[1] != 0
os.chmod(closed, 0o700)
sys.exit(failed)
"""


@pytest.mark.skipif(os.name != "posix", reason="forks, and closes a folder by its mode")
def test_import_needs_no_home(python, tmp_path):
    """Of a container's user, say, whose folders belong to another one. A file of decisions is read when one is due."""
    done = python("-c", CLOSED, str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    if "open" in done.stdout:
        pytest.skip("this user may read every folder, whatever its mode")


@pytest.mark.parametrize(("adapter", "package"), [("pyg", "torch_geometric"), ("dgl", "dgl")])
def test_adapters_are_attributes_that_are_imported_when_they_are_asked_for(python, adapter, package):
    pytest.importorskip(package)
    code = f"""
import sys, edgeless
assert {package!r} not in sys.modules
print(edgeless.{adapter}.nn.__name__, edgeless.distributed.__name__)
"""
    done = python("-W", "ignore", "-c", code)
    assert done.stdout.split() == [f"edgeless.{adapter}.nn", "edgeless.distributed"], done.stderr


@pytest.mark.parametrize(("adapter", "package"), [("pyg", "torch_geometric"), ("dgl", "dgl")])
def test_an_attribute_without_its_framework_says_what_to_install(python, adapter, package):
    done = python("-c", f"import sys, edgeless; sys.modules[{package!r}] = None; edgeless.{adapter}")
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: edgeless.{adapter} needs") and "pip install" in last


def test_what_is_no_attribute_is_an_error_that_names_the_package():
    import edgeless

    with pytest.raises(AttributeError, match="module 'edgeless' has no attribute 'keras'"):
        edgeless.keras  # noqa: B018


def test_finding_an_inner_module_imports_nothing(python):
    # Python 3.11 holds the lock of all imports while it looks for a module: an import within waits for ever for
    # another thread that has begun it.
    code = """
import importlib.util, sys
import edgeless
from edgeless.layers.stand_in import _Finder
before = set(sys.modules)
found = [_Finder.find_spec(name) for name in ("edgeless.pyg.nn.models.basic_gnn", "edgeless.dgl.nn.pytorch.conv")]
print([spec.name for spec in found], set(sys.modules) - before)
"""
    done = python("-c", code)
    assert done.stdout.strip() == "['edgeless.pyg.nn.models.basic_gnn', 'edgeless.dgl.nn.pytorch.conv'] set()", (
        done.stderr
    )

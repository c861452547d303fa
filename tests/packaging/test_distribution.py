"""The sdist and the wheel hold everything that the checkout has, under the right names."""

import fcntl
import re
import subprocess
import sys
import tarfile
import zipfile

import pytest

FOLDERS = {"shared": "edgeless", "dgl_plugin": "edgeless/dgl", "pyg_plugin": "edgeless/pyg"}
PAYLOAD = (".py", ".pyi", ".json", ".typed")


def checked_in(root, *folders):
    """Files of the project in these folders: what git knows or, in an unpacked sdist, what lies there."""
    listed = subprocess.run(["git", "ls-files", *folders], cwd=root, capture_output=True, text=True)
    if listed.returncode == 0 and listed.stdout:
        return {name for name in listed.stdout.split() if (root / name).is_file()}
    found = (path for folder in folders for path in (root / folder).rglob("*") if path.is_file())
    return {str(path.relative_to(root)) for path in found if "__pycache__" not in path.parts and path.suffix != ".so"}


def installed_name(name):
    folder, rest = name.split("/", 1)
    return f"{FOLDERS[folder]}/{rest}"


@pytest.fixture(scope="module")
def built(root, tmp_path_factory):
    """An sdist and what the wheel's Python part would be, made without compiling anything."""
    out = tmp_path_factory.mktemp("built")
    run = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(out)]
    # setuptools collects an sdist in a folder of the checkout, so two workers may not do it at the same time.
    with open(root / "setup.py") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for command in (["sdist", "-d", str(out)], ["build_py", "--build-lib", str(out / "lib")]):
            made = subprocess.run([*run, *command], cwd=root, capture_output=True, text=True)
            assert made.returncode == 0, made.stdout + made.stderr
    return out


def test_the_sdist_has_every_source_and_test(root, built):
    (file,) = built.glob("*.tar.gz")
    with tarfile.open(file) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    wanted = checked_in(root, "core_cuda", *FOLDERS, "tests", "docs", "examples")
    wanted |= {"setup.py", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "tox.ini"}
    wanted |= {"CITATION.cff", "SECURITY.md"}
    assert wanted - names == set()
    assert {name for name in names if name.endswith((".so", ".pyc", ".o"))} == set()


def test_the_wheel_has_every_module_and_no_other_top_level(root, built):
    files = {str(path.relative_to(built / "lib")) for path in (built / "lib").rglob("*") if path.is_file()}
    wanted = {installed_name(name) for name in checked_in(root, *FOLDERS) if name.endswith(PAYLOAD)}
    assert wanted - files == set()
    assert {name.split("/")[0] for name in files} == {"edgeless"}


def test_the_wheel_has_the_headers_that_kernels_are_known_by(root, built):
    """setup.py and the digest of a kernel's sources choose files by the same rule, so packs fit both."""
    from edgeless.kernels.headers import is_header

    core, carried = root / "core_cuda", built / "lib" / "edgeless" / "kernels" / "sources"
    found = {path.relative_to(carried).as_posix() for path in carried.rglob("*") if path.is_file()}
    known = {path.relative_to(core).as_posix() for path in core.rglob("*") if path.is_file()}
    assert found == {name for name in known if is_header(name)}


def test_the_metadata_say_what_pyproject_says(root, built):
    import edgeless

    info = built / "edgeless.egg-info"
    assert (info / "top_level.txt").read_text().split() == ["edgeless"]
    metadata = (info / "PKG-INFO").read_text()
    assert f"Version: {edgeless.__version__}\n" in metadata
    for extra in ("pyg", "dgl", "demo", "bench", "test"):
        assert f"Provides-Extra: {extra}\n" in metadata
    assert "edgeless = edgeless.__main__:main" in (info / "entry_points.txt").read_text()


def test_a_wheel_needs_the_torch_it_was_built_with_and_an_sdist_any(built):
    import torch

    minor = ".".join(torch.__version__.split(".")[:2])
    (file,) = built.glob("*.tar.gz")
    with tarfile.open(file) as archive:
        (name,) = (name for name in archive.getnames() if name.count("/") == 1 and name.endswith("/PKG-INFO"))
        assert "Requires-Dist: torch>=2.11\n" in archive.extractfile(name).read().decode()
    assert f"Requires-Dist: torch=={minor}.*\n" in (built / "edgeless.egg-info" / "PKG-INFO").read_text()


def test_the_metadata_files_agree(root):
    """The citation names the version and the licence of the package."""
    import edgeless

    citation = (root / "CITATION.cff").read_text()
    assert f"version: {edgeless.__version__}\n" in citation and "license: Apache-2.0\n" in citation


def test_no_framework_is_a_hard_dependency(root):
    tomllib = pytest.importorskip("tomllib", reason="reading pyproject.toml needs Python 3.11")
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    assert "dependencies" in project["dynamic"] and "dependencies" not in project  # setup.py names torch alone


def test_a_wheel_that_tox_built_is_complete(root):
    """The wheel in the environment next door, where there is one: it has the extension too."""
    wheels = list(root.glob(".tox/.pkg_*/tmp/dist/*.whl"))
    if not wheels:
        pytest.skip("no tox environment has built a wheel here")
    for wheel in wheels:
        names = set(zipfile.ZipFile(wheel).namelist())
        assert any(name.startswith("edgeless/_C.") and name.endswith((".so", ".pyd")) for name in names)
        assert {name.split("/")[0].split("-")[0] for name in names} == {"edgeless"}
        assert "edgeless/py.typed" in names


def test_workflows_run_environments_of_tox(root):
    """The workflows cannot run here; what they ask of tox is there."""
    known = set(re.findall(r"^\[testenv:(\w+)\]", (root / "tox.ini").read_text(), re.MULTILINE))
    asked = []
    for file in (root / ".github" / "workflows").glob("*.yml"):
        text = file.read_text()
        assert "\t" not in text and text.startswith("name: ")
        asked += re.findall(r"tox -e (\w[\w,]*)$", text, re.MULTILINE)
        asked += [name for names in re.findall(r"environment: \[(.*)\]", text) for name in names.split(", ")]
    asked = {name for names in asked for name in names.split(",")}
    assert {"lint", "docs", "core", "frameworks", "pack", "wheels"} <= asked <= known

"""The documents keep their promises: commands that CI runs, links that lead somewhere."""

import argparse
import importlib
import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("", "docs", "docs/decisions", "docs/how-to", "examples")
DOCUMENTS = sorted(str(path.relative_to(ROOT)) for folder in PAGES for path in (ROOT / folder).glob("*.md"))
NOTES = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
FOLDERS = "core_cuda|shared|pyg_plugin|dgl_plugin|tests|docs|examples"
SOURCES = ("core_cuda", "shared", "pyg_plugin", "dgl_plugin")
MOST_README_LINES = 120


def test_ci_runs_the_test_command_of_the_readme(root):
    commands = [line for line in (root / ".ci" / "run").read_text().splitlines() if "tox" in line and line[0] != "#"]
    assert len(commands) == 1
    assert commands[0] in (root / "README.md").read_text().splitlines()


def test_the_readme_has_the_figures_of_the_measured_demo(root):
    measured = (root / "docs" / "performance.md").read_text()
    cells = re.search(r"^\| gatv2, .*?\| (.*) \| (.*) \| (.*) \| (.*) \|$", measured, re.MULTILINE)
    stock, fused, time, memory = cells.groups()
    columns = (*zip(stock.split(", "), fused.split(", "), strict=True),)
    figures = (f"{float(time):.0f} times less", f"{float(memory):.0f} times less", "")
    readme = (root / "README.md").read_text()
    for (theirs, ours), less in zip(columns, figures, strict=True):
        assert re.search(rf"^\| .* \| {theirs} \| {ours} \| {less}", readme, re.MULTILINE), (theirs, ours, less)


@pytest.mark.parametrize("module", ["edgeless", "edgeless.padding"])
def test_the_reference_has_every_public_name(root, module):
    """The other modules are listed there as a whole."""
    listed = set(re.findall(r"auto(?:function|class|exception):: (\S+)", (root / "docs" / "reference.md").read_text()))
    found = importlib.import_module(module)
    assert {f"{module}.{name}" for name in found.__all__ if callable(getattr(found, name))} - listed == set()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_to_files_lead_somewhere(root, document):
    text = (root / document).read_text()
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        if not target.startswith(("http:", "https:")):
            assert ((root / document).parent / target).exists(), f"{document} links to {target}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_to_headings_lead_somewhere(root, document):
    text = (root / document).read_text()
    for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]*)\)", text):
        page = (root / document).parent / target if target else root / document
        headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
        anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert anchor in anchors, f"{document} links to {target}#{anchor}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_pictures_exist(root, document):
    for target in re.findall(r'(?:src|srcset)="([^"]+)"', (root / document).read_text()):
        assert ((root / document).parent / target).exists(), f"{document} shows {target}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_paths_that_are_named_exist(root, document):
    named = set(re.findall(rf"`((?:{FOLDERS})/[\w./-]+)`", (root / document).read_text()))
    assert {name for name in named if not (root / name).exists()} == set()


def test_contributing_names_the_files_of_a_change(root):
    assert re.search(r"`core_cuda/[\w./-]+`", (root / "CONTRIBUTING.md").read_text())


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_have_the_options_that_are_named(root, document):
    """Every ``python -m edgeless COMMAND --option`` is one that the command knows, and so is a suite."""
    from edgeless.__main__ import COMMANDS
    from edgeless.tools.bench.suites import SUITES

    for command, options in re.findall(r"python -m edgeless (\w+)([^`\n|&]*)", (root / document).read_text()):
        assert command in COMMANDS, f"{document}: python -m edgeless {command}"
        parser = argparse.ArgumentParser()
        importlib.import_module(COMMANDS[command][0]).add_arguments(parser)
        known = {option for action in parser._actions for option in action.option_strings}
        line = f"{document}: python -m edgeless {command}{options}"
        assert set(re.findall(r"(?<!\S)--[\w-]+", options)) <= known, line
        assert set(re.findall(r"--suite (\S+)", options)) <= set(SUITES), line


@pytest.mark.parametrize("document", DOCUMENTS)
def test_modules_that_are_run_exist(root, document):
    for module in re.findall(r"python -m (edgeless\.[\w.]+)", (root / document).read_text()):
        assert importlib.util.find_spec(module) is not None, f"{document}: python -m {module}"


def test_decision_notes_are_indexed_short_and_numbered_once(root):
    index = (root / "docs" / "decisions" / "README.md").read_text()
    for note in NOTES:
        text = note.read_text()
        heading = text.partition("\n")[0].removeprefix("# ")
        assert heading.startswith(f"{note.name[:4]}. "), f"{note.name} is headed {heading}"
        assert f"[{heading}]({note.name})" in index, f"docs/decisions/README.md does not list {note.name}"
        assert len(text.splitlines()) <= 60, f"{note.name} is longer than a page"
    numbers = [note.name[:4] for note in NOTES]
    assert len(numbers) == len(set(numbers))


@pytest.mark.parametrize("note", NOTES, ids=lambda note: note.name[:4])
def test_decision_notes_begin_with_status_code_and_effect(note):
    numbers = {other.name[:4] for other in NOTES}
    lines = re.sub(r"\n  +", " ", note.read_text()).splitlines()
    assert lines[1] == "" and lines[5] == ""
    assert [line.partition(": ")[0] for line in lines[2:5]] == ["- Status", "- Code", "- Effect"]
    assert re.match(r"- Status: (Accepted|Superseded by )", lines[2])
    assert set(re.findall(r"(?<!\d)(\d{4})(?=[-\]])", lines[2])) <= numbers
    assert "`" in lines[3]


def test_the_readme_is_short(root):
    assert len((root / "README.md").read_text().splitlines()) <= MOST_README_LINES


def test_constants_named_in_decision_notes_exist(root):
    suffixes = (".py", ".h", ".cpp", ".cuh")
    files = (path for folder in SOURCES for path in (root / folder).rglob("*") if path.suffix in suffixes)
    words = set(re.findall(r"\w+", "\n".join(path.read_text() for path in files)))
    for note in NOTES:
        named = set(re.findall(r"`(k[A-Z]\w+|_?[a-z]+_[a-z_]+|_?[A-Z][A-Z0-9_]+)`", note.read_text()))
        assert named - words == set(), f"{note.name} names what the sources no longer have"


def test_decision_notes_named_in_sources_exist(root):
    numbers = {note.name[:4] for note in NOTES}
    for folder in SOURCES:
        for path in (root / folder).rglob("*"):
            if path.suffix in (".py", ".h", ".cpp", ".cuh"):
                named = set(re.findall(r"docs/decisions/(\d{4})", path.read_text()))
                assert named <= numbers, f"{path.relative_to(root)} names {named - numbers}"


def test_every_example_is_listed_and_run_by_a_test(root):
    listed = (root / "examples" / "README.md").read_text()
    tests = "\n".join(path.read_text() for path in (root / "tests").rglob("test_*examples.py"))
    scripts = sorted(path.name for path in (root / "examples").glob("*.py"))
    assert scripts
    for name in scripts:
        assert f"- [{name}]({name}): " in listed
        assert f'"{name}"' in tests


def test_the_changelog_knows_the_version(root):
    import edgeless

    assert f"## {edgeless.__version__}" in (root / "CHANGELOG.md").read_text()


def test_the_licence_is_whole(root):
    text = (root / "LICENSE").read_text()
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text

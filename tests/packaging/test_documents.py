"""The documents keep their promises: commands that CI runs, links that lead somewhere."""

import re

import pytest

DOCUMENTS = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs/performance.md",
    "docs/design.md",
    "docs/choosing.md",
]


def test_ci_runs_the_test_command_of_the_readme(root):
    commands = [line for line in (root / ".ci" / "run").read_text().splitlines() if "tox" in line and line[0] != "#"]
    assert len(commands) == 1
    assert commands[0] in (root / "README.md").read_text().splitlines()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_to_files_lead_somewhere(root, document):
    text = (root / document).read_text()
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        if not target.startswith(("http:", "https:")):
            assert ((root / document).parent / target).exists(), f"{document} links to {target}"


def test_paths_named_in_contributing_exist(root):
    text = (root / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"`((?:core_cuda|shared|pyg_plugin|dgl_plugin|tests)/[\w./-]+)`", text))
    assert named, "CONTRIBUTING.md names the files of a change"
    assert {name for name in named if not (root / name).exists()} == set()


def test_the_changelog_knows_the_version(root):
    import edgeless

    assert f"## {edgeless.__version__}" in (root / "CHANGELOG.md").read_text()


def test_the_licence_is_whole(root):
    text = (root / "LICENSE").read_text()
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text

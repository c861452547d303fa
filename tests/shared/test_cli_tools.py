"""What the commands are made of: memory peaks, child processes, tables, progress."""

import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch

from edgeless.tools.cli import child, console, memory
from edgeless.tools.cli.child import ChildError, run_child

MB = 1 << 20
CPU = torch.device("cpu")


# In a process of its own: a heap that other tests have left with room in it keeps what is freed into it.
PEAK = """
import torch
from edgeless.tools.cli import memory

if not {by_kernel}:
    memory._reset_high_water_mark = lambda: False
torch.ones(300 << 18).sum()  # before: does not count
with memory.peak_memory(torch.device("cpu")) as peak:
    torch.ones(50 << 18).sum()  # freed before the next one
    torch.ones(120 << 18).exp_()
print(peak.bytes)
"""


@pytest.mark.parametrize("by_kernel", [True, False], ids=["high-water mark", "watching"])
def test_the_peak_is_what_was_alive_at_once(by_kernel):
    script = PEAK.format(by_kernel=by_kernel)
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert 110 * MB < int(ran.stdout) < 150 * MB


def test_the_peak_of_nothing_is_next_to_nothing():
    with memory.peak_memory(CPU) as peak:
        pass
    assert peak.bytes < 5 * MB


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a module that a child process can run and returns its name."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)

    def write(source):
        (tmp_path / "side_under_test.py").write_text(textwrap.dedent(source))
        return "side_under_test"

    return write


def test_a_child_gets_its_configuration_and_sends_events(module):
    name = module(
        """
        import json, sys
        from edgeless.tools.cli.child import emit
        config = json.load(sys.stdin)
        print("chatter of a framework")
        emit("epoch", loss=config["loss"])
        emit("result", total=3)
        """
    )
    events = []
    assert run_child(name, {"loss": 0.5}, events.append) == {"total": 3}
    assert events == [{"loss": 0.5}]


def test_a_child_that_fails_says_what_it_wrote_last(module):
    with pytest.raises(ChildError, match=r"exit status 1\n(.*\n)*ValueError: the reason"):
        run_child(module("raise ValueError('the reason')"), {})


def test_a_child_without_a_result_is_an_error(module):
    with pytest.raises(ChildError, match="ended with exit status 0\nonly chatter"):
        run_child(module("print('only chatter')"), {})


def test_a_killed_child_hints_at_memory(module):
    with pytest.raises(ChildError, match=r"killed by signal 9 \(out of memory\?\)"):
        run_child(module("import os; os.kill(os.getpid(), 9)"), {})


def test_an_event_is_one_line_of_json(capsys):
    child.emit("epoch", text="a\nb")
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line[len(child.MARK) :]) == {"event": "epoch", "text": "a\nb"}


def test_a_plain_table_aligns_its_columns():
    lines = console.plain_table("title", ["", "a", "long"], [["first", "1", "2"], ["x", "10", "3"]]).splitlines()
    assert lines == ["title", "        a  long", "-----  --  ----", "first   1     2", "x      10     3"]


def test_tables_and_progress_do_without_rich(monkeypatch, capsys):
    monkeypatch.setattr(console, "rich", None)
    console.print_table("title", ["", "a"], [["row", "1"]], ["a note"])
    with console.progress() as add:
        advance = add("work", 2)
        advance("half")
        advance("done")
    out = capsys.readouterr().out
    assert "row  1" in out
    assert "a note" in out
    assert out.endswith("work: 2/2  done\n")


def test_a_table_in_a_pipe_is_never_cut(capsys):
    cells = ["x" * 30] * 4
    console.print_table("title", cells, [cells])
    assert capsys.readouterr().out.count("x" * 30) == 8


def test_a_table_fits_a_narrow_terminal_and_loses_nothing():
    rows = [["pyg", "forward + backward", "1,234", "left out: needs about 23 GB"]] * 2
    columns = ["peer", "", "ms", "edgeless is faster by"]
    wide, narrow, least = (console.column_widths(columns, rows, room) for room in (200, 50, 10))
    assert wide == [4, 18, 5, 27]
    assert sum(narrow) + 3 * 4 + 1 == 50
    assert least == [4, 8, 5, 8]  # words and figures stay whole, "1,234" and "edgeless"


@pytest.mark.parametrize(
    ("value", "text"), [(1234.5, "1,234"), (99.94, "99.9"), (9.876, "9.88"), (0.12345, "0.123"), (0.0, "0.000")]
)
def test_milliseconds_have_three_digits(value, text):
    assert console.milliseconds(value) == text


def test_the_module_runs_without_any_framework(tmp_path, monkeypatch):
    """`python -m edgeless info` in a fresh HOME, where importing a framework fails."""
    for name in ("torch_geometric", "dgl"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('broken on purpose')")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    done = subprocess.run([sys.executable, "-m", "edgeless", "info"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("cannot be imported") == 2

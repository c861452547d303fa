"""What goes wrong on the command line is one sentence on standard error, before the work begins."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from edgeless.__main__ import main
from edgeless.tools.cli import child, devices


@pytest.fixture
def refused(monkeypatch, capsys):
    """Runs a command that must be refused before it loads, measures or trains anything; returns what it said."""

    def never(*args, **kwargs):
        raise AssertionError("the work has begun")

    monkeypatch.setattr(devices, "installed", lambda framework: True)  # the complaint is not about frameworks
    monkeypatch.setattr("edgeless.tools.demo.command.run_child", never)
    monkeypatch.setattr("edgeless.tools.bench.command.measure", never)

    def run(arguments):
        try:
            status = main(list(map(str, arguments)))
        except SystemExit as end:  # argparse
            status = end.code
        out, err = capsys.readouterr()
        assert (status, out, err.count("\n")) == (2, "", 1), err
        return err

    return run


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("demo --device foo", "--device must be auto, cpu, cuda or cuda:N, got 'foo'"),
        ("demo --device mps", "--device must be auto, cpu, cuda or cuda:N, got 'mps'"),
        ("demo --device=", "--device must be auto, cpu, cuda or cuda:N, got ''"),
        ("demo --device cuda:-1", "--device must be auto, cpu, cuda or cuda:N, got 'cuda:-1'"),
        ("demo --seed -1", "--seed must be at least 0, got -1"),
        (f"demo --seed {2**63}", "--seed must be at most 2,147,483,647"),
        ("demo --seeds 0", "--seeds must be at least 1, got 0"),
        ("demo --threads 1000000", "--threads must be at most 1,024, got 1000000"),
        ("demo --nodes 999999999999", "--nodes must be at most 2,147,483,647"),
        ("demo --nodes 2000000000", "a graph of 2,000,000,000 nodes and 1,000,000 edges needs about"),
        ("demo --nodes 200 --edges 200 --hidden 9999999", "a layer of 4 heads of 9,999,999 needs about"),
        ("demo --edges 1", "--edges must be at least 2, got 1"),
        ("demo --dropout nan", "--dropout must be a number in [0, 1], got nan"),
        ("demo --dropout 1.5", "--dropout must be a number in [0, 1], got 1.5"),
        ("demo --lr inf", "--lr must be a number at least 0, got inf"),
        ("demo --weight-decay -1", "--weight-decay must be a number at least 0, got -1.0"),
        ("demo --epochs x", "argument --epochs: invalid int value: 'x'"),
        ("demo --layer gcn2", "argument --layer: invalid choice: 'gcn2'"),
        ("demo --dataset=", "argument --dataset: invalid choice: ''"),
        ("demo --dataset cora --root=", "--root .: no Cora/raw/ind.cora.graph in it"),
        ("demo --npz=", ".: cannot be read as an .npz of arrays (Is a directory)"),
        ("demo --json missing/x.json", "--json missing/x.json: cannot be written (No such file or directory)"),
        ("demo --json .", "--json .: must be a file, but is a directory"),
        ("demo --nothing", "unrecognized arguments: --nothing"),
        ("info --nothing", "unrecognized arguments: --nothing"),
        ("", "the following arguments are required"),
        ("bench --threads 0", "--threads must be at least 1, got 0"),
        ("bench --compare-threads 1,0", "--compare-threads must be at least 1, got 0"),
        ("bench --compare-threads 1 --device foo", "--device must be auto, cpu, cuda or cuda:N, got 'foo'"),
        ("bench --device mps", "--device must be auto, cpu, cuda or cuda:N, got 'mps'"),
        ("bench --rounds 0", "--rounds must be at least 1, got 0"),
        ("bench --runs -1", "--runs must be at least 1, got -1"),
        ("bench --warmup -1", "--warmup must be at least 0, got -1"),
        ("bench --heads 0", "--heads must be at least 1, got 0"),
        ("bench --dropout 2", "--dropout must be a number in [0, 1], got 2.0"),
        ("bench --dropout 0.5 --minibatch gatv2", "--dropout is for --op and --layer"),
        ("bench --dropout 0.5 --layer gcn", "--dropout is for gatv2, gat, rgat, got --layer gcn"),
        ("bench --dropout 0.5 --op min_F8", "--op: dropout is of attention (gatv2, gat, gt), got 0.5 for min_F8"),
        ("bench --batch-size 0", "--batch-size must be at least 1, got 0"),
        ("bench --fanout 15,x", "argument --fanout: takes whole numbers, as in 15,10, got '15,x'"),
        ("bench --fanout 15,0", "--fanout must be at least 1, got 0"),
        ("bench --graph toy --features 999999999", "--graph toy: a row of 999,999,999 numbers for every node needs"),
        ("bench --graph toy --op gat_H0_D1", "an aggregation is called gatv2_H8_D128"),
        ("bench --graph toy nowhere", "--graph nowhere: not one of star, toy"),
        ("bench --graph ../x --data .", "--graph ../x: not one of star, toy"),
        ("bench --graph toy --data missing", "--data missing: no such folder"),
        ("bench --graph toy --json missing/x.json", "--json missing/x.json: cannot be written (No such file"),
        ("bench --graph toy --baseline .", "--baseline .: not a file of peer figures"),
    ],
)
def test_options(refused, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert message in refused(arguments.split())
    assert list(tmp_path.iterdir()) == []


def test_a_plot_has_a_format(refused, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    assert "--plot x.foo: the name must end in one of ." in refused(["demo", "--plot", "x.foo"])
    assert "--plot missing/x.png: cannot be written" in refused(["demo", "--plot", "missing/x.png"])
    assert "--plot and --json are the same file, x.png" in refused(["demo", "--plot", "x.png", "--json", "./x.png"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux" or not os.path.isdir("/proc/self"), reason="a folder nobody writes to")
def test_a_folder_that_takes_no_file(refused):
    assert "--json /proc/self/x.json: cannot be written" in refused(["demo", "--json", "/proc/self/x.json"])


@pytest.mark.parametrize(
    "figures", ['{"machine": 1}', '{"machine":1,"date":2,"layers":[],"aggregation":[{"graph":1}]}', "[]", "\udcff"]
)
def test_a_file_that_holds_no_figures(refused, tmp_path, figures):
    file = tmp_path / "peers.json"
    file.write_text(figures, errors="surrogateescape")
    assert "not a file of peer figures" in refused(["bench", "--graph", "toy", "--baseline", file])


# Files of a graph ------------------------------------------------------------------------------------------------


def arrays(**changes):
    good = {
        "node_features": np.ones((3, 2), np.float32),
        "node_labels": np.array([0, 1, 1]),
        "edges": np.array([[0, 1], [1, 2]]),
        "train_masks": np.array([True, False, False]),
        "val_masks": np.array([False, True, False]),
        "test_masks": np.array([False, False, True]),
    }
    return {**good, **changes}


def truncated(file):
    np.savez(file, **arrays())
    file.write_bytes(file.read_bytes()[:700])


def wrong_sum(file):
    np.savez(file, **arrays())
    content = bytearray(file.read_bytes())
    place = content.index(np.ones((3, 2), np.float32).tobytes())
    content[place] ^= 1
    file.write_bytes(content)


def single_array(file):
    with open(file, "wb") as stream:
        np.save(stream, np.ones(3))


BROKEN = {
    "truncated": truncated,
    "empty": lambda file: file.write_bytes(b""),
    "wrong sum": wrong_sum,
    "single array": single_array,
    "text": lambda file: file.write_text("hello"),
    "pickled": lambda file: np.savez(file, **arrays(node_labels=np.array([0, None, {}], dtype=object))),
    "directory": lambda file: file.mkdir(),
    "missing": lambda file: None,
}


@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.parametrize("command", ["demo", "bench"])
def test_files_that_cannot_be_read(refused, tmp_path, kind, command):
    file = tmp_path / "g.npz"
    BROKEN[kind](file)
    if command == "demo":
        assert f"{file}: cannot be read as an .npz of arrays (" in refused(["demo", "--npz", file])
    elif kind != "missing":
        said = refused(["bench", "--graph", "toy", "g", "--data", tmp_path])
        assert f"{file}: cannot be read as an .npz of arrays (" in said


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"node_labels": np.array([0, 1])}, "node_labels must have shape [N] = [3], got [2]"),
        ({"node_labels": np.array([0, -1, 1])}, "node_labels must be integers in [0, 65536), got -1 to 1"),
        ({"node_labels": np.array([0, 10**12, 1])}, "node_labels must be integers in [0, 65536), got 0 to 10000"),
        ({"node_labels": np.array([0, 0.5, 1])}, "node_labels must be integers in [0, 65536), got fractions"),
        ({"node_labels": np.array(["a", "b", "c"])}, "node_labels must be numbers, got <U1"),
        ({"node_features": np.ones(3)}, "node_features must have shape [N, F], got [3]"),
        ({"node_features": np.ones((3, 0))}, "node_features must have shape [N, F], got [3, 0]"),
        ({"node_features": np.full((3, 2), np.nan)}, "node_features must be finite"),
        ({"edges": np.zeros((0, 2), int)}, "edges must be at least one, got none"),
        ({"edges": np.array([[0.0, 1.0]])}, "edges must be integers, got float64"),
        ({"edges": np.array([[0, 3]])}, "edges must be node ids in [0, 3), got 0 to 3"),
        ({"edges": np.array([[0, 2**63 - 1]])}, "edges must be node ids in [0, 3), got 0 to 9223372036854775807"),
        ({"train_masks": np.ones(4, bool)}, "train_masks must have shape [N] or [S, N] with N = 3, got [4]"),
        ({"val_masks": np.ones((3, 2), bool)}, "val_masks must have shape [N] or [S, N] with N = 3, got [3, 2]"),
        ({"test_masks": np.ones((0, 3), bool)}, "test_masks must have shape [N] or [S, N] with N = 3, got [0, 3]"),
        ({"train_masks": np.zeros(3, bool)}, "train_masks must choose a node, got none"),
    ],
)
def test_files_that_do_not_fit(refused, tmp_path, changes, message):
    file = tmp_path / "g.npz"
    np.savez(file, **arrays(**changes))
    assert f"{file}: {message}" in refused(["demo", "--npz", file])


def test_planetoid_files_that_are_cut_short(refused, tmp_path):
    for part in ("x", "tx", "allx", "y", "ty", "ally", "graph"):
        (tmp_path / f"ind.cora.{part}").write_bytes(b"\x80\x04")
    assert f"--root {tmp_path}: cannot be read as Cora (" in refused(["demo", "--dataset", "cora", "--root", tmp_path])


# Signals, pipes, disks ---------------------------------------------------------------------------------------------


def command(*arguments, **options):
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}  # argparse swallows what an unbuffered write raises
    return subprocess.Popen(
        [sys.executable, "-m", "edgeless", *arguments], env=environment, stderr=subprocess.PIPE, text=True, **options
    )


def test_a_reader_that_has_enough():
    read, write = os.pipe()
    os.close(read)
    process = command("--help", stdout=write)
    os.close(write)
    assert process.communicate()[1] == ""
    assert process.returncode == 128 + signal.SIGPIPE


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_under_standard_output():
    with open("/dev/full", "w") as full:
        process = command("--help", stdout=full)
        assert process.communicate()[1] == "edgeless: [Errno 28] No space left on device\n"
    assert process.returncode == 1


def test_signs_that_the_terminal_lacks(monkeypatch):
    from edgeless.tools.cli import console

    class Ascii:
        encoding = "ascii"

    assert console.plus_minus("3 %") == "±3 %"
    monkeypatch.setattr(console.sys, "stdout", Ascii())
    assert console.plus_minus("3 %") == "+-3 %"


def test_a_name_that_ascii_lacks():
    """The title, the table and the complaint have signs that PYTHONIOENCODING=ascii cannot print."""
    script = (
        "from edgeless.tools.cli.process import print_anything; print_anything()\n"
        "from edgeless.tools.cli.console import plus_minus, print_table\n"
        "print_table('gr\\xfc\\xdfe \\udcff', ['', 'a'], [['b', plus_minus('1')]], ['\\xb1'])"
    )
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    ran = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "gr\\xfc\\xdfe \\udcff" in ran.stdout
    assert "+-1" in ran.stdout


PARENT = """
import signal, sys
from edgeless.tools.cli import child
from edgeless.tools.cli.process import Terminated, signals_raise
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may have them ignored
signal.signal(signal.SIGHUP, signal.SIG_DFL)
try:
    with signals_raise():
        child.run_child("sleeping_side", {}, lambda event: print(event["pid"], flush=True))
except Terminated as end:
    sys.exit(end.status)
except KeyboardInterrupt:
    sys.exit(130)
"""
SLEEPER = """
import os, time
from edgeless.tools.cli.child import emit
emit("pid", pid=os.getpid())
time.sleep(100)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_to_the_parent_ends_its_child(tmp_path, number):
    (tmp_path / "sleeping_side.py").write_text(SLEEPER)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    parent = subprocess.Popen([sys.executable, "-c", PARENT], env=environment, stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    parent.send_signal(number)  # to the parent alone
    assert parent.wait() == 128 + number
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    pytest.fail("the child lives on")


def test_a_child_that_never_reads_is_judged_by_its_end(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    (tmp_path / "deaf_side.py").write_text("import os; os.close(0); raise SystemExit(3)")
    with pytest.raises(child.ChildError, match="ended with exit status 3"):
        child.run_child("deaf_side", {"much": "x" * (1 << 20)})


def test_handlers_are_put_back():
    before = signal.getsignal(signal.SIGTERM)
    assert main(["demo", "--seed", "-1"]) == 2
    assert signal.getsignal(signal.SIGTERM) is before

"""Files that are written: by several writers at once, on a disk that is full, and by a process that is killed."""

import errno
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from deciding import decide
from processes import forking

import edgeless.distributed as ed
from edgeless import Graph, blocks
from edgeless.choices.engines import ENGINES
from edgeless.choices.tuning_file import TuningFile
from edgeless.files import file_lock
from edgeless.files.whole_files import whole_file
from edgeless.tools.cli.files import OutputError, writing

partition_module = sys.modules["edgeless.distributed.partition"]  # whose name is the function's, too


def graph_of(num_edges=20_000):
    return Graph.from_edge_index(torch.randint(0, 500, (2, num_edges)), 500, 500)


def in_threads(*works):
    """Runs all at once; what they raised."""
    raised = []

    def run(work):
        try:
            work()
        except Exception as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def names(folder):
    return sorted(path.name for path in folder.iterdir())


# Whole files ---------------------------------------------------------------------------------------------------------


def test_a_file_is_there_when_its_block_has_ended(tmp_path):
    file = tmp_path / "a.json"
    with whole_file(file) as half:
        half.write_text("new")
        assert half.parent == tmp_path and half.suffix == ".json" and not file.exists()
    assert file.read_text() == "new" and names(tmp_path) == ["a.json"]
    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error), whole_file(file) as half:
            half.write_text("half of it")
            raise error
        assert file.read_text() == "new" and names(tmp_path) == ["a.json"]
    with pytest.raises(FileNotFoundError), whole_file(tmp_path / "nowhere" / "a"):
        pass
    assert file.read_text() == "new"


def test_a_file_has_the_mode_that_any_file_has(tmp_path):
    pytest.importorskip("safetensors")
    (tmp_path / "any").write_text("")
    blocks.save(graph_of(100), tmp_path / "blocks")
    with whole_file(tmp_path / "text") as half:
        half.write_text("")
    modes = {(tmp_path / name).stat().st_mode for name in ("any", "blocks", "text")}
    assert len(modes) == 1


def test_what_a_command_writes_replaces_files_alone(tmp_path):
    file, link = tmp_path / "a.json", tmp_path / "link"
    file.write_text("before")
    link.symlink_to(file)
    words = "--json .*a.json: cannot be written .No space left"
    with pytest.raises(OutputError, match=words), writing("--json", file) as path:
        path.write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")
    assert file.read_text() == "before"
    with writing("--json", link) as path:
        path.write_text("through the link")
    assert file.read_text() == "through the link" and link.is_symlink()
    with writing("--json", Path("/dev/null")) as path:
        assert path == Path("/dev/null")
    assert names(tmp_path) == ["a.json", "link"]


# Several writers -----------------------------------------------------------------------------------------------------


def test_threads_save_blocks_to_one_file(tmp_path):
    pytest.importorskip("safetensors")
    graph = graph_of(2000)
    blocks.save(graph, tmp_path / "blocks")

    def save():
        for _ in range(25):
            blocks.save(graph, tmp_path / "blocks")

    assert in_threads(*[save] * 4) == []
    assert names(tmp_path) == ["blocks"]
    blocks.load(graph, tmp_path / "blocks")


def kept(path):
    return sorted(entry["width"] for entry in TuningFile(path, ENGINES).read().values())


@pytest.mark.skipif(file_lock.fcntl is None, reason="needs the locks of a POSIX system")
def test_processes_and_threads_keep_one_another_s_decisions(tmp_path):
    file, context = tmp_path / "cache" / "tuning.json", multiprocessing.get_context(forking())
    workers = [context.Process(target=decide, args=(str(file), 1000 * k, 25)) for k in range(3)]
    for worker in workers:
        worker.start()
    assert in_threads(*[lambda k=k: decide(file, 1000 * k, 25) for k in (3, 4)]) == []
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert kept(file) == [1000 * k + i for k in range(5) for i in range(25)]
    assert names(file.parent) == ["tuning.json"]


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(file_lock, "fcntl", None)
    decide(tmp_path / "a", 0, 2)
    monkeypatch.undo()
    if file_lock.fcntl is not None:
        monkeypatch.setattr(file_lock.fcntl, "flock", refuse)
    decide(tmp_path / "a", 2, 2)
    assert kept(tmp_path / "a") == [0, 1, 2, 3] and names(tmp_path) == ["a"]


@pytest.mark.skipif(file_lock.fcntl is None, reason="needs the locks of a POSIX system")
def test_nobody_waits_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(file_lock, "PATIENCE", 0.05)
    with file_lock.locked(tmp_path / "a"):
        decide(tmp_path / "a", 0, 1)
    assert kept(tmp_path / "a") == [0]


@pytest.mark.skipif(file_lock.fcntl is None, reason="needs the locks of a POSIX system")
def test_a_lock_ends_with_its_block_also_in_a_process_forked_inside(tmp_path):
    begun = time.monotonic()
    with file_lock.locked(tmp_path / "a"):
        child = os.fork()
        if child == 0:
            time.sleep(60)  # with what was open
            os._exit(0)
    try:
        decide(tmp_path / "a", 0, 1)
        assert time.monotonic() - begun < file_lock.PATIENCE
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def test_an_empty_file_holds_no_decision(tmp_path):
    (tmp_path / "a").write_text("")
    assert kept(tmp_path / "a") == []
    decide(tmp_path / "a", 7, 1)
    assert kept(tmp_path / "a") == [7]


# Full disks ----------------------------------------------------------------------------------------------------------


def parts_of(folder, num_parts=3):
    draw = torch.Generator().manual_seed(0)
    edge_index = torch.randint(0, 3000, (2, 6000), generator=draw)
    x = torch.randn(3000, 8, generator=draw)
    return ed.partition(edge_index, 3000, num_parts, folder, method="contiguous", node_data={"x": x})


@pytest.mark.parametrize("before", ["nothing", "an empty folder"])
@pytest.mark.parametrize("failing", ["the second part", "the manifest", "a signal"])
def test_a_partition_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch, before, failing):
    pytest.importorskip("safetensors")
    folder = tmp_path / "new" / "parts"
    if before == "an empty folder":
        folder.mkdir(parents=True)
    write, written = partition_module.write_part, []

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    def second(*args):
        if written:
            raise KeyboardInterrupt if failing == "a signal" else OSError(errno.ENOSPC, "No space left on device")
        written.append(write(*args))
        return written[-1]

    name, writer = ("write_manifest", full) if failing == "the manifest" else ("write_part", second)
    with monkeypatch.context() as patch:
        patch.setattr(partition_module, name, writer)
        with pytest.raises(KeyboardInterrupt if failing == "a signal" else OSError):
            parts_of(folder)
    assert names(folder) == [] if before == "an empty folder" else names(tmp_path) == []
    parts_of(folder)
    assert ed.load(folder).num_own == 3000


LIMITED = """
import resource, sys, torch
import edgeless.distributed as ed
from edgeless import Graph, blocks
from edgeless.choices.tuning_file import TuningFile
sys.path[:0] = {path!r}
from deciding import DECISION
from test_writers import ENGINES, Path, decide, graph_of, names, parts_of

folder = Path({folder!r})
graph = graph_of()
blocks.save(graph, folder / "blocks")
before = (folder / "blocks").read_bytes()
decide(folder / "tuning.json", 0, 1)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
for call in (
    lambda: parts_of(folder / "parts"),
    lambda: blocks.save(graph, folder / "blocks"),
    lambda: TuningFile(folder / "tuning.json", ENGINES).add([{{**DECISION, "device": "d" * 5000}}]),
):
    try:
        call()
        print("written")
    except OSError as error:
        print(type(error).__name__, error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert names(folder) == ["blocks", "tuning.json"], names(folder)
assert (folder / "blocks").read_bytes() == before
decide(folder / "tuning.json", 1, 1)
parts_of(folder / "parts")
print(ed.load(folder / "parts").num_own)
"""


def test_where_the_system_takes_no_more(tmp_path):
    """A limit to the size of files is met where a full disk is: in the middle of a write."""
    pytest.importorskip("safetensors")
    code = LIMITED.format(folder=str(tmp_path), path=[str(Path(__file__).parent)])
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    *said, loaded = ran.stdout.splitlines() or [""]
    assert loaded == "3000", ran.stdout + ran.stderr
    assert [line.split()[0] for line in said] == ["OSError"] * 3, said
    assert f"partition: {tmp_path}/parts/part-00000.safetensors cannot be written: " in said[0]
    assert f"blocks.save: {tmp_path}/blocks cannot be written: " in said[1]
    assert all("File too large" in line for line in said)


def test_parts_that_a_killed_call_left_are_named(tmp_path):
    pytest.importorskip("safetensors")
    parts_of(tmp_path / "parts")
    (tmp_path / "parts" / "manifest.json").unlink()
    with pytest.raises(FileExistsError, match="holds parts without a manifest, of a call that was killed: remove them"):
        parts_of(tmp_path / "parts")


# Children ------------------------------------------------------------------------------------------------------------

PARENT = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell starts what stands behind an ampersand
sys.path[:0] = {path!r}
if __name__ == "__main__":
    import endless_work
    {run}
"""
WORK = """
import os, time

def work(rank, processes, device, config):
    os.write(1, b"%d\\n" % os.getpid())  # in one piece, whatever buffers Python has
    time.sleep(300)
    yield

if __name__ == "__main__":
    from edgeless.tools.cli.child import configuration
    print(os.getpid(), configuration()["text"], file=open("pid", "w"), flush=True)
    time.sleep(300)
"""


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def expect_end(pids):
    for _ in range(200):
        if not any(map(is_alive, pids)):
            return
        time.sleep(0.1)
    for pid in filter(is_alive, pids):
        os.kill(pid, 9)
    pytest.fail("children live on")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_workers_of_a_bench_end_with_their_parent(tmp_path):
    (tmp_path / "endless_work.py").write_text(WORK)
    run = (
        "from edgeless.tools.bench import processes; "
        'processes.run(endless_work.work, 2, {"device": "cpu", "threads": 1})'
    )
    (tmp_path / "parent.py").write_text(PARENT.format(path=[str(tmp_path)], run=run))
    parent = subprocess.Popen([sys.executable, str(tmp_path / "parent.py")], stdout=subprocess.PIPE, text=True)
    pids = [int(parent.stdout.readline()) for _ in range(2)]
    assert all(map(is_alive, pids))
    parent.kill()
    parent.wait()
    expect_end(pids)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_child_of_a_command_ends_with_its_parent(tmp_path):
    (tmp_path / "endless_work.py").write_text(WORK)
    run = 'from edgeless.tools.cli.child import run_child; run_child("endless_work", {"text": "x"})'
    (tmp_path / "parent.py").write_text(PARENT.format(path=[str(tmp_path)], run=run))
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    parent = subprocess.Popen([sys.executable, str(tmp_path / "parent.py")], cwd=tmp_path, env=environment)
    for _ in range(600):
        said = (tmp_path / "pid").read_text().split() if (tmp_path / "pid").exists() else []
        if len(said) == 2:
            break
        time.sleep(0.1)
    pid, text = said
    assert text == "x" and is_alive(int(pid))
    parent.kill()
    parent.wait()
    expect_end([int(pid)])

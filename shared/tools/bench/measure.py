"""Times the peers of one case together, then takes their peak memory one by one."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Optional

import torch

import edgeless
from edgeless.tools.cli.child import ChildError, run_child
from edgeless.tools.cli.devices import UsageError, installed, require
from edgeless.tools.cli.memory import available_memory
from edgeless.tools.timing import Failed, Timer

from . import memory, peers
from .graphs import BenchGraph
from .work import DTYPES, MODES, Case, Work

# An illegal access ends the CUDA context and with it every measurement that follows.
_MISALIGNED = "left out: dies with a misaligned address in a kernel of Inductor's (seen with torch 2.11)"
BREAKS_CUDA = {
    **{("gat", "pyg-compiled", dtype): _MISALIGNED for dtype in DTYPES},
    ("gat", "edgeless-pyg-compiled", "bf16"): _MISALIGNED,
}


@dataclass
class Plan:
    """The measurements of every case.

    Attributes:
        timer: how runs are timed, and on which device.
        peers: names, or None for all that can run here.
        modes: some of :data:`edgeless.tools.bench.work.MODES`.
        threads: numbers of CPU threads; each peer is timed with each of them.
        memory: whether to take peaks, with the first number of threads.
        data: the folder of graphs that are files.
        limit: on the CPU, the seconds that a peer may take for its peaks, which are a few steps in a process of its
            own; a peer that needs longer, or whose process dies, is left out. With a limit every peer runs this way
            before it is timed, whether ``memory`` asks for its peaks or not.
    """

    timer: Timer
    peers: Optional[Sequence[str]] = None
    modes: Sequence[str] = MODES
    threads: Sequence[int] = (2,)
    memory: bool = True
    data: Optional[Path] = None
    limit: Optional[float] = None


@dataclass
class Result:
    """One peer's figures for one case and mode. Times are in milliseconds, peaks in bytes above the inputs, of which
    ``kept_bytes`` are there between calls.

    ``engine`` is the one that ran a bare aggregation of edgeless.
    """

    graph: str
    case: Case
    peer: str
    mode: str
    threads: int
    failed: Optional[str] = None
    median_ms: Optional[float] = None
    spread: Optional[float] = None
    runs: int = 0
    peak_bytes: Optional[int] = None
    kept_bytes: Optional[int] = None
    first_call_bytes: Optional[int] = None
    engine: Optional[str] = None


def peers_of(case: Case, wanted: Optional[Sequence[str]], device: torch.device) -> list[str]:
    """The peers that run a case: those that the user named, or the default ones that can run here."""
    if wanted is None:
        return [peer for peer in peers.default(case) if _can_run(case, peer, device)]
    chosen = [peer for peer in wanted if peer in peers.known(case)]
    if not chosen:
        raise UsageError(f"--peers {' '.join(wanted)}: for {case.name} there are {', '.join(peers.known(case))}")
    for peer in chosen:
        if (framework := peers.framework_of(case, peer)) is not None:
            require(framework)
        if peer == "pyg-sparsetensor" and not peers.has_torch_sparse():
            raise UsageError(f"--peers {peer} needs torch_sparse: pip install --no-build-isolation torch_sparse")
    return chosen


def _can_run(case: Case, peer: str, device: torch.device) -> bool:
    framework = peers.framework_of(case, peer)
    if framework is None:
        return True
    if not installed(framework) or (peer == "pyg-sparsetensor" and not peers.has_torch_sparse()):
        return False
    if framework == "dgl" and device.type == "cuda":
        import dgl

        try:
            dgl.graph(([0], [0])).to(device)
        except dgl.DGLError:  # a DGL built for the CPU only
            return False
    return True


def measure(plan: Plan, graph: BenchGraph, case: Case) -> list[Result]:
    """Every figure of one case on one graph."""
    device = plan.timer.device
    results, works, peaks = [], {}, {}
    for peer in peers_of(case, plan.peers, device):
        room = available_memory() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
        needed = peers.edge_bytes(case, peer, graph)
        why = BREAKS_CUDA.get((case.name, peer, case.dtype)) if device.type == "cuda" else None
        if room is not None and needed > room:
            why = f"left out: needs about {needed / 1e9:.0f} GB"
        if why is None and plan.limit is not None and device.type == "cpu":
            peaks[peer], why = _try_out(plan, graph, case, peer)
        if why is None:
            try:
                works[peer] = peers.build(case, peer, graph)
            except peers.Refused as refusal:
                why = str(refusal)
        if why is not None:
            results += [Result(graph.name, case, peer, mode, plan.threads[0], failed=why) for mode in plan.modes]
    for mode in plan.modes:
        runs = {(peer, n): _with_threads(work.mode(mode), n) for peer, work in works.items() for n in plan.threads}
        for (peer, n), timing in plan.timer.compare(runs).items():
            result = Result(graph.name, case, peer, mode, n)
            if isinstance(timing, Failed):
                result.failed = str(timing)
            else:
                result.median_ms, result.spread, result.runs = timing.median, timing.spread, len(timing.runs)
            results.append(result)
    torch.set_num_threads(plan.threads[0])
    if case.kind == "op":
        timed = [result for result in results if peers.ours(result.peer) and result.failed is None]
        engines = {peer: peers.engine_of(works[peer]) for peer in {result.peer for result in timed}}
        for result in timed:
            result.engine = engines[result.peer]
    runs.clear()
    ran = dict.fromkeys(result.peer for result in results if result.failed is None) if plan.memory else {}
    made = [peer for peer in ran if device.type == "cuda" and memory.is_made_by_runs(peer)]
    for peer in (*made, *(peer for peer in ran if peer not in made)):
        work = works.pop(peer) if peer in made else None
        if work is None and works:
            _forget(works, device)
        _take_peaks(plan, graph, [result for result in results if result.peer == peer], peaks.get(peer), work)
    _forget(works, device)
    return results


def _forget(works: dict[str, Work], device: torch.device) -> None:
    works.clear()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _try_out(plan: Plan, graph: BenchGraph, case: Case, peer: str) -> tuple[Optional[dict], Optional[str]]:
    """(the peaks of a peer, None), or (None, the reason to leave it out). Runs it in another process first, in case it
    crashes.
    """
    try:
        return _peaks_of_child(plan, graph, Result(graph.name, case, peer, plan.modes[0], plan.threads[0])), None
    except ChildError as error:
        return None, f"left out: {str(error).splitlines()[0].partition(' ')[2]}"


def _with_threads(run: Callable[[], None], threads: int) -> Callable[[], None]:
    def timed() -> None:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        run()

    return timed


def _take_peaks(
    plan: Plan, graph: BenchGraph, results: list[Result], peaks: Optional[dict], made: Optional[Work]
) -> None:
    """Fills in the peaks of one peer, where they are not known already.

    The resident set of this process says nothing about one peer, so on the CPU each gets a process of its own. The CUDA
    allocator counts exactly in this process too, after memory that earlier runs left behind was freed.
    """
    some = results[0]
    try:
        if peaks is None:
            cuda = plan.timer.device.type == "cuda"
            peaks = _peaks_here(graph, some, made) if cuda else _peaks_of_child(plan, graph, some)
    except (ChildError, torch.cuda.OutOfMemoryError) as error:
        print(f"{some.graph}, {some.case.label}: memory of {some.peer} not measured: {str(error).splitlines()[-1]}")
        return
    for result in results:
        result.peak_bytes, result.kept_bytes = peaks[result.mode], peaks.get("kept")
        result.first_call_bytes = peaks.get("first_call")


def _peaks_here(graph: BenchGraph, some: Result, made: Optional[Work]) -> dict:
    if made is None:
        edgeless.clear_cache()
    gc.collect()
    return memory.measure(some.case, some.peer, graph, made)


def _peaks_of_child(plan: Plan, graph: BenchGraph, some: Result) -> dict:
    config = {
        "graph": graph.path or graph.name,
        "case": asdict(some.case),
        "peer": some.peer,
        "threads": plan.threads[0],
    }
    config.update(device=str(plan.timer.device), data=None if plan.data is None else str(plan.data))
    return run_child("edgeless.tools.bench.memory", config, limit=plan.limit)

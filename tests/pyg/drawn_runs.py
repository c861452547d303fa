"""Compares drawn layers with PyG. As a program it does so for many, in several processes, and says what it found:

python tests/pyg/drawn_runs.py --first 100000 --seconds 600 --processes 2 --walks now
python tests/pyg/drawn_runs.py --seeds 3000047 3000082 --device cuda
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import logging
import multiprocessing
import os
import sys
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from queue import Empty

import torch
from drawn_messages import STEPS, Drawn, inputs
from generated_cases import tensors
from torch import nn

from edgeless.kernels import compiler
from edgeless.kernels.nvrtc import installed_nvrtc
from edgeless.layers.calls import recording
from edgeless.programs.layers import OFF
from edgeless.programs.run import compiled
from edgeless.pyg.generated.calls import PROGRAMS

TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-4, torch.float16: 8e-3, torch.bfloat16: 6e-2}


class Under(nn.Module):
    """A layer under a setting of EDGELESS_GENERATE."""

    def __init__(self, layer, choice):
        super().__init__()
        self.layer, self.choice = layer, choice

    def forward(self, *args):
        before = os.environ.get("EDGELESS_GENERATE")
        os.environ["EDGELESS_GENERATE"] = self.choice
        try:
            return self.layer(*args)
        finally:
            os.environ.pop("EDGELESS_GENERATE")
            if before is not None:
                os.environ["EDGELESS_GENERATE"] = before


class Wrong(AssertionError):
    """A drawn layer differs from PyG's."""


def results(module, args) -> tuple[list, list, list]:
    """Outputs, gradients of all that has some, and buffers."""
    torch.manual_seed(2)
    out = [t for t in tensors(module(*args)) if t.is_floating_point()]
    wanted = [t for t in tensors(list(args)) if t.requires_grad] + [p for p in module.parameters() if p.requires_grad]
    outputs = [t for t in out if t.requires_grad]
    generator, grads = torch.Generator().manual_seed(3), []
    if wanted and outputs and torch.is_grad_enabled():
        weights = [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t) for t in outputs]
        grads = torch.autograd.grad(outputs, wanted, weights, allow_unused=True)
        grads = [torch.zeros_like(t) if g is None else g for t, g in zip(wanted, grads, strict=True)]
    return [t.detach() for t in out], list(grads), [b.detach().clone() for b in module.buffers()]


def cast(value, device, dtype):
    """A nested value whose floats have another device and dtype, as new leaves."""
    if isinstance(value, torch.Tensor):
        changed = value.detach().to(device, dtype if value.is_floating_point() else value.dtype)
        return changed.requires_grad_(value.requires_grad)
    return tuple(cast(v, device, dtype) for v in value)


def difference(a, b) -> float:
    """The difference by norm where both are finite; infinite where one is and the other not."""
    if a.shape != b.shape:
        return float("inf")
    a, b = a.detach().double().cpu(), b.detach().double().cpu()
    finite = b.isfinite()
    if not torch.equal(finite, a.isfinite()):
        return float("inf")
    return float((a[finite] - b[finite]).norm() / b[finite].norm().clamp(min=1e-2))


def compare(layer: Drawn, stock: Drawn, args, said: list) -> None:
    """Raises :class:`Wrong` if they disagree."""
    exact, short = layer.dtype == torch.float64, layer.dtype not in (torch.float64, torch.float32)
    theirs = results(Under(stock, "off"), args)
    if not exact:
        if not all(t.isfinite().all() for part in theirs for t in part):
            return  # out of the range of short floats
        reference = copy.deepcopy(stock).double()
        reference.plain = reference.plain.double()
        truth = results(Under(reference, "off"), cast(args, args[2].device, torch.float64))
    mine = results(Under(layer, "on"), args)
    steps = bool(layer.names & STEPS or "linear" in str(layer.tree)) or layer.name not in ("sum", "mean")
    for what, a, b, c in zip(("output", "gradient", "buffer"), mine, theirs, theirs if exact else truth, strict=True):
        if not exact and steps and (what == "gradient" or short):
            continue
        for place, (ours, given, right) in enumerate(zip(a, b, c, strict=True)):
            found = difference(ours, right)
            bound = TOLERANCES[layer.dtype] if exact else max(TOLERANCES[layer.dtype], 3 * difference(given, right))
            if not found <= bound or (ours.dtype, ours.shape) != (given.dtype, given.shape):
                raise Wrong(f"{what} {place} of {layer.dtype} differs by {found:.1e}, allowed {bound:.1e}; {said}")


def run(seed: int, device: str = "cpu") -> list[str]:
    """Compares one drawn layer with PyG on three graphs; returns what its calls did."""
    layer = Drawn(seed).to(device)
    layer.plain = layer.plain.to(device)
    stock = copy.deepcopy(layer)
    stock.replayed = True
    with recording() as calls:
        for graph in range(3):
            args = cast(inputs(layer, 1000 * seed + graph), device, layer.dtype)
            try:
                with torch.no_grad(), torch.random.fork_rng():
                    results(Under(copy.deepcopy(stock), "off"), args)
            except Exception as error:
                with contextlib.suppress(type(error)), torch.no_grad():
                    results(Under(copy.deepcopy(layer), "on"), args)
                    raise Wrong(f"seed {seed}, graph {graph}: PyG fails, {error}, and ours does not") from error
                return [f"PyG fails, {type(error).__name__}: {str(error)[:100]}"]
            first = len(calls)
            try:
                with torch.random.fork_rng():
                    compare(layer, stock, args, [])
            except Exception as error:
                said = [outcome(found) for _, found in calls[first:] if found.reasons != (OFF,)]
                refused = any(what != "taken" for what in said)
                if "dropout" in layer.names and layer.training and refused:
                    continue  # the stock layer has drawn other numbers
                raise Wrong(f"seed {seed}, graph {graph}, {layer.form}, {layer.tree}, {said}: {error}") from error
    broken = [text for text in texts() if "cannot be compiled" in text]
    if broken:
        raise Wrong(f"seed {seed}, {layer.form}, {layer.tree}: {broken}")
    return [outcome(found) for _, found in calls if found.reasons != (OFF,)]


def texts() -> list[str]:
    """How the walks of all programs run, in words."""
    programs = [program for program in PROGRAMS._entries.values() if not isinstance(program, str)]
    return [walk.code.text() for program in programs for walk in program.walks()]


def outcome(found) -> str:
    """What an explanation says of a call: "taken" or the reason why not."""
    return "taken" if found.fused else found.reasons[0]


def _process(number: int, options, queue, places) -> None:
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)
    warnings.simplefilter("ignore")
    sys.path.append(str(Path(__file__).parents[1] / "shared"))
    from on_host import running

    if options.device != "cpu" and installed_nvrtc().version >= (13, 0):
        compiler.OPTIONS = (*compiler.OPTIONS, "--Ofast-compile=max")
    end, said, wrong, layers = time.time() + options.seconds, Counter(), 0, 0
    seeds = options.seeds or range(options.first, 1 << 62)
    seed = 0
    for seed in seeds[number :: options.processes]:
        if time.time() > end or layers >= options.count:
            break
        places[number] = seed
        PROGRAMS.clear()
        try:
            with running(options.walks):
                said.update(outcome.split(" (")[0] for outcome in run(seed, options.device))
        except Exception as error:
            wrong += 1
            where = "" if isinstance(error, Wrong) else traceback.format_exc()[-600:]
            print(f"WRONG seed {seed}: {type(error).__name__}: {error} {where}", flush=True)
            if "CUDA error" in str(error):  # after which nothing runs in this process
                break
        layers += 1
    compiled.wait()
    print(
        f"process {number}: {layers} layers to seed {seed}, {wrong} wrong, {said['taken']} calls by programs",
        flush=True,
    )
    queue.put((layers, seed, said, wrong))


def main() -> None:
    """Runs layers in processes until the time is over."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--first", type=int, default=100_000, help="the first seed")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--count", type=int, default=1 << 30, help="the most layers of a process")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument(
        "--walks", choices=("off", "now", "host"), default="off", help="the interpreter, C, or CUDA that the host runs"
    )
    parser.add_argument("--seeds", type=int, nargs="+", help="these alone")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    queue, places = context.Queue(), context.Array("q", options.processes)
    jobs = [context.Process(target=_process, args=(i, options, queue, places)) for i in range(options.processes)]
    for job in jobs:
        job.start()
    found = []
    while len(found) < len(jobs):
        alive = any(job.is_alive() for job in jobs)
        try:
            found.append(queue.get(timeout=2))
        except Empty:
            if not alive:
                break
    for i, job in enumerate(jobs):
        job.join()
        if job.exitcode:
            print(f"WRONG seed {places[i]}: its process ends with {job.exitcode}")
            found.append((0, places[i], Counter(), 1))
    said, wrong = sum((s for _, _, s, _ in found), Counter()), sum(each for *_, each in found)
    last = max(seed for _, seed, _, _ in found)
    first = min(options.seeds) if options.seeds else options.first
    print(f"{sum(n for n, *_ in found)} layers from seed {first} to {last}, {wrong} wrong")
    print(f"{said['taken']} calls by programs; others: {(said - Counter(taken=said['taken'])).most_common(25)}")


if __name__ == "__main__":
    main()

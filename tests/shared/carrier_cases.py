"""Tests of the carriers of halo rows, and fakes of symmetric memory; spawned processes import this module by name.

The symmetric memory of CPU processes is a file that all of them map. A queue replaces the side stream: one that runs
its work only when somebody waits for it, or a thread that runs it at once, after naps of random length. The former
finds buffers that are read or reused too early, the latter work that is too late or out of order.
"""

import functools
import queue
import random
import threading
import time

import torch
import torch.distributed as dist
from part_cases import FEATURES, NODES, compare, edges, partitions
from part_training import Attention, raising, same_bits

import edgeless
import edgeless.distributed as ed
from edgeless import functional
from edgeless.distributed import symmetric

FAKES = ("late", "thread")


class SharedFiles:
    """Replaces ``symmetric._Memory``."""

    timeout_ms = 60_000

    def __init__(self, folder):
        self.folder, self.made = folder, 0
        self.group = dist.new_group(backend="gloo")  # for barriers, which may come between any collectives

    def take(self, nbytes):
        self.made += 1
        self.name = str(self.folder / f"memory-{time.monotonic_ns()}-{dist.get_rank()}")
        return torch.from_file(self.name, shared=True, size=nbytes, dtype=torch.uint8)

    def share(self, tensor):
        names = [None] * dist.get_world_size()
        dist.all_gather_object(names, (self.name, tensor.numel()))
        assert len({size for _, size in names}) == 1, f"sizes differ: {names}"
        buffers = [torch.from_file(name, shared=True, size=size, dtype=torch.uint8) for name, size in names]
        return Handle(buffers, self.group)


class Handle:
    def __init__(self, buffers, group):
        self.buffers, self.group = buffers, group

    def get_buffer(self, rank, shape, dtype, first):
        start, numel = first * dtype.itemsize, torch.Size(shape).numel()
        part = self.buffers[rank][start : start + numel * dtype.itemsize]
        assert part.numel() == numel * dtype.itemsize, "beyond the end"
        return part.view(dtype).view(shape)

    def barrier(self, channel, timeout_ms):
        dist.barrier(group=self.group)


class Late:
    """Replaces ``symmetric._Side``: runs all work as late as possible."""

    def __init__(self):
        self.waiting, self.begun = [], 0

    def mark(self):
        return 0

    def wait(self, mark):
        while self.begun < mark:
            self.begun += 1
            self.waiting.pop(0)()

    def run(self, after, *works):
        first = self.begun + len(self.waiting) + 1
        self.waiting += works
        return range(first, first + len(works))

    def settle(self, seconds=0):
        pass  # work that is left does not run: it would wait for ranks that may not run theirs


class Thread:
    """Replaces ``symmetric._Side``: runs work at any time."""

    def __init__(self):
        self.waiting, self.naps = queue.SimpleQueue(), random.Random(dist.get_rank())
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self):
        while True:
            work, done = self.waiting.get()
            time.sleep(self.naps.choice((0, 0, 1e-3, 3e-3)))
            with torch.inference_mode():  # allows tensors of either mode
                work()
            done.set()

    def mark(self):
        return None

    def wait(self, mark):
        assert mark is None or mark.wait(60), "what was given to the thread has failed"
        time.sleep(self.naps.choice((0, 0, 1e-3, 3e-3)))

    def run(self, after, *works):
        marks = [threading.Event() for _ in works]
        for one in zip(works, marks, strict=True):
            self.waiting.put(one)
        return marks

    def settle(self, seconds=60):
        self.run(None, lambda: None)[0].wait(min(seconds, 60))


def fake(folder, kind):
    """Gives processes without GPUs a fake of symmetric memory."""
    side = {"late": Late, "thread": Thread}[kind]
    symmetric.refusal = lambda ranks, device: ""
    symmetric.connect = lambda ranks, sent, device: symmetric.Symmetric(ranks, sent, SharedFiles(folder), side())


def carried(rank, world, folder, carrier, work):
    """Runs ``work`` so that it loads parts with this carrier: one of ``load``'s, or a fake of symmetric memory."""
    if carrier in FAKES:
        fake(folder, carrier)
        carrier = "symmetric"
    ed.load = functools.partial(ed.load, carrier=carrier)
    yield from work(rank, world, folder)


# Work ------------------------------------------------------------------------------------------------------------


class Fold(torch.nn.Module):
    def __init__(self, reduce):
        super().__init__()
        self.reduce, self.linear = reduce, torch.nn.Linear(FEATURES, 4)

    def forward(self, x, graph, *weight):
        if self.reduce == "max":
            return self.linear(functional.neighbor_reduce(graph, x, "max"))
        return self.linear(functional.spmm(graph, x, *weight, reduce=self.reduce))


def layers():
    def call(graph):
        taken = graph if isinstance(graph, ed.DistGraph) else edgeless.Graph.from_edge_index(graph, NODES, NODES)
        return lambda layer, x, given: [layer(x, taken, *given.values())]

    yield "attention", lambda: Attention(FEATURES, 3, 4, dropout=0.3), call, False, ()
    yield "sum", lambda: Fold("sum"), call, False, ("w",)
    yield "mean", lambda: Fold("mean"), call, False, ()
    yield "max", lambda: Fold("max"), call, False, ()


def functions(rank, world, folder):
    """Compares layers with one process, over all partitions."""
    for name, (kind, *_) in partitions(world).items():
        dg = ed.load(folder / name)
        if dg.carrier != "symmetric":
            yield f"carried by {dg.carrier}"
        for wrong in compare(layers(), dg, edges(kind), name):
            yield f"{name}: {wrong}"


def same_as_all_to_all(rank, world, folder):
    """Checks for the bits of an all-to-all: forward and backward, twice, and with several exchanges in flight.

    Carriers move bytes, so all dtypes are tested on the random partition, and one on each of the others.
    """
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    for number, name in enumerate(partitions(world)):
        dg, plain = ed.load(folder / name), ed.load(folder / name, carrier="all_to_all")
        for dtype in dtypes if name == "random" else (dtypes[number % 4],):
            found = [_there_and_back(graph, dtype) for graph in (dg, dg, plain)]
            for number, (one, again, right) in enumerate(zip(*found, strict=True)):
                if not (torch.equal(one, right) and torch.equal(again, right)):
                    yield f"{name}, {dtype}: tensor {number} differs"
        numbers = torch.arange(dg.num_own * 3, device=dg.device).view(-1, 3) + 1000 * rank
        if not torch.equal(dg.halo.receive(numbers), plain.halo.receive(numbers)):
            yield f"{name}: integers differ"


def _there_and_back(dg, dtype):
    draw = torch.Generator().manual_seed(dg.rank)
    found = []
    for shape, join in (((5,), True), ((2, 3), False), ((40,), True), ((), True), ((0,), True)):
        x = torch.randn(dg.num_own, *shape, generator=draw).to(dg.device, dtype).requires_grad_()
        (rows,) = dg.start(x, join=join).wait()
        weights = torch.randn(rows.shape, generator=draw).to(dg.device, dtype)
        rows.backward(weights, retain_graph=True)
        rows.backward(weights * 2)  # no exchange comes between the two
        found += [rows.detach(), x.grad]
    # Three exchanges in flight, waited for in another order, while constant features are fetched.
    xs = [torch.randn(dg.num_own, w, generator=draw).to(dg.device, dtype).requires_grad_() for w in (3, 8, 4)]
    flights = [dg.start(x) for x in xs]
    (stay,) = dg.sources(xs[0].detach())
    with torch.no_grad():
        (again,) = dg.sources(xs[1])
    rows = [flights[k].wait()[0] for k in (2, 0, 1)]
    torch.cat(rows, dim=1).cos().sum().backward()
    with torch.inference_mode():
        (last,) = dg.sources(xs[2])
    return found + [stay, again, last.clone()] + [t.detach() for t in rows] + [x.grad for x in xs]


def slots(rank, world, folder):
    """Checks the number of buffers (slots), also after exchanges that do not end."""
    dg = ed.load(folder / "random")
    carrier, x = dg.halo.carrier, torch.randn(dg.num_own, 4, dtype=torch.float64, device=dg.device)
    most = max(map(sum, dg.halo.ranks.all_say(dg.halo.num_sent)))

    def sizes():
        return [slot.bytes // (8 * most) for slot in carrier._slots]

    def exchange(width):
        rows = x.new_ones(dg.num_own, width).requires_grad_()
        dg.sources(rows)[0].sum().backward()

    for width in (4, 4, 2, 6, 4, 6):
        exchange(width)
    if sizes() != [6]:
        yield f"one exchange at a time has buffers of widths {sizes()}"
    if carrier.bytes != 6 * 8 * most:
        yield f"counts {carrier.bytes} bytes"
    for _ in range(3):
        flights = [dg.start(x.new_ones(dg.num_own, w)) for w in (2, 6)]
        for flight in flights:
            flight.wait()
    if sizes() != [6, 6]:
        yield f"two at once have buffers of widths {sizes()}"
    # Exchanges are dropped before they end, one of them at first on one rank only, so that its buffer stays taken.
    dropped = [dg.start(x.new_ones(dg.num_own, 6).requires_grad_()) for _ in range(2)]
    kept = dropped.pop() if rank == 0 else dropped.clear()
    exchange(6)
    if sizes() != [6, 6, 6]:
        yield f"with two that have not ended there are buffers of widths {sizes()}"
    del kept
    dropped.clear()
    taken = [dg.start(x.new_ones(dg.num_own, 6)) for _ in range(3)]
    if sizes() != [6, 6, 6]:
        yield f"when all ranks have dropped them there are buffers of widths {sizes()}"
    for flight in taken:
        flight.wait()
    # A gradient that nobody needs is sent and not waited for.
    a = x.clone().requires_grad_()
    flight = dg.halo.start(a, True)
    coming = flight.coming
    out = flight.wait()
    torch.autograd.grad(out.sum(), coming)
    del flight, out, coming
    exchange(6)
    try:
        with torch.no_grad():
            raise KeyError(dg.start(x))  # an error in the midst of it
    except KeyError:
        pass
    taken = [dg.start(x.new_ones(dg.num_own, 6)) for _ in range(3)]
    if sizes() != [6, 6, 6]:
        yield f"after errors there are buffers of widths {sizes()}"
    for flight in taken:
        flight.wait()
    dg.halo.forget()
    if carrier.bytes:
        yield f"{carrier.bytes} bytes are left"
    exchange(3)


def everything(rank, world, folder):
    for work in (functions, same_as_all_to_all, slots, same_bits):
        for wrong in work(rank, world, folder):
            yield f"{work.__name__}: {wrong}"


def refuse(rank, world, folder):
    """Checks the errors for unknown carriers, for symmetric memory on the CPU, and for ranks that disagree."""
    why = "it needs parts on GPUs, and they are on cpu"
    dg = ed.load(folder / "random")
    if (dg.carrier, dg.carrier_refusal) != ("all_to_all", why) or "carrier='all_to_all'" not in repr(dg):
        yield f"auto is {dg}: {dg.carrier_refusal}"
    if ed.load(folder / "random", carrier="all_to_all").carrier_refusal:
        yield "a carrier that was asked for has a refusal"
    yield from raising(
        RuntimeError,
        ["carrier must be 'auto' or 'all_to_all' here, got 'symmetric'", why],
        lambda: ed.load(folder / "random", carrier="symmetric"),
    )
    yield from raising(
        RuntimeError,
        ["all ranks must load with one carrier", "rank 0: all_to_all", "rank 1: auto"],
        lambda: ed.load(folder / "random", carrier="auto" if rank else "all_to_all"),
    )
    yield from raising(
        ValueError if rank else RuntimeError,
        ["got 'none'"],
        lambda: ed.load(folder / "random", carrier="none" if rank else "auto"),
    )
    yield from raising(
        RuntimeError,
        ["all ranks must load with one keep_features", "rank 0: False", "rank 1: None"],
        lambda: ed.load(folder / "random", keep_features=None if rank else False),
    )
    broken = {"count": 0}

    class Broken(SharedFiles):
        def share(self, tensor):
            broken["count"] += 1
            if rank == 1:
                raise OSError("no descriptor")

    symmetric.refusal = lambda ranks, device: ""
    symmetric.connect = lambda ranks, sent, device: symmetric.Symmetric(ranks, sent, Broken(folder), Late())
    dg = ed.load(folder / "random")
    if dg.carrier != "all_to_all" or "rank 1: OSError: no descriptor" not in dg.carrier_refusal or not broken["count"]:
        yield f"a rendezvous that fails on one rank: {dg}, {dg.carrier_refusal}"
    dg.sources(dg.ndata["x"])

"""The work of test_parts.py's processes; spawned processes import this module by name."""

import copy
import functools
import json
import os
import shutil
import signal
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from part_cases import FEATURES, NODES, edges, join, node_data
from torch.nn.parallel import DistributedDataParallel

import edgeless
import edgeless.distributed as ed
from edgeless import functional

CLASSES, STEPS = 4, 4


class Attention(torch.nn.Module):
    """A layer of one's own on edgeless.functional."""

    def __init__(self, wide, heads, channels, dropout=0.0):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.sources, self.own = (torch.nn.Linear(wide, heads * channels) for _ in range(2))
        self.att = torch.nn.Parameter(torch.randn(heads, channels))

    def forward(self, x, graph):
        x_l, x_r = (linear(x).unflatten(1, (self.heads, -1)) for linear in (self.sources, self.own))
        rate = self.dropout if self.training else 0.0
        return functional.gatv2_attention(graph, x_l, x_r, self.att, dropout=rate).flatten(1)


class Net(torch.nn.Module):
    """Attention with dropout, batch norm, and a mean of neighbours."""

    def __init__(self):
        super().__init__()
        self.attention = Attention(FEATURES, 3, 4, dropout=0.3)
        self.norm = torch.nn.BatchNorm1d(12)
        self.last = torch.nn.Linear(12, CLASSES)

    def forward(self, x, graph):
        x = self.norm(self.attention(x, graph)).relu()
        return self.last(functional.spmm(graph, x, reduce="mean") + x)


def new_net():
    torch.manual_seed(0)
    return Net().double()


def loss_of(net, dg):
    out = net(dg.ndata["x"], dg)
    return ed.mean(F.cross_entropy(out, dg.ndata["y"], reduction="none"), dg.ndata["train"], dg)


def steps(net, optimizer, loss, seed):
    """The losses of STEPS steps of training."""
    found = []
    for step in range(STEPS):
        torch.manual_seed(seed(step))
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        found.append(value.item())
    return found


def train_whole():
    """The losses and the state of a training in one process."""
    net, data = new_net(), node_data()
    graph = edgeless.Graph.from_edge_index(edges("loops"), NODES, NODES)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)

    def loss():
        return F.cross_entropy(net(data["x"], graph)[data["train"]], data["y"][data["train"]])

    return steps(net, optimizer, loss, lambda step: 50 + step), net


def train(rank, world, folder):
    """Compares DDP over parts with one process; then checks repeated runs, and checkpoints in both directions."""
    losses, whole = train_whole()
    for name in ("empty", "random"):  # in "empty" only the first rank has labels, and the last has no node
        dg, net = ed.load(folder / name), ed.convert_batchnorm(new_net())
        model = DistributedDataParallel(net, static_graph=True, gradient_as_bucket_view=True)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        found = steps(model, optimizer, functools.partial(loss_of, model, dg), lambda step: 50 + step + 1000 * rank)
        if any(abs(have - want) > 1e-10 * abs(want) for have, want in zip(found, losses, strict=True)):
            yield f"{name}: losses {found} instead of {losses}"
        for key, want in whole.state_dict().items():
            error = float((net.state_dict()[key] - want).double().norm())
            if error > 1e-9 * float(want.double().norm()) + 1e-12:
                yield f"{name}: {key} is off by {error:.1e}"
    if rank == 0:
        torch.save(net.state_dict(), folder / f"of-{world}.pt")
    yield from _same_bits(dg)
    yield from _checkpointed(dg)
    yield from _compiled(dg)
    yield from _rounded(dg)
    net.load_state_dict(torch.load(folder / "of-1.pt"))  # saved by one process
    net.eval()
    with torch.no_grad():
        out = ed.gather(model(dg.ndata["x"], dg), dg)
    if not torch.allclose(out, torch.load(folder / "out-of-1.pt"), rtol=1e-10, atol=1e-12):
        yield "a checkpoint of one process gives other results"


def same_bits(rank, world, folder):
    """Checks that twenty steps from one state give the same bits."""
    yield from _same_bits(ed.load(folder / "random"))


def _same_bits(dg):
    net = ed.convert_batchnorm(new_net().float().to(dg.device))
    x, first = dg.ndata["x"].float().requires_grad_(), None
    for _ in range(20):
        torch.manual_seed(1)
        net.zero_grad()
        x.grad = None
        out = net(x, dg)
        ed.mean(out.square().sum(1), None, dg).backward()
        bits = [out.detach().clone(), x.grad.clone(), *(p.grad.clone() for p in net.parameters())]
        first = bits if first is None else first
        if not all(map(torch.equal, bits, first)):
            yield "two runs differ in their bits"
            return


def _checkpointed(dg):
    """Checks that a recomputation by torch.utils.checkpoint draws the same mask."""
    found = []
    for use in (False, True):
        net, x = new_net().attention, dg.ndata["x"].clone().requires_grad_()
        torch.manual_seed(2)
        if use:
            out = torch.utils.checkpoint.checkpoint(net, x, dg, use_reentrant=False)
        else:
            out = net(x, dg)
        out.square().sum().backward()
        found.append(x.grad)
    if not torch.equal(*found):
        yield "a checkpoint gives other gradients"


def _compiled(dg):
    """Checks that torch.compile, whose graph breaks at exchanges, gives the same results."""
    found = []
    for compiled in (False, True):
        net, x = new_net().eval(), dg.ndata["x"].clone().requires_grad_()
        out = (torch.compile(net, backend="eager") if compiled else net)(x, dg)
        out.square().sum().backward()
        found.append((out.detach(), x.grad))
    for have, want in zip(*found, strict=True):
        if not torch.allclose(have, want, rtol=1e-10, atol=1e-12):
            yield "a compiled model gives other results"


def _rounded(dg):
    """Checks that bfloat16 has at most twice the error of one process, against float64."""

    def gradients(graph, x, dtype):
        net = new_net().eval().to(dtype)
        rows = x.to(dtype).requires_grad_()
        out = net(rows, graph)
        nodes = graph.nodes if graph is dg else torch.arange(NODES)
        out.backward(torch.cos(torch.arange(NODES * CLASSES).double()).view(NODES, CLASSES)[nodes].to(dtype))
        found = torch.cat([p.grad.double().flatten() for p in net.parameters()])
        if graph is dg:
            dist.all_reduce(found)
        return found

    whole, x = edgeless.Graph.from_edge_index(edges("loops"), NODES, NODES), node_data()["x"]
    truth = gradients(whole, x, torch.float64)
    one = float((gradients(whole, x, torch.bfloat16) - truth).norm())
    parts = float((gradients(dg, dg.ndata["x"], torch.bfloat16) - truth).norm())
    if not parts <= 2 * one:
        yield f"bfloat16 is off by {parts:.2e}, and one process by {one:.2e}"


class Partly(torch.nn.Module):
    """Two dtypes; a parameter that no process uses, one that only the first uses, and one that requires no gradient."""

    def __init__(self):
        super().__init__()
        self.one, self.two = torch.nn.Linear(3, 4).double(), torch.nn.Linear(4, 2).double()
        self.single, self.unused, self.fixed = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
        self.fixed.requires_grad_(False)

    def forward(self, x, first):
        out = self.two(self.one(x).relu())
        return (out * self.single).sum() if first else out.sum()


def averages(rank, world, folder, device="cpu"):
    """Checks that ``average_gradients`` gives the mean over the processes, also repeatedly, and the steps of DDP."""
    torch.manual_seed(3)
    net = Partly().to(device)
    xs = torch.randn(world, 5, 3, dtype=torch.float64).to(device)
    want = {name: torch.zeros_like(p) for name, p in net.named_parameters() if p.requires_grad}
    for other in range(world):
        net.zero_grad()
        net(xs[other], other == 0).backward()
        for name in want:
            grad = dict(net.named_parameters())[name].grad
            want[name] += 0 if grad is None else grad / world
    for kept in (False, True):  # views of one tensor, which the next backward adds to
        net.zero_grad(set_to_none=not kept)
        net(xs[rank], rank == 0).backward()
        ed.average_gradients(net)
        for name, p in net.named_parameters():
            if not p.requires_grad:
                if p.grad is not None:
                    yield f"{name} has a gradient"
            elif not torch.allclose(p.grad, want[name], rtol=1e-6 if p.dtype == torch.float32 else 1e-12, atol=1e-14):
                yield f"{name}, kept={kept}: {p.grad} instead of {want[name]}"
    found = []
    for average in (False, True):
        torch.manual_seed(4)
        net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)).double().to(device)
        model = net if average else DistributedDataParallel(net, static_graph=True, gradient_as_bucket_view=True)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
        for step in range(STEPS):
            optimizer.zero_grad()
            model(xs[rank] + step).square().mean().backward()
            if average:
                ed.average_gradients(net)
            optimizer.step()
        found.append([p.detach() for p in net.parameters()])
    if not all(torch.allclose(*pair, rtol=1e-9, atol=1e-12) for pair in zip(*found, strict=True)):
        yield f"other steps than DDP's: {found}"


# Failures --------------------------------------------------------------------------------------------------------


def raising(kind, words, call):
    """Yields what is wrong unless ``call`` raises an error of this kind with these words."""
    try:
        call()
    except kind as error:
        missing = [word for word in words if word not in str(error)]
        if missing:
            yield f"{missing} missing in {error}"
    except Exception as error:
        yield f"{type(error).__name__} instead of {kind.__name__}: {error}"
    else:
        yield f"nothing raised for {words}"


def fail(rank, world, folder):
    """Checks every failure that all ranks must raise before anything is exchanged; the group works afterwards."""
    random = folder / "random"
    dg, x = ed.load(random), torch.ones(1)
    rows = torch.ones(dg.num_own, 5)
    same = ["all ranks must do the same", "rank 0:", "rank 1:"]
    yield from raising(
        RuntimeError, [*same, "[5]", "[6]"], lambda: dg.sources(rows if rank else rows.new_ones(dg.num_own, 6))
    )
    yield from raising(RuntimeError, [*same, "float64"], lambda: dg.sources(rows.double() if rank else rows))
    yield from raising(
        RuntimeError, [*same, "no gradient"], lambda: dg.sources(rows.clone().requires_grad_(bool(rank)))
    )
    loss = torch.ones(dg.num_own)
    yield from raising(
        RuntimeError, [*same, "takes the mean"], lambda: ed.mean(loss, None, dg) if rank else dg.sources(rows.clone())
    )
    yield from raising(
        ValueError, ["one row for each", f"[{dg.num_own + 1}, 5]"], lambda: dg.sources(torch.ones(dg.num_own + 1, 5))
    )
    yield from raising(RuntimeError, ["fingerprints differ"], lambda: ed.load(random if rank else folder / "metis"))
    yield from raising(ValueError, ["must divide the 5 parts"], lambda: ed.load(folder / "five"))
    yield from raising(FileNotFoundError, ["manifest.json"], lambda: ed.load(folder / "nothing"))
    yield from raising(ValueError, ["version 99", "update edgeless"], lambda: ed.load(folder / "newer"))
    cut = ValueError if rank == world - 1 else RuntimeError
    words = ["bytes"] if rank == world - 1 else ["other ranks could not load", f"rank {world - 1}:", "bytes"]
    yield from raising(cut, words, lambda: ed.load(folder / "cut"))
    yield from raising(cut, ["another partition"], lambda: ed.load(folder / "mixed"))
    dist.all_reduce(x)
    if x.item() != world:
        yield "the group is not whole after the errors"


def write_damaged(folder, world):
    """Partitions for :func:`fail`, beside those of part_cases."""
    folder = Path(folder)
    ed.partition(edges("loops"), NODES, 5, folder / "five", method="random")
    last = f"part-{world - 1:05d}.safetensors"
    for name in ("newer", "cut", "mixed"):
        shutil.copytree(folder / "random", folder / name)
    manifest = json.loads((folder / "newer" / "manifest.json").read_text())
    (folder / "newer" / "manifest.json").write_text(json.dumps({**manifest, "version": 99}))
    os.truncate(folder / "cut" / last, 100)
    ed.partition(edges("loops"), NODES, world, folder / "other", method="random", node_data=node_data(), seed=5)
    other = (folder / "other" / last).read_bytes()
    (folder / "mixed" / last).write_bytes(other)
    manifest = json.loads((folder / "mixed" / "manifest.json").read_text())
    manifest["files"][world - 1]["bytes"] = len(other)
    (folder / "mixed" / "manifest.json").write_text(json.dumps(manifest))


def lose_one(rank, folder, store, words):
    """Trains until rank 1 is killed; the other rank puts its error into ``words``."""
    torch.set_num_threads(1)
    join(rank, 2, store, seconds=30)
    dg, net = ed.load(Path(folder) / "random"), new_net()
    try:
        for step in range(1000):
            if rank == 1 and step == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            loss_of(copy.deepcopy(net), dg).backward()
    except RuntimeError as error:
        words.put(str(error))
        # Exit without cleanup: gloo's threads, having lost their peer, sometimes abort a process that destroys them.
        os._exit(0)

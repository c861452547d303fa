"""Graphs, partitions and processes of the tests of DistGraph; spawned processes import this module by name."""

import copy
import gc
import os
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from processes import forking

import edgeless.distributed as ed

NODES, FEATURES, EDGE_FEATURES = 45, 6, 2
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


# Graphs and partitions -------------------------------------------------------------------------------------------


def edges(kind):
    """``[2, E]``: with multi-edges, self loops (two at one node) and nodes 39 to 44 isolated."""
    generator = torch.Generator().manual_seed(3)
    if kind == "apart":  # edges join nodes of one residue modulo 6 only
        classes, ranks = torch.randint(6, (200,), generator=generator), torch.randint(6, (2, 200), generator=generator)
        return classes + 6 * ranks
    found = torch.randint(39, (2, 230), generator=generator)
    loops = torch.tensor([[3, 3, 7, 20], [3, 3, 7, 20]])
    found = torch.cat((found[:, :100], loops, found[:, :40], found[:, 100:]), dim=1)
    return found if kind == "loops" else found[:, found[0] != found[1]]


def node_data():
    generator = torch.Generator().manual_seed(4)
    return {
        "x": torch.randn(NODES, FEATURES, dtype=torch.float64, generator=generator),
        "y": torch.randint(4, (NODES,), generator=generator),
        "train": torch.arange(NODES) % 9 == 1,  # none of them on the last of three ranks of "given"
    }


def edge_data(edge_index):
    generator = torch.Generator().manual_seed(5)
    num_edges = edge_index.size(1)
    return {
        "e": torch.randn(num_edges, EDGE_FEATURES, dtype=torch.float64, generator=generator),
        "w": torch.rand(num_edges, dtype=torch.float64, generator=generator) + 0.5,
    }


def partitions(world):
    """name -> (kind of edges, number of parts, method)."""
    nodes = torch.arange(NODES)
    empty = torch.where(nodes % 9 == 1, 0, nodes % max(world - 1, 1))
    return {
        "random": ("loops", world, "random"),
        "contiguous": ("plain", world, "contiguous"),
        "metis": ("loops", world, "metis"),
        "merged": ("loops", 6, "random"),
        "apart": ("apart", world, nodes % world),
        "empty": ("loops", world, empty),
    }


def write_partitions(folder, world):
    """Writes all of them and returns their names."""
    for name, (kind, parts, method) in partitions(world).items():
        edge_index = edges(kind)
        ed.partition(
            edge_index,
            NODES,
            parts,
            Path(folder) / name,
            method=method,
            node_data=node_data(),
            edge_data=edge_data(edge_index),
        )
    return list(partitions(world))


# Processes -------------------------------------------------------------------------------------------------------


def spawn(work, world, folder, *inputs, backend="gloo"):
    """Runs ``work(rank, world, folder, *inputs)``, a generator of what is wrong, in ``world`` processes of one group.

    With ``backend="nccl"`` each has a GPU, where :func:`edgeless.distributed.load` puts its part.

    Returns what all processes found wrong.
    """
    method = forking()
    errors = mp.get_context(method).SimpleQueue()
    folder = Path(folder)
    mp.start_processes(
        _enter,
        (work, world, str(folder), str(folder / f"store-{work.__name__}"), errors, backend, inputs),
        nprocs=world,
        start_method=method,
    )
    found = []
    while not errors.empty():
        found.append(errors.get())
    return found


def _enter(rank, work, world, folder, store, errors, backend, inputs):
    gc.freeze()  # garbage collections, which exchanges run, then skip what was imported
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    join(rank, world, store, backend=backend)
    try:
        for wrong in work(rank, world, Path(folder), *inputs):
            errors.put(f"rank {rank} of {world}: {wrong}")
    except Exception:  # the other ranks fail as well: their errors must not hide the cause
        errors.put(f"rank {rank} of {world}: {traceback.format_exc()}")
    finally:
        dist.destroy_process_group()


def join(rank, world, store, seconds=60, backend="gloo"):
    """A group over a file, as ``edgeless.distributed.init`` would make one under torchrun."""
    from datetime import timedelta

    os.environ.pop("WORLD_SIZE", None)
    options = {"rank": rank, "world_size": world, "timeout": timedelta(seconds=seconds)}
    dist.init_process_group(backend, init_method=f"file://{store}", **options)


# Comparison ------------------------------------------------------------------------------------------------------


def whole_edges(values, size):
    """Values of the edges of all processes, in the order of the whole graph, by name; one exchange serves all names.

    Args:
        values: name -> (edge ids, values) of this process.
        size: the number of processes.
    """
    mine = {name: (ids.cpu(), of.cpu()) for name, (ids, of) in values.items()}
    found = [mine] * size
    if mine and size > 1:
        dist.all_gather_object(found, mine)
    order = {name: torch.cat([of[name][0] for of in found]).argsort() for name in mine}
    return {name: torch.cat([of[name][1] for of in found])[order[name]] for name in mine}


def weights_of(out):
    """The weights of an output in a loss: functions of the element's index alone."""
    flat = torch.arange(out.numel(), dtype=torch.float64, device=out.device).view(out.shape)
    return torch.cos(flat * 0.37)


def doubled(layer):
    """The layer in float64, with parameters none of which is zero."""
    layer = copy.deepcopy(layer).double()
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64, generator=generator) * 0.4)
    return layer


def run_whole(layer, call, x, given, gradient, seed):
    """name -> tensor of one process: the output, further results, and the gradients of all inputs and parameters."""
    x = x.clone().requires_grad_(gradient)
    given = {name: t.clone().requires_grad_() for name, t in given.items()}
    torch.manual_seed(seed)
    results = call(layer, x, given)
    sum((r * weights_of(r)).sum() for r in results).backward()
    found = {f"result {i}": r.detach() for i, r in enumerate(results)}
    found.update({f"grad of {name}": p.grad for name, p in layer.named_parameters()})
    found.update({f"grad of {name}": t.grad for name, t in given.items()})
    return found | ({"grad of x": x.grad} if gradient else {})


def run_parts(layer, call, dg, looped, given, gradient, seed, dtype):
    """The results of :func:`run_whole`, computed on the parts of all processes and put together."""
    x = dg.ndata["x"].to(dtype).clone().requires_grad_(gradient)
    given = {name: dg.edata[name].to(dtype).clone().requires_grad_() for name in given}
    torch.manual_seed(seed + dg.rank)  # only the first rank's generator counts
    layer.zero_grad()
    results = call(layer, x, given)
    graph = dg.with_self_loops() if looped else dg
    total = x.new_zeros(())
    found, by_edge = {}, {}
    for i, result in enumerate(results):
        by_node = i == 0
        num_rows = dg.total_nodes if by_node else graph.total_edges
        ids = dg.nodes if by_node else graph.edge_ids
        weights = weights_of(torch.empty(num_rows, *result.shape[1:], device=ids.device))[ids]
        total = total + (result * weights.to(dtype)).sum()
        if by_node:
            found[f"result {i}"] = ed.gather(result.detach(), dg)
        else:
            by_edge[f"result {i}"] = ids, result.detach()
    total.backward()
    parameters = dict(layer.named_parameters())
    here = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters.values()]
    gradients = torch.cat([g.flatten() for g in here]) if here else x.new_zeros(0)
    if dg.size > 1:
        dist.all_reduce(gradients)
    for name, g, flat in zip(parameters, here, gradients.split([g.numel() for g in here]), strict=True):
        found[f"grad of {name}"] = flat.view_as(g)
    by_edge.update({f"grad of {name}": (dg.edge_ids, t.grad) for name, t in given.items()})
    found.update(whole_edges(by_edge, dg.size))
    return found | ({"grad of x": ed.gather(x.grad, dg)} if gradient else {})


def differences(have, want, dtype):
    """Yields what differs by more than the tolerance, relative by norm or, if they cancel, to the largest."""
    largest = max(float(t.norm()) for t in want.values() if t is not None)
    for name, right in want.items():
        if right is None:
            if have[name].any():
                yield f"{name} is not zero"
            continue
        if have[name].shape != right.shape:
            yield f"{name} has shape {list(have[name].shape)} and not {list(right.shape)}"
            continue
        size, error = float(right.norm()), float((have[name].double().cpu() - right.cpu()).norm())
        limit = TOLERANCE[dtype] * (size if size > 1e-4 * largest else 0.1 * largest)
        if not error <= limit:
            yield f"{name} is off by {error:.1e}, more than {limit:.1e}"


def ways(number, partition, dg, shared):
    """The dtypes that a case runs in on a partition, and whether its features have a gradient there.

    On "random" a case runs in all four ways, on every other partition in one. ``shared``: the groups of two and of
    three processes divide these between them, case by case. On GPUs, of which no test has three, all of them run.
    """
    shared = shared and dg.device.type != "cuda"
    names = list(partitions(dg.size))
    turn = number + dg.size  # even in one of the two worlds
    if partition == "random":
        found = [(dtype, gradient) for dtype in (torch.float64, torch.float32) for gradient in (True, False)]
        return [way for k, way in enumerate(found) if not shared or (k % 3 == 0) == (turn % 2 == 0)]
    mine = not shared or (turn + names.index(partition)) % 2 == 0
    return [(torch.float64, number // 2 % 2 == 0)] if mine else []


def compare(cases, dg, edge_index, partition, shared=False):
    """Runs every case on the parts of this process and, on the first rank, in one process; yields what differs.

    A case is (name, layer, call, whether the layer adds loops, names of edge data). ``call(graph)`` gives a function of
    the layer, x and a dict of edge tensors, to a list of results. ``partition`` and ``shared``: see :func:`ways`.
    """
    edge_index = edge_index.to(dg.device)
    for number, (name, make, call, looped, given) in enumerate(cases):
        todo = ways(number, partition, dg, shared)
        truth = doubled(make()) if todo else None
        for dtype, gradient in todo:
            layer = copy.deepcopy(truth).to(dg.device, dtype)
            have = run_parts(layer, call(dg), dg, looped, given, gradient, 9, dtype)
            if dg.rank:
                continue
            x = node_data()["x"].to(dg.device, dtype).double()
            with_edges = {n: t.to(x.device, dtype).double() for n, t in edge_data(edge_index).items() if n in given}
            rounded = copy.deepcopy(layer).double()
            want = run_whole(rounded, call(edge_index), x, with_edges, gradient, 9)
            for wrong in differences(have, want, dtype):
                yield f"{name}, {dtype}, x {'with' if gradient else 'without'} gradient: {wrong}"

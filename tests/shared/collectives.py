"""The work of test_cache_distributed.py's processes: a spawned process can import this module, but no test module."""

import torch
import torch.distributed as dist

from edgeless.cache import graph_from_edge_index

NODES, EDGES = 500, 20_000


def edges(seed, num_edges=EDGES):
    return torch.randint(0, NODES, (2, num_edges), generator=torch.Generator().manual_seed(seed))


def broadcast(buffer, rank):
    dist.broadcast(buffer, 0)


def broadcast_later(buffer, rank):
    dist.broadcast(buffer, 0, async_op=True).wait()


def send_and_receive(buffer, rank):
    (dist.recv if rank else dist.send)(buffer, 1 - rank)


def sum_of_both(buffer, rank):
    dist.all_reduce(buffer)


def scatter(buffer, rank):
    dist.scatter(buffer, None if rank else [buffer.flip(1), edges(7)], 0)


def gather(buffer, rank):
    dist.all_gather(list(buffer.view(2, -1)), buffer[0].clone())


def one_id(buffer, rank):
    """Changes one id of a large graph, which a sample of the ids would probably miss."""
    ids = buffer.clone()
    ids[1, 7_777] = (ids[1, 7_777] + 1) % NODES
    dist.broadcast(buffer if rank else ids, 0)


COLLECTIVES = [broadcast, broadcast_later, send_and_receive, sum_of_both, scatter, gather, one_id]


def work(rank, file, errors):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    try:
        for write in COLLECTIVES:
            buffer = edges(rank) if write is not one_id else edges(0)
            if write is sum_of_both:
                buffer //= 2
            before = graph_from_edge_index(buffer, NODES, NODES)
            assert graph_from_edge_index(buffer, NODES, NODES) is before
            compiled = _compiled if write is broadcast else None
            if compiled is not None:
                compiled(buffer)
            write(buffer, rank)
            after = graph_from_edge_index(buffer, NODES, NODES)
            if not torch.equal(after.edge_index(), buffer):
                errors.put(f"{write.__name__}: the graph of rank {rank} is stale")
            if compiled is not None and not torch.equal(compiled(buffer), after.csr.indptr.diff()):
                errors.put(f"{write.__name__}: the compiled program of rank {rank} is stale")
    finally:
        dist.destroy_process_group()


@torch.compile(backend="eager")
def _compiled(edge_index):
    return graph_from_edge_index(edge_index, NODES, NODES).csr.indptr.diff()


def write_one_id(edge_index):
    edge_index[0, 11_111] = (edge_index[0, 11_111] + 1) % NODES

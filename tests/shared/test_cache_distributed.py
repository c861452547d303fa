"""The cache where other processes write into an edge_index: collectives of torch.distributed, and shared memory."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from collectives import NODES, edges, work, write_one_id
from processes import forking

import edgeless
from edgeless.cache import graph_from_edge_index

pytestmark = [
    pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo"),
    pytest.mark.slow,
]


def test_collectives_write_into_an_edge_index(tmp_path):
    errors = mp.get_context(forking()).SimpleQueue()
    mp.start_processes(work, (str(tmp_path / "store"), errors), nprocs=2, start_method=forking())
    found = []
    while not errors.empty():
        found.append(errors.get())
    assert not found


def test_another_process_writes_into_shared_memory():
    edgeless.clear_cache()
    edge_index = edges(0).share_memory_()
    before = graph_from_edge_index(edge_index, NODES, NODES)
    process = mp.get_context(forking()).Process(target=write_one_id, args=(edge_index,))
    process.start()
    process.join()
    assert process.exitcode == 0
    after = graph_from_edge_index(edge_index, NODES, NODES)
    assert torch.equal(after.edge_index(), edge_index)
    assert not torch.equal(after.edge_index(), before.edge_index())

"""A thousand sampled graphs leave nothing behind."""

import gc
import tracemalloc

import pytest
import torch

import edgeless
from edgeless.cache import graph_from_edge_index

NUM_GRAPHS = 1000
NUM_NODES, NUM_EDGES = 500, 2000  # about 150 kB of index tensors a graph with all it derives: 150 MB if they stayed
MAY_GROW = 20 * 2**20


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def use(edge_index):
    """What a layer does: look the graph up, with and without loops, forward and transpose."""
    for self_loops in (False, True):
        graph = graph_from_edge_index(edge_index, NUM_NODES, NUM_NODES, self_loops=self_loops)
        graph.csc  # noqa: B018
        graph.with_self_loops().csc  # noqa: B018


def sampled(seed):
    return torch.randint(NUM_NODES, (2, NUM_EDGES), generator=torch.Generator().manual_seed(seed))


def edited_in_place():
    edge_index = sampled(0)
    for seed in range(NUM_GRAPHS):
        edge_index.copy_(sampled(seed))
        yield edge_index


def fresh():
    return (sampled(seed) for seed in range(NUM_GRAPHS))


@pytest.mark.parametrize("graphs", [fresh, edited_in_place])
def test_a_thousand_graphs(graphs):
    try:
        resident_bytes()
    except OSError:
        pytest.skip("needs /proc/self/statm to see the process's memory")
    edgeless.clear_cache()
    most = 0
    for step, edge_index in enumerate(graphs()):
        use(edge_index)
        most = max(most, edgeless.cache_info().graphs)
        if step == 100:  # allocators are warm
            before = resident_bytes()
    after = resident_bytes()
    assert most == 2  # with loops and without
    assert after - before < MAY_GROW
    del edge_index
    assert edgeless.cache_info()[2:4] == (0, 0)


def test_no_python_object_is_left():
    def run(num_graphs):
        for seed in range(num_graphs):
            use(sampled(seed)[:, :50])
        gc.collect()

    run(50)
    tracemalloc.start()
    try:
        run(10)
        grown = []
        for _ in range(3):
            before, _ = tracemalloc.get_traced_memory()
            run(200)
            after, _ = tracemalloc.get_traced_memory()
            grown.append(after - before)
    finally:
        tracemalloc.stop()
    # A single small object a graph would be more, in every window; a table that doubles is seen in one of them.
    assert min(grown) < 200 * 20, grown

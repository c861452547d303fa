"""The cache of graphs in many threads, and in processes forked while one of them is in it."""

import gc
import os
import threading

import pytest
import torch
from forks import run_in_fork
from test_cache import Unhashable, bytes_of_one, counts, empty_cache, lookup, new_edges  # noqa: F401  a fixture

import edgeless
from edgeless import Graph
from edgeless.cache import GraphCache

# Threads -------------------------------------------------------------------------------------------------------------


def test_many_threads():
    shared = [new_edges() + step % 2 for step in range(4)]
    failures = []

    def work(seed):
        try:
            for step in range(200):
                edge_index = shared[(seed + step) % 4]
                assert torch.equal(lookup(edge_index).edge_index(), edge_index)
                passing = new_edges() if step % 3 else new_edges().flip(0)
                assert torch.equal(lookup(passing).edge_index(), passing)
                if step % 50 == 0:
                    edgeless.set_cache_limit((1 + seed) * bytes_of_one())
                    edgeless.cache_info()
                    gc.collect()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    edgeless.set_cache_limit(2**30)
    shared.clear()
    assert counts()[2] == 0
    assert edgeless.graph.weak_cache._cache._charged == 0


def test_an_anchor_that_dies_inside_the_cache():
    """The callback of a death must not wait for the lock that its own thread holds."""
    cache = GraphCache(limit=10**9)
    anchor = Unhashable()
    cache.get(anchor, 0, lambda: Graph.from_edge_index(new_edges()))
    with cache._locked():
        del anchor
        assert len(cache._entries) == 1
    assert len(cache._entries) == 0  # swept when the lock was free


# Forks ---------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_forked_inside_the_cache_does_not_wait():
    edge_index = new_edges()
    lookup(edge_index)
    holding, done = threading.Event(), threading.Event()

    def hold():
        with edgeless.graph.weak_cache._cache._locked():
            holding.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    holding.wait(60)

    def use():
        graph = lookup(edge_index)
        return lookup(edge_index) is graph and torch.equal(graph.edge_index(), edge_index) and counts() == (1, 1, 1)

    try:
        assert run_in_fork(use)
    finally:
        done.set()
        thread.join()
    assert counts()[2] == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_keeps_the_graphs_of_its_parent():
    edge_index = new_edges()
    graph = lookup(edge_index)
    assert run_in_fork(lambda: lookup(edge_index) is graph)

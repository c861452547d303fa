"""The pool of large CPU results: what is freed is used again, what is alive never, and nothing is kept for ever."""

import gc
import os
import subprocess
import sys
import threading

import pytest
import torch
from forks import run_in_fork

import edgeless
from edgeless import _C

MB = 1 << 20
LEAST = 32 * MB  # core_cuda/common/cpu/pool.h

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the pool is for Linux")


@pytest.fixture(autouse=True)
def empty_pool():
    gc.collect()
    edgeless.clear_cache()
    assert edgeless.cache_info().pooled == 0
    yield
    edgeless.clear_cache()


def result(megabytes, value=1.0):
    """A result of an op, [rows, 256], as large as asked for."""
    rows = torch.full((), value).expand(megabytes * 1024, 256)
    return torch.ops.edgeless.add_row(rows, torch.zeros(256))


def test_a_freed_result_is_used_again():
    first = result(40)
    address = first.data_ptr()
    assert edgeless.cache_info().pooled == 0
    del first
    assert edgeless.cache_info().pooled == 40 * MB
    second = result(38, value=2.0)
    assert second.data_ptr() == address
    assert edgeless.cache_info().pooled == 0
    assert torch.equal(second, torch.full_like(second, 2.0))


def test_a_block_lives_as_long_as_any_view_of_it():
    view = result(40, value=3.0)[7:9]
    other = result(40, value=4.0)
    assert edgeless.cache_info().pooled == 0
    assert view.unique().tolist() == [3.0]
    assert other.unique().tolist() == [4.0]
    del view
    assert edgeless.cache_info().pooled == 40 * MB


def test_results_that_are_alive_never_share_memory():
    generator = torch.Generator().manual_seed(0)
    alive = {}
    for step in range(60):
        size = int(torch.randint(33, 60, (), generator=generator))
        alive[step] = result(size, value=float(step))
        if len(alive) > 4:
            drop = list(alive)[int(torch.randint(len(alive), (), generator=generator))]
            del alive[drop]
        for value, tensor in alive.items():
            assert (tensor[0, 0], tensor[-1, -1]) == (value, value)
    for value, tensor in alive.items():
        assert tensor.unique().tolist() == [value]


def test_a_result_that_is_much_smaller_gets_memory_of_its_own():
    large = result(80)
    address = large.data_ptr()
    del large
    small = result(40)
    assert small.data_ptr() != address
    # As much as was mapped anew was given back first: the pool does not grow with every size that is seen.
    assert edgeless.cache_info().pooled == 0


def test_small_results_do_not_go_through_the_pool():
    small = result(31)
    del small
    assert edgeless.cache_info().pooled == 0
    assert 31 * MB < LEAST


def test_what_is_idle_for_long_is_given_back():
    wide, other = result(64), result(40)
    del wide, other
    assert edgeless.cache_info().pooled == 104 * MB
    for _ in range(256):  # kPatience of core_cuda/common/cpu/pool.cpp
        result(40)
    assert edgeless.cache_info().pooled == 104 * MB
    result(40)
    assert edgeless.cache_info().pooled == 40 * MB


def test_clear_cache_releases_and_what_is_alive_stays():
    kept, freed = result(40, value=5.0), result(40)
    del freed
    edgeless.clear_cache()
    assert _C.pooled_bytes() == 0
    assert kept.unique().tolist() == [5.0]


def test_threads_may_take_and_give_at_once():
    wrong = []

    def work(value):
        for _ in range(10):
            found = result(33, value=float(value))
            if found[0, 0] != value or found[-1, -1] != value:
                wrong.append(value)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_result_is_a_tensor_like_any_other(tmp_path):
    x = result(33, value=6.0)
    assert x.is_contiguous()
    assert x.data_ptr() % 64 == 0
    torch.save(x, tmp_path / "x.pt")
    assert torch.equal(torch.load(tmp_path / "x.pt"), x)
    x.resize_(70 * 1024, 256)  # grows into memory of torch's own
    assert x[: 33 * 1024].unique().tolist() == [6.0]
    with torch.inference_mode():
        assert result(33).is_inference()


def test_the_pool_can_be_turned_off():
    script = (
        "import torch, edgeless\n"
        "x = torch.ops.edgeless.add_row(torch.ones(40 * 1024, 256), torch.zeros(256))\n"
        "assert x.sum() == x.numel()\n"
        "del x\n"
        "print(edgeless.cache_info().pooled)\n"
    )
    for choice, pooled in (("0", "0"), ("1", str(40 * MB))):
        env = {**os.environ, "EDGELESS_POOL": choice}
        ran = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
        assert ran.stdout.strip() == pooled


def test_children_forked_inside_the_pool_do_not_wait():
    """Threads take and give all the time, so some children are forked while one of them is inside the pool."""
    stop = threading.Event()

    def work():
        while not stop.is_set():
            result(33)

    def use():
        return bool(result(33, value=7.0)[-1, -1] == 7.0)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            assert run_in_fork(use)
    finally:
        stop.set()
        for thread in threads:
            thread.join()


OUT_OF_ADDRESSES = """
import resource, torch, edgeless

def result(megabytes):
    rows = torch.ones(()).expand(megabytes * 1024, 256)
    return torch.ops.edgeless.add_row(rows, torch.zeros(256))

result(64)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (512 << 20), -1))
idle = [result(100) for _ in range(4)]
del idle
assert edgeless.cache_info().pooled >= 400 << 20
{work}
"""


def run_out_of_addresses(work):
    script = OUT_OF_ADDRESSES.format(work=work)
    # one thread: every other one takes addresses for a heap and a stack of its own
    return subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )


WORK = {
    "the pool itself": "assert result(400).shape == (400 * 1024, 256)",
    "a smaller result than the pool takes": (
        "hold = []\n"
        "try:\n"
        "    while True: hold.append(torch.empty(30 << 20, dtype=torch.uint8))\n"
        "except RuntimeError: pass\n"
        "assert result(31).shape == (31 * 1024, 256)\n"
    ),
    "a graph": (
        "edges = torch.zeros(2, 1, dtype=torch.int64).expand(2, 8_000_000)\n"
        "assert edgeless.Graph.from_edge_index(edges, 9, 9).num_edges == 8_000_000\n"
    ),
}


@pytest.mark.parametrize("work", WORK.values(), ids=WORK.keys())
def test_an_op_without_room_gives_the_pool_back_first(work):
    ran = run_out_of_addresses(work)
    assert ran.returncode == 0, ran.stderr


def test_what_does_not_fit_without_the_pool_either_is_an_error():
    ran = run_out_of_addresses("result(1000)")
    assert "can't allocate memory" in ran.stderr


def test_clear_cache_makes_room_for_torch():
    """As the documents advise."""
    ran = run_out_of_addresses("edgeless.clear_cache()\ntorch.empty(400 << 20, dtype=torch.uint8)")
    assert ran.returncode == 0, ran.stderr

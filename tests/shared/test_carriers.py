"""What carries halo rows: symmetric memory as far as it goes without GPUs, and on two GPUs against an all-to-all."""

import gc
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("safetensors")
pytest.importorskip("pymetis")

from carrier_cases import carried, everything, refuse
from part_cases import spawn, write_partitions

import edgeless.distributed as ed
from edgeless.distributed import symmetric

needs_gloo = pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo")


@needs_gloo
@pytest.mark.slow
@pytest.mark.parametrize(("world", "fake"), ((2, "late"), (3, "thread")))
def test_rows_by_symmetric_memory(tmp_path, world, fake):
    write_partitions(tmp_path, world)
    assert not spawn(carried, world, tmp_path, fake, everything)


@needs_gloo
@pytest.mark.slow
def test_what_cannot_be_had_is_said_on_every_rank(tmp_path):
    write_partitions(tmp_path, 2)
    assert not spawn(refuse, 2, tmp_path)


@pytest.mark.cuda
def test_rows_by_symmetric_memory_of_two_gpus(tmp_path):
    if torch.cuda.device_count() < 2 or not dist.is_nccl_available():
        pytest.skip("needs two GPUs and NCCL")
    write_partitions(tmp_path, 2)
    assert not spawn(carried, 2, tmp_path, "symmetric", everything, backend="nccl")


# One process -----------------------------------------------------------------------------------------------------


def test_one_process_needs_no_carrier(tmp_path):
    write_partitions(tmp_path, 2)
    for name in ("auto", "all_to_all", "symmetric"):
        dg = ed.load(tmp_path / "random", carrier=name)
        assert (dg.carrier, dg.carrier_refusal) == ("all_to_all", "")
        assert "carrier" not in repr(dg)
    with pytest.raises(ValueError, match="load: carrier must be one of 'auto', 'all_to_all', 'symmetric', got 'nccl'"):
        ed.load(tmp_path / "random", carrier="nccl")
    with pytest.raises(TypeError, match="load: keep_features must be True, False or None, got 'yes'"):
        ed.load(tmp_path / "random", keep_features="yes")


class Alone:
    """Stands for a rank, for its memory and for its stream: every other rank says and does what it does."""

    rank, size, timeout_ms = 0, 2, 0

    def __init__(self, fails=()):
        self.asked, self.fails = [], list(fails)

    def all_say(self, value):
        return [value, value]

    def take(self, nbytes):
        self.asked.append(nbytes)
        if nbytes in self.fails:
            raise MemoryError("none left")
        return torch.zeros(nbytes, dtype=torch.uint8)

    def share(self, memory):
        def get_buffer(rank, shape, dtype, first):
            if dtype == torch.uint8:
                return torch.tensor([rank], dtype=dtype)
            start, numel = first * dtype.itemsize, torch.Size(shape).numel()
            return memory[start : start + numel * dtype.itemsize].view(dtype).view(shape)

        return SimpleNamespace(get_buffer=get_buffer, barrier=lambda channel, timeout_ms: None)

    def mark(self):
        return None

    def wait(self, mark):
        pass

    def run(self, after, *works):
        return [work() for work in works]

    def settle(self, seconds=0):
        pass


def alone(**options):
    rank = Alone(**options)
    return symmetric.Symmetric(rank, [[0, 10], [7, 0]], rank, rank), rank


def test_a_slot_is_the_smallest_that_fits_and_small_ones_make_room():
    carrier, rank = alone()

    def take(width):
        return carrier._take(torch.empty(3, width))

    def give(*ways):
        for way in ways:
            carrier.arrive(way)

    assert rank.asked == [1]
    give(take(2))
    assert rank.asked == [1, 80] and carrier.bytes == 80  # 10 rows of the rank that sends most
    two, one = take(2), take(1)
    assert rank.asked == [1, 80, 40] and carrier.bytes == 120
    give(two, one)
    one, two = take(1), take(2)
    assert (one.slot.bytes, two.slot.bytes) == (40, 80)
    give(one, two)
    give(take(3))
    assert rank.asked == [1, 80, 40, 120] and carrier.bytes == 120
    give(take(0))
    carrier.forget()
    assert carrier.bytes == 0


def test_a_slot_outlives_what_uses_it_until_all_ranks_have_dropped_it(monkeypatch):
    carrier, rank = alone()
    way = carrier._take(torch.empty(3, 2))
    slot, held = way.slot, way.slot.held
    assert held.nbytes() == 24
    monkeypatch.setattr(rank, "all_say", lambda value: [value, set() if isinstance(value, set) else value])
    del way
    gc.collect()
    other = carrier._take(torch.empty(3, 2))
    assert other.slot is not slot and slot.held is held
    monkeypatch.undo()
    again = carrier._take(torch.empty(3, 2))
    assert again.slot is slot and carrier.bytes == 160


def test_memory_that_one_rank_cannot_have_is_an_error():
    carrier, _ = alone(fails=[80])
    with pytest.raises(RuntimeError, match="symmetric memory of 80 bytes cannot be had on every rank: rank 0: MemoryE"):
        carrier._take(torch.empty(3, 2))
    assert carrier._take(torch.empty(3, 1)).slot.bytes == 40  # and others go on


def test_memory_that_others_do_not_see_is_not_used(monkeypatch):
    monkeypatch.setattr(Alone, "run", lambda self, after, *works: [None for _ in works])
    with pytest.raises(RuntimeError, match=r"other ranks write .* cannot be had .*: read \[\] from ranks \[1\]"):
        alone()


HERE, THERE = ("host boot", "gpu 0"), ("host boot", "gpu 1")


@pytest.mark.parametrize(
    ("other", "access", "atomics", "words"),
    [
        (THERE, True, True, ""),
        (("elsewhere boot", "gpu 1"), True, True, "it needs all ranks on one host, and rank 1 is on elsewhere"),
        (HERE, True, True, "it needs a GPU for every rank, and rank 1 has the same"),
        (("host boot", "gpu 7"), True, True, "the GPU of rank 1 is not visible"),
        (THERE, False, False, "its GPU has no access to that of rank 1"),
        (THERE, True, False, "it needs NVLink, and the GPU of rank 1 is not reached by it"),
    ],
)
def test_gpus_that_do_not_reach_one_another_are_named(monkeypatch, other, access, atomics, words):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"gpu {index}"))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: access)
    monkeypatch.setattr(symmetric, "_has_atomics", lambda one, other: atomics)
    assert symmetric._peer_refusal([HERE, other], 0, torch.device("cuda", 0)) == words


def test_a_torch_without_symmetric_memory_says_so(monkeypatch):
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(symmetric, "PRIVATE", "torch.distributed._nothing")
    reason, _ = symmetric._own_refusal(torch.device("cuda", 0))
    assert reason.startswith(f"torch {torch.__version__} has no symmetric memory that is known here (ModuleNotFoundErr")
    ranks = SimpleNamespace(rank=0, size=2, all_say=lambda value: [value, ("", HERE)])
    assert symmetric.refusal(ranks, torch.device("cuda", 0)) == f"rank 0: {reason}"

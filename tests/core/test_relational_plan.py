"""Where sums over relations are multiplied while they are kept: one answer for the op, the layers and the reports.

Without a GPU, for devices as CUDA describes them.
"""

from types import SimpleNamespace

import pytest
import torch

from edgeless import _C, TypedGraph
from edgeless.functional import relational
from edgeless.graph import typed as typed_graph
from edgeless.plan import recording as plan_recording
from edgeless.plan import steps as plan
from edgeless.plan.steps import DEVICES, Device, takes_widths

KB = 1024
# capability: (what a block may ask for, the widest rows of floats, of 16 bits)
FAMILIES = {
    75: (64 * KB, 0, 0),
    80: (163 * KB, 64, 128),
    86: (99 * KB, 64, 64),
    89: (99 * KB, 64, 64),
    90: (227 * KB, 128, 128),
    120: (99 * KB, 64, 64),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
WIDTHS = (0, 1, 4, 8, 12, 60, 63, 64, 65, 66, 68, 72, 100, 120, 124, 127, 128, 129, 132, 136, 256)


def described(capability):
    return Device(f"sm_{capability}", 100, 2**20, FAMILIES[capability][0], capability=capability)


def widest(capability, dtype):
    _, floats, halves = FAMILIES[capability]
    return floats if dtype == torch.float32 else 0 if dtype == torch.float64 else halves


def expected(capability, dtype, *widths):
    """Whole vectors of 16 bytes, up to the widest."""
    return all(0 < w <= widest(capability, dtype) and w * dtype.itemsize % 16 == 0 for w in widths)


@pytest.fixture(params=FAMILIES)
def capability(request, monkeypatch):
    """The current device is said to be one of these."""
    monkeypatch.setattr(plan.Device, "of", lambda _: described(request.param))
    plan._known_width.cache_clear()
    yield request.param
    plan._known_width.cache_clear()


def ask_core(device, dtype, in_width, out_width, wide_index=False):
    return _C.fuses_widths(
        dtype=str(dtype).removeprefix("torch."), wide_index=wide_index, capability=device.capability,
        shared_bytes=device.shared_bytes, in_width=in_width, out_width=out_width,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_widths_of_every_device(capability, dtype):
    device = described(capability)
    assert device.most_fused_width(dtype, False) == widest(capability, dtype)
    assert device.most_fused_width(dtype, True) == 0  # ids of 64 bits
    for one in WIDTHS:
        for other in WIDTHS:
            fuses = expected(capability, dtype, one, other)
            assert ask_core(device, dtype, one, other) is fuses, (one, other)
            assert takes_widths(device.most_fused_width(dtype, False), dtype, (one, other)) is fuses, (one, other)
            assert not ask_core(device, dtype, one, other, wide_index=True)


# Of the kernel of each dtype and width that takes the most memory: 780 bytes for where the segments of three tiles of
# 64 begin, and, in numbers of 4 or 2 bytes,
# - the sums of rows of 128 floats: own rows 64 x 132, root 128 x 132, sums 64 x 136; for each of 256 threads 4 numbers
#   of leads, 8 rows of 4 and 6 more;
# - the gradients of segments of 64 floats: x and g 64 x 72 each, the weight 64 x 64; for each of 256 threads 2 numbers
#   of leads, 16 rows of 2 and 6 more;
# - the gradients of segments of 16 bits: x and g 64 rows each and the weight, all longer by 8; two chunks of 64 edges
#   (96 of narrow rows), and as many weights of 4 bytes and 16 more.
MEMORY = {
    (torch.float32, 128): 780 + 4 * ((64 + 128) * 132 + 64 * 136 + 256 * (4 + 8 * 4 + 6)),
    (torch.float32, 64): 780 + 4 * (2 * 64 * 72 + 64 * 64 + 256 * (2 + 16 * 2 + 6)),
    (torch.float16, 128): 780 + 2 * (2 * 64 + 128) * 136 + 2 * (2 * 64 * 136 + 4 * 80),
    (torch.float16, 64): 780 + 2 * (2 * 64 + 64) * 72 + 2 * (2 * 96 * 72 + 4 * 112),
}


@pytest.mark.parametrize("dtype,width", MEMORY)
def test_a_device_has_the_memory_or_a_byte_too_little(dtype, width):
    def most(capability, shared_bytes):
        device = Device("some", 100, 2**20, shared_bytes, capability=capability)
        return device.most_fused_width(dtype, False)

    needed = MEMORY[dtype, width]
    assert most(80, needed) == width
    assert most(80, needed - 1) == width // 2 * (width == 128)
    assert most(79, needed) == most(0, needed) == 0


@pytest.mark.parametrize("name", DEVICES)
def test_named_devices_are_as_cuda_describes_them(name):
    device = DEVICES[name]
    assert device.shared_bytes == FAMILIES[device.capability][0]
    assert device.clusters is (device.capability >= 90)


def graph_on_cuda(**given):
    """What the decisions look at of a typed graph."""
    of = {"device": torch.device("cuda", 0), "graph": SimpleNamespace(index_dtype=torch.int32), **given}
    return SimpleNamespace(**of)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_and_reports_decide_as_the_op_does(capability, dtype):
    device = described(capability)
    wide = graph_on_cuda(graph=SimpleNamespace(index_dtype=torch.int64))
    ids = [torch.empty(n, dtype=torch.int32, device="meta") for n in (3, 40, 41, 50, 50, 51, 3, 9, 5, 0, 0)]
    for k, m in ((64, 64), (68, 64), (64, 68), (72, 128), (128, 128), (128, 132), (63, 64), (8, 8)):
        weight = torch.empty(2, k, m, dtype=dtype, device="meta")
        fuses = ask_core(device, dtype, k, m)
        assert relational.fuses(graph_on_cuda(), weight, dtype) is fuses, (k, m)
        assert not relational.fuses(wide, weight, dtype)
        assert not relational.fuses(graph_on_cuda(device=torch.device("cpu")), weight, dtype)
        assert not relational.fuses(graph_on_cuda(), weight[:, None], dtype)  # blocks
        args = {"x": torch.empty(20, k, dtype=dtype, device="meta"), "weight": weight, "by_dst": ids, "num_dst": 10}
        (step,) = plan_recording._steps_of("relational_sum", args)
        assert ("multiplied in the kernel that sums" in step.kernel) is fuses, (k, m)


def test_rows_that_are_no_vectors_are_reported_as_the_op_runs_them(monkeypatch):
    monkeypatch.setattr(plan.Device, "of", lambda _: DEVICES["h200"])
    ids = [torch.empty(n, dtype=torch.int32, device="meta") for n in (3, 40, 41, 50, 50, 51, 3, 9, 5, 0, 0)]
    weight = torch.empty(2, 64, 64, device="meta")

    def says(x):
        args = {"x": x, "weight": weight, "by_dst": ids, "num_dst": 10}
        return "in the kernel that sums" in plan_recording._steps_of("relational_sum", args)[0].kernel

    assert says(torch.empty(20, 64, device="meta")) and says(torch.empty(20, 68, device="meta")[:, :64])
    assert not says(torch.empty(20, 66, device="meta")[:, :64])  # rows begin between vectors
    assert not says(torch.empty(64, 20, device="meta").t())
    shifted = torch.empty(20 * 64 + 1)[1:].view(20, 64)
    assert shifted.data_ptr() % 16 and not says(shifted.as_subclass(OnCuda))


class OnCuda(torch.Tensor):
    """Says that it is on CUDA, as far as a report asks."""

    @property
    def device(self):
        return torch.device("cuda", 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("blocks,k,m", [(2, 32, 32), (2, 34, 32), (4, 32, 32), (4, 32, 36)])
def test_blocks_are_made_whole_only_for_kernels_that_take_them(capability, dtype, blocks, k, m):
    weight = torch.empty(2, blocks, k, m, dtype=dtype)
    graph = graph_on_cuda(num_edges=1 << 18, by_dst=[None, None, torch.empty(9)])
    whole = relational.whole_matrices(graph, weight, dtype)
    if ask_core(described(capability), dtype, blocks * k, blocks * m):
        assert whole.shape == (2, blocks * k, blocks * m)
    else:
        assert whole is weight


def test_orders_and_segments_follow_the_decision(capability, monkeypatch):
    """128 floats to 16: with fused kernels multiplying first is less to move here, without them summing first."""
    sizes = (4_800_000, 860_000, 860_000)
    rows = [torch.empty(n, device="meta") for n in sizes]
    graph = graph_on_cuda(
        num_edges=sizes[0], by_dst=[None, rows[1], rows[1]], by_src=[None, rows[2]],
        format=lambda key, build: build(graph), tiled=lambda by_dst, mean: "tiled",
    )  # fmt: skip
    weight = torch.empty(51, 128, 16, device="meta")
    fused = relational.fuses(graph, weight, torch.float32)
    assert fused is (capability == 90)
    order = relational.choose_order(*sizes, 128, 16, one_pass=False, fused=fused)
    assert relational.transforms(graph, weight, fused) is (order == "transform")
    by_dst, by_src, _ = relational.segments_of(graph, fused, "sum", None, True, torch.float32)
    assert (by_dst == by_src == "tiled") is fused
    assert fused or (by_dst is graph.by_dst and by_src is graph.by_src)


@pytest.mark.parametrize("on_cuda", [True, False])
def test_segments_are_cut_short_where_they_are_a_blocks(capability, on_cuda, monkeypatch):
    ends = torch.stack((torch.arange(600), torch.zeros(600, dtype=torch.int64)))
    graph = TypedGraph.from_edge_index(ends, torch.zeros(600, dtype=torch.int64), 1, 600, 1)
    if on_cuda:
        monkeypatch.setattr(TypedGraph, "device", property(lambda self: torch.device("cuda", 0)))
    lengths = graph._sorted(graph.graph.csr)[2].diff().tolist()
    short = on_cuda and capability >= 80
    assert lengths == ([64] * 9 + [24] if short else [512, 88])
    assert (typed_graph.CUT, typed_graph._TILED_CUT) == (512, 64)


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_a_program_for_a_gpu_elsewhere_is_traced_as_for_the_largest():
    plan._known_width.cache_clear()
    assert plan.most_fused_width(torch.device("cuda", 0), torch.float32) == 128
    plan._known_width.cache_clear()


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_answer_is_that_of_the_current_device(dtype):
    device = torch.device("cuda", torch.cuda.current_device())
    found, known = Device.of(device), torch.cuda.get_device_properties(device)
    assert found.capability == 10 * known.major + known.minor
    assert found.shared_bytes == getattr(known, "shared_memory_per_block_optin", found.shared_bytes)
    plan._known_width.cache_clear()
    assert plan.most_fused_width(device, dtype) == found.most_fused_width(dtype, False)
    if found.capability in FAMILIES:
        assert found.shared_bytes == FAMILIES[found.capability][0]
        assert plan.most_fused_width(device, dtype) == widest(found.capability, dtype)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_program_takes_the_answer_for_a_constant(monkeypatch, dynamic):
    monkeypatch.setattr(plan.Device, "of", lambda _: described(80))
    plan._known_width.cache_clear()

    def step(x, weight):
        most = plan.most_fused_width(x.device, x.dtype)
        return x * most + takes_widths(most, x.dtype, tuple(weight.shape[1:]))

    torch._dynamo.reset()
    compiled = torch.compile(step, backend="eager", fullgraph=True, dynamic=dynamic)
    for k, m in ((64, 64), (68, 64), (64, 68), (60, 32)):
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.ones(3, dtype=dtype)
            weight = torch.empty(2, k, m)
            assert torch.equal(compiled(x, weight), step(x, weight)), (k, m, dtype)
    plan._known_width.cache_clear()

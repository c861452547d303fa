"""What a report says of a call, counted by hand: bytes of every pass, rows that are gathered, time at the roof."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from devices import with_wide_indices
from plan_cases import H200, ID, NUMBERS, D, E, S, graph, ids, leaf, on_meta, said, said_to_be_on

from edgeless import _C, functional
from edgeless.choices.engines import named
from edgeless.plan import steps as plan
from edgeless.plan.recording import _sddmm_of, _spmm_of, _steps_of
from edgeless.plan.relations import _widths_of_products
from edgeless.plan.steps import DEVICES, Device, attention_steps, extremum_steps, seconds_at_roof, spmm_step, table

SIZES = {"num_src": S, "num_dst": D, "num_edges": E}
EVERY_DTYPE = pytest.mark.parametrize("dtype", NUMBERS)


# Sums ----------------------------------------------------------------------------------------------------------------


@EVERY_DTYPE
def test_sums(dtype):
    """An edge reads its row and its id, a row of the result is written; the gradient is the same turned round."""
    x, row = leaf(S, 6, dtype=dtype), 6 * NUMBERS[dtype]
    forward, back = ("spmm", "forward", E * (row + ID) + D * row), ("spmm", "backward", E * (row + ID) + S * row)
    assert said(lambda: functional.spmm(graph(), x), x) == [forward, back]
    with torch.no_grad():
        assert said(lambda: functional.spmm(graph(), x), x) == [forward]


def test_sums_by_weights():
    """A weight is read for every edge and head; its gradient is a product of both ends of every edge."""
    x, weight, row = leaf(S, 2, 3), leaf(E, 2), 2 * 3 * 4
    forward, back = E * (row + ID + 2 * 4) + D * row, E * (row + ID + 2 * 4) + S * row
    products = E * (row + ID) + D * row + E * 2 * 4
    found = said(lambda: functional.spmm(graph(), x, weight), x, weight)
    assert sorted(found) == sorted(
        [("spmm", "forward", forward), ("spmm", "backward", back), ("sddmm", "products, backward", products)]
    )


def test_sums_by_scales():
    """That of a source is read for every edge, and beside a weight."""
    x, row, scale = leaf(S, 6), 6 * 4, torch.rand(S)
    back = ("spmm", "backward", E * (row + ID) + S * row)
    scaled = ("spmm", "forward", E * (row + ID + 4) + D * row)
    assert said(lambda: functional.spmm(graph(), x, src_scale=scale), x) == [scaled, back]
    both = E * (row + ID + 4 + 4) + D * row
    args = {"x": x, "weight": torch.rand(E, 1), "src_scale": scale, "csr": list(graph().csr[:2])}
    assert _spmm_of(args, named("rowsplit"), "forward").bytes == both


def test_ids_of_8_bytes():
    x, row = leaf(S, 6), 24
    wide = with_wide_indices(graph())
    assert said(lambda: functional.spmm(wide, x), x) == [
        ("spmm", "forward", E * (row + 8) + D * row), ("spmm", "backward", E * (row + 8) + S * row),
    ]  # fmt: skip


def test_sums_by_other_engines():
    """cuSPARSE reads a number for every edge; blocks read some rows once for several edges, and bits for an edge."""
    args = {"device": H200, **SIZES}
    row = 64 * 2
    for weight in (0, 4):
        step = spmm_step(torch.bfloat16, 64, weight_bytes=weight, engine=named("cusparse"), **args)
        assert step.bytes == E * (row + ID + 2) + D * row
    wsb = named("wsb")
    assert spmm_step(torch.bfloat16, 64, weight_bytes=4, engine=wsb, num_rows=6, **args).bytes == 6 * (
        row + ID + (2 if wsb.reads_values else 4)
    ) + D * row  # fmt: skip


@EVERY_DTYPE
def test_products_by_edge(dtype):
    """An edge reads a source's row and an id and writes its products; a destination's row is read once."""
    number, opmath = NUMBERS[dtype], 8 if dtype == torch.float64 else 4
    dst, src = leaf(D, 2, 3, dtype=dtype), leaf(S, 2, 3, dtype=dtype)
    row = 2 * 3 * number
    with torch.no_grad():
        found = said(lambda: functional.sddmm_dot(graph(), dst, src))
    assert found == [("sddmm", "products", E * (row + ID) + D * row + E * 2 * opmath)]
    with torch.no_grad():
        found = said(lambda: functional.sddmm_dot(graph(), dst.flatten(1), src.flatten(1)))
    assert found == [("sddmm", "products", E * (row + ID) + D * row + E * opmath)]


# Extrema -------------------------------------------------------------------------------------------------------------


@EVERY_DTYPE
@pytest.mark.parametrize("arg", [1, 2, 4])
def test_extrema(dtype, arg):
    """A destination writes its row and, for every number, which edge it is; the gradient reads both, and writes that of
    the sources.
    """
    row = 6 * NUMBERS[dtype]
    steps = extremum_steps(dtype, 6, device=Device("CPU"), arg_bytes=arg, **SIZES)
    assert [step.bytes for step in steps] == [E * (row + ID) + D * (row + 6 * arg), D * (row + 6 * arg) + S * row]
    (forward,) = extremum_steps(dtype, 6, device=Device("CPU"), arg_bytes=arg, backward=False, index_bytes=8, **SIZES)
    assert forward.bytes == E * (row + 8) + D * (row + 6 * arg)


def test_a_call_of_extrema():
    x, row, arg = leaf(S, 6), 24, 6 * 1  # rows of up to 256 edges: their places are bytes
    handle = graph()
    assert handle.max_in_degree == 3
    forward, back = E * (row + ID) + D * (row + arg), D * (row + arg) + S * row
    assert said(lambda: functional.neighbor_reduce(handle, x, "max"), x) == [
        ("neighbor_reduce", "forward", forward), ("neighbor_reduce", "gradient", back),
    ]  # fmt: skip


# Attention -----------------------------------------------------------------------------------------------------------
#
# K: bytes of a key, of all heads, V: of a value, T: of the statistics of the softmax. Forward, an edge reads key and
# value of its source, one row where they are the same, and an id; a destination reads its query, of the size of a key,
# writes its result and its statistics. The pass by destination reads these rows again, and of a destination the query,
# the result, its gradient and the statistics, and writes the query's gradient. The pass by source reads for an edge the
# query of its destination, the gradient of the result and two statistics; a source has its rows and their gradients.


def attention_bytes(K, V, T, shared):
    edge, source = (V, 2 * V) if shared else (K + V, 2 * K + 2 * V)
    return [
        ("forward", E * (edge + ID) + D * (K + V + T)),
        ("by destination", E * (edge + ID) + D * (2 * K + 2 * V + T)),
        ("by source", E * (K + V + 2 * T + ID) + S * source),
    ]


@EVERY_DTYPE
@pytest.mark.parametrize("score", _C.SCORES)
def test_attention(score, dtype):
    number, statistic = NUMBERS[dtype], 8 if dtype == torch.float64 else 4
    T = 2 * statistic
    if score == "dot":
        inputs = leaf(D, 2, 5, dtype=dtype), leaf(S, 2, 5, dtype=dtype), leaf(S, 2, 3, dtype=dtype)
        expected = attention_bytes(2 * 5 * number, 2 * 3 * number, T, shared=False)
        call = functional.dot_attention
    elif score == "gat":  # whose key is a number of each head
        inputs = leaf(S, 2, 5, dtype=dtype), leaf(S, 2, dtype=dtype), leaf(D, 2, dtype=dtype)
        expected = attention_bytes(T, 2 * 5 * number, T, shared=False)
        call = functional.gat_attention
    else:
        rest = leaf(2, 5, dtype=dtype) if score == "gatv2" else leaf(2, dtype=dtype)
        inputs = leaf(S, 2, 5, dtype=dtype), leaf(D, 2, 5, dtype=dtype), rest
        expected = attention_bytes(2 * 5 * number, 2 * 5 * number, T, shared=True)
        call = getattr(functional, f"{score}_attention")
    found = said(lambda: call(graph(), *inputs), *inputs)
    assert found == [(f"attention ({score})", step, count) for step, count in expected]


@pytest.mark.parametrize("score", [score for score in _C.SCORES if _C.values_are_keys(score)])
def test_values_that_are_the_keys_are_as_wide(score):
    """Whatever width is given for them."""

    def steps(value_dim):
        sizes = {"passes": ("forward", "by_dst", "by_src"), "device": Device("CPU"), **SIZES}
        return attention_steps(score, torch.float32, 2, 5, value_dim, **sizes)

    assert steps(3) == steps(5)
    assert [(s.step, s.bytes) for s in steps(3)] == attention_bytes(40, 40, 8, shared=True)


def test_attention_over_rows_that_several_edges_share():
    """Of seven edges five rows are read by destination and six by source."""
    steps = attention_steps(
        "dot", torch.float32, 2, 5, 3, passes=("forward", "by_dst", "by_src"), device=Device("CPU"),
        num_gathered=(5, 6), **SIZES,
    )  # fmt: skip
    K, V, T = 40, 24, 8
    assert [step.bytes for step in steps] == [
        5 * (K + V + ID) + D * (K + V + T),
        5 * (K + V + ID) + D * (2 * K + 2 * V + T),
        6 * (K + V + 2 * T + ID) + S * (2 * K + 2 * V),
    ]


def test_a_part_of_the_gradients_is_a_part_of_the_passes():
    q, k, v = leaf(D, 2, 5), leaf(S, 2, 5), leaf(S, 2, 3)

    def passes(*wanted):
        return [step for _, step, _ in said(lambda: functional.dot_attention(graph(), q, k, v), *wanted)][1:]

    assert passes(q, k, v) == ["by destination", "by source"]
    for t in (k, v):
        t.requires_grad_(False)
    assert passes(q) == ["by destination"]
    q.requires_grad_(False), v.requires_grad_(True)
    assert passes(v) == ["by destination", "by source"]


# Products ------------------------------------------------------------------------------------------------------------


def test_products_by_type():
    """Rows, matrices and offsets are read once, the result is written; the gradient of matrices reads both rows."""
    x, weight = leaf(7, 6), leaf(2, 6, 9)
    rows, results, matrices, offsets = 7 * 6 * 4, 7 * 9 * 4, 2 * 6 * 9 * 4, 3 * 8
    found = said(lambda: functional.segment_mm(x, weight, torch.tensor([3, 4])), x, weight)
    moved = rows + results + matrices + offsets
    assert sorted(found) == [
        ("typed_mm", "product", moved), ("typed_mm", "product, backward", moved), ("typed_outer", "of weights", moved),
    ]  # fmt: skip


def test_products_by_the_types_of_rows():
    """Where a row is stands beside it."""
    types = torch.tensor([0, 0, 1, 1, 1, 0, 0])
    x, weight = leaf(7, 6), leaf(2, 6, 9)
    with torch.no_grad():
        found = said(lambda: functional.gather_mm(x, weight, types))
    assert [name for name, *_ in found] == ["typed_mm"]
    (order,) = {t.element_size() for t in (graph().csr[0],)}
    assert found[0][2] == (7 * 6 + 7 * 9 + 2 * 6 * 9) * 4 + (3 + 7) * order


def test_maps_by_type():
    """Seven rows of 6 numbers, three types: everything that is given is read once, the result written once."""
    x, y, offsets = torch.empty(7, 6), torch.empty(7, 9), torch.empty(4, dtype=torch.int32)
    given = {"x": x, "offsets": offsets}

    def moved(name, **more):
        (step,) = _steps_of(name, {**given, **more})
        return step.bytes, step.kernel

    rows, types = 7 * 6 * 4 + 4 * 4, 3
    weight, bias = torch.empty(types, 9, 6), torch.empty(types, 9)
    product = rows + types * 9 * 6 * 4 + 7 * 9 * 4
    assert moved("typed_linear", weight=weight, bias=None) == (product, "3 types, 7 x 6 -> 9")
    assert moved("typed_linear", weight=weight, bias=bias) == (product + types * 9 * 4, "3 types, 7 x 6 -> 9")
    assert moved("typed_outer", y=y, rows=None) == (rows + 7 * 9 * 4 + types * 6 * 9 * 4, "3 types, 7 x 6, 9")
    places = torch.empty(7, dtype=torch.int32)
    assert moved("typed_outer", y=y, rows=places)[0] == rows + 7 * 4 + 7 * 9 * 4 + types * 6 * 9 * 4
    blend = {"y": torch.empty(7, 6), "alpha": torch.empty(types), "rows": None}
    mixed = rows + 7 * 6 * 4 + types * 4
    assert moved("typed_blend", **blend) == (mixed + 7 * 6 * 4, "3 types, 7 x 6")
    assert moved("typed_blend_backward", grad=torch.empty(7, 6), **blend)[0] == mixed + 3 * 7 * 6 * 4
    half = {"x": x.bfloat16(), "weight": weight.bfloat16(), "bias": None}
    assert moved("typed_linear", **half)[0] == (7 * 6 + types * 9 * 6 + 7 * 9) * 2 + 4 * 4


def test_maps():
    """Rows are read once for all maps and all results are written; a sum of maps has one result."""
    x, y = on_meta(7, 6), on_meta(7, 5, dtype=torch.float32)
    (step,) = _steps_of("project", {"x": x, "weights": [on_meta(9, 6), on_meta(4, 6)]})
    assert step.bytes == 7 * 6 * 4 + 7 * (9 + 4) * 4 and step.kernel == "2 maps, 7 x 6 -> 13"
    (step,) = _steps_of("project_sum", {"xs": [x, y], "weights": [on_meta(9, 6), on_meta(9, 5)]})
    assert step.bytes == 7 * (6 + 5) * 4 + 7 * 9 * 4 and step.kernel == "2 maps, 7 x 6 -> 9"
    half = on_meta(7, 6, dtype=torch.bfloat16)
    (step,) = _steps_of("project", {"x": half, "weights": [on_meta(9, 6, dtype=torch.bfloat16)]})
    assert step.bytes == 7 * 6 * 2 + 7 * 9 * 2


@pytest.mark.parametrize("widths,joined,found", [
    ((8, 4), 2, [12]), ((8, 5), 2, [8, 5]), ((8, 4, 3), 2, [12, 3]), ((8, 4), 1, [8, 4]), ((8, 4, 4), 3, [16]),
])  # fmt: skip
def test_maps_are_one_product_where_their_columns_are_whole_vectors(widths, joined, found):
    args = {"x": on_meta(1 << 15, 6), "weights": [on_meta(width, 6) for width in widths], "joined": joined}
    assert _widths_of_products({**args, "x": on_meta(1 << 15, 6, dtype=torch.float32)}) == found


# Devices -------------------------------------------------------------------------------------------------------------


def reported(monkeypatch, capability, index=1, **given):
    """What is made of what torch says of a GPU, and the driver of its shared memory."""
    major, minor = divmod(capability, 10)
    said = {"major": major, "minor": minor, "multi_processor_count": 90, "L2_cache_size": 7_000_000, **given}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 7)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**said))
    monkeypatch.setattr(_C, "shared_bytes_of_block", lambda device: 100_000 + device)
    return Device.of(torch.device("cuda", index))


def test_a_device_is_what_torch_says_of_it(monkeypatch):
    plain = Device("RTX 4090", 90, 7_000_000, 100_001, False, capability=89)
    assert reported(monkeypatch, 89, name="RTX 4090") == plain
    hopper = Device("H100", 90, 7_000_000, 100_001, True, capability=90)
    assert reported(monkeypatch, 90, name="H100") == hopper
    # One that is known has its roofs.
    changed = {"multiprocessors": 90, "l2_bytes": 7_000_000, "shared_bytes": 100_001}
    assert reported(monkeypatch, 90, name="NVIDIA H200") == dataclasses.replace(H200, name="NVIDIA H200", **changed)


def test_a_device_without_a_number_is_the_current_one(monkeypatch):
    assert reported(monkeypatch, 120, index=None, name="RTX 5090").shared_bytes == 100_007


# Where time is spent -------------------------------------------------------------------------------------------------


def test_the_roof_of_the_l2_ends_where_its_rows_do():
    fits = 45 * 2**20
    assert H200.gather_roofs[0] == (fits, 9.3e12)
    assert seconds_at_roof(H200, 9300, fits) == 9300 / 9.3e12
    assert seconds_at_roof(H200, 9300, 400 * 2**20) == 9300 / 4.7e12
    # Halfway between two measured sets, and never faster from a larger one.
    assert seconds_at_roof(H200, 9300, 206 * 2**20) == 9300 / (7.7e12 + (6.2e12 - 7.7e12) / 2)
    times = [seconds_at_roof(H200, 9300, size * 2**20) for size in range(1, 500)]
    assert times == sorted(times)
    assert seconds_at_roof(DEVICES["a100"], 9300, 0) is None
    # A sum gathers all sources, a slice of their columns at a time.
    rows = fits // 256
    for times, roof in ((1, 9.3e12), (9, 4.7e12)):
        step = spmm_step(torch.float32, 64, num_src=rows * times, num_dst=D, num_edges=E, device=H200)
        assert (step.slices, step.seconds) == (1, step.bytes / roof)
    sizes = {"num_src": 60 * rows, "num_dst": 60 * rows, "num_edges": 10**8}
    step = spmm_step(torch.float32, 4096, device=H200, **sizes)
    assert step.slices > 1 and step.seconds == step.bytes / 4.7e12


@pytest.mark.parametrize("which", ["forward", "by_dst", "by_src"])
@pytest.mark.parametrize("score,edge", [("gatv2", (1, 2)), ("dot", (2, 2))])
def test_attention_gathers_rows_of_the_other_side(score, edge, which):
    """Forward and by destination those of sources, one row or keys and values; by source two of destinations."""
    head = {"dtype": torch.float32, "heads": 1, "key_dim": 64, "value_dim": 64}
    rows = 45 * 2**20 // (256 * edge[which == "by_src"])
    for times, roof in ((1, 9.3e12), (9, 4.7e12)):
        sides = (rows * times, D) if which != "by_src" else (S, rows * times)
        (step,) = attention_steps(
            score, **head, passes=[which], device=H200, num_src=sides[0], num_dst=sides[1], num_edges=E
        )
        assert (step.slices, step.seconds) == (1, step.bytes / roof)


def test_slices_of_attention_are_at_the_roof_of_the_l2():
    """Rows of all heads take 172 MB, which do not fit it, and those of one head 21.5 MB."""
    sizes = {"num_src": 168_114, "num_dst": 168_114, "num_edges": 13_595_114}
    (step,) = attention_steps("gatv2", torch.bfloat16, 8, 64, 64, device=H200, **sizes)
    assert step.slices == 8 and step.seconds == step.bytes / 9.3e12


def test_hubs_are_merged_on_the_side_that_has_them():
    """The longest row of destinations is short, and that of sources may be cut."""
    sizes = {"num_src": 10**5, "num_dst": 10**5, "num_edges": 10**7, "device": H200}
    passes = ("forward", "by_dst", "by_src")

    def merges(*longest):
        steps = attention_steps("dot", torch.float32, 1, 64, 64, passes=passes, max_degrees=longest, **sizes)
        return [step.kernel.endswith("merges hubs") for step in steps]

    assert merges(40, 10**6) == [False, False, True] and merges(10**6, 40) == [True, True, False]
    assert merges(40, 40) == [False] * 3 and merges() == [True] * 3 and merges(40) == [False, False, True]
    extrema = {**sizes, "backward": False}
    found = [extremum_steps(torch.float32, 64, max_degrees=m, **extrema)[0].kernel for m in ((), (40,), (10**6,))]
    assert [kernel.endswith("merges hubs") for kernel in found] == [True, False, True]


def test_products_by_edge_at_the_roof(monkeypatch):
    said_to_be_on(monkeypatch, H200)
    for sources, roof in ((45 * 2**14, 9.3e12), (400 * 2**14, 4.7e12)):  # rows of 64 bytes
        args = {"dst": on_meta(D, 1, 16), "src": on_meta(sources, 1, 16), "csr": ids(D + 1, E)}
        step = _sddmm_of(args, named("rowsplit"))
        assert step.seconds == step.bytes / roof and step.kernel == "vectors of 16 B"


def test_gradients_of_extrema_and_products_are_at_the_roof_of_the_memory(monkeypatch):
    assert extremum_steps(torch.float32, 6, device=H200, **SIZES)[1].seconds == (3 * (24 + 24) + 5 * 24) / 4.7e12
    said_to_be_on(monkeypatch, H200)
    (step,) = _steps_of("project", {"x": on_meta(7, 6), "weights": [on_meta(9, 6)]})
    assert step.seconds == 7 * (6 + 9) * 4 / 4.7e12


# Words ---------------------------------------------------------------------------------------------------------------


def test_a_report_word_for_word():
    """spmm of 512 floats on pokec: 3.3 GB of rows in slices, whose rows may be cut where nobody knows the longest."""
    sizes = {"num_src": 1_632_803, "num_dst": 1_632_803, "num_edges": 30_622_564}
    step = spmm_step(torch.float32, 512, device=H200, **sizes)
    moved = 30_622_564 * (2048 + 4) + 1_632_803 * 2048
    assert table([step]) == (
        f"spmm, forward: rowsplit: {step.kernel} in {step.slices} slices; {moved / 1e9:.3g} GB, "
        f"{moved / 4.7e12 * 1e3:.3g} ms at the roofline\n"
        "  (core_cuda/spmm/cuda/product.cuh: spmm::spmm_kernel<float, int32_t, 4, (spmm::Weighing)0, 8>)"
    )
    assert step.kernel.endswith(" blocks, merges hubs")
    assert not spmm_step(torch.float32, 512, device=H200, max_degree=30, **sizes).kernel.endswith("hubs")


def test_the_sum_of_the_times_is_told_where_all_are_known():
    step = spmm_step(torch.float32, 6, device=Device("CPU"), **SIZES)
    one, two = (dataclasses.replace(step, seconds=s, kernel="k") for s in (0.001, 0.0025))
    text = "spmm, forward: rowsplit: k; 0.000268 MB"
    assert table([one]) == f"{text}, 1 ms at the roofline"
    assert (
        table([one, two])
        == f"{text}, 1 ms at the roofline\n{text}, 2.5 ms at the roofline\ntogether 3.5 ms at the roofline"
    )
    unknown = dataclasses.replace(one, seconds=None, refused="it cannot", origin="a measurement")
    assert "together" not in table([one, two, unknown])
    assert table([one, unknown]) == f"{text}, 1 ms at the roofline\n{text}\n  (engine by a measurement)\n  (it cannot)"


@pytest.mark.parametrize("num_bytes,text", [
    (0, "0 MB"), (268, "0.000268 MB"), (1_234_567, "1.23 MB"), (999_000_000, "999 MB"), (10**9, "1 GB"),
    (1_234 * 10**9, "1,230 GB"), (999_900_000, "1,000 MB"),
])  # fmt: skip
def test_bytes_in_words(num_bytes, text):
    assert plan._megabytes(num_bytes) == text

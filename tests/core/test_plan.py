"""What the plans choose, for two families of devices, without a GPU; and how they are printed."""

import dataclasses
import itertools

import pytest
import torch

import edgeless
from edgeless import _C, functional
from edgeless.functional.relational_layer import relational_layer
from edgeless.plan.recording import record
from edgeless.plan.steps import DEVICES, Device, attention_steps, extremum_steps, spmm_step, table

DTYPES = ("float32", "float16", "bfloat16", "float64")
PASSES = ("forward", "by_dst", "by_src")
HALVES = ("float16", "bfloat16")
TWITCH = {"num_src": 168_114, "num_dst": 168_114, "num_edges": 13_595_114}


def attention_plan(device="h200", **given):
    sizes = {"num_rows": 1000, "num_edges": 10_000, "num_gathered": 1000, "max_degree": -1}
    options = {"dropout": False, "arrays": False, "edge_dim": 0, "edge_arrays": 0, "wide_index": False}
    shape = {"pass_": "forward", "score": "dot", "dtype": "float32", "heads": 1, "key_dim": 64, "value_dim": 64}
    found = DEVICES[device]
    on = {"multiprocessors": found.multiprocessors, "l2_bytes": found.l2_bytes}
    return _C.attention_plan(**{**sizes, **options, **shape, **on, **given})


def bytes_of_row(score, dtype, key, value):
    widest = value if score == "gat" else key if _C.values_are_keys(score) else max(key, value)
    return widest * getattr(torch, dtype).itemsize


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("score", _C.SCORES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_kernel_holds_the_row_and_has_the_options_of_the_call(device, score, dtype):
    widest = {"float32": 512, "float64": 256}.get(dtype, 1024)
    widths = [0, 1, 4, 8, 12, 16, 32, 33, 64, 65, 96, 128, 129, 136, 256, 257, 640, widest - 1, widest]
    for pass_, key, value, degree, heads in itertools.product(PASSES, widths, widths, (1, 5, 40), (1, 8)):
        if key > widest or value > widest:
            continue
        for options, edge_dim, wide in itertools.product((False, True), (0, 1, 8), (False, True)):
            if edge_dim and (score != "gatv2" or not options):
                continue
            plan = attention_plan(
                device, pass_=pass_, score=score, dtype=dtype, key_dim=key, value_dim=value, num_edges=1000 * degree,
                heads=heads, arrays=options, edge_dim=edge_dim, wide_index=wide,
            )  # fmt: skip
            found = (pass_, key, value, heads, options, edge_dim, wide, plan)
            held = plan["lanes"] * plan["vectors"] * plan["vector_bytes"]
            assert held >= bytes_of_row(score, dtype, key, value), found
            assert plan["options"].startswith("edge term" if edge_dim else "edge arrays" if options else "plain"), found
            assert plan["heads_per_slice"] * plan["lanes"] <= 128 and plan["edges"] in (2, 4, 5, 8), found


@pytest.mark.parametrize("score", _C.SCORES)
@pytest.mark.parametrize("pass_", PASSES)
def test_few_rows_of_one_vector_have_an_edge_for_each_lane(score, pass_):
    """Where a lane for each row would leave most lanes without one: 132 multiprocessors hold 135,168 rows at a time."""

    def sub_warp(rows, degree, **given):
        sizes = {"num_rows": rows, "num_edges": rows * degree, "num_gathered": rows, "max_degree": degree}
        plan = attention_plan(score=score, pass_=pass_, **{"key_dim": 4, "value_dim": 4, **sizes, **given})
        return plan["lanes"], plan["edges_of_lane"]

    assert sub_warp(50_000, 11) == sub_warp(200_000, 64) == sub_warp(50_000, 11, dtype="bfloat16") == (4, 1)
    halves = sub_warp(50_000, 11, dtype="bfloat16", key_dim=8, value_dim=8)
    assert halves == ((4, 1) if score == "gat" else (1, 4))  # others have more to do for eight numbers
    assert sub_warp(150_000, 11) == sub_warp(50_000, 11, heads=2) == sub_warp(300_000, 64) == (1, 4)
    assert sub_warp(50_000, 11, key_dim=8, value_dim=8) == (2, 4)


@pytest.mark.parametrize("score", _C.SCORES)
@pytest.mark.parametrize("dtype", HALVES)
def test_heads_of_up_to_four_16_bit_numbers_are_read_by_8_bytes(score, dtype):
    """Filled up to 16 bytes they would be copied, and half of what is computed would be of zeros."""

    def read(key, value, **given):
        plan = attention_plan(score=score, dtype=dtype, key_dim=key, value_dim=value, heads=8, **given)
        return plan["vector_bytes"], plan["lanes"]

    assert {read(key, value, pass_=pass_) for key in (3, 4) for value in (1, 4) for pass_ in PASSES} == {(8, 1)}
    assert read(4, 4, wide_index=True) == read(4, 4, arrays=True) == (8, 1)
    assert read(5, 5) == (16, 1)
    assert read(4, 5) == ((8, 1) if _C.values_are_keys(score) else (16, 1))
    assert read(5, 4) == ((8, 1) if score == "gat" else (16, 1))
    assert attention_plan(score=score, dtype="float32", key_dim=4, value_dim=4)["vector_bytes"] == 16


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("score", _C.SCORES)
def test_what_a_lane_has_of_a_row_stays_in_registers(score, pass_):
    """Four vectors of the two rows of each of four edges were 1.3 KB a thread in local memory."""

    def lane(dtype, width, **given):
        plan = attention_plan(score=score, pass_=pass_, dtype=dtype, key_dim=width, value_dim=width, **given)
        return plan["vectors"], plan["edges"]

    doubles = [lane("float64", width) for width in (16, 64, 128, 256)]
    floats = [lane("float32", width, arrays=True) for width in (200, 256, 512)]
    if score == "gat" or (score, pass_) == ("cosine", "forward"):  # which keep little of an edge
        assert doubles == [(1, 4), (4, 4), (4, 4), (4, 4)] and floats == [(4, 4), (4, 4), (4, 4)]
        if pass_ == "forward":  # those without options were no faster
            assert [lane("float32", width) for width in (200, 256, 512)] == floats
    else:
        assert doubles == [(1, 4), (1, 4), (2, 4), (4, 2)] and floats == [(2, 4), (2, 4), (4, 2)]


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("score", _C.SCORES)
def test_rows_that_would_leave_lanes_idle_have_three_vectors_a_lane(score, pass_):
    """11 vectors by 4 lanes, not 16; 40 by 16; 80 of 16-bit numbers by 32, where 4 would not stay in registers."""

    def lane(dtype, width, degree=10, **given):
        sizes = {"key_dim": width, "value_dim": width, "num_edges": 1000 * degree}
        plan = attention_plan(score=score, pass_=pass_, dtype=dtype, **sizes, **given)
        return plan["lanes"], plan["vectors"], plan["edges"]

    two_rows = pass_ != "forward" and score != "gat"
    for dtype in HALVES:
        for options in (False, True):
            assert lane(dtype, 640, arrays=options) == (32, 3, 2 if two_rows else 4)
            assert lane(dtype, 80, arrays=options)[1] < 3  # the tensor cores', or bound by what it gathers
        assert (lane(dtype, 160, arrays=True) == (8, 3, 4)) == (not two_rows)
    assert (lane("float32", 44, arrays=True) == (4, 3, 4)) == (score == "gatv2" or two_rows)
    assert (lane("float32", 72) == (8, 3, 4)) == (score == "gatv2" or pass_ != "forward")
    assert (lane("float32", 160, arrays=True) == (16, 3, 4)) == (score == "gatv2" or pass_ != "forward")
    assert lane("float32", 72, degree=5) == (8, 3, 4)
    assert lane("float32", 72, degree=2)[1] == 1  # rows of the graph are short: fewer edges a batch
    assert {lane("float32", width, arrays=options)[1] for width in (32, 60, 128) for options in (False, True)} == {1}
    for index, width in itertools.product((False, True), (44, 72, 160)):  # ids of 64 bits change nothing
        assert lane("float32", width, wide_index=index, arrays=True) == lane("float32", width, arrays=True)
    if score == "gatv2":
        assert lane("float32", 44, arrays=True, edge_dim=8)[1] == 1


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("score", _C.SCORES)
def test_rows_of_5_and_10_vectors_have_sub_warps_of_as_many_lanes(score, pass_):
    """A warp has six or three of them, and four or two with lanes that are a power of two."""

    def lane(dtype, width, degree=15, heads=8, **given):
        sizes = {"key_dim": width, "value_dim": width, "num_edges": 1000 * degree, "heads": heads}
        plan = attention_plan(score=score, pass_=pass_, dtype=dtype, **{**sizes, **given})
        return plan["lanes"], plan["vectors"], plan["vector_bytes"], plan["edges"]

    for dtype, size in (("float32", 16), ("bfloat16", 8), ("float16", 8)):
        assert lane(dtype, 20) == lane(dtype, 17, dropout=True) == lane(dtype, 20, heads=1) == (5, 1, size, 5)
        assert lane(dtype, 20, wide_index=True) == lane(dtype, 20, arrays=True) == (5, 1, size, 5)
        assert lane(dtype, 20, degree=2)[0] in (4, 8)  # in short rows two edges a batch are faster
    assert lane("float32", 12)[0] == 4 and lane("float32", 24)[0] == 8  # three and six lanes were no faster
    ten = (5, 2, 16, 5) if pass_ == "forward" else (10, 1, 16, 5)
    assert lane("float32", 40) == ten
    if score != "gatv2":
        assert lane("float32", 40, heads=1) == ten
    if pass_ == "forward":
        assert lane("float32", 40, degree=80) == (ten if score == "gatv2" else (10, 1, 16, 5))
        assert (lane("bfloat16", 40, heads=3)[0] == 5) == (score != "cosine")
    elif score == "gat":
        assert lane("float32", 40, degree=80) == (16, 1, 16, 8)
    if score != "cosine" and (score == "gat" or pass_ != "forward"):
        assert lane("bfloat16", 40) == (5, 1, 16, 5)
    assert lane("float64", 10)[0] == 8
    if score == "gatv2":
        assert lane("float32", 20, arrays=True, edge_dim=4)[0] == 8
        assert lane("bfloat16", 20, arrays=True, edge_dim=4)[:3] == (4, 1, 16)


def test_16_bit_rows_of_half_vectors_are_copied_where_l2_does_not_hold_them():
    sizes = {"score": "gatv2", "dtype": "bfloat16", "heads": 8, "key_dim": 20, "value_dim": 20}
    rows = {"num_rows": 150_000, "num_edges": 2_000_000}
    assert attention_plan(**sizes, **rows, num_gathered=150_000)["vector_bytes"] == 8
    assert attention_plan(**sizes, **rows, num_gathered=200_000)["vector_bytes"] == 16


def test_sub_warps_of_five_lanes_have_wide_head_tiles():
    """As many heads as the L2 holds, up to 40 vectors a node: 640 bytes of float32."""
    sizes = {"score": "gatv2", "heads": 8, "key_dim": 20, "value_dim": 20, "num_edges": 550_000}
    assert attention_plan(**sizes, num_rows=50_000, num_gathered=50_000)["slices"] == 1
    assert attention_plan(**sizes, num_rows=50_000, num_gathered=200_000)["heads_per_slice"] == 2


@pytest.mark.parametrize("dtype,width", [("float32", 513), ("bfloat16", 1025), ("float64", 257)])
def test_a_row_that_is_too_wide_has_no_kernel(dtype, width):
    assert attention_plan(dtype=dtype, key_dim=width - 1) and not attention_plan(dtype=dtype, key_dim=width)


@pytest.mark.parametrize("device", DEVICES)
def test_tensor_cores_take_wide_rows_of_16_bits(device):
    for score, dtype, pass_ in itertools.product(_C.SCORES, DTYPES, PASSES):
        plan = attention_plan(device, score=score, dtype=dtype, pass_=pass_, key_dim=128, value_dim=128)
        expected = dtype in HALVES and score != "gat"
        assert (plan["kernel"] == "tensor cores") == expected, (score, dtype, pass_)


def test_batches_of_edges_follow_the_mean_degree():
    edges = [attention_plan(score="gat", num_edges=1000 * degree)["edges"] for degree in (2, 5, 40)]
    assert edges == [2, 4, 8]
    assert attention_plan(score="gat", dtype="bfloat16", num_edges=2000)["edges"] == 4
    for score in ("gat", "gatv2"):
        by_degree = [attention_plan(score=score, num_edges=1000 * degree, arrays=True) for degree in (2, 5, 40)]
        assert [plan["edges"] for plan in by_degree] == [4, 4, 8]
        assert {plan["options"] for plan in by_degree} == {"edge arrays"}
    narrow = {"dtype": "bfloat16", "key_dim": 16, "value_dim": 16, "score": "gat"}
    assert [attention_plan(**narrow, num_edges=1000 * degree)["edges"] for degree in (2, 5, 40)] == [2, 4, 4]


@pytest.mark.parametrize(
    "dtype,dim,lanes",
    [("bfloat16", 4, 1), ("bfloat16", 8, 1), ("bfloat16", 16, 2), ("float32", 4, 1), ("float32", 8, 2)],
)
def test_narrow_heads_have_narrow_teams_with_options_too(dtype, dim, lanes):
    """A sub-warp of four lanes would leave half of them or more without a part of the row."""

    def sub_warp(heads, **given):
        sizes = {"num_rows": 10**6, "num_edges": 10**7, "num_gathered": 10**6, "key_dim": dim, "value_dim": dim}
        plan = attention_plan(**{**sizes, "dtype": dtype, "heads": heads, "arrays": True, **given})
        assert plan["kernel"] != "tensor cores"
        return plan["lanes"], plan["edges"]

    for score, pass_ in itertools.product(_C.SCORES, PASSES):
        assert sub_warp(8, score=score, pass_=pass_) == (lanes, 4)
    assert sub_warp(8, score="gatv2", edge_dim=8) == (lanes, 4)
    # With one head as many rows end in a warp as it has sub-warps.
    assert sub_warp(1) == sub_warp(1, pass_="by_dst", num_edges=2 * 10**6) == (4, 4)
    assert sub_warp(1, pass_="by_dst") == sub_warp(1, score="gatv2") == (lanes, 4)


@pytest.mark.parametrize("pass_", PASSES)
def test_a_kernel_has_no_more_options_than_the_call(pass_):
    """Dropout alone took up to 1.3 times as long in a kernel that looks for arrays by edge as well."""

    def options(**given):
        return attention_plan(pass_=pass_, **{"score": "gatv2", "dtype": "bfloat16", **given})["options"]

    assert [options(), options(dropout=True), options(arrays=True)] == ["plain", "dropout", "edge arrays"]
    assert options(dropout=True, arrays=True) == "dropout and edge arrays"
    assert options(arrays=True, edge_dim=8) == options(dropout=True, arrays=True, edge_dim=8) == "edge term"
    for dtype, width in (("float32", 512), ("bfloat16", 1024), ("float64", 256)):
        assert options(dtype=dtype, key_dim=width, dropout=True) == "dropout"


@pytest.mark.parametrize("score", _C.SCORES)
@pytest.mark.parametrize("pass_", PASSES)
def test_ids_of_64_bits_and_doubles_have_kernels_of_their_own_shape(score, pass_):
    """Not one kernel with all options and four vectors a lane for every row."""

    def kernel(width, dtype="float32", **given):
        shape = {"key_dim": width, "value_dim": width, "heads": 8, "dtype": dtype, **given}
        plan = attention_plan(score=score, pass_=pass_, num_edges=40_000, **shape)
        return plan["kernel"], plan["options"], plan["lanes"], plan["vectors"], plan["edges"]

    for width, options in itertools.product((4, 8, 16, 32, 128, 256, 512), (False, True)):
        assert kernel(width, arrays=options, wide_index=True) == kernel(width, arrays=options)
    kinds = [kernel(width, dtype="bfloat16", wide_index=True) for width in (4, 16, 64, 128)]
    assert {kind for kind, *_ in kinds} == {"vectors"}  # the tensor cores' kernels have ids of 32 bits
    assert [lanes for _, _, lanes, *_ in kinds] == [1, 2, 8, 16]
    for options in (False, True):
        doubles = [kernel(width, dtype="float64", arrays=options) for width in (2, 4, 8)]
        assert [lanes for _, _, lanes, *_ in doubles] == [1, 2, 4]
        assert {kind for _, kind, *_ in doubles} == {"edge arrays" if options else "plain"}


@pytest.mark.parametrize("pass_", PASSES)
def test_terms_of_narrow_heads_are_made_in_tiles(pass_):
    """Of 16-bit numbers, where several heads walk an edge together and there are a few features."""

    def options(heads=4, dim=16, edge_dim=8, dtype="bfloat16", **given):
        shape = {"heads": heads, "key_dim": dim, "value_dim": dim, "edge_dim": edge_dim, "dtype": dtype}
        plan = attention_plan(score="gatv2", pass_=pass_, arrays=True, **shape, **given)
        return plan["options"]

    tiles = [options(), options(dtype="float16"), options(8, 4), options(32, 4), options(16, 8), options(2, 16)]
    assert set(tiles) == {"edge term in tiles"}
    lanes = [options(dtype="float32"), options(1), options(1, 8), options(3), options(dim=64), options(edge_dim=3)]
    assert set(lanes) == {"edge term"} and options(wide_index=True) == "edge term in tiles"


def test_a_slice_fits_the_l2_of_the_device():
    """Rows of all heads take 172 MB on twitch: a head at a time, 21.5 MB, fits the caches."""
    sizes = {"num_rows": 168_114, "num_edges": 13_595_114, "num_gathered": 168_114}
    for device in DEVICES:
        plan = attention_plan(device, score="gatv2", dtype="bfloat16", heads=8, key_dim=64, value_dim=64, **sizes)
        assert plan["slices"] > 1 and plan["slices"] * plan["heads_per_slice"] >= 8


def test_heads_share_a_walk_where_a_slice_would_leave_a_row_few_lanes():
    """Eight heads of eight numbers: on 1.6 million nodes a head at a time took up to nine times as long."""
    narrow = {"heads": 8, "key_dim": 8, "value_dim": 8}
    large = {"num_rows": 1_632_803, "num_edges": 30_622_564, "num_gathered": 1_632_803, **narrow}
    twitch = {"num_rows": 168_114, "num_edges": 13_595_114, "num_gathered": 168_114, **narrow}
    for device, score, dtype, pass_ in itertools.product(DEVICES, _C.SCORES, DTYPES, PASSES):
        for sizes, least in ((large, 256), (twitch, 128)):
            plan = attention_plan(device, score=score, dtype=dtype, pass_=pass_, **sizes)
            row = plan["heads_per_slice"] * 8 * getattr(torch, dtype).itemsize
            assert plan["slices"] == 1 or row >= least, (device, score, dtype, pass_, plan)
    by_source = {"score": "gat", "dtype": "float32", "pass_": "by_src"}
    assert attention_plan(**by_source, **twitch)["slices"] == 1  # it reads three numbers of a node beside the row


def test_a_slice_is_wider_where_arrays_are_read_by_edge():
    """A head at a time would read a sector of 32 bytes of each array for four bytes."""
    nodes = {"num_rows": 168_114, "num_gathered": 168_114, "heads": 8, "key_dim": 64, "value_dim": 64}

    def heads(arrays, edges=13_595_114, **given):
        given = {"dtype": "bfloat16", "arrays": True, "edge_arrays": arrays, "num_edges": edges, **nodes, **given}
        return attention_plan(**given)["heads_per_slice"]

    for pass_ in PASSES:
        assert heads(0, score="gat", pass_=pass_) <= 2 and heads(1, score="gat", pass_=pass_) == 4
        assert heads(0, score="dot", pass_=pass_) == 1 and heads(1, score="dot", pass_=pass_) >= 2
    assert heads(2, score="dot", pass_="by_src") == 8
    assert heads(1, score="gat", dtype="float32") == 2
    # A forward of floats goes on by heads that fit the L2 where the arrays fit it too.
    assert heads(1, score="gat", dtype="float32", edges=10**6) == 1
    assert heads(1, score="gat", dtype="float32", edges=10**6, pass_="by_dst") == 2


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("score", _C.SCORES)
@pytest.mark.parametrize("dtype", DTYPES[:3])
def test_blocks_begin_once_where_a_small_graph_has_long_rows(device, score, dtype):
    def turns(rows, edges, **given):  # of as many rows and edges a multiprocessor as an H200 has of these
        rows, edges = (DEVICES[device].multiprocessors * n // 132 for n in (rows, edges))
        sizes = {"num_rows": rows, "num_gathered": rows, "num_edges": edges, "key_dim": 0 if score == "gat" else 64}
        found = attention_plan(device, **{**sizes, "score": score, "dtype": dtype, **given})
        return found["blocks"] * found["slices"] / (found["resident"] * DEVICES[device].multiprocessors)

    for pass_ in PASSES:
        assert turns(50_000, 750_000, pass_=pass_) <= 1, pass_
        assert turns(125_000, 750_000, pass_=pass_) > 1, pass_  # short rows: their ends take blocks unequal times
        assert turns(1_000_000, 15_000_000, pass_=pass_) > 1, pass_  # a block's start is nothing there
        assert turns(50_000, 750_000, pass_=pass_, arrays=True, edge_arrays=1) > 1, pass_
        assert turns(50_000, 750_000, pass_=pass_, num_gathered=1_000_000) > 1, pass_  # more than L2 holds


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("number_bytes", [2, 4])
@pytest.mark.parametrize("weighed", [False, True])
def test_blocks_of_sums_begin_once_where_a_small_graph_has_long_rows(device, number_bytes, weighed):
    found = DEVICES[device]

    def blocks(rows, edges, number_bytes, gathered=0):  # of rows and edges as above
        rows, edges = (found.multiprocessors * n // 132 for n in (rows, edges))
        plan = _C.reduce_plan(
            vectors=16, vector_bytes=16, num_rows=rows, num_edges=edges, num_gathered=gathered or rows, max_degree=-1,
            carry_bytes=256, carry_budget=1 << 20, narrow_sub_warps=False, number_bytes=number_bytes, weighed=weighed,
            wide_index=False, multiprocessors=found.multiprocessors, l2_bytes=found.l2_bytes,
        )  # fmt: skip
        return plan["blocks"] / found.multiprocessors

    assert 4 < blocks(80_000, 1_200_000, number_bytes) <= 9
    assert blocks(80_000, 1_200_000, 0) > 9  # extrema: several turns are quicker
    assert blocks(200_000, 1_200_000, number_bytes) > 9
    assert blocks(1_000_000, 15_000_000, number_bytes) > 9
    assert blocks(80_000, 1_200_000, number_bytes, gathered=1_000_000) > 9


@pytest.mark.parametrize("max_degree,merges", [(-1, True), (40, False), (10**6, True)])
def test_segments_are_merged_where_a_row_may_be_cut(max_degree, merges):
    assert attention_plan(num_edges=10**7, max_degree=max_degree)["merges"] is merges


@pytest.mark.parametrize(
    "graph,dtype,shares,engine",
    [
        ((169_343, 1_166_243), torch.float32, False, "gather"),  # arxiv: few edges a row
        ((1_632_803, 30_622_564), torch.bfloat16, False, "gather"),  # pokec
        ((1_632_803, 30_622_564), torch.float32, True, "gather"),
    ],
)
def test_how_the_gradient_of_an_extremum_goes_back_over_the_transpose(graph, dtype, shares, engine):
    nodes, edges = graph
    steps = extremum_steps(
        dtype, 512, num_src=nodes, num_dst=nodes, num_edges=edges, device=DEVICES["h200"], arg_bytes=2, shares=shares,
        has_transpose=True,
    )  # fmt: skip
    assert steps[1].kernel == engine


def test_where_the_gradient_of_an_extremum_is_added_up():
    for nodes, shares, engines in (
        (11_758, False, ("shared_scatter", "shared_scatter")),
        (46_563, True, ("cluster_scatter", "scatter")),
    ):
        for device, engine in zip(("h200", "a100"), engines, strict=True):
            steps = extremum_steps(
                torch.float32, 512, num_src=nodes, num_dst=nodes, num_edges=100 * nodes, device=DEVICES[device],
                shares=shares,
            )  # fmt: skip
            assert steps[1].kernel == engine, (nodes, device)


def test_bytes_and_the_roof():
    """SpMM of 64 floats over edges of 4-byte indices: every row once for every edge, every result once."""
    step = spmm_step(torch.float32, 64, device=DEVICES["h200"], **TWITCH)
    assert step.bytes == 13_595_114 * (256 + 4) + 168_114 * 256
    assert step.seconds == step.bytes / 9.3e12  # 43 MB are gathered
    wide = spmm_step(torch.float32, 4096, device=dataclasses.replace(DEVICES["h200"], l2_bytes=2**20), **TWITCH)
    slices = 168_114 * 512  # bytes that each tile of the columns gathers from, 86 MB
    assert wide.seconds == wide.bytes / DEVICES["h200"].gather_roof(slices)
    assert spmm_step(torch.float32, 64, device=Device("CPU"), **TWITCH).seconds is None


@pytest.mark.parametrize("score", _C.SCORES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_backward_moves_more_than_a_forward(score, dtype):
    forward, *backward = attention_steps(
        score, dtype, 8, 1 if score == "gat" else 128, 128, passes=PASSES, device=DEVICES["h200"], **TWITCH
    )
    assert [s.step for s in backward] == ["by destination", "by source"]
    assert sum(s.bytes for s in backward) > forward.bytes > TWITCH["num_edges"] * 8 * 128 * dtype.itemsize


def graph_of(nodes=40, edges=300, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return edgeless.Graph.from_edge_index(torch.randint(nodes, (2, edges), generator=draw), nodes, nodes)


def test_a_call_is_recorded_with_its_backward():
    graph = graph_of()
    x = torch.randn(40, 4, 8, requires_grad=True)
    att = torch.randn(4, 8)
    steps = record(lambda: functional.gatv2_attention(graph, x, x, att), [x])
    assert [s.step for s in steps] == ["forward", "by destination", "by source"]
    assert {s.op for s in steps} == {"attention (gatv2)"} and x.grad is None
    steps = record(lambda: functional.neighbor_reduce(graph, x.flatten(1), "max"), [x])
    assert [s.step for s in steps] == ["forward", "gradient"]
    with torch.no_grad():
        steps = record(lambda: functional.spmm(graph, x.flatten(1)), [x])
    assert [s.op for s in steps] == ["spmm"]
    assert "rowsplit" in table(steps) and table([]) == "no op of edgeless runs"


@pytest.mark.cuda
def test_the_current_device():
    found = Device.of(torch.device("cuda"))
    properties = torch.cuda.get_device_properties(0)
    assert found.multiprocessors == properties.multi_processor_count and found.l2_bytes == properties.L2_cache_size
    if "H200" in found.name:
        assert dataclasses.replace(found, name="H200") == DEVICES["h200"]


def test_sums_over_relations_say_their_segments():
    edge_index = torch.stack((torch.arange(60) % 20, torch.arange(60) % 7))
    graph = edgeless.TypedGraph.from_edge_index(edge_index, torch.arange(60) % 3, 3, 20, 20)
    x, weight = torch.randn(20, 8, requires_grad=True), torch.randn(3, 8, 4, requires_grad=True)
    steps = record(lambda: functional.relational_sum(graph, x, weight), [x, weight])
    assert [step.step for step in steps] == ["forward", "of features", "of weights"]
    segments = int(graph.by_dst[0][-1])
    assert f"{segments} segments of 3 types" in table(steps)
    assert steps[0].bytes == 60 * (32 + 4) + 2 * segments * 4 + 20 * 4 * 4 + weight.numel() * 4


@pytest.mark.parametrize("edges,segments,tiles,pays", [
    (620_000, 462_491, 7_980, True),  # fb15k
    (5_668_682, 3_215_396, 54_000, True),  # am
    (4_800_000, 810_081, 19_600, True),  # biokg
    (148_100, 84_144, 1_350, False),  # mutag: too few for all warps
    (672_884, 223_312, 4_300, False),  # bgs
    (21_000_000, 1_458_334, 56_700, False),  # mag: 14 edges a segment
])  # fmt: skip
def test_segments_that_a_warp_sums_by_itself(edges, segments, tiles, pays):
    assert _C.short_segments_pay(edges, segments, tiles, 64) is pays
    assert not _C.short_segments_pay(edges, segments, tiles, 68)


@pytest.mark.parametrize("added,rows,pays,of_halves", [
    (3_215_396, 881_680, True, False),  # am
    (84_144, 27_163, True, True),  # mutag
    (1_991_655, 1_900_000, True, True),  # mag, by source
    (867_810, 94_000, True, False),  # biokg, by source
    (26_949, 7_262, False, False),  # aifb: too few for all warps
    (462_491, 15_000, False, False),  # fb15k: 31 a row
    (1_100_000, 100_000, False, False),
])  # fmt: skip
def test_rows_that_a_warp_adds_up_by_itself(added, rows, pays, of_halves):
    for halves, expected in ((False, pays), (True, of_halves)):
        assert _C.short_rows_pay(added, rows, 64, halves) is expected
        assert not _C.short_rows_pay(added, rows, 68, halves)
        assert not _C.short_rows_pay(added, rows, 32, halves)


@pytest.mark.parametrize("in_width,out_width,pays", [
    (64, 64, True), (16, 64, True), (64, 20, True), (36, 36, True),
    (64, 16, False), (32, 32, False), (68, 64, False), (64, 68, False),
])  # fmt: skip
def test_gradients_of_segments_that_a_warp_sums_by_itself(in_width, out_width, pays):
    assert _C.short_gradients_pay(in_width, out_width) is pays


@pytest.mark.parametrize("edges,segments,tiles,dtype,width,by_warps", [
    (520_000, 450_000, 7500, torch.float32, 64, True),
    (520_000, 450_000, 7500, torch.float32, 68, False),
    (520_000, 450_000, 7500, torch.bfloat16, 64, False),
    (5000, 4900, 100, torch.float32, 64, False),
])  # fmt: skip
def test_the_plan_says_that_a_warp_sums_segments_by_itself(edges, segments, tiles, dtype, width, by_warps, monkeypatch):
    from edgeless.plan import recording as plan_recording

    monkeypatch.setattr(plan_recording.Device, "of", lambda _: DEVICES["h200"])

    def ids(count):
        return torch.empty(count, dtype=torch.int32, device="meta")

    sizes = (41, segments, segments + 1, edges, edges, segments + 1001, 41, tiles + 1, 20, 0, 0)
    x, weight = (torch.empty(shape, dtype=dtype, device="meta") for shape in ((1000, width), (40, width, 64)))
    args = {"x": x, "weight": weight, "by_dst": list(map(ids, sizes)), "num_dst": 1000}
    (step,) = plan_recording._steps_of("relational_sum", args)
    assert ("sixteen segments a warp" in step.kernel) is by_warps


@pytest.mark.parametrize("dtype,width,by_warps", [
    (torch.float32, 64, True), (torch.float32, 68, False), (torch.float32, 32, False), (torch.bfloat16, 64, False),
])  # fmt: skip
def test_the_plan_says_so_of_gradients(dtype, width, by_warps, monkeypatch):
    from edgeless.plan import recording as plan_recording

    monkeypatch.setattr(plan_recording.Device, "of", lambda _: DEVICES["h200"])
    sizes = (41, 4900, 4901, 5000, 5000, 5901, 41, 101, 20, 0, 0)
    by_src = [torch.empty(size, dtype=torch.int32, device="meta") for size in sizes]
    shapes = {"x": (1000, width), "weight": (40, width, width), "grad": (900, width)}
    args = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
    steps = plan_recording._steps_of("relational_sum_backward", {**args, "by_src": by_src, "needs": [True, True]})
    assert [step.step for step in steps] == ["of features", "of weights"]
    assert all(("sixteen segments a warp" in step.kernel) is by_warps for step in steps)


@pytest.mark.parametrize(
    "rows,root,by_warps", [(30_000, None, True), (30_000, 64, True), (30_000, 68, False), (900, 64, False)]
)
def test_the_plan_says_that_a_warp_adds_up_rows(rows, root, by_warps, monkeypatch):
    from edgeless.plan import recording as plan_recording

    monkeypatch.setattr(plan_recording.Device, "of", lambda _: DEVICES["h200"])
    sizes = (41, 4900, 4901, 5000, 5000, 5901, 41, 101, 20, 0, 0)
    segments = [torch.empty(size, dtype=torch.int32, device="meta") for size in sizes]
    shapes = {"x": (rows, 64), "weight": (40, 64, 64), "grad": (rows, 64)} | (
        {} if root is None else {"root": (root, 64)}
    )
    args = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    (forward,) = plan_recording._steps_of("relational_sum", {**args, "by_dst": segments, "num_dst": rows})
    back = plan_recording._steps_of("relational_sum_backward", {**args, "by_src": segments, "needs": [True, True]})
    assert [("adds up sixteen rows" in step.kernel) for step in (forward, *back)] == [by_warps, by_warps, False]


@pytest.mark.parametrize("order", ["aggregate", "transform"])
def test_a_layer_over_relations_says_its_parts(order, monkeypatch):
    monkeypatch.setattr(edgeless.functional.relational_layer, "transforms", lambda *_: order == "transform")
    edge_index = torch.stack((torch.arange(60) % 20, torch.arange(60) % 7))
    graph = edgeless.TypedGraph.from_edge_index(edge_index, torch.arange(60) % 3, 3, 20, 20)
    shapes = {"x": (20, 8), "weight": (3, 8, 4), "root": (8, 4)}
    given = {name: torch.randn(shape, requires_grad=True) for name, shape in shapes.items()}
    steps = record(lambda: relational_layer(graph, **given, out_dtype=torch.float32), list(given.values()))
    forward = [("relational_sum", "forward")]
    back = [("relational_sum", "of features"), ("relational_sum", "of weights")]
    if order == "transform":
        forward, back = [*forward, ("spmm", "forward")], [("spmm", "backward"), *back]
    assert [(step.op, step.step) for step in steps] == [*forward, ("project", "forward"), *back]
    assert "1 maps, 20 x 8 -> 4" in table(steps)


def test_attention_over_pairs_says_its_parts():
    from edgeless.functional.pair_attention import walks
    from edgeless.plan.recording import _steps_of

    ends = torch.tensor([[0, 1, 1, 2, 0], [1, 1, 1, 0, 2]])
    graph = edgeless.TypedGraph.from_edge_index(ends, torch.tensor([0, 0, 1, 1, 1]), 2, 3, 3)
    args = {"x": torch.ones(3, 8), "weight": torch.ones(2, 8, 4), "walks": walks(graph).arrays}
    forward = _steps_of("pair_attention", args)
    assert [step.step for step in forward] == ["products of pairs", "queries of segments", "forward"]
    assert all(step.kernel == "5 pairs, 4 segments of 2 types" and step.bytes > 0 for step in forward)
    backward = _steps_of("pair_attention_backward", {**args, "needs": [True, False, False, True, False]})
    assert [step.step for step in backward] == ["statistics of rows", "by pair", "of features"]
    assert sum(step.bytes for step in backward) > sum(step.bytes for step in forward)


@pytest.mark.cuda
def test_a_plan_of_rgat_says_its_parts():
    nn = pytest.importorskip("edgeless.pyg.nn")
    layer, ends = nn.RGATConv(16, 16, 3).to("cuda"), torch.randint(9, (2, 40), device="cuda")
    said = edgeless.explain(layer, torch.randn(9, 16, device="cuda"), ends, ends[0] % 3, plan=True)
    assert "pair_attention, forward: segments: " in str(said)

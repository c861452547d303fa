"""The kernels that plans of sums, extrema, relations, pairs and linear maps name, for the tests that compile them."""

import itertools

import torch

from edgeless import _C
from edgeless.kernels import Kernel
from edgeless.plan.steps import DEVICES, dtype_name, extremum_steps, spmm_step

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
ARXIV = {"num_src": 169_343, "num_dst": 169_343, "num_edges": 1_166_243}
TWITCH = {"num_src": 168_114, "num_dst": 168_114, "num_edges": 13_595_114}
WEIGHTS = ("none", "by_id", "in_order", "of_segments")


def sums():
    """Forward: every weighing, width of vectors and id."""
    on = {"device": DEVICES["h200"]}
    for dtype, width, graph, index in itertools.product(DTYPES, (3, 6, 64, 512), (ARXIV, TWITCH), (4, 8)):
        for given in ({}, {"weight_bytes": 4}, {"weight_bytes": 4, "scaled_only": True}):
            yield from spmm_step(dtype, width, **graph, **on, index_bytes=index, **given).kernels
        by_head = {"weight_bytes": 8, "by_head": True}
        yield from spmm_step(dtype, width, **graph, **on, index_bytes=index, **by_head).kernels
    for dtype, wide, vectors in itertools.product(DTYPES, (False, True), (1, 8, 64)):
        yield of(_C.sampled_kernel(dtype=dtype_name(dtype), wide_index=wide, vectors=vectors))


def extrema():
    """Forward and every way back."""
    small = {"num_src": 1_000, "num_dst": 1_000, "num_edges": 100_000}
    for dtype, graph, shares, back in itertools.product(DTYPES, (ARXIV, TWITCH, small), (False, True), (False, True)):
        for device, reduce, arg_bytes in itertools.product(DEVICES.values(), ("max", "min"), (1, 2, 4)):
            given = {"shares": shares, "has_transpose": back, "reduce": reduce, "arg_bytes": arg_bytes}
            for step in extremum_steps(dtype, 512, **graph, device=device, **given):
                yield from step.kernels


def relations():
    """The fused kernels of segments and of rows, for many and for few of them."""
    sizes = itertools.product(DTYPES[:3], WEIGHTS, (32, 64, 128), (1, 100), (False, True))
    for dtype, weights, width, scale, backward in sizes:
        yield of(_C.segments_plan(
            backward=backward, dtype=dtype_name(dtype), weights=weights, edges=6_000 * scale, segments=4_600 * scale,
            tiles=80 * scale, types=50, in_width=width, out_width=width, multiprocessors=132,
        ))  # fmt: skip
    for dtype, width, rows, transposed in itertools.product(DTYPES[:3], (32, 64, 128), (900, 90_000), (False, True)):
        for device in DEVICES.values():
            yield of(_C.rows_plan(
                dtype=dtype_name(dtype), segments=3 * rows, rows=rows, tiles=rows // 20, own_width=width, width=width,
                transposed=transposed, multiprocessors=132, capability=device.capability,
                shared_bytes=device.shared_bytes,
            ))  # fmt: skip


def products():
    """Products and outer products by type, skip connections, linear maps, and the passes over pairs."""
    for dtype, width, transposed in itertools.product(DTYPES, (3, 8, 64), (False, True)):
        kind = dtype_name(dtype)
        yield of(_C.typed_product_kernel(dtype=kind, depth=64, columns=width, transposed=transposed, capability=90))
        yield of(_C.blend_kernel(dtype=kind, width=width, backward=transposed))
        yield of(_C.typed_outer_kernel(dtype=kind, capability=90))
    sizes = itertools.product(DTYPES[:3], (1_000, 200_000), (64, 512), ((False, False), (False, True), (True, True)))
    for dtype, nodes, width, (divided, transposed) in sizes:
        rows, depth = (width, nodes) if divided else (nodes, width)
        plan = _C.map_kernel(
            dtype=dtype_name(dtype), rows=rows, columns=width, depth=depth, nodes=nodes, divided=divided,
            transposed=transposed, capability=90, allows_tf32=False,
        )  # fmt: skip
        if plan:
            yield of(plan)
    for dtype, which, vectors, degree, dropout in itertools.product(
        DTYPES[:3], ("forward", "by_src"), (4, 16, 32), (2, 5, 40), (False, True)
    ):
        yield of(_C.pair_plan(
            pass_=which, dtype=dtype_name(dtype), vectors=vectors, num_rows=1_000, num_edges=1_000 * degree,
            num_gathered=1_000, max_degree=-1, dropout=dropout, multiprocessors=132, l2_bytes=60 * 2**20,
        ))  # fmt: skip
    yield from (of(_C.deltas_kernel(dtype=dtype_name(dtype), vectors=n)) for dtype in DTYPES[:3] for n in (8, 32))


def of(plan):
    """(header, expression) of a plan."""
    return plan["header"], plan["expression"]


def every():
    """All of them, each once, in an order of their own."""
    found = {name for part in (sums, extrema, relations, products) for name in part()}
    return [Kernel(header, expression) for header, expression in sorted(found)]


def sample():
    """One of every template and type of rows."""
    found = {}
    for kernel in every():
        template, _, arguments = kernel.expression.partition("<")
        found.setdefault((template, arguments.partition(",")[0] if "spmm" in template else ""), kernel)
    return list(found.values())

"""Sums over relations of float32 rows, their gradients, and the sums of rows: CUDA kernels that the host runs."""

from __future__ import annotations

from itertools import pairwise

import on_host as host
import pytest
import segments_on_host as segments
import torch
from segments_on_host import GradientsArgs, Neighbors, ProductsArgs, Rows, RowSumsArgs, Segments, neighbors
from test_segment_tiles import typed

from edgeless.ops.relational import segment_tiles, typed_edges

pytestmark = pytest.mark.skipif(host.missing() is not None, reason=f"{host.missing()}")

SRC, DST, TYPES, CUT = 97, 90, 3, 64


class Side:
    """The segments of one direction of a graph, in tiles: most of few edges, some of many, a relation of none."""

    def __init__(self, num_gathered=SRC, num_rows=DST):
        graph = typed(num_gathered, num_rows, 400, TYPES, hub=120, empty=1)
        found = typed_edges(*graph.graph.csr, graph.edge_type, TYPES, CUT)
        count = int(found[0][-1])
        self.type_ptr, self.rows, self.ptr = found[0], found[1][:count], found[2][: count + 1]
        self.indices, self.ids = found[3], found[4]
        begins = torch.bincount(self.rows, minlength=num_rows).cumsum(0)
        places = self.rows.argsort(stable=True)
        self.by_row = torch.cat((begins.new_zeros(1), begins, places)).int()
        self.type_tiles, self.tiles, *_ = segment_tiles(
            self.type_ptr, self.rows, self.ptr, self.by_row, graph.num_edges, False
        )
        lengths = self.ptr.diff()
        assert lengths.max() > 16 and (lengths == 1).any() and self.type_tiles.diff().max() > 1
        self.segment_of_edge = torch.arange(count).repeat_interleave(lengths)
        self.type_of_segment = torch.searchsorted(self.type_ptr[1:], torch.arange(count), right=True)

    def segments(self) -> Segments:
        given = (self.type_tiles.data_ptr(), self.tiles.data_ptr(), self.tiles.numel() - 1, TYPES)
        return Segments(*given, self.ptr.data_ptr(), self.rows.data_ptr())


def leaf(*shape, seed, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def noise(*shape, dtype=torch.float32):
    return torch.full(shape, float("nan"), dtype=dtype)


def weighed(side: Side, kind: str, rows: torch.Tensor) -> tuple[Neighbors, torch.Tensor, tuple]:
    """The neighbours with weights of one kind, the exact sums of the segments, and what must be kept."""
    edges, count = side.indices.numel(), side.rows.numel()
    weights = leaf(count if kind == "of_segments" else edges, seed=3)
    of_edge = {
        "none": torch.ones(edges), "in_order": weights, "by_id": weights[side.ids.long()] if kind == "by_id" else None,
        "of_segments": weights[side.segment_of_edge] if kind == "of_segments" else None,
    }[kind]  # fmt: skip
    given = {
        "none": {}, "in_order": {"weights": weights}, "by_id": {"weights": weights, "ids": side.ids},
        "of_segments": {"of_segments": weights},
    }[kind]  # fmt: skip
    sums = torch.zeros(count, rows.size(1), dtype=torch.float64)
    sums.index_add_(0, side.segment_of_edge, of_edge.double()[:, None] * rows.double()[side.indices.long()])
    return neighbors(rows, side.indices, **given), sums, (weights,)


def run(side: Side, kind: str, rows, weight, x=None, share=2, blocks=2, wants=(True, True)):
    """Products of the sums of rows, or with x both gradients, and the exact sums."""
    back = x is not None
    in_width, out_width = weight.shape[1:]
    depth, columns = (out_width, in_width) if back else (in_width, out_width)
    width = 32 if max(in_width, out_width) <= 32 and not back else 64
    of, sums, kept = weighed(side, kind, rows)
    chunks = (side.tiles.numel() - 1) // share + TYPES
    out = noise(side.rows.numel(), columns) if wants[0] else None
    partial = noise(chunks, columns, depth) if back and wants[1] else None
    scratch = torch.empty(TYPES * (width * width // 4 + width // 4) * 16 + (chunks + 2) * 16, dtype=torch.uint8)
    library, sizes = segments.library(width, kind, depth == width), (in_width, out_width, share, False)
    made = [None if t is None else t.data_ptr() for t in (out, partial)]
    if back:
        given = (Rows.of(weight), Rows.of(x), weight.stride(0), *made, *sizes)
        call, args = library.run_gradients, GradientsArgs(side.segments(), of, *given)
    else:
        given = (Rows.of(weight), weight.stride(0), made[0], *sizes)
        call, args = library.run_products, ProductsArgs(side.segments(), of, *given)
    call(segments.ctypes.byref(args), segments.ctypes.c_void_p(scratch.data_ptr()), blocks)
    assert kept
    if partial is None:
        return out, sums
    tiles = side.type_tiles.tolist()
    grad = torch.zeros(TYPES, columns, depth)
    for t, (first, last) in enumerate(pairwise(tiles)):
        at = first // share + t
        grad[t] = partial[at : at + -(-(last - first) // share)].sum(0)
    return out, sums, grad


def error(found, expected):
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("kind,k,m", [("of_segments", 64, 64), ("by_id", 40, 24), ("none", 32, 32)])
def test_products_of_sums(kind, k, m):
    side = Side()
    x, weight = leaf(SRC, k, seed=0), leaf(TYPES, k, m, seed=1)
    found, sums = run(side, kind, x, weight)
    expected = torch.einsum("pk,pkm->pm", sums, weight.double()[side.type_of_segment])
    assert error(found, expected) < 1e-6
    assert torch.equal(found, run(side, kind, x, weight, share=1, blocks=1)[0])


@pytest.mark.parametrize("kind,k,m", [("none", 64, 64), ("by_id", 24, 40), ("in_order", 64, 20)])
def test_gradients(kind, k, m):
    side = Side(DST, SRC)
    x, weight, grad = leaf(SRC, k, seed=0), leaf(TYPES, k, m, seed=1), leaf(DST, m, seed=2)
    rows, sums, of_weight = run(side, kind, grad, weight, x)
    expected = torch.einsum("pm,pkm->pk", sums, weight.double()[side.type_of_segment])
    own = x.double()[side.rows.long()]
    outer = torch.zeros(TYPES, k, m, dtype=torch.float64)
    outer.index_add_(0, side.type_of_segment, own[:, :, None] * sums[:, None, :])
    assert error(rows, expected) < 1e-6 and error(of_weight, outer) < 1e-6
    assert torch.equal(rows, run(side, kind, grad, weight, x, wants=(True, False))[0])
    assert torch.equal(of_weight, run(side, kind, grad, weight, x, wants=(False, True))[2])


def test_infinities_stay_where_they_are():
    x, weight = leaf(SRC, 64, seed=0), leaf(TYPES, 64, 64, seed=1)
    x[3, 5], x[4, 6] = float("inf"), float("nan")
    side = Side()
    found, sums = run(side, "of_segments", x, weight)
    expected = torch.einsum("pk,pkm->pm", sums, weight.double()[side.type_of_segment])
    finite = expected.isfinite()
    assert not finite.all() and torch.equal(found.isfinite(), finite)
    assert torch.equal(found.isnan(), expected.isnan()) and error(found[finite], expected[finite]) < 1e-6


@pytest.mark.parametrize("dtype,wide,transposed", [
    (torch.float32, False, False), (torch.float32, False, True), (torch.bfloat16, True, False),
    (torch.bfloat16, False, True),
])  # fmt: skip
def test_sums_of_rows(dtype, wide, transposed):
    side, width, own_width = Side(), 64, 56
    products, own = leaf(side.rows.numel(), width, seed=0, dtype=dtype), leaf(DST - 2, own_width, seed=1, dtype=dtype)
    root, bias = leaf(own_width, width, seed=2, dtype=dtype), leaf(width, seed=3, dtype=dtype)
    stored = root.t().contiguous() if transposed else root
    out = noise(DST, width, dtype=torch.float32 if wide else dtype)
    args = RowSumsArgs(
        None, side.by_row.data_ptr(), neighbors(products, side.by_row[DST + 1 :]), 0, DST, DST - 2, Rows.of(own),
        Rows.of(stored), transposed, bias.data_ptr(), out.data_ptr(), wide, own_width, width, 0, False,
    )  # fmt: skip
    name = "float" if dtype == torch.float32 else "__nv_bfloat16"
    segments.library(64, "none", True, name, transposed).run_rows(segments.ctypes.byref(args), 2)
    expected = torch.zeros(DST, width, dtype=torch.float64).index_add_(0, side.rows.long(), products.double())
    expected[: DST - 2] += own.double() @ root.double()
    expected += bias.double()
    assert error(out, expected) < (1e-6 if out.dtype == torch.float32 else 4e-3)

"""Thresholds turn once along each size, and not with the count of multiprocessors."""

import pytest

from edgeless import _C


def test_more_tiles_never_turn_short_segments_off():
    """Nor do longer segments turn them on: the rule turns once along each size, whatever the multiprocessors."""
    tiles = [_C.short_segments_pay(8 * n, 2 * n, n, 64) for n in range(0, 40_000, 48)]
    edges = [_C.short_segments_pay(n, 40_000, 10_000, 64) for n in range(0, 800_000, 5_000)]
    widths = [_C.short_segments_pay(40_000, 40_000, 10_000, n) for n in range(4, 257, 4)]
    assert tiles == sorted(tiles) and edges == sorted(edges, reverse=True) and widths == sorted(widths, reverse=True)
    for found in (tiles, edges, widths):
        assert {True, False} == set(found)


def test_more_rows_never_turn_short_rows_off():
    for halves in (False, True):
        rows = [_C.short_rows_pay(60_000, n, 64, halves) for n in range(0, 80_000, 100)]
        added = [_C.short_rows_pay(n, 60_000, 64, halves) for n in range(0, 800_000, 5_000)]
        assert rows == sorted(rows) and added == sorted(added, reverse=True)
        assert {True, False} == set(rows) == set(added)


@pytest.mark.parametrize("multiprocessors", [108, 132, 148, 170])
def test_a_graph_has_one_kernel_on_devices_of_a_family(multiprocessors):
    """fb15k turned with the count: sixteen segments a warp up to 166 multiprocessors and not from there on."""
    plan = _C.segments_plan(
        backward=False, dtype="float32", weights="of_segments", edges=620_000, segments=462_491, tiles=7_980, types=474,
        in_width=64, out_width=64, multiprocessors=multiprocessors,
    )  # fmt: skip
    assert plan["by_warps"] and "short_products_kernel" in plan["expression"]

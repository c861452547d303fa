"""Useful bytes of a bare aggregation and the roof that a gather of rows has on an H200.

Useful: every neighbour's row read once per edge, every row of the other side read and every output row written once.
With R = H * D * b the bytes of one row over all heads, N nodes, M edges and 4-byte indices.
"""

from __future__ import annotations

from edgeless.plan import DEVICES

from .work import DTYPES, Case

# The L2 serves a set of rows that fits, HBM the others.
_H200 = DEVICES["h200"]
L2_ROOF, HBM_ROOF, L2_FITS = _H200.l2_roof, _H200.hbm_roof, _H200.l2_fits

FAMILY = {"spmm_none": "spmm", "spmm_both": "spmm", "max": "min"}


def row_bytes(case: Case) -> int:
    """R."""
    return case.heads * case.channels * DTYPES[case.dtype].itemsize


def useful_bytes(case: Case, mode: str, nodes: int, edges: int) -> int:
    """Bytes that one run has to move under the rule above."""
    r, h, size = row_bytes(case), case.heads, DTYPES[case.dtype].itemsize
    stat = 8 * h  # (logsumexp, Delta) of a destination, read per edge by the pass over sources
    scalar = h * size  # a GAT logit's share of one node
    arg = 4 * case.channels  # which edge won
    forward, backward = {
        "gatv2": (
            edges * (r + 4) + 2 * nodes * r + 4 * nodes * h,
            edges * (3 * r + stat + 8) + 6 * nodes * r,
        ),
        "gat": (
            edges * (r + scalar + 4) + nodes * (r + scalar) + 4 * nodes * h,
            edges * (2 * r + 2 * scalar + stat + 8) + 5 * nodes * r,
        ),
        "gt": (
            edges * (2 * r + 4) + 2 * nodes * r,
            edges * (4 * r + stat + 8) + 9 * nodes * r,
        ),
        "spmm": (edges * (r + 4) + nodes * r, edges * (r + 4) + nodes * r),
        "min": (edges * (r + 4) + nodes * (r + arg), nodes * (2 * r + arg)),
    }[FAMILY.get(case.op, case.op)]
    return forward if mode == "forward" else forward + backward


def gather_roof(case: Case, nodes: int) -> float:
    """Bytes per second of the roof for whole rows; a kernel that walks slices that fit L2 may pass the lower one."""
    gathered = nodes * row_bytes(case) * (2 if case.op == "gt" else 1)
    return L2_ROOF if gathered <= L2_FITS else HBM_ROOF

"""The useful bytes of a bare aggregation, and the roofline of a gather of rows on an H200.

Useful bytes: every gathered row is read once per edge, every row of the query side is read once and every output row is
written once. R = H * D * b is the bytes of one row over all heads; N nodes, M edges, 4-byte indices.
"""

from __future__ import annotations

from edgeless.plan import DEVICES

from .work import DTYPES, Case

# Gathers from a set of rows that fits the L2 run at L2 bandwidth, others at HBM bandwidth.
_H200 = DEVICES["h200"]
L2_ROOF, HBM_ROOF, L2_FITS = _H200.l2_roof, _H200.hbm_roof, _H200.l2_fits

FAMILY = {"spmm_none": "spmm", "spmm_both": "spmm", "max": "min"}


def row_bytes(case: Case) -> int:
    """R, the bytes of one row over all heads."""
    return case.heads * case.channels * DTYPES[case.dtype].itemsize


def useful_bytes(case: Case, mode: str, nodes: int, edges: int) -> int:
    """The useful bytes of one run, as defined above."""
    r, h, size = row_bytes(case), case.heads, DTYPES[case.dtype].itemsize
    stat = 8 * h  # (logsumexp, Delta) of a destination, read per edge by the source pass
    scalar = h * size  # one node's terms of GAT logits
    arg = 4 * case.channels  # argmin or argmax of an output row
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
    """The roofline of gathering whole rows, in bytes per second. Kernels with feature tiles that fit the L2 may exceed
    the HBM one.
    """
    gathered = nodes * row_bytes(case) * (2 if case.op == "gt" else 1)
    return L2_ROOF if gathered <= L2_FITS else HBM_ROOF

"""What a report asks the plans of the kernels, argument by argument."""

import pytest
import torch
from plan_cases import H200

from edgeless import _C, plan
from edgeless.plan import attention_steps, extremum_steps, spmm_step

SIZES = {"num_src": 70_000, "num_dst": 50_000, "num_edges": 900_000, "device": H200}
DEVICE = {"multiprocessors": 132, "l2_bytes": 60 * 2**20}


@pytest.fixture
def asked(monkeypatch):
    """Every question with its arguments, in order."""
    questions = []

    def listen(name):
        answer = getattr(_C, name)
        monkeypatch.setattr(plan._C, name, lambda **given: questions.append((name, given)) or answer(**given))

    for name in ("attention_plan", "fold_plan", "gradient_plan", "narrow_sums_pay"):
        listen(name)
    return questions


@pytest.mark.parametrize("dtype,width,vectors", [
    (torch.float32, 65, 17), (torch.bfloat16, 65, 9), (torch.float16, 64, 8), (torch.float64, 3, 2),
])  # fmt: skip
@pytest.mark.parametrize("weight_bytes,index_bytes", [(0, 4), (4, 8)])
def test_a_sum(asked, dtype, width, vectors, weight_bytes, index_bytes):
    """Rows in vectors of 16 bytes, the last of them not full; pieces in the arithmetic's numbers, for which there is an
    eighth of the result's memory or a megabyte.
    """
    size = dtype.itemsize
    options = {"weight_bytes": weight_bytes, "index_bytes": index_bytes, "max_degree": 77}
    spmm_step(dtype, width, **SIZES, **options)
    (_, narrow), (_, fold) = asked
    assert narrow == {
        "num_edges": 900_000, "num_rows": 50_000, "halves": size == 2, "weighted": weight_bytes > 0,
    }  # fmt: skip
    assert fold == {
        "vectors": vectors, "vector_bytes": 16, "num_rows": 50_000, "num_edges": 900_000, "num_gathered": 70_000,
        "max_degree": 77, "carry_bytes": width * (8 if size == 8 else 4),
        "carry_budget": max(2**20, 50_000 * width * size // 8), "narrow_teams": _C.narrow_sums_pay(**narrow),
        "number_bytes": size, "weighed": weight_bytes > 0, "wide_index": index_bytes == 8, **DEVICE,
    }  # fmt: skip
    assert [name for name, _ in asked[:2]] == ["narrow_sums_pay", "fold_plan"]


@pytest.mark.parametrize("arg_bytes,shares,has_transpose,index_bytes", [(1, False, True, 4), (4, True, False, 8)])
def test_an_extremum(asked, arg_bytes, shares, has_transpose, index_bytes):
    """A piece has a number and where it is; its gradient is planned for the other side's columns."""
    options = {"arg_bytes": arg_bytes, "shares": shares, "has_transpose": has_transpose, "index_bytes": index_bytes}
    extremum_steps(torch.bfloat16, 65, max_degrees=(77, 9), **SIZES, **options)
    (first, fold), (second, gradient) = asked
    assert (first, second) == ("fold_plan", "gradient_plan")
    assert fold == {
        "vectors": 9, "vector_bytes": 16, "num_rows": 50_000, "num_edges": 900_000, "num_gathered": 70_000,
        "max_degree": 77, "carry_bytes": 65 * 8, "carry_budget": max(2**20, 50_000 * 130 // 8), "narrow_teams": True,
        "number_bytes": 0, "weighed": False, "wide_index": False, **DEVICE,
    }  # fmt: skip
    assert gradient == {
        "dtype": "bfloat16", "arg_bytes": arg_bytes, "wide_index": index_bytes == 8, "shares": shares,
        "has_transpose": has_transpose, "num_rows": 50_000, "num_columns": 70_000, "num_edges": 900_000, "width": 65,
        "multiprocessors": 132, "shared_bytes": 227 * 1024, "clusters": True,
    }  # fmt: skip


def test_the_passes_of_attention(asked):
    """Rows are the destinations', and by source the sources'; arrays by edge are those of the pass."""
    attention_steps(
        "gatv2", torch.float16, 4, 32, 32, passes=("forward", "by_dst", "by_src"), max_degrees=(77, 9), options=True,
        edge_dim=6, edge_arrays={"forward": 1, "by_dst": 2, "by_src": 3}, index_bytes=8, **SIZES,
    )  # fmt: skip
    rows = {"forward": (50_000, 70_000, 77, 1), "by_dst": (50_000, 70_000, 77, 2), "by_src": (70_000, 50_000, 9, 3)}
    assert [given for _, given in asked] == [
        {
            "pass_": which, "score": "gatv2", "dtype": "float16", "heads": 4, "key_dim": 32, "value_dim": 32,
            "num_rows": own, "num_edges": 900_000, "num_gathered": others, "max_degree": longest, "options": True,
            "edge_dim": 6, "edge_arrays": arrays, "wide_index": True, **DEVICE,
        }
        for which, (own, others, longest, arrays) in rows.items()
    ]  # fmt: skip
    attention_steps("dot", torch.float32, 4, 32, 16, **SIZES)
    assert {name: asked[-1][1][name] for name in ("value_dim", "max_degree", "options", "edge_dim", "edge_arrays")} == {
        "value_dim": 16, "max_degree": -1, "options": False, "edge_dim": 0, "edge_arrays": 0,
    }  # fmt: skip

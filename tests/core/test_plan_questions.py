"""What a report asks the plans of the kernels, argument by argument."""

import pytest
import torch
from plan_cases import H200, D, E, S, ids, on_meta

from edgeless import _C
from edgeless.choices.engines import ROWSPLIT
from edgeless.plan import recording as plan_recording
from edgeless.plan import steps as plan
from edgeless.plan.steps import Step, attention_steps, extremum_steps, spmm_step

SIZES = {"num_src": 70_000, "num_dst": 50_000, "num_edges": 900_000, "device": H200}
DEVICE = {"multiprocessors": 132, "l2_bytes": 60 * 2**20}


@pytest.fixture
def asked(monkeypatch):
    """Every question with its arguments, in order."""
    questions = []

    def listen(name):
        answer = getattr(_C, name)
        monkeypatch.setattr(plan._C, name, lambda **given: questions.append((name, given)) or answer(**given))

    for name in ("attention_plan", "reduce_plan", "gradient_plan", "narrow_sums_pay"):
        listen(name)
    return questions


@pytest.mark.parametrize("dtype,width,vectors,vector_bytes", [
    (torch.float32, 65, 65, 4), (torch.bfloat16, 65, 9, 16), (torch.float16, 64, 8, 16), (torch.float64, 3, 3, 8),
])  # fmt: skip
@pytest.mark.parametrize("weight_bytes,index_bytes", [(0, 4), (4, 8)])
def test_a_sum(asked, dtype, width, vectors, vector_bytes, weight_bytes, index_bytes):
    """Rows in vectors of 16, 8 or 4 bytes, padded where none fits; segments in the arithmetic's numbers, for which
    there is an eighth of the result's memory or a megabyte.
    """
    size = dtype.itemsize
    options = {"weight_bytes": weight_bytes, "index_bytes": index_bytes, "max_degree": 77}
    spmm_step(dtype, width, **SIZES, **options)
    (_, narrow), (_, fold) = asked
    assert narrow == {
        "num_edges": 900_000, "num_rows": 50_000, "halves": size == 2, "weighted": weight_bytes > 0,
    }  # fmt: skip
    assert fold == {
        "vectors": vectors, "vector_bytes": vector_bytes, "num_rows": 50_000, "num_edges": 900_000,
        "num_gathered": 70_000, "max_degree": 77, "carry_bytes": width * (8 if size == 8 else 4),
        "carry_budget": max(2**20, 50_000 * width * size // 8), "narrow_sub_warps": _C.narrow_sums_pay(**narrow),
        "number_bytes": size, "weighed": weight_bytes > 0, "wide_index": index_bytes == 8, **DEVICE,
    }  # fmt: skip
    assert [name for name, _ in asked[:2]] == ["narrow_sums_pay", "reduce_plan"]


@pytest.mark.parametrize("arg_bytes,shares,has_transpose,index_bytes", [(1, False, True, 4), (4, True, False, 8)])
def test_an_extremum(asked, arg_bytes, shares, has_transpose, index_bytes):
    """A segment has a number and where it is; its gradient is planned for the other side's columns."""
    options = {"arg_bytes": arg_bytes, "shares": shares, "has_transpose": has_transpose, "index_bytes": index_bytes}
    extremum_steps(torch.bfloat16, 65, max_degrees=(77, 9), **SIZES, **options)
    (first, fold), (second, gradient) = asked
    assert (first, second) == ("reduce_plan", "gradient_plan")
    assert fold == {
        "vectors": 9, "vector_bytes": 16, "num_rows": 50_000, "num_edges": 900_000, "num_gathered": 70_000,
        "max_degree": 77, "carry_bytes": 65 * 8, "carry_budget": max(2**20, 50_000 * 130 // 8),
        "narrow_sub_warps": True, "number_bytes": 0, "weighed": False, "wide_index": False, **DEVICE,
    }  # fmt: skip
    assert gradient == {
        "dtype": "bfloat16", "arg_bytes": arg_bytes, "wide_index": index_bytes == 8, "shares": shares,
        "has_transpose": has_transpose, "num_rows": 50_000, "num_columns": 70_000, "num_edges": 900_000, "width": 65,
        "multiprocessors": 132, "shared_bytes": 227 * 1024, "clusters": True,
    }  # fmt: skip


def test_the_passes_of_attention(asked):
    """Rows are the destinations', and by source the sources'; arrays by edge are those of the pass."""
    attention_steps(
        "gatv2", torch.float16, 4, 32, 32, passes=("forward", "by_dst", "by_src"), max_degrees=(77, 9), arrays=True,
        edge_dim=6, edge_arrays={"forward": 1, "by_dst": 2, "by_src": 3}, index_bytes=8, **SIZES,
    )  # fmt: skip
    rows = {"forward": (50_000, 70_000, 77, 1), "by_dst": (50_000, 70_000, 77, 2), "by_src": (70_000, 50_000, 9, 3)}
    assert [given for _, given in asked] == [
        {
            "pass_": which, "score": "gatv2", "dtype": "float16", "heads": 4, "key_dim": 32, "value_dim": 32,
            "num_rows": own, "num_edges": 900_000, "num_gathered": others, "max_degree": longest, "dropout": False,
            "arrays": True, "edge_dim": 6, "edge_arrays": arrays, "wide_index": True, **DEVICE,
        }
        for which, (own, others, longest, arrays) in rows.items()
    ]  # fmt: skip
    attention_steps("dot", torch.float32, 4, 32, 16, dropout=True, **SIZES)
    names = ("value_dim", "max_degree", "dropout", "arrays", "edge_dim", "edge_arrays")
    assert {name: asked[-1][1][name] for name in names} == {
        "value_dim": 16, "max_degree": -1, "dropout": True, "arrays": False, "edge_dim": 0, "edge_arrays": 0,
    }  # fmt: skip


# From the arguments of a recorded op ---------------------------------------------------------------------------------


@pytest.fixture
def told(monkeypatch):
    """What the steps of an op are made of, without making them."""
    options = []
    step = Step("some", "step", "rowsplit", "a kernel", 1, 0, None)
    for name, made in (("attention_steps", [step]), ("extremum_steps", [step, step]), ("spmm_step", step)):
        monkeypatch.setattr(plan_recording, name, lambda *_, made=made, **given: options.append(given) or made)
    return options


EDGES = {"edge_attr": on_meta(E, 6)}
SCALE = {"edge_scale": on_meta(E, 2)}
GRADS = {"grad_out": on_meta(D, 2, 5)}


@pytest.mark.parametrize("score,given,forward,backward,edge_dim", [
    ("gatv2", {}, 0, 0, 0),
    ("gatv2", {"dropout": 0.5}, 0, 0, 0),
    ("gatv2", EDGES, 1, 1, 6),
    ("gatv2", SCALE, 1, 1, 0),
    ("gatv2", EDGES | SCALE | GRADS, 2, 2, 6),
    ("gatv2", {"grad_weights": on_meta(E, 2)}, 0, 1, 0),
    ("gat", EDGES, 1, 1, 0),  # whose term is made before
    ("dot", EDGES, 1, 1, 0),
    ("dot", EDGES | GRADS, 1, 2, 0),  # of keys and of values
    ("dot", EDGES | SCALE | GRADS | {"grad_weights": on_meta(E, 2)}, 2, 4, 0),
])  # fmt: skip
def test_what_attention_reads_by_edge(told, score, given, forward, backward, edge_dim):
    value = None if score == "gatv2" else on_meta(S, 2, 5)
    args = {"dst": on_meta(D, 2, 5), "src": on_meta(S, 2, 5), "value": value, "csr": ids(D + 1, E), "score": score}
    plan_recording._attention_of({**args, **given, "max_degrees": [7, 8]}, ["forward"], ROWSPLIT)
    (found,) = told
    assert found["edge_arrays"] == {"forward": forward, "by_dst": backward, "by_src": backward}
    assert (found["dropout"], found["arrays"]) == ("dropout" in given, backward > 0)
    assert (found["edge_dim"], found["max_degrees"]) == (edge_dim, [7, 8])
    assert (found["num_src"], found["num_dst"], found["num_edges"], found["index_bytes"]) == (S, D, E, 4)


@pytest.mark.parametrize("ties,transposed,arg", [("first", True, torch.uint8), ("shared", False, torch.int16)])
def test_how_an_extremum_was_called(told, ties, transposed, arg):
    csc = ids(S + 1, E) if transposed else []
    args = {"x": on_meta(S, 6), "csr": ids(D + 1, E), "csc": csc, "ties": ties, "max_degrees": [7, 8]}
    expected = {
        "num_src": S, "num_dst": D, "num_edges": E, "index_bytes": 4, "arg_bytes": arg.itemsize,
        "shares": ties != "first", "has_transpose": transposed, "max_degrees": [7, 8],
    }  # fmt: skip
    forward = plan_recording._steps_of("neighbor_reduce", {**args, "arg_dtype": arg})
    back = plan_recording._steps_of("neighbor_reduce_backward", {**args, "arg": on_meta(D, 6, dtype=arg)})
    found = [{name: given[name] for name in (*expected, "backward")} for given in told]
    assert found == [{**expected, "backward": False}, {**expected, "backward": True}]
    assert (len(forward), len(back)) == (2, 1)  # of a backward the gradient alone


def test_sums_of_products_walk_the_direction_of_their_pass(told):
    """Forward the edges by destination, backward those by source, each with its longest row."""
    pairs = ids(3, 6, 0, 6, 6, 0)
    args = {"x": on_meta(S, 6), "weight": on_meta(2, 6, 9), "by_dst": pairs, "by_src": ids(3, 6, 0, 6, 6, 12)}
    args |= {"csr": ids(D + 1, E), "csc": ids(6 + 1, E), "num_dst": D, "max_degrees": [7, 8]}
    args["edge_weight"] = on_meta(E)
    plan_recording._steps_of("relational_layer", args)
    plan_recording._steps_of("relational_layer_backward", {**args, "grad": on_meta(D, 9), "needs": [True] * 5})
    names = ("num_src", "num_dst", "max_degree", "weight_bytes")
    assert [tuple(given[name] for name in names) for given in told] == [(6, D, 7, 4), (D, 6, 8, 4)]

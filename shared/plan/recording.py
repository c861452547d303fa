"""Records the ops that run in a call and describes each as steps of :mod:`edgeless.plan.steps`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .. import _C
from ..checks import opmath_dtype
from ..choices.engines import ROWSPLIT, Engine, current_engine, origin, pick
from ..ops.relational import widths
from .device import dtype_name
from .relations import (
    TYPED_STEPS,
    adds_root,
    edge_bytes,
    pair_steps,
    product_step,
    relational_steps,
    tensors_in,
    typed_step,
)
from .steps import Device, Step, attention_steps, extremum_steps, named, seconds_at_roof, spmm_step

__all__ = ["record", "record_stand_ins"]


class _Recorder(TorchDispatchMode):
    """Records edgeless ops as they run: name, arguments by name, the current engine, and whether it is a backward."""

    def __init__(self):
        super().__init__()
        self.calls: list[tuple[str, dict[str, Any], str, bool]] = []
        self.backward = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace == "edgeless":
            names = [argument.name for argument in func._schema.arguments]
            name = func._schema.name.rpartition("::")[2]
            self.calls.append((name, {**dict(zip(names, args)), **kwargs}, current_engine(), self.backward))
        return func(*args, **kwargs)


def record(call, inputs: Sequence[Any]) -> list[Step]:
    """Runs ``call()`` and, where gradients are on, its backward, and returns the steps of the ops that ran.

    Args:
        call: returns a tensor, a dictionary of tensors, or a tuple that begins with either.
        inputs: the backward computes gradients of the tensors herein, also of those in dictionaries, tuples and lists;
            other objects are ignored.
    """
    recorder = _Recorder()
    with recorder:
        out = call()
        outs = [t for t in tensors_in(out[0] if isinstance(out, (tuple, list)) else out) if t.requires_grad]
        leaves = [t for t in tensors_in(inputs) if t.requires_grad]
        recorder.backward = True
        if leaves and outs:
            torch.autograd.grad(outs, leaves, [torch.ones_like(t) for t in outs], allow_unused=True)
    return [step for call in recorder.calls for step in _steps_by_engine(*call)]


def record_stand_ins(call) -> list[Step]:
    """The steps of a call on stand-ins of tensors, whose device need not exist, and of its backward where gradients are
    on. Autograd has no part in it: the ops of the backward are those that the ops of the forward call.
    """
    recorder, graded = _Recorder(), torch.is_grad_enabled()
    with recorder, torch._C._AutoDispatchBelowAutograd():
        call()
    calls = recorder.calls
    with torch.no_grad():
        if graded:
            back = [found for name, args, *_ in reversed(calls) for found in _backward_calls(name, args)]
            calls = calls + [(name, args, "rowsplit", True) for name, args in back]
        # Other engines look at a graph's contents, which stand-ins do not have.
        steps = [step for name, args, _, back in calls for step in _steps_by_engine(name, args, "rowsplit", back)]
        return [replace(step, origin="") for step in steps]


def _backward_calls(name: str, args: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The ops that the backward of an op calls if all gradients are needed, with the arguments that steps depend on."""
    needs = {"needs": [True] * 7}
    if name == "attention":
        out = args["dst"] if args.get("value") is None else args["value"]
        return [("attention_backward", {**args, **needs, "grad_out": out})]
    if name in ("relational_layer", "relational_sum"):
        needs = {"needs": [True, True, args.get("edge_weight") is not None]}
        grad = args["x"].new_empty(args["num_dst"], widths(args["weight"])[1])
        return [(f"{name}_backward", {**args, **needs, "grad": grad})]
    if name == "pair_attention":
        return [("pair_attention_backward", {**args, **needs})]
    if name == "pair_maps":
        pairs = args["by_dst"][3].numel()
        grads = {f"grad_{what}": args["k"].new_empty(pairs, widths(args[weight])[1])
                 for what, weight in (("keys", "k_weight"), ("values", "v_weight"))}  # fmt: skip
        return [("pair_maps_backward", {**args, **needs, **grads})]
    if name == "typed_linear":
        grad = args["x"].new_empty(args["x"].size(0), args["weight"].size(1))
        back = {"x": grad, "weight": args["weight"], "offsets": args["offsets"]}
        return [("typed_mm", back), ("typed_outer", {"x": grad, "y": args["x"], "offsets": args["offsets"]})]
    return []


def _steps_by_engine(name: str, args: dict[str, Any], chosen: str, backward: bool) -> list[Step]:
    """The steps of an op on the chosen engine or, if it does not support the op, on another, with the reason."""
    which = "backward" if backward else "forward"
    engine, refused = pick(name, args, chosen)
    if name == "spmm":
        return [replace(_spmm_of(args, engine, which), refused=refused, origin=origin(name, args, chosen))]
    if name == "sddmm":
        return [replace(_sddmm_of(args, engine, which), refused=refused)]
    if name in _ATTENTION:
        passes = ["forward"] if name == "attention" else _backward_passes(args)
        asked = origin(name, args, chosen)
        return [replace(step, refused=refused, origin=asked) for step in _attention_of(args, passes, engine)]
    steps = _steps_of(name, args)
    if backward and name in _ALSO_BACKWARD:
        steps = [replace(step, step=_backward_of(step.step)) for step in steps]
    return [replace(step, refused=refused) if step.engine in _OURS else step for step in steps]


# Ops that backwards call too, as the gradients of others.
_ALSO_BACKWARD = ("project", "project_sum", "relational_sum", "typed_mm", "typed_linear")


def _backward_of(step: str) -> str:
    return "backward" if step == "forward" else f"{step}, backward"


_OURS = ("rowsplit", "segments")
_ATTENTION = ("attention", "attention_backward", "attention_backward_into")


def _spmm_of(args: dict[str, Any], engine: Engine, step: str) -> Step:
    x, weight = args["x"], args.get("weight")
    weight_bytes = 0 if weight is None else weight.size(1) * weight.element_size()
    if args.get("src_scale") is not None:
        weight_bytes += args["src_scale"].element_size()
    if engine.num_rows is not None:
        weight_bytes = 4  # the bits of a block's column
    heads = x.size(1) if x.dim() == 3 else 1
    given = {
        "scaled_only": weight is None and weight_bytes > 0,
        "by_head": weight is not None and heads > 1 and weight.size(1) > 1 and weight.stride(1) != 0,
    }
    return _sum_of(args, x.dtype, x[0].numel() if len(x) else 0, x.size(0), weight_bytes, step, engine, **given)


def _sddmm_of(args: dict[str, Any], engine: Engine, which: str = "forward") -> Step:
    dst, src, sizes = args["dst"], args["src"], _graph_sizes(args)
    device, row = sizes["device"], src[0].numel() * src.element_size() if len(src) else 0
    heads = src.size(1) if src.dim() == 3 else 1
    products = sizes["num_edges"] * heads * opmath_dtype(src.dtype).itemsize
    num_bytes = sizes["num_edges"] * (row + sizes["index_bytes"]) + dst.numel() * dst.element_size() + products
    kernel = "SDDMM_ALG_DEFAULT" if engine.kernel else "vectors of 16 B" if device.multiprocessors else device.name
    seconds, step = seconds_at_roof(device, num_bytes, len(src) * row), "products"
    found = Step(
        "sddmm", step if which == "forward" else _backward_of(step), engine.name, kernel, 1, num_bytes, seconds
    )
    if engine.kernel or not device.multiprocessors:
        return found
    dtype = src.dtype if dst.dtype == src.dtype else opmath_dtype(src.dtype)
    vectors = -(-src.size(-1) * dtype.itemsize // 16)
    wide = sizes["index_bytes"] == 8
    return named(found, _C.sampled_kernel(dtype=dtype_name(dtype), wide_index=wide, vectors=vectors))


def _graph_sizes(args: dict[str, Any]) -> dict[str, Any]:
    indptr, indices = args["csr"][:2]
    return {
        "num_dst": indptr.numel() - 1,
        "num_edges": indices.numel(),
        "index_bytes": indptr.element_size(),
        "device": Device.of(indptr.device),
    }


def _attention_of(args: dict[str, Any], passes: Sequence[str], engine: Engine) -> list[Step]:
    dst, value, score = args["dst"], args.get("value"), args["score"]
    rows = value if score == "gat" and value is not None else dst
    scale, features, grad_weights, grad_out = (
        args.get(name) is not None for name in ("edge_scale", "edge_attr", "grad_weights", "grad_out")
    )
    backward = scale + features + grad_weights + (features and grad_out and score == "dot")
    edge_arrays = {"forward": scale + features, "by_dst": backward, "by_src": backward}
    return attention_steps(
        score, rows.dtype, dst.size(1), dst.size(2) if dst.dim() == 3 else 1,
        (args["src"] if value is None else value).size(-1), num_src=args["src"].size(0), passes=passes,
        max_degrees=args.get("max_degrees") or (), dropout=args.get("dropout", 0) > 0, arrays=backward > 0,
        edge_dim=args["edge_attr"].size(1) if score == "gatv2" and features else 0,
        edge_arrays=edge_arrays, engine=engine,
        num_gathered=[engine.num_rows(args[side]) if args[side] else 0 for side in ("csr", "csc")]
        if engine.num_rows else (), **_graph_sizes(args),
    )  # fmt: skip


def _backward_passes(args: dict[str, Any]) -> list[str]:
    needs = args.get("needs", [True] * 7)
    wants_dst, wants_src = needs[0] or any(needs[3:]), needs[1] or needs[2]
    return ["by_dst"] * (wants_dst or wants_src) + ["by_src"] * wants_src


def _steps_of(name: str, args: dict[str, Any]) -> list[Step]:
    if name in ("neighbor_reduce", "neighbor_reduce_backward"):
        x, backward = args["x"], name.endswith("backward")
        arg_bytes = args["arg"].element_size() if backward else args["arg_dtype"].itemsize
        steps = extremum_steps(
            x.dtype, x.size(1), num_src=x.size(0), arg_bytes=arg_bytes, shares=args["ties"] != "first",
            has_transpose=bool(args["csc"]), backward=backward, reduce=args.get("reduce", "max"),
            max_degrees=args.get("max_degrees") or (), **_graph_sizes(args),
        )  # fmt: skip
        return steps[1:] if backward else steps
    if name in ("project", "project_sum"):
        return [product_step(name, args)]
    if name in ("relational_sum", "relational_sum_backward"):
        return relational_steps(name, args)
    if name in TYPED_STEPS:
        return [typed_step(name, args)]
    if name == "relational_layer":
        return _layer_steps(args)
    if name == "relational_layer_backward":
        return _layer_steps_back(args)
    if name in ("pair_maps", "pair_maps_backward", "pair_maps_backward_over"):
        return _pair_map_steps(name, args)
    if name == "pair_dot_attention":
        return _pair_dot_steps(args)
    if name in ("pair_attention", "pair_attention_backward", "pair_attention_backward_over"):
        return pair_steps(name, args)
    return []


def _sum_of(
    args: dict[str, Any],
    dtype: torch.dtype,
    width: int,
    num_src: int,
    weight_bytes: int,
    step: str,
    engine: Engine = ROWSPLIT,
    **given: bool,
) -> Step:
    max_degree = (args.get("max_degrees") or [-1])[0]
    return spmm_step(
        dtype, width, num_src=num_src, max_degree=max_degree, weight_bytes=weight_bytes, step=step,
        engine=engine, num_rows=engine.num_rows and engine.num_rows(args["csr"]), **given, **_graph_sizes(args),
    )  # fmt: skip


def _layer_steps(args: dict[str, Any]) -> list[Step]:
    """The steps of a layer over relations: its relational sum, or the products of its (source, type) pairs and their
    sum; then the product of the destinations' rows and root.
    """
    x, root = args["x"], args.get("root")
    if not args["csr"]:
        steps = relational_steps("relational_sum", args)
    else:
        pairs, width = args["by_dst"][3].numel(), widths(args["weight"])[1]
        steps = relational_steps("relational_sum", {**args, "num_dst": pairs})
        steps.append(_sum_of(args, x.dtype, width, pairs, edge_bytes(args), "forward"))
    if root is not None:
        own = x.narrow(0, 0, args["num_dst"]) if args.get("own") is None else args["own"]
        adds = not args["csr"] and adds_root(args)
        steps.append(product_step("project", {"x": own, "weights": [root.t()]}, "by row sums" if adds else "onto"))
    return steps


def _layer_steps_back(args: dict[str, Any]) -> list[Step]:
    grad, x, needs = args["grad"], args["x"], args["needs"][:2]
    steps = []
    if any(needs) and args["csr"]:
        back = {"csr": args["csc"], "max_degrees": (args.get("max_degrees") or [-1])[1:]}
        steps.append(_sum_of(back, x.dtype, grad.size(1), len(grad), edge_bytes(args), "backward"))
    return steps + relational_steps("relational_sum_backward", {**args, "needs": needs})


def _pair_map_steps(name: str, args: dict[str, Any]) -> list[Step]:
    """The steps of keys and values of pairs: one relational sum each, over a graph whose edges are the pairs."""
    backward = name != "pair_maps"
    needs = args.get("needs", [True] * 5)
    steps = []
    for what, rows, weight, grad, needed in (
        ("keys", "k", "k_weight", "grad_keys", (needs[0], needs[2] or needs[4], False)),
        ("values", "v", "v_weight", "grad_values", (needs[1], needs[3], False)),
    ):
        given = {"x": args[rows], "weight": args[weight], "by_dst": args["by_dst"], "by_src": args["by_src"]}
        if backward:
            found = relational_steps("relational_sum_backward", {**given, "grad": args[grad], "needs": needed})
        else:
            found = relational_steps("relational_sum", {**given, "num_dst": args["by_dst"][3].numel()})
        steps += [replace(step, op="pair_maps", step=f"{what}, {step.step}") for step in found]
    return steps


def _pair_dot_steps(args: dict[str, Any]) -> list[Step]:
    """The steps of keys, logits, values, and the sum of values weighted by the softmax of the logits."""
    keys, values = _pair_map_steps("pair_maps", {**args, "by_src": []})
    pairs, (_, heads, _, width) = args["by_dst"][3].numel(), args["v_weight"].shape
    rows = args["v"].new_empty((pairs, heads, width), device="meta")
    logits = rows.new_empty((args["csr"][1].numel(), heads))
    products = _sddmm_of({"dst": args["q"].unflatten(1, (heads, -1)), "src": rows, "csr": args["csr"]}, ROWSPLIT)
    # softmax_sum is gat's forward with the logits as edge terms of the score and no score terms of nodes.
    given = {**args, "dst": logits, "src": rows, "value": rows, "score": "gat", "edge_attr": logits}
    sums = _attention_of(given, ["forward"], ROWSPLIT)
    return [replace(step, op="pair_dot_attention") for step in (keys, products, values, *sums)]

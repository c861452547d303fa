"""The gradients of a program as a program, whose own gradients are walks over edges too: second derivatives.

The first backward runs as a program only under ``create_graph``. It reads the values that the forward has kept, as
every backward does, and keeps the values that the gradients of its results need.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from ..capture.watching import is_seen
from ..graph.handle import Graph
from . import worth
from .cache import without_hooks
from .front.rules import Inference
from .front.spaces import Argument, Refused
from .front.tracing import outputs_of, set_outputs, trace_gradients
from .layers import generate_choice
from .program import Program
from .scheduling.kept_sums import use_kept_sums

_MOST = 16  # derivatives of one program; the requested gradients seldom change
_lock = threading.RLock()


class Derivative(Program):
    """Gradients of a program's results as a function of its arguments and of the results' gradients.

    Args:
        program: the program.
        chosen: positions of the arguments whose gradients are the results; an argument on which no result depends has
            none.
        wanted: positions of the arguments whose gradients its own backward computes; the gradients of the results are
            arguments behind those of the program.

    Raises:
        Refused: the gradients cannot be a program.

    Attributes:
        chosen: positions of the arguments whose gradients are the results.
        given_by: pairs of a node whose value is given and its index among the values that the program keeps.
    """

    is_gradient = True

    def __init__(self, program: Program, chosen: Sequence[int], wanted: Sequence[int]):
        self.receiving, self.wanted, self.sizes = program.receiving, list(wanted), program.sizes
        self.form = self.landing = None
        self.written, self.notes, self.draws = [], [], program.draws
        self.needs_last, self.least_edges = program.needs_last, program.least_edges
        self.derivatives = {}
        cotangents = program.cotangents()
        arguments = [*program.arguments, *cotangents]
        try:
            joint, depends, _ = trace_gradients(
                program.module, program.arguments, cotangents, chosen, self.sizes, again=True
            )
        except Refused:
            raise
        except Exception as error:
            raise Refused(f"its gradients cannot be traced, {type(error).__name__}: {str(error)[:160]}") from error
        self.chosen = [p for p, d in zip(chosen, depends) if d]
        results = outputs_of(joint)
        first = len(program.outputs)
        kept = results[first : first + len(program.saved)]
        use_kept_sums(joint, kept)
        infer = Inference(self.sizes)
        infer.annotate(joint, arguments)
        set_outputs(joint, results[first + len(program.saved) :])
        alive = set(joint.graph.nodes)
        self.given_by = [(n, i) for i, n in enumerate(kept) if n in alive and n.op == "call_function"]
        self.module = joint
        self._complete(infer, arguments, [node for node, _ in self.given_by])


def derivative_of(program: Program, chosen: Sequence[int], wanted: Sequence[int], tensors: Sequence[Any]) -> Derivative:
    """The gradients of a program as a program, made and checked at the first use.

    Args:
        tensors: the program's arguments and the gradients of its results, from which the check draws samples.

    Raises:
        Refused: the gradients cannot be a program.
    """
    key = (tuple(chosen), tuple(wanted), generate_choice() == "off")
    found = program.derivatives.get(key)
    if found is None:
        with _lock:
            found = program.derivatives.get(key)
            if found is None:
                if torch._C._len_torch_dispatch_stack() and is_seen():
                    raise Refused("a mode of torch that sees every op is active")
                if len(program.derivatives) >= _MOST:
                    raise Refused(f"{_MOST} programs of its second derivatives were made")
                found = program.derivatives[key] = _make(program, chosen, wanted, tensors)
    if isinstance(found, str):
        raise Refused(found)
    return found


def _make(program: Program, chosen, wanted, tensors) -> Derivative | str:
    from .checking import check_derivative

    if isinstance(program, Derivative):
        return "third derivatives are computed over all edges at once"
    if not chosen:
        return "none of its gradients is requested"
    try:
        with without_hooks(), torch.enable_grad():
            found = Derivative(program, chosen, wanted)
            check_derivative(found, program, _examples(program, tensors))
    except Refused as error:
        return str(error)
    except Exception as error:
        return f"the generator fails, {type(error).__name__}: {str(error).strip()[:160]}"
    return found


def _examples(program: Program, tensors: Sequence[Any]) -> list[Argument]:
    """The arguments with the tensors of a call."""
    described = [*program.arguments, *program.cotangents()]
    values = [torch.zeros_like(a.value, device="cpu") if t is None else t.detach() for a, t in zip(described, tensors)]
    return [Argument(value, a.space, a.written, name=a.name) for a, value in zip(described, values)]


def refuse_now(derivative: Derivative, program: Program, graph: Graph, compiled: bool) -> None:
    """Refuses a derivative where ops over all edges are faster, or would find other extrema.

    Args:
        program: the program that ``derivative`` differentiates.
        compiled: whether the program's own walks ran as compiled code, if they have compiled code.
    """
    ready = derivative.ready(graph)
    if derivative.divides_extrema and compiled and not ready:
        raise Refused("walks of a minimum's or maximum's second derivatives are not compiled as those of its forward")
    if generate_choice() != "auto":
        return
    if not ready and graph.num_edges * derivative.width < worth.INTERPRETED:
        raise Refused("the walks of its second derivatives are not compiled")
    worth.refuse_products(program, graph)

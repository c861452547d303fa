"""Records the ATen ops of a function of stand-ins as a graph.

It does what ``make_fx`` does with fake tensors, but makes no symbols, no Python code of the graph and no call stacks of
ops, which programs do not need. A trace takes a third of the time.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Optional

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class Ops:
    """A graph of ops, with the constants that it reads as attributes.

    Args:
        graph: the graph, whose ``get_attr`` nodes name constants.
        constants: the object that has the constants as attributes.
    """

    def __init__(self, graph: Graph, constants: Any = None):
        self.graph = graph
        for node in graph.nodes:
            if node.op == "get_attr" and constants is not None:
                setattr(self, node.target, getattr(constants, node.target))

    def __call__(self, *arguments: Any, instead: Mapping[Any, Callable] = MappingProxyType({})) -> list[Any]:
        """Calls the ops and returns the graph's results; ``instead`` maps ops to functions that replace them."""
        values: dict[Node, Any] = {}
        given = iter(arguments)
        for node in self.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(given)
            elif node.op == "get_attr":
                values[node] = getattr(self, node.target)
            else:
                args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
                if node.op == "output":
                    return list(args[0])
                values[node] = instead.get(node.target, node.target)(*args, **kwargs)
        raise ValueError("a graph without results")


class _Recorder(TorchDispatchMode):
    """Adds every op to a graph. It is entered inside of the mode of the stand-ins."""

    def __init__(self, decompositions: dict, line: Callable[[], Optional[str]]):
        super().__init__()
        self.graph, self.decompositions, self.line = Graph(), decompositions, line
        self.ops = Ops(self.graph)
        self.known: dict[int, tuple[Tensor, Node]] = {}  # keeps the tensors alive, so that no other gets their id

    def node_of(self, tensor: Tensor) -> Node:
        """The node of a tensor; a tensor from elsewhere is a constant."""
        found = self.known.get(id(tensor))
        if found is None:
            name = f"constant_{len(self.known)}"
            setattr(self.ops, name, tensor)
            found = self.add(self.graph.get_attr(name), tensor)
        return found[1]

    def add(self, node: Node, tensor: Tensor) -> tuple[Tensor, Node]:
        """Notes that a tensor is the result of a node."""
        node.meta["val"] = tensor
        entry = self.known[id(tensor)] = (tensor, node)
        return entry

    def argument(self, value: Any) -> Any:
        """Converts an argument of an op to an argument of a node."""
        if isinstance(value, Tensor):
            return self.node_of(value)
        if isinstance(value, (list, tuple)):
            return type(value)(map(self.argument, value))
        return value

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        whole = self.decompositions.get(func)
        with self:
            if whole is not None:
                return whole(*args, **kwargs)
            if _is_composite(func):
                return func.decompose(*args, **kwargs)
        result = func(*args, **kwargs)
        several = isinstance(result, (list, tuple))
        if not (isinstance(result, Tensor) or (several and any(isinstance(r, Tensor) for r in result))):
            return result
        inputs = self.argument(args), {name: self.argument(value) for name, value in kwargs.items()}
        node = self.graph.call_function(func, *inputs)
        node.stack_trace = self.line()
        if several:
            node.meta["val"] = result
            for place, each in enumerate(result):
                if isinstance(each, Tensor):
                    self.add(self.graph.call_function(operator.getitem, (node, place)), each)
        else:
            self.add(node, result)
        return result


def _is_composite(func) -> bool:
    """Returns whether an op is composed of others. Autograd decomposes it, except in inference mode or inside of
    another op.
    """
    keys = torch._C.DispatchKey
    return (
        func.namespace == "aten"
        and func.has_kernel_for_dispatch_key(keys.CompositeImplicitAutograd)
        and not func.has_kernel_for_dispatch_key(keys.CPU)
    )


def record(
    function: Callable,
    stand_ins: Callable[[], Sequence[Tensor]],
    decompositions: Optional[dict] = None,
    line: Callable[[], Optional[str]] = lambda: None,
) -> Ops:
    """The ops of ``function(*tensors)``, whose results are a tuple of tensors.

    Args:
        stand_ins: makes the tensors; called under the mode in which tensors have no contents.
        decompositions: functions that replace ops.
        line: returns the line of the user's code that is running.
    """
    recorder = _Recorder(decompositions or {}, line)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.autograd.set_multithreading_enabled(False):
        tensors = stand_ins()
        for place, tensor in enumerate(tensors):
            recorder.add(recorder.graph.placeholder(f"argument_{place}"), tensor)
        with recorder:
            results = function(*tensors)
        recorder.graph.output(tuple(map(recorder.node_of, pytree.tree_leaves(results))))
    recorder.graph.eliminate_dead_code()
    return recorder.ops

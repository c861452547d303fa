"""Deferred results of ``edge_updater()``.

During a call of a layer, ``edge_updater()`` returns :class:`EdgeValue` tensors without contents. If the forward passes
one to ``propagate()``, both steps run as one program, and the values are never in a tensor. If it is read in any other
way, or is a result of the layer, the program of ``edge_updater()`` alone computes it.
"""

from __future__ import annotations

import contextlib
import operator
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Optional

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils import _pytree as pytree

from edgeless.functional.dropout import seed_tensor
from edgeless.graph.handle import Graph
from edgeless.layers.calls import ran_generated
from edgeless.programs import EDGE, FIRST
from edgeless.programs.front.in_place import writes, writes_inside
from edgeless.programs.worth import are_hooked

_INFO = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "layout", "ndim", "is_cuda", "is_sparse")),
    *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.__len__),
    *(Tensor.is_floating_point, torch.is_floating_point, Tensor.is_complex, torch.is_complex, torch.numel),
}
_OF_GRADIENTS = frozenset(("register_hook", "register_post_accumulate_grad_hook", "retain_grad", "grad"))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_computing: weakref.WeakSet = weakref.WeakSet()  # layers that read edge values in a way that Python cannot observe
_known: weakref.WeakSet = weakref.WeakSet()  # layers of which a call has been observed to its end
_buffers: weakref.WeakKeyDictionary[Any, list[Tensor]] = weakref.WeakKeyDictionary()
_widths: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_described: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


class Unread(RuntimeError):
    """Raised if edge values are read where they cannot be computed."""


class EdgeValue(Tensor):
    """A tensor with a row for each edge, which is computed when it is read.

    Attributes:
        pending: the call whose result it is.
        place: its index among the results of the call.
    """

    pending: Pending
    place: int

    @staticmethod
    def __new__(cls, pending: Pending, place: int, shape: list[int], dtype: torch.dtype, device: torch.device):
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        made.pending, made.place = pending, place
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        """Handles an op that was called from C++, so that autograd has not recorded it."""
        if torch.is_grad_enabled() and any(value.known().requires_grad for value in _values_in((args, kwargs))):
            _refuse(f"{func} reads values of edges that edge_updater() has not computed")
        args, kwargs = computed((args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        first = args[0] if args else None
        if type(first) is EdgeValue and func in _INFO and first.pending.values is None:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") in _OF_GRADIENTS and any(v.pending.joined for v in _values_in((args, kwargs))):
            _refuse("the gradient of an edge_updater()'s values is read that a propagate() has computed itself")
        args, kwargs = computed((args, kwargs or {}))
        return func(*args, **kwargs)

    def known(self) -> Tensor:
        """Returns the tensor, after computing it if necessary."""
        return self.pending.compute()[self.place]

    def __deepcopy__(self, memo):
        return self.known().__deepcopy__(memo)

    def __reduce_ex__(self, protocol):
        return self.known().__reduce_ex__(protocol)


def _values_in(tree: Any) -> list[EdgeValue]:
    return [leaf for leaf in pytree.tree_leaves(tree) if type(leaf) is EdgeValue]


def computed(tree: Any) -> Any:
    """Replaces each :class:`EdgeValue` in nested containers by its tensor."""
    return pytree.tree_map(lambda leaf: leaf.known() if type(leaf) is EdgeValue else leaf, tree)


class Pending:
    """A deferred call of ``edge_updater()``.

    Attributes:
        kwargs: the arguments of the call.
        program, graph, tensors: the program that computes the call alone, and its inputs.
        joined: whether a joined program of ``propagate()`` has computed the call.
        values: the results of the call, once the program has computed them.
    """

    def __init__(self, layer, kwargs: dict[str, Any], program, graph: Graph, tensors: list[Tensor]):
        self.layer, self.kwargs = layer, kwargs
        self.program, self.graph, self.tensors = program, graph, tensors
        self.joined, self.values, self._seed = False, None, None
        self.read = [tensors[i] for i in _description(program)[0]]
        self._versions = [tensor._version for tensor in self.read]
        self._grad = torch.is_grad_enabled()

    def seed(self) -> Optional[Tensor]:
        """The seed of the call's dropouts, for every program that computes the call."""
        if self.program.draws and self._seed is None:
            self._seed = seed_tensor(None, self.tensors[0].device)
        return self._seed

    def is_unchanged(self) -> bool:
        """Returns whether the tensors that the call reads have not been written since."""
        return [tensor._version for tensor in self.read] == self._versions

    def has_state(self, own: list[Tensor]) -> bool:
        """Returns whether ``own`` are the tensors that the layer had at the call."""
        return len(own) <= len(self.tensors) and all(
            map(operator.is_, own, self.tensors[len(self.tensors) - len(own) :])
        )

    def compute(self) -> list[Tensor]:
        """Computes the results of the call."""
        if self.values is None:
            if not self.is_unchanged():
                _refuse("what an edge_updater() reads was written in place before its values were read")
            with torch.set_grad_enabled(self._grad):
                self.values = self.program(self.graph, self.tensors, self.seed())
            ran_generated(self.layer, self.program.how, self.program.text)
            self.kwargs, self.tensors, self.read = {}, [], []
        return self.values


def _description(program) -> tuple[list[int], Optional[list[tuple[list[int], int, torch.dtype]]]]:
    """The indices of the tensors that a program reads, and the shapes of its results, None if a result is no edge
    value.
    """
    found = _described.get(program)
    if found is None:
        from edgeless.programs.front.rules import space_of, value_of

        holders = [node for node in program.module.graph.nodes if node.op == "placeholder"][FIRST:]
        shapes: Optional[list] = []
        for node in program.outputs[: program.results]:
            space = space_of(node)
            if space.kind != EDGE or space.is_ends:
                shapes = None
                break
            value = value_of(node)
            rows = list(map(int, value.shape))
            rows[space.dim] //= program.sizes.edges
            shapes.append((rows, space.dim, value.dtype))
        found = _described[program] = [i for i, node in enumerate(holders) if node.users], shapes
    return found


# One call of a layer ------------------------------------------------------------------------------------------------


class _State(threading.local):
    scope: Optional[Scope] = None
    watches = 0


_state = _State()


def watches() -> int:
    """The number of function modes of this thread that belong to this module."""
    return _state.watches


def _refuse(clause: str):
    clause = f"{clause}; the next call of the layer computes them"
    if _state.scope is not None:
        _state.scope.unread = clause  # the caller may catch the exception or replace it
    raise Unread(clause)


def scope_of(layer) -> Optional[Scope]:
    """The current call of a layer in this thread, if it may defer its ``edge_updater()``."""
    scope = _state.scope
    return scope if scope is not None and scope.layer is layer else None


class Scope:
    """One call of a layer, with its deferred edge values."""

    def __init__(self, layer):
        self.layer, self.pending, self._values = layer, [], []
        self._watch: Optional[_Watch] = None
        self.unread: Optional[str] = None

    def defer(self, edge_index: Tensor, kwargs: dict[str, Any], program, graph: Graph, tensors: list[Tensor]) -> Any:
        """Defers a call of ``edge_updater()`` and returns its results, or None if it has to be computed now."""
        structure, writes_attributes = program.form
        if program.written or writes_attributes or type(edge_index) is not Tensor:
            return None
        shapes = _description(program)[1]
        if shapes is None or len(shapes) != structure.num_leaves or any(t.is_inference() for t in tensors):
            return None
        if self._watch is None:
            if torch._C._len_torch_function_stack() > _state.watches:
                return None
            self._watch = _Watch(self)
        pending = Pending(self.layer, kwargs, program, graph, tensors)
        self.pending.append(pending)
        values = []
        for place, (shape, dim, dtype) in enumerate(shapes):
            rows = [n * graph.num_edges if d == dim else n for d, n in enumerate(shape)]
            values.append(EdgeValue(pending, place, rows, dtype, graph.device))
        self._values += map(weakref.ref, values)
        return pytree.tree_unflatten(values, structure)

    def note_width(self, numbers: int) -> None:
        """Notes the elements per edge of a ``propagate()`` of the layer."""
        _widths[self.layer] = numbers

    def width(self) -> int:
        """The elements per edge of the last ``propagate()``; an ``edge_updater()`` may become part of the next one."""
        # A checkpoint repeats the call, which must then choose the same.
        return 1 if are_hooked() else _widths.get(self.layer, 1)

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """A block whose ops are not those of the layer's forward."""
        self.unwatch()
        try:
            yield
        finally:
            if self._watch is not None:
                self._watch.start()

    def unwatch(self) -> None:
        """Stops watching the writes of the forward."""
        if self._watch is not None:
            self._watch.stop()

    def before_write(self, target: Tensor) -> None:
        """Computes the deferred values that read a tensor, before it is written."""
        for pending in self.pending:
            if pending.values is None and any(_share_memory(tensor, target) for tensor in pending.read):
                pending.compute()

    def finish(self, result: Any) -> Any:
        """Returns the result of the call with tensors for edge values, and replaces those in the layer's attributes."""
        alive = [value for reference in self._values if (value := reference()) is not None]
        if not alive:
            return result
        for value in alive:
            value.known()
        self.settle()
        return computed(result)

    def settle(self) -> None:
        """Replaces edge values in the attributes of the layer by tensors."""
        for module in self.layer.modules() if self.pending else ():
            for state in (module.__dict__, module._buffers):
                for name, value in list(state.items()):
                    if type(value) is EdgeValue:
                        state[name] = value.known()


def _share_memory(a: Tensor, b: Tensor) -> bool:
    try:
        return a is b or a.untyped_storage()._cdata == b.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):  # it has no storage
        return False


class _Watch(TorchFunctionMode):
    """Computes deferred values before a tensor that they read is written in place."""

    def __init__(self, scope: Scope):
        super().__init__()
        self.scope, self.started = scope, False

    def start(self) -> None:
        if not self.started:
            self.__enter__()
            self.started = True
            _state.watches += 1

    def stop(self) -> None:
        if self.started and _get_current_function_mode() is self:  # not inside of a mode that the forward has entered
            self.started = False
            _state.watches -= 1
            self.__exit__(None, None, None)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if args and isinstance(args[0], Tensor) and (writes(name) or writes_inside(name, args, kwargs)):
            self.scope.before_write(args[0])
        elif "out" in kwargs:
            for each in pytree.tree_leaves(kwargs["out"]):
                if isinstance(each, Tensor):
                    self.scope.before_write(each)
        return func(*args, **kwargs)


def call(layer, forward: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Calls a layer whose ``edge_updater()`` may be deferred."""
    if layer in _computing or any(map(layer.__dict__.get, _HOOKS)):
        return forward(*args, **kwargs)
    is_new = layer not in _known
    buffers = [(buffer, buffer.clone()) for buffer in _buffers_of(layer)] if is_new else []
    outer, scope = _state.scope, Scope(layer)
    _state.scope = scope
    try:
        result = forward(*args, **kwargs)
        scope.unwatch()
        if scope.pending and not scope.unread:
            result = scope.finish(result)
            _known.add(layer)
        if not scope.unread:
            return result
        if not is_new:
            raise Unread(scope.unread)
    except Exception as error:
        if not scope.unread:
            raise
        if not is_new:
            raise Unread(scope.unread) from error
    finally:
        if scope.unread:
            _computing.add(layer)
        scope.unwatch()
        _state.scope = outer
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
    return forward(*args, **kwargs)


def _buffers_of(layer) -> list[Tensor]:
    found = _buffers.get(layer)
    if found is None:
        found = _buffers[layer] = list(layer.buffers())
    return found

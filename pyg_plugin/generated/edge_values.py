"""What ``edge_updater()`` returns to a layer's forward until somebody reads it.

While a layer is called, its ``edge_updater()`` gives :class:`EdgeValue`. Where the forward passes one to
``propagate()``, both steps run as one program and no tensor has the values. Whoever reads one otherwise, or gets it
from the call, has it computed by the program of ``edge_updater()`` alone.
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
_computing: weakref.WeakSet = weakref.WeakSet()  # layers that read their values in a way that cannot be followed
_known: weakref.WeakSet = weakref.WeakSet()  # layers whose calls have been followed to the end
_buffers: weakref.WeakKeyDictionary[Any, list[Tensor]] = weakref.WeakKeyDictionary()
_widths: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_described: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


class Unread(RuntimeError):
    """Values are read in a way in which they cannot be computed at that time."""


class EdgeValue(Tensor):
    """A tensor with a row for each edge that is computed when it is read.

    Attributes:
        pending: the call that it is a result of.
        place: which result it is.
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
        """An op that no Python function was called for, above which autograd has seen no gradient."""
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
        """The tensor, which is computed if it has not been."""
        return self.pending.compute()[self.place]

    def __deepcopy__(self, memo):
        return self.known().__deepcopy__(memo)

    def __reduce_ex__(self, protocol):
        return self.known().__reduce_ex__(protocol)


def _values_in(tree: Any) -> list[EdgeValue]:
    return [leaf for leaf in pytree.tree_leaves(tree) if type(leaf) is EdgeValue]


def computed(tree: Any) -> Any:
    """Nested containers with tensors in place of :class:`EdgeValue`."""
    return pytree.tree_map(lambda leaf: leaf.known() if type(leaf) is EdgeValue else leaf, tree)


class Pending:
    """A call of ``edge_updater()`` that has not been computed.

    Attributes:
        kwargs: what the layer passed.
        program, graph, tensors: what computes it alone.
        joined: whether a program of ``propagate()`` has computed it for itself.
        values: its results, once they are computed.
    """

    def __init__(self, layer, kwargs: dict[str, Any], program, graph: Graph, tensors: list[Tensor]):
        self.layer, self.kwargs = layer, kwargs
        self.program, self.graph, self.tensors = program, graph, tensors
        self.joined, self.values, self._seed = False, None, None
        self.read = [tensors[i] for i in _description(program)[0]]
        self._versions = [tensor._version for tensor in self.read]
        self._grad = torch.is_grad_enabled()

    def seed(self) -> Optional[Tensor]:
        """The seed of its dropouts, the same for whatever computes it."""
        if self.program.draws and self._seed is None:
            self._seed = seed_tensor(None, self.tensors[0].device)
        return self._seed

    def is_unchanged(self) -> bool:
        """Whether nothing that it reads has been written since."""
        return [tensor._version for tensor in self.read] == self._versions

    def has_state(self, own: list[Tensor]) -> bool:
        """Whether these are the tensors that the layer had at the call."""
        return len(own) <= len(self.tensors) and all(
            map(operator.is_, own, self.tensors[len(self.tensors) - len(own) :])
        )

    def compute(self) -> list[Tensor]:
        """Its results."""
        if self.values is None:
            if not self.is_unchanged():
                _refuse("what an edge_updater() reads was written in place before its values were read")
            with torch.set_grad_enabled(self._grad):
                self.values = self.program(self.graph, self.tensors, self.seed())
            ran_generated(self.layer, self.program.how, self.program.text)
            self.kwargs, self.tensors, self.read = {}, [], []
        return self.values


def _description(program) -> tuple[list[int], Optional[list[tuple[list[int], int, torch.dtype]]]]:
    """Which tensors a program reads, and the shapes of its results; None if not all of them are values of edges."""
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
    """How many modes of functions of this thread are of this module."""
    return _state.watches


def _refuse(clause: str):
    clause = f"{clause}; the next call of the layer computes them"
    if _state.scope is not None:
        _state.scope.unread = clause  # what is raised may be caught, or come out as another exception
    raise Unread(clause)


def scope_of(layer) -> Optional[Scope]:
    """The call of a layer that this thread is in, if its ``edge_updater()`` may be left for later."""
    scope = _state.scope
    return scope if scope is not None and scope.layer is layer else None


class Scope:
    """One call of a layer, with the values of edges that are not computed yet."""

    def __init__(self, layer):
        self.layer, self.pending, self._values = layer, [], []
        self._watch: Optional[_Watch] = None
        self.unread: Optional[str] = None

    def defer(self, edge_index: Tensor, kwargs: dict[str, Any], program, graph: Graph, tensors: list[Tensor]) -> Any:
        """The results of a call of ``edge_updater()`` for later, or None if they have to be computed now."""
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
        """Notes how many numbers an edge has in a ``propagate()`` of the layer."""
        _widths[self.layer] = numbers

    def width(self) -> int:
        """How many it had in the last one, which an ``edge_updater()`` may become a part of."""
        return 1 if are_hooked() else _widths.get(self.layer, 1)  # a call that is repeated must not know more

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """A block in which no op is one of the layer's forward."""
        self.unwatch()
        try:
            yield
        finally:
            if self._watch is not None:
                self._watch.start()

    def unwatch(self) -> None:
        """Stops watching what the forward writes."""
        if self._watch is not None:
            self._watch.stop()

    def before_write(self, target: Tensor) -> None:
        """Computes what reads a tensor that is going to be written."""
        for pending in self.pending:
            if pending.values is None and any(_share_memory(tensor, target) for tensor in pending.read):
                pending.compute()

    def finish(self, result: Any) -> Any:
        """The result of the call, with tensors in it and in the attributes of the layer."""
        alive = [value for reference in self._values if (value := reference()) is not None]
        if not alive:
            return result
        for value in alive:
            value.known()
        self.settle()
        return computed(result)

    def settle(self) -> None:
        """Puts tensors in place of values in the attributes of the layer."""
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
    """Computes values before a tensor that they are computed of is written in place."""

    def __init__(self, scope: Scope):
        super().__init__()
        self.scope, self.started = scope, False

    def start(self) -> None:
        if not self.started:
            self.__enter__()
            self.started = True
            _state.watches += 1

    def stop(self) -> None:
        if self.started and _get_current_function_mode() is self:  # not within a mode of the forward's own
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
    """Calls a layer, whose ``edge_updater()`` may leave what it returns for later."""
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

"""Prepares a call of ``propagate()`` or ``edge_updater()`` for the generator: its tensors with their index spaces, a
key of everything else, and the upstream method as a function of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Optional

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.nn.utils import stateless
from torch.utils import _pytree as pytree

from edgeless.autocast import rounds_to
from edgeless.checks import PLAIN
from edgeless.programs import EDGE, FIRST, PARAMETER, Argument, Refused, Sizes, Space
from edgeless.programs.keys import globals_key, module_key, value_key

_SKIPPED = frozenset(("inspector", "training_hooks", "propagate", "edge_updater"))
_STEPS = ("message", "aggregate", "update", "edge_update", "message_and_aggregate")
_CONTAINERS = ("_parameters", "_buffers", "_modules")


class Call:
    """One call of a layer's ``propagate()`` or ``edge_updater()``.

    Args:
        layer: the layer.
        method: the upstream method, called as ``method(layer, edge_index, size=..., **kwargs)``.
        names: names of the arguments of the layer's steps, such as ``x_j``.
        num_edges: ``E``.
        size: the numbers of nodes that row 0 and row 1 of ``edge_index`` refer to, None where they are not known.
        kwargs: the arguments that the layer passes.

    Raises:
        Refused: the arguments do not fit together, or their index spaces are ambiguous.

    Attributes:
        counts: the numbers of nodes of the two rows.
        receiving: the row with the receiving nodes.
        tensors: all tensors of the call; the layer's own are last.
    """

    def __init__(self, layer, method: Callable, names: Sequence[str], num_edges: int, size, kwargs: dict[str, Any]):
        self.layer, self.method, self.num_edges = layer, method, num_edges
        self.receiving = 1 if layer.flow == "source_to_target" else 0
        self._name(names)
        self.counts = self._counts(size, kwargs)
        self.one_set = self.counts[0] == self.counts[1]
        self.sizes = Sizes(*self.counts, num_edges)
        self.tensors: list[Tensor] = []
        self.spaces: list[Space] = []
        self.labels: list[str] = []
        self.given = self._specs(kwargs)
        self.first_own = len(self.tensors)
        self._add_state()

    # Arguments ------------------------------------------------------------------------------------------------------

    def _name(self, names: Sequence[str]) -> None:
        self.names = frozenset(names)
        self.lifted = {name[:-2] for name in names if name[-2:] in ("_i", "_j")}

    def _counts(self, size, kwargs) -> tuple[int, int]:
        counts: list[Optional[int]] = list(size) if size is not None else [None, None]
        for name in self.lifted:
            value = kwargs.get(name)
            pair = value if isinstance(value, (tuple, list)) else None
            if pair is not None and len(pair) != 2:
                raise Refused(f"{name} has {len(pair)} parts")
            for row in (0, 1):
                x = pair[row] if pair is not None else value
                used = pair is not None or f"{name}_{'i' if row == self.receiving else 'j'}" in self.names
                if isinstance(x, Tensor) and used:
                    if x.dim() < 1 or not -x.dim() <= self.layer.node_dim < x.dim():
                        raise Refused(f"{name} has no dimension {self.layer.node_dim}")
                    rows = x.size(self.layer.node_dim)
                    if counts[row] not in (None, rows):
                        raise Refused(f"{name} has {rows} rows where {counts[row]} are expected")
                    counts[row] = rows
        first, second = counts
        if first is None and second is None:
            raise Refused("the number of nodes is not known before it is computed from edge_index")
        return (second if first is None else first, first if second is None else second)

    def _specs(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Adds the tensors among the arguments; returns the arguments with their indices instead, for :meth:`run`."""
        return {name: self._spec(name, value) for name, value in kwargs.items()}

    def _spec(self, name: str, value: Any):
        if name in self.lifted:
            if isinstance(value, (tuple, list)):
                return tuple, [self._node_rows(f"{name}_{row}", x, row) for row, x in enumerate(value)]
            both = f"{name}_i" in self.names and f"{name}_j" in self.names
            row = self.receiving if f"{name}_i" in self.names else 1 - self.receiving
            if both and not self.one_set and isinstance(value, Tensor):
                raise Refused(f"{name} has rows for {self.counts[0]} and {self.counts[1]} nodes")
            return self._node_rows(name, value, row)
        if isinstance(value, (tuple, list)) and any(isinstance(x, Tensor) for x in value):
            return type(value), [self._other(name, x) for x in value]
        return self._other(name, value)

    def _node_rows(self, name: str, value: Any, row: int):
        if not isinstance(value, Tensor):
            return self._constant(value)
        return self._add(name, value, Space(self.sizes.side(row), self.layer.node_dim % value.dim()))

    @staticmethod
    def _constant(value: Any):
        if not isinstance(value, (int, float, str, type(None))) and not callable(value):
            raise Refused(f"an argument is a {type(value).__name__}")
        return "constant", value

    def _other(self, name: str, value: Any):
        if not isinstance(value, Tensor):
            return self._constant(value)
        rows = value.size(0) if value.dim() else -1
        by_edge, by_node = rows == self.num_edges, rows in self.counts
        if by_edge and by_node:
            raise Refused(f"{name} has {rows} rows, which are both the nodes' and the edges' number")
        if by_edge:
            return self._add(name, value, Space(EDGE, 0))
        if by_node:
            row = self.receiving if self.counts[self.receiving] == rows else 1 - self.receiving
            return self._add(name, value, Space(self.sizes.side(row), 0))
        return self._add(name, value, Space())

    def _add(self, name: str, value: Tensor, space: Space):
        if type(value) not in PLAIN or value.layout is not torch.strided or value.is_nested or value.is_complex():
            raise Refused(f"an argument is a {type(value).__name__} of layout {value.layout} and dtype {value.dtype}")
        self.labels.append(name)
        self.tensors.append(value)
        self.spaces.append(space)
        return "tensor", len(self.tensors) - 1

    def _add_state(self) -> None:
        """Adds the layer's parameters, buffers and tensors in attributes, by name."""
        layer = self.layer
        self.parameters = [name for name, _ in layer.named_parameters()]
        self.buffers = [name for name, _ in layer.named_buffers()]
        for name, value in (*layer.named_parameters(), *layer.named_buffers()):
            if is_lazy(value):
                raise Refused("a parameter is not initialised")
            self._add(name, value, Space())
        self.attributes = []
        for module in layer.modules():
            for key, value in module.__dict__.items():
                if isinstance(value, Tensor):
                    self.attributes.append((module, key))
                    self._add(key, value, Space())

    def key(self) -> Hashable:
        """The key of the call's program: all that it depends on besides the tensors' contents."""
        layer = self.layer
        tensors = tuple(
            (
                value.dtype,
                value.device,
                space,
                tuple(n for d, n in enumerate(value.shape) if not (space.kind != PARAMETER and d == space.dim)),
                value.requires_grad,
            )
            for value, space in zip(self.tensors, self.spaces)
        )
        methods = (type(layer), self.method, *(getattr(type(layer), step) for step in _STEPS))
        state = (
            rounds_to(self.device.type),
            torch.is_grad_enabled(),
            torch.get_default_dtype(),
            self.receiving,
            self.one_set,
            tuple((name, _spec_key(spec)) for name, spec in self.given.items()),
            tuple(self.parameters),
            tuple(self.buffers),
        )
        return tensors, state, globals_key(type(layer), methods), module_key(layer, _SKIPPED)

    def form(self) -> tuple:
        """The structure of the results of the last :meth:`run`, and the attributes that it wrote."""
        return self.structure, self.writes

    @property
    def device(self) -> torch.device:
        """The device of the first tensor."""
        return self.tensors[0].device if self.tensors else torch.device("cpu")

    def arguments(self) -> list[Argument]:
        """The arguments of :meth:`run`."""
        first, last = self.first_own + len(self.parameters), self.first_own + len(self.parameters) + len(self.buffers)
        ends = torch.zeros(2, 1, dtype=torch.int64, device=self.device)
        return [
            Argument(ends, Space(EDGE, 1, is_ends=True), name="edge_index"),
            Argument(ends[0], Space(EDGE, 0), name="edge_ids"),
            Argument(ends[0], Space(), name="seed"),
            *(
                Argument(tensor, space, first <= i < last, name=name)
                for i, (tensor, space, name) in enumerate(zip(self.tensors, self.spaces, self.labels))
            ),
        ]

    def wanted(self) -> list[int]:
        """The positions of the arguments that require a gradient."""
        if not torch.is_grad_enabled():
            return []
        return [FIRST + i for i, t in enumerate(self.tensors) if t.requires_grad and t.is_floating_point()]

    # The upstream method as a function
    # ---------------------------------------------------------------------------------

    def run(self, sizes: Sizes, ends: Tensor, ids: Tensor, seed: Tensor, *tensors: Tensor) -> tuple:
        """The upstream method's results for other tensors, then the tensors that it writes into attributes.

        Sets ``structure`` and ``writes``. The layer's state is as before afterwards.
        """
        layer, own = self.layer, self.first_own
        names = [*self.parameters, *self.buffers]
        state = dict(zip(names, tensors[own:]))

        def value(spec):
            kind, what = spec
            if kind == "tensor":
                return tensors[what]
            return what if kind == "constant" else kind(value(part) for part in what)

        given = {name: value(spec) for name, spec in self.given.items()}
        modules = list(layer.modules())
        before = [_Snapshot(module) for module in modules]
        try:
            for (module, name), tensor in zip(self.attributes, tensors[own + len(names) :]):
                module.__dict__[name] = tensor
            expected = [dict(module.__dict__) for module in modules]
            with stateless._reparametrize_module(layer, state, tie_weights=True):
                out = self._called(ends, (sizes.sources, sizes.destinations), given)
            self.writes, written = [], []
            for (path, module), old in zip(layer.named_modules(), expected):
                for name, new in module.__dict__.items():
                    if name in _CONTAINERS or (name in old and old[name] is new):
                        continue
                    if not isinstance(new, Tensor):
                        raise Refused(f"message() writes self.{name}, which is no tensor")
                    self.writes.append((path, name))
                    written.append(new)
                if old.keys() - module.__dict__.keys():
                    raise Refused("message() deletes an attribute")
            if any(snapshot.changed() for snapshot in before):
                raise Refused("message() changes a list or a dictionary of the layer")
        finally:
            for snapshot in before:
                snapshot.restore()
        leaves, self.structure = pytree.tree_flatten(out)
        if not leaves or not all(isinstance(leaf, Tensor) for leaf in leaves):
            raise Refused("propagate() returns something else than tensors")
        return (*leaves, *written)

    def _called(self, ends: Tensor, size: tuple[int, int], given: dict[str, Any]) -> Any:
        """Calls the upstream method with other arguments."""
        return self.method(self.layer, ends, size=size, **given)


_SAME = "\0"  # replaces an argument of edge_updater() that propagate() has under the same name
_VALUE = "\0values"


def join_arguments(kwargs: dict[str, Any], parts: list, values: dict[str, Any], names, edge_names) -> dict[str, Any]:
    """The arguments of a :class:`JoinedCall`.

    Args:
        kwargs: the arguments of ``propagate()``.
        parts: the deferred calls of ``edge_updater()``.
        values: name of an argument that is a result of such a call -> the indices of the call and of the result.
        names, edge_names: names of the arguments of ``propagate()``'s steps, and of ``edge_update()``.
    """
    joined = {name: f"{_VALUE} {values[name]}" if name in values else value for name, value in kwargs.items()}
    for i, part in enumerate(parts):
        one_set = part.graph.num_src == part.graph.num_dst
        for name, value in part.kwargs.items():
            same = _is_same(value, kwargs.get(name)) and _means_the_same(name, one_set, names, edge_names)
            joined[f"{i} {name}"] = _SAME if same else value
    return joined


def _means_the_same(name: str, one_set: bool, names, edge_names) -> bool:
    """Returns whether an argument that both steps have under one name has the same index space in both."""
    ends = [{end for end in "ij" if f"{name}_{end}" in of} for of in (names, edge_names)]
    return all(ends) if one_set and any(ends) else ends[0] == ends[1]


def _is_same(a: Any, b: Any) -> bool:
    if type(a) is tuple and type(b) is tuple and len(a) == len(b):
        return all(map(_is_same, a, b))
    return isinstance(a, Tensor) and a is b


class JoinedCall(Call):
    """A ``propagate()`` joined with the deferred calls of ``edge_updater()`` whose results it reads.

    Args:
        edge_update: the stock ``edge_updater()``.
        edge_names: names of the arguments of ``edge_update()``.
        parts: the deferred calls.
        kwargs: the result of :func:`join_arguments`.
    """

    def __init__(self, layer, method, names, num_edges, size, kwargs, edge_update, edge_names, parts: list):
        self.edge_update, self.edge_names, self.parts = edge_update, edge_names, parts
        super().__init__(layer, method, names, num_edges, size, kwargs)

    def alone(self, part) -> Call:
        """A deferred call as a call of its own, with the current state of the layer."""
        return Call(self.layer, self.edge_update, self.edge_names, self.num_edges, None, part.kwargs)

    def _counts(self, size, kwargs) -> tuple[int, int]:
        counts = super()._counts(size, kwargs)
        ends = [(part.graph.num_src, part.graph.num_dst)[:: 1 if self.receiving == 1 else -1] for part in self.parts]
        if any(each != counts for each in ends):
            raise Refused("edge_updater() and propagate() are called for different numbers of nodes")
        return counts

    def _specs(self, kwargs):
        own = {name: value for name, value in kwargs.items() if " " not in name}
        for name in self.lifted:
            if isinstance(own.get(name), str):
                raise Refused(f"{name} is a value of edges")
        given = super()._specs(own)
        names, lifted = self.names, self.lifted
        self._name(self.edge_names)
        given |= {name: self._spec(name.partition(" ")[2], kwargs[name]) for name in kwargs if name not in own}
        self.names, self.lifted = names, lifted
        return given

    def _called(self, ends: Tensor, size: tuple[int, int], given: dict[str, Any]) -> Any:
        values = []
        for i in range(len(self.parts)):
            own = {name: value for name, value in given.items() if name.startswith(f"{i} ")}
            own = {name.partition(" ")[2]: value for name, value in own.items()}
            own = {name: given[name] if isinstance(v, str) and v == _SAME else v for name, v in own.items()}
            values.append(pytree.tree_leaves(self.edge_update(self.layer, ends, size=size, **own)))
        versions = [value._version for part in values for value in part]
        kwargs = {name: value for name, value in given.items() if " " not in name}
        for name, value in kwargs.items():
            if isinstance(value, str) and value.startswith(_VALUE):
                part, place = map(int, value.split(" ")[1:])
                kwargs[name] = values[part][place]
        out = self.method(self.layer, ends, size=size, **kwargs)
        if versions != [value._version for part in values for value in part]:
            raise Refused("message() writes into what edge_updater() returned")
        return out

    def key(self) -> Hashable:
        """The key of the call's program: all that it depends on besides the tensors' contents."""
        return super().key(), self.edge_update


def _spec_key(spec) -> Hashable:
    kind, what = spec
    if kind == "tensor":
        return spec
    return kind, value_key(what) if kind == "constant" else tuple(map(_spec_key, what))


class _Snapshot:
    """A copy of the attributes of a module and of the contents of containers among them."""

    def __init__(self, module: torch.nn.Module):
        self.module, self.attributes = module, dict(module.__dict__)
        self.contents = {
            name: type(value)(value)
            for name, value in self.attributes.items()
            if type(value) in (list, dict, set) and name not in _CONTAINERS
        }

    def changed(self) -> bool:
        for name, content in self.contents.items():
            value = self.attributes[name]
            if len(value) != len(content):
                return True
            pairs = zip(value, content) if not isinstance(value, dict) else zip(value.items(), content.items())
            if isinstance(value, dict):
                pairs = ((a, b) for x, y in pairs for a, b in zip(x, y))
            if any(a is not b for a, b in pairs):
                return True
        return False

    def restore(self) -> None:
        state = self.module.__dict__
        if state.keys() != self.attributes.keys() or any(state[k] is not v for k, v in self.attributes.items()):
            state.clear()
            state.update(self.attributes)
        if self.changed():
            for name, content in self.contents.items():
                value = self.attributes[name]
                value.clear()
                (value.extend if isinstance(value, list) else value.update)(content)

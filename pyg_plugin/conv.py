"""Base of PyG's drop-in layers: predicates, edge features, and the last steps of a forward."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Optional

import torch
from torch import Tensor
from torch_geometric.nn.aggr import SumAggregation
from torch_geometric.nn.dense.linear import Linear

from edgeless import _C
from edgeless.autocast import autocasts, rounds_to
from edgeless.checks import FLOATS, PLAIN, compiling, exporting_to_onnx
from edgeless.choices.backends import ONNX_REFUSAL, kernel_refusal
from edgeless.distributed.graph import DistGraph
from edgeless.functional.checks import promoted
from edgeless.functional.layer import attention_layer
from edgeless.functional.projection import add_row, add_row_to_heads, project
from edgeless.graph.handle import Graph
from edgeless.layers.adapter import FusedLayer, inference_refusal, is_plain

from .convert import (
    SPARSE,
    Handle,
    Part,
    SortedEdgeList,
    SparseMatrix,
    check_flow,
    for_stock,
    kind_of,
    with_loop_features,
)

LINEAR = (Linear, torch.nn.Linear)
_STEPS = ("message", "edge_update", "aggregate", "message_and_aggregate", "update")
_DRIVERS = ("propagate", "edge_updater")
_OWN_METHODS = frozenset((*_STEPS, *_DRIVERS))
_HOOKS = tuple(
    f"_{step}_forward_{when}"
    for step in ("propagate", "message", "aggregate", "message_and_aggregate", "edge_update")
    for when in ("pre_hooks", "hooks")
)


class Scriptable:
    """Mixin of layers with a ``stock`` class: TorchScript cannot compile a choice between two forwards."""

    stock: ClassVar[type]

    def __prepare_scriptable__(self):
        """The module that TorchScript compiles: the upstream layer with this layer's state."""
        stock = self.stock
        if stock is not type(self).__bases__[-1]:
            return self  # a user's subclass, whose own methods must not be dropped
        scriptable = stock.__new__(stock)
        scriptable.__dict__ = self.__dict__
        return scriptable


class FusedConv(Scriptable, FusedLayer):
    """Base of the drop-in layers, between :class:`edgeless.FusedLayer` and the upstream layer.

    Class attributes of a layer:
        stock: the upstream class, the last of its bases.
        wants_attention: whether the upstream forward returns the attention, given ``return_attention_weights``.
        edge_dims: numbers of dimensions that ``edge_attr`` may have upstream.
        node_dims: values of ``node_dim`` that mean the first dimension of a message.
        aggregations: supported aggregation classes and the kernels' names for them.
        numbers: options that go to the kernels and therefore must be int or float.
        layouts: supported layouts of node features; sparse ones if the forward begins with linear maps.
    """

    stock: ClassVar[type]
    wants_attention: ClassVar[Callable[[Any], bool]]
    edge_dims: ClassVar[tuple] = (1, 2)
    node_dims: ClassVar[tuple] = (0,)
    aggregations: ClassVar[dict] = {SumAggregation: "sum"}
    layouts: ClassVar[tuple] = (torch.strided, torch.sparse_coo, torch.sparse_csr)
    numbers: ClassVar[tuple] = ()
    _op: ClassVar[str] = "attention"  # the compiled op of the layer
    _stock_steps: ClassVar[tuple]
    _own_propagation: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if FusedConv in cls.__bases__:
            cls.stock = cls.__bases__[-1]
            cls.wants_attention = staticmethod(_attention_rule(cls.stock))
            cls._stock_steps = _steps_of(cls.stock)
        elif any(step in vars(cls) for step in _DRIVERS):  # PyG writes templates into the class later
            cls._own_propagation = True

    # Predicates ------------------------------------------------------------------------------------------------------

    def _state_refusals(self) -> list[str]:
        return self._module_refusals()

    def _refusals(self, x_src, x_dst, num_dst: Optional[int], edge_index, edge_attr, loops: bool) -> list[str]:
        """The unsupported reasons of a call that all layers have in common.

        Args:
            x_src, x_dst: node features, as the user passed them.
            num_dst: number of destinations if the layer does not need x_dst, else None.
            loops: whether the layer adds self loops.
        """
        reasons = self._module_refusals()
        if self._are_plain(x_src, x_dst, num_dst, edge_index, edge_attr):
            for reason in (kernel_refusal(x_src.device, self._op), self._edge_refusal(None, edge_index.size(1))):
                if reason:
                    reasons.append(reason)
            return reasons
        for name, x in (("source", x_src), ("destination", x_dst)):
            if x is None and x is x_dst and num_dst is not None:
                continue
            if type(x) not in PLAIN or x.dim() != 2 or x.dtype not in FLOATS:
                reasons.append(f"the {name} features are not a plain floating tensor of two dimensions")
                return reasons
            if x.layout not in self.layouts or x.is_nested:
                reasons.append(f"the {name} features have the layout {'nested' if x.is_nested else x.layout}")
                return reasons
            if reason := inference_refusal(x):
                reasons.append(reason)
                return reasons
        kind = kind_of(edge_index)
        if kind is None:
            reasons.append(f"edge_index is a {type(edge_index).__name__}")
            return reasons
        device = x_src.device
        if reason := kernel_refusal(device, self._op):
            reasons.append(reason)
        if kind.device(edge_index) != device:
            reasons.append(f"edge_index is on {kind.device(edge_index)} and the features are on {device}")
        num_dst = x_dst.size(0) if num_dst is None else num_dst
        if reason := kind.refusal(edge_index, x_src.size(0), num_dst, self, loops):
            reasons.append(reason)
            return reasons
        if kind is Part and x_src is not x_dst:
            reasons.append("x is a pair, and a DistGraph has nodes of one kind")
        if edge_attr is None:
            edge_attr = kind.features(edge_index)
        elif loops and kind is SparseMatrix:
            reasons.append("self loops are added to a sparse matrix, and edge_attr is given")
        if reason := self._edge_refusal(edge_attr, kind.num_edges(edge_index)):
            reasons.append(reason)
        return reasons

    def _are_plain(self, x_src, x_dst, num_dst: Optional[int], edge_index, edge_attr) -> bool:
        """A fast check for the usual supported inputs: plain tensors without edge features. If it fails,
        :meth:`_refusals` checks in detail and finds the reasons.
        """
        if edge_attr is not None or type(edge_index) is not Tensor or (x_dst is None and num_dst is None):
            return False
        if self.flow != "source_to_target" or compiling():
            return False
        return _C.are_rows_and_edges(x_src, x_dst, edge_index)

    def _module_refusals(self) -> list[str]:
        """The unsupported reasons that follow from the layer's own state, whatever its input."""
        steps, state, aggr = _steps_of(type(self)), self.__dict__, self.aggr_module
        if (
            not compiling()
            and steps == self._stock_steps
            and state.keys().isdisjoint(_OWN_METHODS)
            and not (self._own_propagation or self._explain or any(map(state.get, _HOOKS)))
            and self._decomposed_layers == 1
            and self.node_dim in self.node_dims
            and is_plain(aggr, self.aggregations)
            and (not self.numbers or all(isinstance(getattr(self, name), (int, float)) for name in self.numbers))
        ):
            # The usual case; otherwise the checks below find the reasons.
            return tracing_refusals() if torch._C._is_tracing() else []
        reasons = [
            f"{name}() is overridden"
            for name, step, stock in zip(_STEPS, steps, self._stock_steps)
            if step is not stock or name in state
        ]
        if self._own_propagation or (("propagate" in state or "edge_updater" in state) and self._has_own_drivers()):
            reasons.append("propagate() or edge_updater() is overridden")
        if any(map(state.get, _HOOKS)):
            reasons.append("a message passing hook is registered")
        if self._explain:
            reasons.append("explain mode is on")
        if self._decomposed_layers != 1:
            reasons.append(f"decomposed_layers is {self._decomposed_layers}")
        if self.node_dim not in self.node_dims:
            reasons.append(f"node_dim is {self.node_dim}")
        for name in self.numbers:
            if not isinstance(value := getattr(self, name), (int, float)):
                reasons.append(f"{name} is {value!r} and not an int or float")
        if type(aggr) not in self.aggregations:
            names = dict.fromkeys(self.aggregations.values())
            known = "only sum" if len(names) == 1 else "know " + ", ".join(names)
            reasons.append(f"aggr_module is {aggr} and the kernels {known}")
        elif not is_plain(aggr, self.aggregations):
            reasons.append("aggr_module has hooks or another forward")
        return reasons + tracing_refusals()

    def _has_own_drivers(self) -> bool:
        """True if the instance has a ``propagate`` or ``edge_updater`` that the user set. In explain mode, and after
        it, PyG sets those of the class on the instance, which do not count.
        """
        own = (getattr(self.__dict__[step], "__func__", None) for step in _DRIVERS if step in self.__dict__)
        known = [getattr(type(self), f"_{kind}_{step}", None) for kind in ("orig", "jinja") for step in _DRIVERS]
        return any(function is None or function not in known for function in own)

    def _edge_refusal(self, edge_attr: Any, num_edges: int) -> Optional[str]:
        """Returns why the kernels do not support ``edge_attr``; None if they do or there is no ``edge_attr``."""
        lin = self.lin_edge
        if edge_attr is None:
            return None
        if lin is None:
            return "edge_attr is given to a layer without edge_dim"
        if not is_plain(lin, (Linear,)) or lin.bias is not None:
            return "lin_edge is not a plain linear map, or has hooks or another forward"
        if not is_plain_float(edge_attr):
            return "edge_attr is not a plain floating tensor"
        if not _multiplies(edge_attr, lin.weight):
            return f"edge_attr is {edge_attr.dtype} and lin_edge is {lin.weight.dtype}"
        shape = (*edge_attr.shape, 1) if edge_attr.dim() == 1 else edge_attr.shape
        if edge_attr.dim() not in self.edge_dims or shape != (num_edges, lin.weight.size(1)):
            return f"edge_attr does not have the shape [E, edge_dim] = [{num_edges}, {lin.weight.size(1)}]"
        return None

    # Steps of a forward ----------------------------------------------------------------------------------------------

    def _edge_features(self, kind, edge_index, edge_attr: Optional[Tensor], graph: Graph, loops: bool):
        """Edge features ``[E, De]`` in the order of the graph's edges, or None if the layer uses none."""
        if self.lin_edge is None:
            return None
        if edge_attr is None:
            edge_attr = kind.features(edge_index)
            if edge_attr is None:
                return None
        if loops:
            edge_attr = with_loop_features(kind, edge_index, graph, edge_attr, self.fill_value)
        return edge_attr.view(-1, 1) if edge_attr.dim() == 1 else edge_attr

    def _promoted(self, edge_attr: Optional[Tensor], *operands: Optional[Tensor]) -> torch.dtype:
        """The promoted dtype of logits and messages: that of these operands and, given edge features, of the result of
        ``lin_edge``.
        """
        dtype = promoted(operands)
        if edge_attr is None:
            return dtype
        mapped = self.lin_edge.weight.dtype
        if mapped != torch.float64:  # autocast does not convert float64
            mapped = rounds_to(edge_attr.device.type) or mapped
        return torch.promote_types(dtype, mapped)

    @staticmethod
    def _project(x: Tensor, *linears: torch.nn.Module, joined: int = 0, heads: Sequence[int] = ()) -> list[Tensor]:
        """The results of linear maps of one input, see :func:`edgeless.functional.projection.project`."""
        return project(x, *linears, kinds=LINEAR, joined=joined, heads=heads)

    def _layer(self, graph: Graph, score: str, x: Tensor, linears, vectors, row, coefficient) -> Optional[Tensor]:
        """The whole layer with heads concatenated, or None, see :func:`edgeless.functional.layer.attention_layer`."""
        return attention_layer(
            graph,
            score,
            x,
            linears,
            kinds=LINEAR,
            vectors=vectors,
            row=row,
            heads=self.heads,
            coefficient=coefficient,
            dropout=self.dropout if self.training else 0.0,
        )

    def _merge_heads(self, out: Tensor) -> Tensor:
        """``[Nd, H, C]`` to ``[Nd, H * C]``, or to the mean over heads ``[Nd, C]``."""
        return out.flatten(1) if self.concat else out.mean(dim=1)

    def _finish(self, out: Tensor, res: Optional[Tensor]) -> Tensor:
        """The last steps of GAT and GATv2: merge the heads, then add residual and bias."""
        if res is None and self.concat and self.bias is not None:
            return add_row_to_heads(out, self.bias)
        out = self._merge_heads(out)
        if res is not None:
            out = out + res
        return out if self.bias is None else add_row(out, self.bias)

    # Fallback, explain mode and TorchScript --------------------------------------------------------------------------

    def _stock_forward(self, x, edge_index, *rest):
        if type(edge_index) is Graph:
            check_flow(self.flow)
        elif type(edge_index) is DistGraph:
            self._refuse_parts(x, edge_index, *rest)
        given = for_stock(edge_index)
        result = super()._stock_forward(x, given, *rest)
        if given is edge_index or type(edge_index) is Graph or not isinstance(result, tuple):
            return result
        out, (returned, alpha) = result
        if returned is given:
            return out, (edge_index, alpha)
        if getattr(self, "add_self_loops", False):
            return result  # PyG appends int64 loops, so it returns int64 ids
        return out, kind_of(edge_index).with_attention(edge_index, alpha, False, None)

    def _set_jittable_templates(self, *args, **kwargs):
        # Before PyG writes an optimized propagate() into a class, it keeps the original for explain mode. A subclass
        # may inherit the optimized one as its original, which explains nothing: take the base's original instead.
        super()._set_jittable_templates(*args, **kwargs)
        cls = type(self)
        for step in ("propagate", "edge_updater"):
            original = vars(cls).get(f"_orig_{step}")
            for base in cls.__mro__[1:]:
                if original is not None and original is vars(base).get(f"_jinja_{step}"):
                    original = vars(base)[f"_orig_{step}"]
                    setattr(cls, f"_orig_{step}", original)

    def __prepare_scriptable__(self):
        scriptable = super().__prepare_scriptable__()
        if scriptable is not self and "_jinja_propagate" not in vars(self.stock):
            with torch.random.fork_rng(devices=()):
                self.stock(1, 1)  # PyG completes a class when it is first instantiated
        return scriptable


def _steps_of(cls: type) -> tuple:
    """The methods of a class that :data:`_STEPS` names, in that order."""
    return cls.message, cls.edge_update, cls.aggregate, cls.message_and_aggregate, cls.update


def _attention_rule(stock: type) -> Callable[[Any], bool]:
    """The condition for an upstream forward to return the attention: any bool, or a true value, by PyG version."""
    if "isinstance(return_attention_weights, bool)" in inspect.getsource(stock.forward):
        return lambda value: isinstance(value, bool)
    return bool


def tracing_refusals() -> list[str]:
    """The unsupported reason while torch.jit traces, which the kernels do not support."""
    if not torch.jit.is_tracing():
        return []
    return [ONNX_REFUSAL if exporting_to_onnx() else "the call is being traced by torch.jit"]


def pair(x: Any) -> tuple:
    """Source and destination features of ``x``, a tensor or a pair; (None, None) for anything else."""
    if isinstance(x, Tensor):
        return x, x
    if isinstance(x, (tuple, list)) and len(x) == 2:
        return x[0], x[1]
    return None, None


def is_plain_float(tensor: Any) -> bool:
    """True if the kernels can read ``tensor``: dense, floating and of no subclass."""
    return type(tensor) in PLAIN and tensor.dtype in FLOATS and tensor.layout is torch.strided


def sizes_of(size: Any) -> Optional[tuple]:
    """A layer's ``size`` as a tuple of two, each int or None; None if it is no such pair. Accepts NumPy integers."""
    if not isinstance(size, (tuple, list)) or len(size) != 2:
        return None
    try:
        return tuple(n if n is None or isinstance(n, (int, torch.SymInt)) else operator.index(n) for n in size)
    except TypeError:
        return None


def num_dst_of(x_src: Tensor, x_dst: Any, edge_index: Any, size: Any) -> int:
    """Number of destinations: the rows of x_dst, else what the graph says, else ``size``, else the rows of x_src."""
    if isinstance(x_dst, Tensor) and x_dst.dim() > 0:
        return x_dst.size(0)
    kind = kind_of(edge_index)
    num_dst = None
    if kind is Handle:
        num_dst = edge_index.num_dst
    elif kind in SPARSE:
        num_dst = edge_index.size(0)
    elif kind is SortedEdgeList:
        num_dst = edge_index.num_cols
    elif sizes := sizes_of(size):
        num_dst = sizes[1]
    return x_src.size(0) if num_dst is None else num_dst


def _multiplies(features: Tensor, weight: Tensor) -> bool:
    """True if torch multiplies the two: their dtypes are equal, or autocast is on and neither is float64."""
    if features.dtype == weight.dtype:
        return True
    return autocasts(features.device.type) and torch.float64 not in (features.dtype, weight.dtype)

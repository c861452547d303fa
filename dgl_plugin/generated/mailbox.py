"""Records functions of a mailbox: their reductions over messages become reductions over all edges.

DGL calls such a function once for all nodes of one degree, with messages ``[nodes, degree, ...]``. Here the function is
called once, with a :class:`Mail` for each tensor, whose first two dimensions represent all nodes and their edges.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any, Optional

import torch
from torch import Tensor

from edgeless.programs import DESTINATION, EDGE, PARAMETER, Refused

from .deferred import _POINTWISE, Deferred, computed
from .expressions import EDGE_SOFTMAX, FOLD, GATHER, GraphOp, Value
from .generators import Generators

_REDUCTIONS = {"sum": "sum", "mean": "mean", "amax": "max", "amin": "min", "max": "max", "min": "min"}
_MASK = GraphOp("with_edges", lambda _, x, mask: torch.where(mask.view(-1, *[1] * (x.dim() - 1)), x, x.new_zeros(())))


def reduced_by_mailbox(graph, recorder, messages: Mapping, function) -> dict[str, Any]:
    """Calls a function of nodes with a mailbox for all nodes at once; nodes without edges get zeros.

    Raises:
        Refused: the function calls something that is not recorded.
    """
    given = {name: Mail(recorder, recorder.leaf(data, EDGE), _EDGES) for name, data in messages.items()}
    generators = Generators(recorder.device)
    try:
        data = function(_Nodes(graph, recorder, given))
    except Refused:
        generators.restore()
        raise
    except Exception as error:  # the upstream method raises it too, if it is the function's error
        generators.restore()
        raise Refused(f"a function of a mailbox fails, {type(error).__name__}: {str(error)[:120]}") from error
    if generators.have_drawn():
        generators.restore()
        raise Refused("a function of a mailbox draws numbers, which are others for the nodes of every degree")
    if not isinstance(data, Mapping) or not data or not all(isinstance(m, Mail) for m in data.values()):
        raise Refused("a function of a mailbox returns something else than what it computed of it")
    found = {}
    for name, mail in data.items():
        if mail.kind != _NODES:
            raise Refused("a function of a mailbox returns a row for each message")
        value = mail.value
        if recorder.handle.has_zero_in_degree:
            mask = recorder.leaf(recorder.in_degrees() > 0, DESTINATION)
            value = recorder.value(_MASK, (value, mask), {})
        found[name] = recorder.defer(value)
    return found


# The rows of a Mail's value: messages; nodes, with a dimension for their messages; nodes, without that dimension.
_EDGES, _KEPT, _NODES = "message", "node, kept", "node"


class Mail:
    """A tensor in a function of a mailbox.

    Args:
        recorder: the recorder of the call.
        value: the expression, with rows of edges or destinations.
        kind: which dimensions of the tensor the value has.
    """

    def __init__(self, recorder, value: Value, kind: str):
        self.recorder, self.value, self.kind = recorder, value, kind

    def dim(self) -> int:
        """The number of dimensions that the function sees."""
        return len(self.value.shape) + (self.kind != _NODES)

    ndim = property(dim)
    dtype = property(lambda self: self.value.dtype)
    device = property(lambda self: self.recorder.device)

    def size(self, dim: Optional[int] = None):
        """The extent of a dimension; for the dimension of the messages it is a :class:`Degree`."""
        if dim is None:
            return self.shape
        dim += self.dim() if dim < 0 else 0
        if dim == 0:
            raise Refused("the number of nodes of one degree is read")
        if dim == 1 and self.kind != _NODES:
            # Results of nodes without messages are dropped, so any finite value will do.
            return Degree(self.recorder, self.recorder.in_degrees().clamp(min=1).double()) if self.kind == _EDGES else 1
        return self.value.shape[dim - (self.kind != _NODES)]

    shape = property(lambda self: _Shape(self))

    def __getattr__(self, name: str):
        method = getattr(Tensor, name, None)
        if name.startswith("__") or not callable(method):
            raise AttributeError(name)
        return lambda *args, **kwargs: _record(name, method, (self, *args), kwargs)

    def __getitem__(self, index):
        return _record("__getitem__", Tensor.__getitem__, (self, index), {})

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return _record(getattr(func, "__name__", ""), func, args, kwargs or {})

    def __bool__(self):
        raise Refused("the values of a mailbox decide")


def _operator(name: str):
    def apply(self, *args):
        return _record(name, getattr(Tensor, name), (self, *args), {})

    return apply


for _name in ("add", "sub", "mul", "truediv", "pow", "radd", "rsub", "rmul", "rtruediv", "rpow", "neg", "abs"):
    setattr(Mail, f"__{_name}__", _operator(f"__{_name}__"))
for _name in ("lt", "le", "gt", "ge"):
    setattr(Mail, f"__{_name}__", _operator(f"__{_name}__"))


class _Shape:
    def __init__(self, mail: Mail):
        self._mail = mail

    def __getitem__(self, dim):
        if not isinstance(dim, int):
            raise Refused("the shape of a mailbox is read")
        return self._mail.size(dim)


class Degree:
    """The number of messages of each node. Arithmetic of NumPy and Python with it gives such numbers again."""

    def __init__(self, recorder, numbers: Tensor):
        self.recorder, self.numbers = recorder, numbers  # float64 [nodes]

    def _with(self, operation, *others) -> Degree:
        given = [o.numbers if isinstance(o, Degree) else o for o in others]
        if not all(isinstance(o, (int, float, Tensor)) for o in given):
            return NotImplemented
        return Degree(self.recorder, operation(*given))

    def __array_ufunc__(self, function, method, *inputs, **kwargs):
        if method != "__call__" or kwargs or not hasattr(torch, function.__name__):
            return NotImplemented
        numbers = [float(i) if not isinstance(i, Degree) else i for i in inputs]
        return self._with(getattr(torch, function.__name__), *numbers)

    def __float__(self):
        raise Refused("the number of a node's messages decides")

    __int__ = __index__ = __bool__ = __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __float__
    __hash__ = None


for _name in ("add", "sub", "mul", "truediv", "pow"):
    _function = getattr(operator, _name)
    setattr(Degree, f"__{_name}__", lambda self, other, f=_function: _arithmetic(f, self, other))
    setattr(Degree, f"__r{_name}__", lambda self, other, f=_function: _arithmetic(f, other, self))


def _arithmetic(function, a, b):
    degree = a if isinstance(a, Degree) else b
    other = b if degree is a else a
    if isinstance(other, Mail):
        return NotImplemented
    return degree._with(function, a, b)


class _Nodes:
    """A batch of all nodes, the argument of a function of nodes with a mailbox."""

    def __init__(self, graph, recorder, mailbox: dict[str, Mail]):
        self.mailbox, self.data = mailbox, _Data(graph.dstdata, recorder)

    def __getattr__(self, name: str):
        raise Refused(f"a function of a mailbox reads nodes.{name}")


class _Data(Mapping):
    def __init__(self, data, recorder):
        self._data, self._recorder = data, recorder

    def __getitem__(self, name: str) -> Mail:
        return Mail(self._recorder, self._recorder.leaf(computed(self._data[name]), DESTINATION), _NODES)

    def __iter__(self) -> Iterator[str]:
        return iter(self._data.keys())

    def __len__(self) -> int:
        return len(self._data)


# Ops -----------------------------------------------------------------------------------------------------------------


def _record(name: str, func, args: tuple, kwargs: dict) -> Any:
    if name in _POINTWISE:
        return _pointwise(func, args, kwargs)
    first = args[0]
    if name in _REDUCTIONS and isinstance(first, Mail):
        return _reduction(name, func, *args, **kwargs)
    if name == "softmax" and isinstance(first, Mail):
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        if first.kind == _EDGES and dim in (1, 1 - first.dim()) and set(kwargs) <= {"dim", "_stacklevel"}:
            return Mail(first.recorder, first.recorder.value(EDGE_SOFTMAX, (first.value,), {}), _EDGES)
    if name == "unsqueeze" and isinstance(first, Mail):
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        dim += first.dim() + 1 if dim < 0 else 0
        if dim == 1 and first.kind == _NODES:
            return Mail(first.recorder, first.value, _KEPT)
        return _item_op(func, first, _item_dim(first, dim))
    if name == "squeeze" and isinstance(first, Mail) and len(args) == 2:
        dim = args[1] + (first.dim() if args[1] < 0 else 0)
        if dim == 1 and first.kind == _KEPT:
            return Mail(first.recorder, first.value, _NODES)
        return _item_op(func, first, _item_dim(first, dim))
    if name == "__getitem__" and isinstance(first, Mail):
        return _indexed(first, args[1])
    if name in ("cat", "concat"):
        return _joined(func, *args, **kwargs)
    if name == "linear" and isinstance(first, Mail) and first.kind != _KEPT:
        return _mapped(func, args, kwargs)
    raise Refused(f"{name} over a mailbox is not recorded")


def _item_dim(mail: Mail, dim: int) -> int:
    """The value's dimension for a dimension of the tensor behind those of the nodes and the messages."""
    first = 1 if mail.kind == _NODES else 2
    if dim < first:
        raise Refused("the dimensions of a mailbox's nodes or messages change")
    return dim - (mail.kind != _NODES)


def _item_op(func, mail: Mail, *args, **kwargs) -> Mail:
    return Mail(mail.recorder, mail.recorder.value(func, (mail.value, *args), kwargs), mail.kind)


def _reduction(name: str, func, mail: Mail, dim=None, keepdim: bool = False) -> Any:
    if not isinstance(dim, int):
        raise Refused(f"{name} over several dimensions of a mailbox is not recorded")
    dim += mail.dim() if dim < 0 else 0
    if dim == 1 and mail.kind == _EDGES:
        if not mail.dtype.is_floating_point:  # torch sums integers in another dtype
            raise Refused(f"{name} of messages of {mail.dtype} is not recorded")
        value = mail.recorder.value(FOLD[_REDUCTIONS[name]], (mail.value,), {})
        found = Mail(mail.recorder, value, _KEPT if keepdim else _NODES)
        return _Extremum(found) if name in ("max", "min") else found
    if name in ("max", "min"):
        raise Refused(f"{name} over another dimension than the messages is not recorded")
    return _item_op(func, mail, _item_dim(mail, dim), keepdim)


class _Extremum:
    """The result of ``max(dim=1)``, whose indices cannot be read."""

    def __init__(self, values: Mail):
        self.values = values

    def __getitem__(self, place: int) -> Mail:
        if place != 0:
            raise Refused("the place of a mailbox's maximum is read")
        return self.values

    def __iter__(self):
        raise Refused("the place of a mailbox's maximum is read")


def _indexed(mail: Mail, index: Any) -> Mail:
    rows = 1 if mail.kind == _NODES else 2
    index = index if isinstance(index, tuple) else (index,)
    if index[:rows] != (slice(None),) * rows or any(i is not ... and type(i) not in (int, slice) for i in index):
        raise Refused("messages or nodes are selected in a mailbox")
    return _item_op(operator.getitem, mail, (slice(None), *index[rows:]))


def _joined(func, mails, dim: int = 0) -> Mail:
    if not all(isinstance(mail, Mail) and mail.kind == mails[0].kind for mail in mails):
        raise Refused("a mailbox is joined with something else")
    dim = _item_dim(mails[0], dim + (mails[0].dim() if dim < 0 else 0))
    recorder = mails[0].recorder
    return Mail(recorder, recorder.value(torch.cat, ([mail.value for mail in mails], dim), {}), mails[0].kind)


def _mapped(func, args: tuple, kwargs: dict) -> Mail:
    mail = args[0]
    given = [mail.recorder.leaf(a, PARAMETER) if isinstance(a, Tensor) else a for a in args[1:]]
    named = {n: mail.recorder.leaf(a, PARAMETER) if isinstance(a, Tensor) else a for n, a in kwargs.items()}
    if len(mail.value.shape) < 2:
        raise Refused("a mailbox's nodes or messages are multiplied")
    return Mail(mail.recorder, mail.recorder.value(func, (mail.value, *given), named), mail.kind)


def _pointwise(func, args: tuple, kwargs: dict) -> Mail:
    mails = [a for a in (*args, *kwargs.values()) if isinstance(a, Mail)]
    if any(isinstance(a, Mail) for a in kwargs.values()) or not mails:
        raise Refused("a mailbox is passed by name")
    recorder, kinds = mails[0].recorder, {mail.kind for mail in mails}
    if len({mail.dim() for mail in mails}) != 1 or (_NODES in kinds and len(kinds) > 1):
        raise Refused("tensors of a mailbox are broadcast over nodes or messages")
    kind = _EDGES if _EDGES in kinds else mails[0].kind
    dims = mails[0].dim()

    def value(arg: Any) -> Any:
        if isinstance(arg, Mail):
            at_edges = kind == _EDGES and arg.kind == _KEPT
            return recorder.value(GATHER[DESTINATION], (arg.value,), {}) if at_edges else arg.value
        if isinstance(arg, Degree):
            numbers = arg.numbers.to(mails[0].dtype)
            leaf = recorder.leaf(numbers.view(-1, *[1] * (len(mails[0].value.shape) - 1)), DESTINATION)
            return recorder.value(GATHER[DESTINATION], (leaf,), {}) if kind == _EDGES else leaf
        if isinstance(arg, Tensor):
            if type(arg) is Deferred or arg.dim() > dims - (1 if kind == _NODES else 2):
                raise Refused("a mailbox meets a tensor with rows")
            return recorder.leaf(arg, PARAMETER)
        return arg

    return Mail(recorder, recorder.value(func, tuple(map(value, args)), dict(kwargs)), kind)

"""Checks of arguments, and the kinds of tensors and dtypes that are accepted.

Every error names the argument, what was expected and what came.
"""

from __future__ import annotations

import contextlib
import numbers
from typing import Any, Optional

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn import Parameter

from .untraced import constant

# The tensor classes that torch.export traces a model with, in place of parameters, inputs and results.
STAND_INS = (FakeTensor, FunctionalTensor)
# The tensor classes whose operations are those of torch. Any other subclass may do something of its own in them.
PLAIN = (Tensor, Parameter, *STAND_INS)
# The floating dtypes that the kernels compute in float32: 16-bit numbers are widened when they are read.
COMPUTED_IN_FLOAT32 = (torch.float32, torch.bfloat16, torch.float16)
# The floating dtypes in which the kernels read and write tensors.
FLOATS = (*COMPUTED_IN_FLOAT32, torch.float64)
# The dtypes that node ids, edge ids and row pointers are accepted in.
INTEGERS = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64} | {
    getattr(torch, name) for name in ("uint16", "uint32", "uint64") if hasattr(torch, name)
}


# The largest number of nodes: the row pointers of a CSR take 8 bytes each, and their size in bytes is an int64.
MOST_NODES = 2**60 - 2
_NUMBERS = (numbers.Real, torch.SymFloat, torch.SymInt)


def opmath_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which the kernels compute, for rows that are stored in ``dtype``, one of :data:`FLOATS`.

    Softmax statistics and edge weights are stored in it as well.
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


# Whether torch.compile or torch.export is tracing: then no code may read the values of a tensor. Every call of a layer
# asks several times, so this is torch's own function and no wrapper.
compiling = torch.compiler.is_compiling


def transforming() -> bool:
    """Returns whether a transform of torch.func is active: tensors that are made inside of it must not be kept after
    it.
    """
    return not compiling() and torch._C._are_functorch_transforms_active()


def exporting_to_onnx() -> bool:
    """Returns whether ``torch.onnx.export`` is tracing, by torch.export or by TorchScript."""
    return (compiling() or torch.jit.is_tracing()) and _is_in_onnx_export()


@constant
def _is_in_onnx_export() -> bool:
    return torch.onnx.is_in_onnx_export()


def surely(condition) -> bool:
    """Returns whether a condition on sizes holds; False where torch.compile is tracing and a size is known only at run
    time.

    Fake kernels, which get symbolic sizes as well, use ``if_known`` instead.
    """
    if not compiling():
        return bool(condition)
    from torch.fx.experimental import symbolic_shapes  # slow to import, but a tracing torch has imported it

    return symbolic_shapes.guard_or_false(condition) if hasattr(symbolic_shapes, "guard_or_false") else bool(condition)


def normal_tensors():
    """A context whose tensors can be saved for a backward even under torch.inference_mode, as those of a graph must be:
    the graph is kept after inference mode ends.
    """
    if compiling() or not torch.is_inference_mode_enabled():
        return contextlib.nullcontext()
    return _normal_tensors()


@contextlib.contextmanager
def _normal_tensors():
    with torch.inference_mode(False), torch.no_grad():  # leaving inference mode alone would record gradients
        yield


def plain_tensor(tensor: Tensor) -> Tensor:
    """The tensor itself, or the one inside a ``torch_geometric.EdgeIndex``."""
    return tensor if type(tensor) is Tensor or not hasattr(tensor, "as_tensor") else tensor.as_tensor()


def as_index(ids: Tensor) -> Tensor:
    """Integer ids in a dtype that the ops read: int32 stays int32, every other dtype becomes int64."""
    return ids if ids.dtype == torch.int32 else ids.to(torch.int64)


def check_has(call: str, name: str, value: Any, attribute: str, meaning: str) -> None:
    """Raise unless ``value`` has ``attribute``: stands for isinstance with a framework that is not imported here."""
    if not hasattr(value, attribute):
        raise TypeError(f"{call}: {name} must be {meaning}, got {type(value).__name__}")


def as_device(call: str, device) -> torch.device:
    """``device`` as a torch.device, from a torch.device, a str or an int, as ``Tensor.to`` takes it."""
    if not isinstance(device, (torch.device, str, int)) or isinstance(device, bool):
        raise TypeError(f"{call}: device must be a torch.device, a str or an int, got {type(device).__name__}")
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"{call}: device must be one that torch knows, got {device!r} ({error})") from None


def check_integers(call: str, name: str, tensor, shape: str) -> None:
    """Raise unless ``tensor`` is a dense tensor of integers."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{call}: {name} must be a Tensor of shape {shape}, got {type(tensor).__name__}")
    if tensor.layout != torch.strided:
        raise ValueError(
            f"{call}: {name} must be a dense Tensor, got layout {tensor.layout}; see Graph.from_torch_sparse"
        )
    if tensor.dtype not in INTEGERS:
        raise ValueError(f"{call}: {name} must have an integer dtype, got {tensor.dtype}")


def check_edge_index(call: str, edge_index) -> None:
    """Raise unless ``edge_index`` is an integer Tensor ``[2, E]``."""
    check_integers(call, "edge_index", edge_index, "[2, E]")
    if edge_index.dim() != 2 or edge_index.size(0) != 2:
        raise ValueError(f"{call}: edge_index must have shape [2, E], got {list(edge_index.shape)}")


def check_number(call: str, name: str, value: Any) -> None:
    """Raise unless ``value`` is a real number: of Python, of NumPy, or a tensor without dimensions and gradient."""
    kind = type(value)
    if kind is float or kind is int:  # the common case first: every call of a layer runs this
        return
    if isinstance(value, Tensor):
        if value.dim() != 0 or value.is_complex():
            raise TypeError(
                f"{call}: {name} must be a number, got a Tensor of shape {list(value.shape)}, {value.dtype}"
            )
        if value.requires_grad:
            raise TypeError(f"{call}: {name} must be a number, got a Tensor that requires a gradient; detach it")
    elif not isinstance(value, _NUMBERS):
        raise TypeError(f"{call}: {name} must be a number, got {kind.__name__}")


def check_choice(call: str, name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raise unless ``value`` is one of the strings ``choices``."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{call}: {name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def check_num_nodes(call: str, name: str, value) -> None:
    """Raise unless ``value`` is an int from 0 to MOST_NODES."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{call}: {name} must be an int, got {type(value).__name__}")
    if value < 0:
        raise ValueError(f"{call}: {name} must not be negative, got {value}")
    if not compiling() and value > MOST_NODES:
        raise ValueError(f"{call}: {name} must be at most 2**60 - 2, got {value}")


def check_sizes(call: str, num_src: Optional[int], num_dst: Optional[int]) -> None:
    """Raise unless each is a number of nodes, as :func:`check_num_nodes` has it, or None."""
    if num_src is not None:
        check_num_nodes(call, "num_src", num_src)
    if num_dst is not None:
        check_num_nodes(call, "num_dst", num_dst)


def check_symmetric(call: str, is_symmetric: Optional[bool], num_src: int, num_dst: int) -> None:
    """Raise unless is_symmetric is a bool or None, and True only for as many sources as destinations."""
    if is_symmetric is not None and not isinstance(is_symmetric, bool):
        raise TypeError(f"{call}: is_symmetric must be True, False or None, got {type(is_symmetric).__name__}")
    if is_symmetric and num_src != num_dst:
        raise ValueError(f"{call}: is_symmetric needs as many sources as destinations, got {num_src} and {num_dst}")


def num_nodes_of(call: str, names, src: Tensor, dst: Tensor, num_src: Optional[int], num_dst: Optional[int]):
    """(num_src, num_dst) of the edges ``src`` ``[E]`` and ``dst`` ``[E]``.

    A number that is None becomes the largest id of its side plus one. If both are None the graph is square, and both
    become the larger of the two. ``names`` of src and dst are for error messages.
    """
    check_sizes(call, num_src, num_dst)
    square = num_src is None and num_dst is None
    if num_src is None:
        num_src = _num_asked_for(f"{call}: {names[0]}", src)
    if num_dst is None:
        num_dst = _num_asked_for(f"{call}: {names[1]}", dst)
    if square:
        num_src = num_dst = max(num_src, num_dst)
    return num_src, num_dst


def _num_asked_for(name: str, ids: Tensor) -> int:
    """The largest of ``ids`` plus one, 0 without ids. Raises IndexError where that is more than MOST_NODES."""
    if not ids.numel():
        return 0
    num_nodes = int(ids.max()) + 1
    if not compiling() and num_nodes > MOST_NODES:
        check_ids(name, ids, "2**60 - 2", MOST_NODES)
    return num_nodes


def check_ids(name: str, ids: Tensor, limit_name: str, limit: int) -> None:
    """Raise IndexError naming the first id outside ``0 <= id < limit``."""
    if ids.numel() == 0:
        return
    smallest, largest = torch.aminmax(ids)  # one pass where all is well
    if bool(smallest < 0) or bool(largest >= limit):
        position = int(((ids < 0) | (ids >= limit)).to(torch.uint8).argmax())
        raise IndexError(
            f"{name} has id {int(ids[position])} at position {position}, expected 0 <= id < {limit_name} = {limit}"
        )


def check_compressed(call, indptr, indices, edge_ids, num_cols, limit_name, values: bool) -> None:
    """Raise unless indptr ``[rows + 1]``, indices ``[E]`` and edge_ids ``[E]`` or None form a CSR or a CSC.

    Their shapes, dtypes and devices are always checked, their values only when ``values`` is set: that reads all of
    them, and on CUDA waits for the device.
    """
    check_integers(call, "indptr", indptr, "[rows + 1]")
    check_integers(call, "indices", indices, "[E]")
    if indptr.dim() != 1 or indptr.numel() == 0:
        raise ValueError(f"{call}: indptr must have shape [rows + 1], got {list(indptr.shape)}")
    if indices.dim() != 1:
        raise ValueError(f"{call}: indices must have shape [E], got {list(indices.shape)}")
    _check_device(f"{call}: indices", indices, indptr)
    if edge_ids is not None:
        check_integers(call, "edge_ids", edge_ids, "[E]")
        if edge_ids.shape != indices.shape:
            raise ValueError(f"{call}: edge_ids must have shape {list(indices.shape)}, got {list(edge_ids.shape)}")
        _check_device(f"{call}: edge_ids", edge_ids, indptr)
    if values:
        _check_indptr(call, indptr, indices.numel())
        check_ids(f"{call}: indices", indices, limit_name, indptr.numel() - 1 if num_cols is None else num_cols)
        if edge_ids is not None:
            check_permutation(call, "edge_ids", edge_ids, "E")


def _check_device(name: str, tensor: Tensor, like: Tensor) -> None:
    if tensor.device != like.device:
        raise ValueError(f"{name} must be on the device of indptr, {like.device}, got {tensor.device}")


def _check_indptr(call: str, indptr: Tensor, num_edges: int) -> None:
    first, last = int(indptr[0]), int(indptr[-1])
    if first != 0 or last != num_edges:
        raise ValueError(f"{call}: indptr must run from 0 to E = {num_edges}, got {first} to {last}")
    falls = indptr[1:] < indptr[:-1]
    if bool(falls.any()):
        row = int(falls.to(torch.uint8).argmax())
        raise ValueError(
            f"{call}: indptr must not fall, but row {row} runs from {int(indptr[row])} to {int(indptr[row + 1])}"
        )


def check_permutation(call: str, name: str, ids: Tensor, limit_name: str) -> None:
    """Raise unless ``ids`` ``[E]`` contain every number from 0 to E - 1 exactly once."""
    check_ids(f"{call}: {name}", ids, limit_name, ids.numel())
    seen = torch.zeros(ids.numel(), dtype=torch.bool, device=ids.device)
    seen[ids.to(torch.int64)] = True
    if not bool(seen.all()):
        missing = int((~seen).to(torch.uint8).argmax())
        raise ValueError(f"{call}: {name} must be a permutation of 0 to {limit_name} - 1, but {missing} is missing")

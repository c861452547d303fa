"""Checks and decisions that all functions of :mod:`edgeless.functional` share."""

from __future__ import annotations

import numbers
from typing import Optional

import torch
from torch import Tensor

from ..checks import FLOATS, INTEGERS
from ..choices.backends import NotFusedError, current_backend, kernel_refusal
from ..distributed.graph import DistGraph, LocalGraph
from ..graph.handle import Graph
from ..layers.calls import ran_stock


def expect_graph(call: str, graph) -> None:
    """Raise unless ``graph`` is an :class:`edgeless.Graph` or this process' part of one."""
    if not isinstance(graph, (Graph, DistGraph)):
        raise TypeError(f"{call}: graph must be an edgeless.Graph, got {type(graph).__name__}")


def on_this_rank(call: str, graph, dropout, seed, *sources: Tensor) -> tuple:
    """Returns (graph, seed, *sources), the arguments for the kernels of this process, where ``graph`` is not a plain
    :class:`edgeless.Graph`.

    An :class:`edgeless.distributed.DistGraph` becomes the bipartite graph from own and halo nodes to own nodes. The
    rows of halo nodes are fetched and joined with those of own nodes, ``sources`` ``[n, ...]``. For dropout without a
    seed, all processes draw the same seed.
    """
    expect_graph(call, graph)
    if type(graph) is DistGraph:
        sources, graph = graph.sources(*sources), graph.local
    if type(graph) is LocalGraph and dropout and seed is None:
        seed = graph.draw(graph.device)
    return graph, seed, *sources


def expect_dtype(call: str, out_dtype) -> None:
    """Raise unless ``out_dtype`` is a floating ``torch.dtype``."""
    if not isinstance(out_dtype, torch.dtype):
        raise TypeError(f"{call}: out_dtype must be a torch.dtype or None, got {type(out_dtype).__name__}")
    if not out_dtype.is_floating_point:
        raise ValueError(f"{call}: out_dtype must be a floating dtype, got {out_dtype}")


def expect_seed(call: str, seed) -> None:
    """Raise unless ``seed`` is an int of 64 bits, or an integer tensor with one element."""
    if type(seed) is int and -(2**63) <= seed < 2**63:
        return
    if isinstance(seed, Tensor):
        if seed.numel() != 1 or seed.dtype not in INTEGERS:
            raise ValueError(
                f"{call}: seed must be an int or an int64 Tensor of shape [1], got {seed.dtype} {list(seed.shape)}"
            )
    elif not isinstance(seed, (numbers.Integral, torch.SymInt)):
        raise TypeError(f"{call}: seed must be an int, an int64 Tensor or None, got {type(seed).__name__}")
    elif not -(2**63) <= seed < 2**63:
        raise ValueError(f"{call}: seed must be an int of 64 bits, got {seed}")


def expect(call: str, name: str, tensor, sizes: tuple, meaning: str) -> None:
    """Raise unless ``tensor`` has a dtype of the kernels and the shape ``sizes``, where None matches any size.

    ``meaning`` names the sizes in the error message, like ``"[Ns, H, C]"``.
    """
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{call}: {name} must be a Tensor of shape {meaning}, got {type(tensor).__name__}")
    shape = tensor.shape
    if not _matches(shape, sizes):
        numbers = ", ".join("*" if size is None else str(size) for size in sizes)
        raise ValueError(f"{call}: {name} must have shape {meaning} = [{numbers}], got {list(shape)}")
    if tensor.dtype not in FLOATS:
        raise ValueError(f"{call}: {name} must be float32, float64, bfloat16 or float16, got {tensor.dtype}")


def _matches(shape, sizes: tuple) -> bool:
    if len(shape) != len(sizes):
        return False
    for have, want in zip(shape, sizes):  # noqa: SIM110  every call runs this, and any() takes twice as long
        if want is not None and want != have:
            return False
    return True


def promoted(tensors, dtype: Optional[torch.dtype] = None) -> torch.dtype:
    """The dtype to which torch promotes the dtypes of ``tensors`` and ``dtype``; None is ignored."""
    for tensor in tensors:
        if tensor is not None and tensor.dtype != dtype:
            dtype = tensor.dtype if dtype is None else torch.promote_types(dtype, tensor.dtype)
    return dtype


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """The dtype that plain PyTorch computes in for inputs of ``dtype``: the wider of it and float32."""
    return torch.promote_types(dtype, torch.float32)


def cast(tensor: Optional[Tensor], dtype: torch.dtype) -> Optional[Tensor]:
    """``tensor`` in ``dtype``; itself where it is None or has that dtype."""
    return tensor if tensor is None or tensor.dtype == dtype else tensor.to(dtype)


def runs_reference(call: str, device: torch.device, op: str = "attention") -> bool:
    """Returns whether ``call`` runs in plain PyTorch: the backend asks for it, or there is no kernel of ``op`` for the
    device.

    Raises:
        NotFusedError: there is no kernel, and the backend is ``"fused"``.
    """
    backend = current_backend()
    if backend == "reference":
        return True
    refusal = kernel_refusal(device, op)
    if refusal is None:
        return False
    if backend == "fused":
        raise NotFusedError(f"{call}: {refusal}")
    ran_stock(f"edgeless.functional.{call}", call, [refusal])
    return True

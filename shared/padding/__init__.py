"""Pads batches to few sizes, and makes norms ignore the padding.

A batch of small graphs gets additional graphs, whose nodes and edges fill it to one of few sizes, so that a captured
step (:func:`edgeless.capture_step`) can be replayed for it. Edges of the padding stay within its graphs, so messages,
pooling and losses of the real graphs do not change. The loaders are in ``edgeless.pyg.loader`` and
``edgeless.dgl.dataloading``.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, Optional

import torch
from torch import Tensor

from ..checks import compiling, transforming
from .dense_rows import DenseRows
from .masked_norm import RealRows, normalize, normalize_by_ops
from .sizes import Padding, Size, Sizes, choose_sizes, pad_edges

__all__ = [
    "BatchNorm1d",
    "Padding",
    "Size",
    "Sizes",
    "choose_sizes",
    "convert_batchnorm",
    "dense_rows_of",
    "pad_edges",
    "real_rows",
]

# The batch in force --------------------------------------------------------------------------------------------------


class _Active(threading.local):
    def __init__(self):
        self.masks: tuple[Tensor, ...] = ()
        self.batch: Any = None
        self.dense: Optional[DenseRows] = None
        self.real: dict[tuple[int, torch.dtype], RealRows] = {}

    def real_rows(self, mask: Tensor, dtype: torch.dtype) -> RealRows:
        """The real rows of a mask, computed once in a block."""
        key = id(mask), dtype
        if compiling():
            return RealRows(mask, dtype)
        if key not in self.real:
            self.real[key] = RealRows(mask, dtype)
        return self.real[key]


_active = _Active()


@contextlib.contextmanager
def real_rows(
    batch: Any = None,
    *,
    nodes: Optional[Tensor] = None,
    edges: Optional[Tensor] = None,
    graphs: Optional[Tensor] = None,
) -> Iterator[None]:
    """Lets norms that :func:`convert_batchnorm` has converted ignore a batch's padding inside the block.

    Given a batch, ``edgeless.pyg.nn.GPSConv`` also knows the largest number of nodes of a graph without waiting for the
    GPU.

    Args:
        batch: a batch of ``edgeless.pyg.loader.PaddedLoader``, or None.
        nodes, edges, graphs: masks ``[N]``, ``[E]`` and ``[G]``, true for real rows, instead of those of the batch.
    Raises:
        TypeError: neither a batch nor a mask is given.

    Example:
        >>> import torch
        >>> from edgeless.padding import convert_batchnorm, real_rows
        >>> norm = convert_batchnorm(torch.nn.BatchNorm1d(1))
        >>> with real_rows(nodes=torch.tensor([True, True, False])):
        ...     out = norm(torch.tensor([[1.0], [3.0], [100.0]]))
        >>> norm.running_mean  # a tenth of the mean of the two real rows
        tensor([0.2000])
    """
    given = (nodes, edges, graphs)
    if batch is not None:
        given = (batch.node_mask, batch.edge_mask, batch.graph_mask)
    masks = tuple(mask for mask in given if mask is not None)
    if not masks:
        raise TypeError("real_rows: a batch or a mask must be given")
    before = _active.masks, _active.batch, _active.dense, _active.real
    _active.masks, _active.batch, _active.dense, _active.real = masks, batch, None, {}
    try:
        yield
    finally:
        _active.masks, _active.batch, _active.dense, _active.real = before


def dense_rows_of(batch: Any) -> Optional[DenseRows]:
    """Returns where the nodes of the batch in force are in a dense tensor, or None if that is not known on the host.

    Args:
        batch: for every node the index of its graph, int64 ``[N]``. It has to be the same object as in the batch that
            :func:`real_rows` was given.

    Example:
        >>> import torch
        >>> from edgeless.padding import dense_rows_of
        >>> print(dense_rows_of(torch.tensor([0, 0, 1])))  # no batch is in force
        None
    """
    known = _active.batch
    if known is None or batch is None or compiling() or transforming():
        return None
    store = known._store._mapping if hasattr(known, "_store") else {}
    if store.get("batch") is not batch or store.get("ptr") is None or store.get("max_num_nodes") is None:
        return None
    if _active.dense is None:
        _active.dense = DenseRows(batch, store["ptr"], _most_nodes(store["ptr"], store["max_num_nodes"]))
    return _active.dense


def _most_nodes(ptr: Tensor, at_most: int) -> int:
    """The number of nodes of a batch's largest graph, or an upper bound where the host would have to wait."""
    return int(ptr.diff().max()) if ptr.device.type == "cpu" else at_most


# Norms ---------------------------------------------------------------------------------------------------------------


class BatchNorm1d(torch.nn.BatchNorm1d):
    """``torch.nn.BatchNorm1d`` whose statistics are those of the real rows within a block of :func:`real_rows`.

    Outside of such a block, and where it uses its running statistics, it behaves as the class itself. Rows of padding
    are normalised with the statistics of the real rows.
    """

    def forward(self, input: Tensor) -> Tensor:
        """``[R, C]`` to ``[R, C]``, where R is the number of nodes, of edges or of graphs of the batch.

        Raises:
            ValueError: another number of rows, or more than two dimensions.
        """
        if not _active.masks or not (self.training or self.running_mean is None):
            return super().forward(input)
        if input.dim() != 2:
            raise ValueError(f"BatchNorm1d: input must be [rows, channels] in a padded batch, got {list(input.shape)}")
        real = next((mask for mask in _active.masks if mask.numel() == len(input)), None)
        if real is None:
            sizes = ", ".join(str(mask.numel()) for mask in _active.masks)
            raise ValueError(
                f"BatchNorm1d: input must have as many rows as the batch has nodes, edges or graphs, {sizes}, got "
                f"{len(input)}"
            )
        if input.device.type == "cpu" and not compiling() and type(input) is Tensor:
            return self._of_rows(input, real)
        return self._of_mask(input, real)

    def _of_mask(self, input: Tensor, mask: Tensor) -> Tensor:
        """The norm without a synchronisation with the host."""
        wide = torch.promote_types(input.dtype, torch.float32)
        by_ops = compiling() or transforming() or type(input) is not Tensor
        real = _active.real_rows(mask, wide)
        norm = normalize_by_ops if by_ops else normalize
        out, mean, variance = norm(input.to(wide), real, self.weight, self.bias, self.eps)
        if self.training and self.track_running_stats and self.running_mean is not None:
            self._follow(mean, variance * real.unbiased)
        return out.to(input.dtype)

    def _of_rows(self, input: Tensor, real: Tensor) -> Tensor:
        """The norm on the CPU, where the real rows can be counted and torch's own norm of them is faster."""
        count = int(real.sum())
        begins = bool(real[:count].all())  # as in batches of a PaddedLoader
        places = None if begins else torch.cat((real.nonzero().squeeze(1), (~real).nonzero().squeeze(1)))
        rows = input if begins else input.index_select(0, places)
        rows, rest = rows.split([count, len(rows) - count])
        out, mean, scale = torch.native_batch_norm(
            rows,
            self.weight,
            self.bias,
            self.running_mean if self.training else None,
            self.running_var if self.training else None,
            True,
            self._share_of_this_batch(),
            self.eps,
        )
        padded = (rest.to(mean.dtype) - mean) * scale
        if self.weight is not None:
            padded = padded * self.weight + self.bias
        out = torch.cat((out, padded.to(out.dtype)))
        return out if begins else torch.empty_like(out).index_copy(0, places, out)

    def _share_of_this_batch(self) -> float:
        """The weight of this batch's statistics in the running statistics, after the batch was counted."""
        if not self.training or self.num_batches_tracked is None:
            return 0.0
        self.num_batches_tracked.add_(1)
        return 1 / int(self.num_batches_tracked) if self.momentum is None else self.momentum

    def _follow(self, mean: Tensor, variance: Tensor) -> None:
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            running = [self.running_mean, self.running_var]
            now = [mean.to(running[0].dtype), variance.to(running[1].dtype)]
            if self.momentum is not None:
                torch._foreach_lerp_(running, now, self.momentum)
                return
            share = 1 / self.num_batches_tracked
            for before, after in zip(running, now):
                before.lerp_(after, share.to(before.dtype))


# Norms whose results or statistics depend on other graphs' rows -> the reason why they are not converted.
_REFUSED = {
    "SyncBatchNorm": "its statistics are those of several processes",
    "BatchNorm2d": "its rows are no nodes",
    "BatchNorm3d": "its rows are no nodes",
    "HeteroBatchNorm": "its statistics are by type",
    "PairNorm": "it centres all nodes of a batch together",
    "MeanSubtractionNorm": "it centres all nodes of a batch together unless it is given the batch",
    "DiffGroupNorm": "its statistics are weighted by cluster",
}


def convert_batchnorm(model: torch.nn.Module) -> torch.nn.Module:
    """Makes the batch norms of a model ignore the padding of batches, in place.

    ``torch.nn.BatchNorm1d``, and PyG's BatchNorm, which contains one, keep their parameters, statistics and
    ``state_dict``; their class becomes :class:`BatchNorm1d`. Norms within graphs or rows (GraphNorm, LayerNorm,
    InstanceNorm without running statistics, given the batch) need no change.

    Returns:
        ``model`` itself.
    Raises:
        TypeError: model is no module.
        ValueError: a norm's result would depend on the padding and cannot be converted.

    Example:
        >>> import torch
        >>> from edgeless.padding import convert_batchnorm
        >>> convert_batchnorm(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)))[1].num_features
        4
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"convert_batchnorm: model must be a torch.nn.Module, got {type(model).__name__}")
    refused = []
    for name, module in model.named_modules():
        kind = next((cls.__name__ for cls in type(module).__mro__ if cls.__name__ in _REFUSED), None)
        if kind is not None:
            refused.append(f"{name or 'the model'} ({kind}): {_REFUSED[kind]}")
        elif "InstanceNorm" in type(module).__name__ and getattr(module, "track_running_stats", False):
            refused.append(f"{name or 'the model'} ({type(module).__name__}): it averages statistics over graphs")
        elif isinstance(module, torch.nn.BatchNorm1d) and type(module) not in (torch.nn.BatchNorm1d, BatchNorm1d):
            refused.append(f"{name or 'the model'} ({type(module).__name__}): it is a subclass with changes of its own")
    if refused:
        raise ValueError("convert_batchnorm: norms that would see the padding remain: " + "; ".join(refused))
    for module in model.modules():
        if type(module) is torch.nn.BatchNorm1d:
            module.__class__ = BatchNorm1d
    return model

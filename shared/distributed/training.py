"""Losses, gradient averaging and batch norm for models whose graph is partitioned over several processes."""

from __future__ import annotations

from typing import Optional

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..checks import opmath_dtype
from ..choices.backends import FAMILIES
from .graph import DistGraph
from .process import Ranks

__all__ = ["BatchNorm1d", "average_gradients", "convert_batchnorm", "gather", "mean", "refusals"]


def mean(loss: Tensor, mask: Optional[Tensor], dg: DistGraph) -> Tensor:
    """The mean of the per-node ``loss`` over the nodes of all processes where ``mask`` is set.

    DDP averages gradients over processes. The share of this process is scaled so that the average is the gradient of
    the mean. Every process takes part in the backward, even without a node in the mask.

    Args:
        loss: ``[n]``, one value for every own node.
        mask: ``[n]`` bool; None: all nodes.
    Returns:
        Tensor without dimensions, with the same value on every process; NaN if no node is in the mask.

    Example:
        >>> import tempfile, torch
        >>> import edgeless.distributed as ed
        >>> edge_index = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = ed.partition(edge_index, 4, 2, folder, method="contiguous")
        ...     dg = ed.load(folder)  # alone, a process takes all parts
        >>> ed.mean(torch.tensor([1.0, 2.0, 3.0, 6.0]), dg.nodes > 1, dg)
        tensor(4.5000)
    """
    if not isinstance(loss, Tensor) or tuple(loss.shape) != (dg.num_own,):
        came = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f"mean: loss must have shape [n] = [{dg.num_own}], got {came}; use reduction='none'")
    if mask is not None and (mask.dtype != torch.bool or mask.shape != loss.shape):
        raise ValueError(f"mean: mask must be bool of shape [n] = [{dg.num_own}], got {mask.dtype} {list(mask.shape)}")
    ranks = dg.halo.ranks
    chosen = loss if mask is None else torch.where(mask, loss, 0.0)
    share = chosen.sum()
    count = share.new_tensor(loss.numel(), dtype=torch.float64) if mask is None else mask.sum(dtype=torch.float64)
    ranks.agree("takes the mean of", str(loss.dtype))
    total = ranks.sum(torch.stack((share.detach().double(), count)))
    share = share * (ranks.size / total[1]).to(share.dtype)
    return share + ((total[0] / total[1]).to(share.dtype) - share.detach())


def average_gradients(model: nn.Module) -> None:
    """Averages the gradients of ``model`` over all processes, in one all-reduce per dtype and device. Call it after
    ``backward()``, in place of DDP.

    For models of up to a few megabytes and small batches. DDP hides its all-reduce behind the backward, which is
    profitable for larger models; for small ones there is little to hide, and DDP's hooks cost host time. Processes must
    start with the same parameters, as they do with the same seed. A missing gradient counts as zero.

    Example:
        >>> import torch
        >>> import edgeless.distributed as ed
        >>> model = torch.nn.Linear(2, 1)
        >>> model(torch.ones(3, 2)).sum().backward()
        >>> ed.average_gradients(model)  # alone, a process has the average
        >>> model.weight.grad
        tensor([[3., 3.]])
    """
    ranks, alike = Ranks(0), {}
    if ranks.size == 1:
        return
    for parameter in model.parameters():
        if parameter.requires_grad:
            alike.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    for parameters in alike.values():
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        # ATen's flatten and unflatten loop in C++: with small batches, host time dominates.
        average = ranks.sum(torch.ops.aten.flatten_dense_tensors(grads)).div_(ranks.size)
        for parameter, part in zip(parameters, torch.ops.aten.unflatten_dense_tensors(average, grads)):
            parameter.grad = part


def gather(rows: Tensor, dg: DistGraph) -> Tensor:
    """Gathers all processes' own ``rows`` ``[n, ...]`` to ``[N, ...]`` on each, in the order of the whole graph.

    Example:
        >>> import tempfile, torch
        >>> import edgeless.distributed as ed
        >>> edge_index = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = ed.partition(edge_index, 4, 2, folder, method="contiguous")
        ...     dg = ed.load(folder)  # alone, a process takes all parts
        >>> ed.gather(torch.arange(4.0)[dg.nodes], dg)
        tensor([0., 1., 2., 3.])
    """
    return dg.gather(rows)


class _Sum(torch.autograd.Function):
    """All-reduces values over the ranks; the backward all-reduces the gradients."""

    @staticmethod
    def forward(ctx, values):
        total = values.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        total = grad.clone()
        dist.all_reduce(total)
        return total


class BatchNorm1d(nn.BatchNorm1d):
    """``torch.nn.BatchNorm1d`` over the nodes of all processes, on any device; SyncBatchNorm lacks CPU support."""

    def forward(self, x: Tensor) -> Tensor:
        """The normalised rows; ``x`` is ``[n, F]``, and n may differ between processes and be 0."""
        batch = self.training or not self.track_running_stats
        if not batch or not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return super().forward(x)
        self._check_input_dim(x)
        dtype = opmath_dtype(x.dtype)
        rows = x.to(dtype)
        sums = _Sum.apply(torch.cat((rows.sum(0), rows.new_tensor([rows.size(0)]))))
        count = sums[-1].detach()
        average = sums[:-1] / count
        centred = rows - average
        variance = _Sum.apply((centred * centred).sum(0)) / count
        self._track(average.detach(), variance.detach(), count)
        out = centred * torch.rsqrt(variance + self.eps)
        if self.affine:
            out = torch.addcmul(self.bias, out, self.weight)
        return out.to(x.dtype)

    @torch.no_grad()
    def _track(self, average: Tensor, variance: Tensor, count: Tensor) -> None:
        if not (self.training and self.track_running_stats):
            return
        self.num_batches_tracked.add_(1)
        share = 1 / self.num_batches_tracked if self.momentum is None else self.momentum
        self.running_mean.lerp_(average.to(self.running_mean.dtype), share)
        unbiased = variance * (count / (count - 1))
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)


# Framework modules that reduce over all nodes, and would see only those of this process.
_OVER_ALL_NODES = {
    "norm": ("GraphNorm", "PairNorm", "MeanSubtractionNorm", "InstanceNorm", "GraphSizeNorm", "DiffGroupNorm"),
    "pool": ("TopKPooling", "SAGPooling", "ASAPooling", "EdgePooling", "MemPooling", "PANPooling", "ClusterPooling"),
    "glob": ("SumPooling", "AvgPooling", "MaxPooling", "SortPooling", "GlobalAttentionPooling", "Set2Set"),
}
_FRAMEWORKS = ("torch_geometric", "dgl")


def refusals(model: nn.Module) -> list[str]:
    """The reasons why modules of ``model`` cannot run on a partitioned graph, one sentence each; empty if all can.

    Example:
        >>> import torch
        >>> import edgeless.distributed as ed
        >>> ed.refusals(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()))
        []
    """
    found = []
    for name, module in model.named_modules():
        cls, place = type(module), f"{name or 'the model'} is a {type(module).__name__}"
        if cls.__module__.split(".")[0] not in _FRAMEWORKS and not hasattr(module, "_fusion_refusals"):
            continue
        runs = hasattr(module, "_fusion_refusals") or getattr(module, "_runs_on_parts", False)
        if cls.__name__ in _OVER_ALL_NODES["norm"] or getattr(module, "mode", None) == "graph":
            found.append(f"{place}, which normalises over all nodes and would see those of one process only")
        elif cls.__name__ in _OVER_ALL_NODES["pool"] or cls.__name__ in _OVER_ALL_NODES["glob"]:
            found.append(f"{place}, which pools over all nodes and would see those of one process only")
        elif not runs and any(is_layer(module) for is_layer in FAMILIES.values()):
            found.append(
                f"{place}, which edgeless has no fused layer for, or which edgeless.accelerate has not swapped"
            )
    return found


def convert_batchnorm(model: nn.Module) -> nn.Module:
    """Makes every ``torch.nn.BatchNorm1d`` of ``model`` normalise over the nodes of all processes, in place.

    Parameters and buffers stay the same objects, and ``state_dict`` keeps its keys. Call it before wrapping in DDP.

    Raises:
        ValueError: the model has modules that cannot run on a partitioned graph; the message lists :func:`refusals`.

    Example:
        >>> import torch
        >>> import edgeless.distributed as ed
        >>> model = ed.convert_batchnorm(torch.nn.Sequential(torch.nn.BatchNorm1d(2)))
        >>> model(torch.tensor([[0.0, 1.0], [2.0, 1.0]])).shape
        torch.Size([2, 2])
    """
    if reasons := refusals(model):
        raise ValueError(f"convert_batchnorm: {'; '.join(reasons)}")
    for module in model.modules():
        if type(module) is nn.BatchNorm1d:
            module.__class__ = BatchNorm1d
    return model

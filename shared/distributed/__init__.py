"""Training on one graph that is partitioned over several processes of torch.distributed: see docs/scale-out.md."""

from .graph import DistGraph
from .load import load
from .partition import partition
from .process import init
from .training import average_gradients, convert_batchnorm, gather, mean, refusals

__all__ = [
    "DistGraph",
    "average_gradients",
    "convert_batchnorm",
    "gather",
    "init",
    "load",
    "mean",
    "partition",
    "refusals",
]

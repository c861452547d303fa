"""How tests start processes without importing torch in each, which takes seconds."""

import multiprocessing
import sys

import torch


def forking() -> str:
    """The start method of multiprocessing for these tests: ``"forkserver"``, which forks a server that has imported
    what they use and has run nothing: no threads, no autograd. The first process starts the server. torch._dynamo is
    among the imports, since custom autograd functions, optimizers and DDP import it when they are first called.

    With a GPU it is ``"spawn"``: the imports look for the GPU, and CUDA does not survive a fork.
    """
    if torch.cuda.is_available():
        return "spawn"
    frameworks = [name for name in ("torch_geometric", "dgl") if name in sys.modules]
    multiprocessing.set_forkserver_preload(["torch", "torch._dynamo", *frameworks, "edgeless.distributed"])
    return "forkserver"

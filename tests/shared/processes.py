"""Processes of tests that need not import torch, which takes seconds."""

import multiprocessing
import sys

import torch


def forking() -> str:
    """The start method of multiprocessing that forks a process which has imported what these tests use, and has run
    nothing: no threads, no autograd. It starts with the first of them. Autograd functions of one's own, optimizers and
    DDP import torch._dynamo when they are first called.

    Where there is a GPU, of new processes: what is imported looks for it, and CUDA does not survive a fork.
    """
    if torch.cuda.is_available():
        return "spawn"
    frameworks = [name for name in ("torch_geometric", "dgl") if name in sys.modules]
    multiprocessing.set_forkserver_preload(["torch", "torch._dynamo", *frameworks, "edgeless.distributed"])
    return "forkserver"

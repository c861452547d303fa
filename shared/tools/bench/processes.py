"""Several processes of one group for a measurement, as torchrun would start them."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import edgeless.distributed as ed
from edgeless.tools.cli.process import end_after

TIMEOUT = 600.0


def run(work: Callable, processes: int, config: dict, *inputs) -> list:
    """Runs ``work(rank, processes, device, config, *inputs)`` in every process; returns what the first one yields.

    Args:
        work: a generator function in a module that a spawned process can import.
        config: a dictionary with device ("cpu" or "cuda") and threads.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    answers = mp.get_context("spawn").SimpleQueue()
    mp.spawn(_enter, (work, processes, port, config, inputs, answers), nprocs=processes)
    found = []
    while not answers.empty():
        found.append(answers.get())
    return found


def _enter(rank: int, work: Callable, processes: int, port: int, config: dict, inputs: tuple, answers) -> None:
    end_after(multiprocessing.parent_process().join)
    torch.set_num_threads(config["threads"])
    if processes > 1:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank, "LOCAL_RANK": rank}
        os.environ.update({name: str(value) for name, value in {**address, "WORLD_SIZE": processes}.items()})
    device = ed.init(config["device"], timeout=TIMEOUT)
    for found in work(rank, processes, device, config, *inputs):
        if rank == 0:
            answers.put(found)
    if processes > 1:
        dist.destroy_process_group()
        # DistributedDataParallel leaves gloo's threads running (torch 2.13): an interpreter that ends beside them may
        # abort.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

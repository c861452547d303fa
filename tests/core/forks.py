"""Runs work in a forked child with a time limit, so that a test finds children that hang."""

import os
import time

import torch


def run_in_fork(work, seconds: float = 20.0) -> bool:
    """Runs ``work()`` in a forked child and returns its truth. Raises TimeoutError if the child does not end."""
    child = os.fork()
    if child == 0:
        status = 1
        torch.set_num_threads(1)  # OpenMP's threads stay with the parent, and torch would wait for them
        try:
            status = 0 if work() else 1
        finally:
            os._exit(status)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.005)
    os.kill(child, 9)
    os.waitpid(child, 0)
    raise TimeoutError(f"the forked child did not end within {seconds} seconds")

"""A forked child for tests: what it finds out, with a limit of time, since a child that hangs is what is looked for."""

import os
import time

import torch


def run_in_fork(work, seconds: float = 20.0) -> bool:
    """Whether ``work()`` is true in a forked child; TimeoutError where the child does not come to an end."""
    child = os.fork()
    if child == 0:
        status = 1
        torch.set_num_threads(1)  # those of OpenMP stay with the parent, and torch too would wait for them
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

"""Runs one side of a comparison in a process of its own, so that its memory is its own."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import Any, Optional

from .process import end_after

MARK = "@edgeless "  # lines of a child's output that are events; anything else is the frameworks' chatter


class ChildError(RuntimeError):
    """A child process ended without a result; the message ends with what it wrote last."""


def emit(kind: str, **fields: Any) -> None:
    """Sends one event from the child to the parent. :func:`run_child` returns the event ``result``."""
    print(MARK + json.dumps({"event": kind, **fields}), flush=True)


def configuration() -> dict:
    """Returns the ``config`` of :func:`run_child` in the child, which from then on ends with its parent."""
    if hasattr(select, "poll"):  # not on Windows
        output = select.poll()
        output.register(sys.stdout.fileno(), 0)  # the pipe to the parent, polled only for its closing
        end_after(output.poll)
    return json.load(sys.stdin)


def run_child(
    module: str,
    config: dict,
    on_event: Optional[Callable[[dict], None]] = None,
    limit: Optional[float] = None,
) -> dict:
    """Runs ``python -m module`` with ``config`` as JSON on its standard input.

    Args:
        module: a module whose main calls :func:`configuration` and then :func:`emit`.
        on_event: called with every event but the result.
        limit: seconds after which the child is killed.

    Returns:
        The fields of the child's ``result`` event.

    Raises:
        ChildError: if the child fails, sends no result or runs longer than ``limit``.
    """
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    result = None
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as chatter:
        process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=chatter,
            encoding="utf-8",
            errors="replace",
            env=environment,
        )
        expired = threading.Event()
        alarm = threading.Timer(limit or 0, lambda: (expired.set(), process.kill()))
        if limit is not None:
            alarm.start()
        try:
            with contextlib.suppress(BrokenPipeError):  # the child has ended already, and its exit status tells more
                json.dump(config, process.stdin)
                process.stdin.close()
            for line in process.stdout:
                if not line.startswith(MARK):
                    chatter.write(line)
                    continue
                event = json.loads(line[len(MARK) :])
                if event.pop("event") == "result":
                    result = event
                elif on_event is not None:
                    on_event(event)
            code = process.wait()
        finally:
            alarm.cancel()
            process.kill()
            process.wait()
        if result is None and expired.is_set():
            raise ChildError(f"{module} ran longer than {limit:g} s")
        if code != 0 or result is None:
            chatter.seek(0)
            tail = "".join(chatter.readlines()[-12:]).rstrip()
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit status {code}"
            hint = " (out of memory?)" if code == -9 else ""
            raise ChildError(f"{module} {how}{hint}\n{tail}")
    return result

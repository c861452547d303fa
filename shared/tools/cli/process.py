"""How a command ends when somebody else ends it: by a signal, or by closing the pipe that it writes to."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

PIPE_CLOSED = 128 + 13  # as the shell counts a process that SIGPIPE ended


class Terminated(BaseException):
    """A signal asks the process to end; as an exception, so that children are ended and files closed on the way."""

    def __init__(self, number: int):
        super().__init__(number)
        self.status = 128 + number


@contextlib.contextmanager
def signals_raise() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP raise :class:`Terminated`, where by default they leave children behind."""
    if threading.current_thread() is not threading.main_thread():  # which alone may set handlers
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise Terminated(number)

    caught = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    # One that is ignored, as under nohup, stays so.
    before = {number: signal.signal(number, stop) for number in caught if signal.getsignal(number) != signal.SIG_IGN}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_after(wait: Callable[[], object]) -> None:
    """Ends this process at once when ``wait``, which a thread of its own calls, returns: when its parent is gone, say.

    A parent that is killed cannot end its children, and who measures or trains notices nothing of it.
    """

    def end() -> None:
        wait()
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()


def print_anything() -> None:
    """Lets standard output and error print signs that their encoding lacks, as escapes."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def discard_output() -> None:
    """What is still to be written to standard output goes nowhere: the interpreter would complain at its end."""
    with contextlib.suppress(OSError, AttributeError, ValueError):  # no file behind it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

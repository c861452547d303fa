"""The end of a command by others: by a signal, or by closing the pipe that it writes to."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

PIPE_CLOSED = 128 + 13  # the shell's exit status for a process that SIGPIPE ended


class Terminated(BaseException):
    """Raised by a signal to end the process, so that children are ended and files closed on the way."""

    def __init__(self, number: int):
        super().__init__(number)
        self.status = 128 + number


@contextlib.contextmanager
def signals_raise() -> Iterator[None]:
    """Makes SIGTERM and SIGHUP raise :class:`Terminated` in the block. By default they would leave children behind."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise Terminated(number)

    caught = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    # A signal that is ignored, as under nohup, stays ignored.
    before = {number: signal.signal(number, stop) for number in caught if signal.getsignal(number) != signal.SIG_IGN}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_after(wait: Callable[[], object]) -> None:
    """Ends this process when ``wait`` returns, which a separate thread calls: for example when the parent has ended.

    A parent that is killed cannot end its children, which would go on measuring or training.
    """

    def end() -> None:
        wait()
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()


def print_anything() -> None:
    """Lets standard output and error print characters that their encoding lacks, as escapes."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def discard_output() -> None:
    """Discards pending output, about which the interpreter would complain at its end."""
    with contextlib.suppress(OSError, AttributeError, ValueError):  # no file behind it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

"""Tables and progress on a terminal: by rich where it is installed, in plain text where it is not."""

from __future__ import annotations

import contextlib
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Optional

try:
    import rich.console
    import rich.progress
    import rich.table
except ImportError:  # the extras [demo] and [bench] bring it
    rich = None

NEXT_LINE_AFTER = 5.0  # seconds between lines of progress where there is no terminal to redraw


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str] = ()) -> None:
    """Prints rows of strings; the first column is left-aligned, the others right-aligned."""
    if rich is None:
        print(plain_table(title, columns, rows))
    else:
        print(fitted(title))  # not the table's own title, which is wrapped to the table's width
        table = rich.table.Table(header_style="bold")
        # A pipe has no width: never cut a table for it.
        widths = column_widths(columns, rows, shutil.get_terminal_size().columns if sys.stdout.isatty() else 200)
        for i, column in enumerate(columns):
            table.add_column(column, justify="left" if i == 0 else "right", width=widths[i])
        for row in rows:
            table.add_row(*row)
        console = rich.console.Console(width=_table_width(widths), highlight=False)
        with console.capture() as captured:  # rich ends the process when a pipe is closed
            console.print(table)
        print(captured.get(), end="")
    for note in notes:
        print(fitted(note))


def column_widths(columns: Sequence[str], rows: Sequence[Sequence[str]], room: int) -> list[int]:
    """Widths with which the table fits into ``room``, or larger ones if a figure or a word would be cut."""
    cells = list(zip(columns, *rows))
    widths = [max(map(len, column)) for column in cells]
    # A figure with its unit stays in one line; a heading or longer text may be broken between words.
    least = [max(_longest_word(heading), *map(_least_width, rest), 0) for heading, *rest in cells]
    while _table_width(widths) > room and widths != least:
        widest = max(range(len(widths)), key=lambda i: (widths[i] > least[i], widths[i]))
        widths[widest] -= 1
    return widths


def _table_width(widths: Sequence[int]) -> int:
    return sum(widths) + 3 * len(widths) + 1  # with borders


def _least_width(cell: str) -> int:
    return len(cell) if len(cell) <= 12 else _longest_word(cell)


def _longest_word(text: str) -> int:
    return max(map(len, text.split()), default=0)


def fitted(text: str) -> str:
    """``text`` in lines that fit the terminal; in one line where there is none."""
    return textwrap.fill(text, shutil.get_terminal_size().columns) if sys.stdout.isatty() else text


def plus_minus(text: str) -> str:
    """``text`` after the sign for a spread, if standard output can print it."""
    try:
        "±".encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return f"+-{text}"
    return f"±{text}"


def plain_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The same table in plain text."""
    cells = [list(columns), *map(list, rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]

    def line(row: Sequence[str]) -> str:
        first, *rest = (cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths)))
        return "  ".join((first, *rest)).rstrip()

    return "\n".join([title, line(columns), "  ".join("-" * w for w in widths), *map(line, rows)])


Advance = Callable[[Optional[str]], None]


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str, int], Advance]]:
    """Yields ``add(name, total)``, which starts a bar and returns ``advance(text)``, called once per step."""
    if rich is None or not sys.stdout.isatty():
        yield _plain_progress
        return
    bars = rich.progress.Progress(
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(bar_width=15),  # a name, the columns and a text in 80 columns
        rich.progress.MofNCompleteColumn(),
        rich.progress.TimeElapsedColumn(),
        rich.progress.TextColumn("{task.fields[text]}"),
    )
    with bars:

        def add(name: str, total: int) -> Advance:
            task = bars.add_task(name, total=total, text="")
            return lambda text=None: bars.update(task, advance=1, text=text or "")

        yield add


def _plain_progress(name: str, total: int) -> Advance:
    done, last = 0, time.monotonic()
    print(f"{name}: started", flush=True)

    def advance(text: Optional[str] = None) -> None:
        nonlocal done, last
        done += 1
        if done == total or time.monotonic() - last > NEXT_LINE_AFTER:
            last = time.monotonic()
            print(f"{name}: {done}/{total}  {text or ''}".rstrip(), flush=True)

    return advance


def megabytes(count: float) -> str:
    """Bytes as MB with three significant digits."""
    return f"{count / 1e6:,.0f} MB" if count >= 1e7 else f"{count / 1e6:.1f} MB"


def milliseconds(ms: float) -> str:
    """Milliseconds with three significant digits."""
    if ms >= 100:
        return f"{ms:,.0f}"
    return f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}" if ms >= 1 else f"{ms:.3f}"


def times(ratio: float) -> str:
    """A ratio as text."""
    return f"{ratio:.1f}x" if ratio < 100 else f"{ratio:.0f}x"

"""Draws the figures of the demo's table."""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path

from edgeless.tools.cli.console import megabytes, milliseconds
from edgeless.tools.cli.devices import UsageError

COLOURS = {"stock": "#9aa5b1", "edgeless": "#1f6feb"}


def check_drawable(file: Path) -> None:
    """Raises UsageError where matplotlib is missing or knows no format of this name."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise UsageError("--plot needs matplotlib; install it with: pip install 'edgeless[demo]'") from None
    formats = sorted(FigureCanvasBase.get_supported_filetypes())
    if file.suffix.lower()[1:] not in formats:
        raise UsageError(f"--plot {file}: the name must end in one of .{', .'.join(formats)}")


def draw(file: Path, title: str, names: dict[str, str], sides: dict[str, dict]) -> None:
    """Three panels: epoch time, peak memory, and the loss of the first seed over the seconds of training."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (time_axes, memory_axes, loss_axes) = plt.subplots(1, 3, figsize=(12, 4), width_ratios=(1, 1, 2))
    for axes, heading, read, show in (
        (time_axes, "epoch, ms", lambda side: 1e3 * statistics.median(side["seconds"]), milliseconds),
        (memory_axes, "peak memory, MB", lambda side: side["peak_bytes"] / 1e6, lambda mb: megabytes(1e6 * mb)[:-3]),
    ):
        values = [read(sides[side]) for side in names]
        bars = axes.bar([name.split()[0] for name in names.values()], values, color=[COLOURS[side] for side in names])
        axes.bar_label(bars, [show(value) for value in values])
        axes.set_title(heading)
        axes.margins(y=0.15)
    for side, name in names.items():
        losses = sides[side]["runs"][0]["losses"]
        elapsed = list(itertools.accumulate(sides[side]["seconds"][: len(losses)]))
        loss_axes.plot(elapsed, losses, label=name, color=COLOURS[side], marker=".", markersize=4)
    loss_axes.set_xscale("log")
    loss_axes.xaxis.set_major_formatter("{x:g}")
    loss_axes.xaxis.set_minor_formatter("")
    loss_axes.set_xlabel("seconds of training, log scale")
    loss_axes.set_title("training loss")
    loss_axes.legend()
    for axes in (time_axes, memory_axes, loss_axes):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=9, parse_math=False)  # the name of a file may hold dollars
    figure.tight_layout()
    figure.savefig(file, dpi=150)
    plt.close(figure)

"""The README's picture: time and peak memory of a training step, as SVG for light and for dark pages.

The SVG is written as text and not by a plotting library, so that the same figures give the same file everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Optional

from edgeless.tools.cli.console import megabytes, milliseconds
from edgeless.tools.cli.layers import LAYERS

from .peers import ours
from .runs import Suite

# The runs that are drawn if they exist, one below the other: suite, graph, description.
PANELS = (
    ("cpu", "tolokers", "tolokers, 12 thousand nodes, 1 million edges"),
    ("h200-layers", "arxiv", "twin of arxiv, 169 thousand nodes, 1.2 million edges"),
)
SHOWN = ("gatv2", "gat", "transformer")
PEERS = {"pyg": "PyG", "pyg-compiled": "PyG compiled", "dgl": "DGL", "edgeless-pyg": "edgeless"}

NAMES, WIDTH, GAP, BAR, STEP, VALUE = 130, 270, 40, 13, 16, 70  # pixels; VALUE: beside the longest bar


@dataclass(frozen=True)
class Theme:
    """Colours of text and of the peers' bars."""

    text: str
    quiet: str
    bars: tuple[str, ...]


THEMES = {
    "light": Theme("#1f2328", "#59636e", ("#8c959f", "#afb8c1", "#6e7781", "#0969da")),
    "dark": Theme("#f0f6fc", "#9198a1", ("#7d8590", "#57606a", "#9ea7b3", "#4493f8")),
}


def files(suites: dict[str, Suite]) -> dict[str, str]:
    """File name -> SVG; empty if none of these runs was committed."""
    panels = [(suites[suite], graph, title) for suite, graph, title in PANELS if suite in suites]
    panels = [panel for panel in panels if panel[1] in panel[0].graphs()]
    return {f"picture-{name}.svg": draw(panels, theme) for name, theme in THEMES.items()} if panels else {}


def draw(panels: list[tuple[Suite, str, str]], theme: Theme) -> str:
    """All panels, one below the other."""
    parts: list[str] = []
    colours: dict[str, str] = {}  # measured peer -> colour
    y = 44
    for suite, graph, title in panels:
        layers = [layer for layer in SHOWN if _find(suite, graph, layer, "edgeless-pyg")]
        found = {peer: [_find(suite, graph, layer, peer) for layer in layers] for peer in PEERS}
        found = {peer: rows for peer, rows in found.items() if any(rows)}
        colours.update({peer: theme.bars[list(PEERS).index(peer)] for peer in found})
        block = len(found) * STEP + 10  # the bars of a layer
        where = suite.settings[0]["device"]
        parts.append(_text(0, y, f"{where}: {title}", theme.text, 13, bold=True))
        for left, heading, key, show in (
            (NAMES, "forward + backward, ms", "median_ms", milliseconds),
            (NAMES + WIDTH + GAP, "peak memory", "peak_bytes", megabytes),
        ):
            parts.append(_text(left, y + 22, heading, theme.quiet, 12))
            values = {peer: [row and row[key] for row in rows] for peer, rows in found.items()}
            parts += _bars(left, y + 32, block, values, show, colours, theme)
        for i, layer in enumerate(layers):
            middle = y + 32 + i * block + len(found) * STEP / 2 + 3
            parts.append(_text(0, middle, LAYERS[layer].baseline, theme.text, 12))
        y += 32 + len(layers) * block + 22
    width, height = NAMES + 2 * WIDTH + GAP, y - 16
    body = "\n".join(_legend(colours, theme) + parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="-apple-system, Segoe UI, Helvetica, Arial, sans-serif">\n{body}\n</svg>\n'
    )


def _find(suite: Suite, graph: str, layer: str, peer: str) -> Optional[dict]:
    return suite.find(graph, (layer, "fp32"), peer, mode="forward_backward")


def _text(x: float, y: float, text: str, colour: str, size: int, bold: bool = False) -> str:
    weight = ' font-weight="600"' if bold else ""
    return f'<text x="{x:g}" y="{y:g}" fill="{colour}" font-size="{size}"{weight}>{text}</text>'


def _legend(colours: dict[str, str], theme: Theme) -> list[str]:
    parts = []
    for i, (peer, colour) in enumerate(colours.items()):
        parts.append(f'<rect x="{NAMES + 120 * i}" y="4" width="12" height="12" fill="{colour}"/>')
        parts.append(_text(NAMES + 120 * i + 18, 14, PEERS[peer], theme.text, 12))
    return parts


def _bars(
    left: int,
    top: int,
    block: int,
    values: dict[str, list[Optional[float]]],
    show: Callable[[float], str],
    colours: dict[str, str],
    theme: Theme,
) -> list[str]:
    """A bar for every peer and layer, all to the same scale, with its figure at the end."""
    longest = max((value for row in values.values() for value in row if value is not None), default=1)
    parts = []
    for j, (peer, row) in enumerate(values.items()):
        for i, value in enumerate(row):
            y, length = top + i * block + j * STEP, 0.0
            if value is not None:
                length = round(max(1.5, (WIDTH - VALUE) * value / longest), 1)
                parts.append(f'<rect x="{left}" y="{y}" width="{length:g}" height="{BAR}" fill="{colours[peer]}"/>')
            label = "not measured" if value is None else show(value)
            colour = theme.text if ours(peer) else theme.quiet
            parts.append(_text(left + length + 5, y + 11, label, colour, 11, bold=ours(peer)))
    return parts

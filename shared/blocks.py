"""Files of a graph's weighted sparse blocks (:mod:`edgeless.graph.wsb`), and an estimate of their size.

Blocks can be built without a GPU and are the same on every device. One safetensors file holds those of both
directions: ``by_dst.first``, ``.order``, ``.columns`` and ``.bits`` of :class:`edgeless.graph.wsb.Blocks`, and the
same of ``by_src`` unless one array of neighbours serves both directions. The metadata hold the format and its version,
the graph's sizes and fingerprint, and a fingerprint of the tensors.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Union

import torch
from torch import Tensor

from .files.tensor_files import opened, safetensors, write
from .graph.fingerprint import Fingerprint
from .graph.handle import Graph
from .graph.wsb import COLUMNS, HEIGHT, Blocks, WsbFormat, blocks_of, num_listed

__all__ = ["load", "num_bytes", "save"]

FORMAT, VERSION = "edgeless-blocks", "1"
_SIDES = ("by_dst", "by_src")
_BLOCK_BYTES = 4 * COLUMNS + 4 * COLUMNS * HEIGHT // 32  # an int32 index and HEIGHT bits per column
_SAMPLE = 256  # windows that an estimate counts, per direction
_AT_ONCE = 1024  # windows whose edges are sorted at a time

Side = tuple[str, list[Tensor], int]  # name, [indptr, indices], number of columns


def _expect_graph(call: str, graph: Any) -> None:
    if not isinstance(graph, Graph):
        raise TypeError(f"{call}: graph must be an edgeless.Graph, got {type(graph).__name__}")


def _sides(graph: Graph) -> list[Side]:
    """Returns the directions of a graph, only one if both have the same arrays. Builds the transpose."""
    arrays = [graph.csr_arrays(False), graph.csc_arrays(False)]
    sides = list(zip(_SIDES, arrays, (graph.num_src, graph.num_dst)))
    return sides[:1] if arrays[0][1] is arrays[1][1] else sides


def num_bytes(graph: Graph, *, exact: bool = False) -> int:
    """Returns the bytes of the blocks of both directions without building them. Builds the transpose.

    Args:
        graph: on any device.
        exact: count all windows of 32 rows. Else the result is an estimate from 256 evenly spaced ones per direction.
    Raises:
        TypeError: graph is no Graph.

    Example:
        >>> import torch
        >>> from edgeless import Graph, blocks
        >>> graph = Graph.from_edge_index(torch.tensor([[0, 1, 2], [1, 2, 0]]))
        >>> blocks.num_bytes(graph)
        280
    """
    _expect_graph("blocks.num_bytes", graph)
    total = 0
    for _, (indptr, indices), num_columns in _sides(graph):
        num_windows = -(-(indptr.numel() - 1) // HEIGHT)
        looked_at = num_windows if exact else min(num_windows, _SAMPLE)
        windows = torch.arange(looked_at, device=indptr.device) * num_windows // max(looked_at, 1)
        blocks = 0
        for some in windows.split(_AT_ONCE):
            blocks += int(((num_listed(indptr, indices, num_columns, some) + COLUMNS - 1) // COLUMNS).sum())
        if looked_at < num_windows:
            blocks = blocks * num_windows // looked_at
        total += 4 * (2 * num_windows + 1) + _BLOCK_BYTES * blocks
    return total


def save(graph: Graph, file: Union[str, os.PathLike]) -> None:
    """Writes the blocks of a graph to one file. Builds the blocks, and the transpose if the graph has none yet.

    Works without a GPU. Nobody sees an incomplete file, even if several threads or processes save to it.

    Args:
        graph: on any device.
        file: the path, whose file is replaced if it exists.
    Raises:
        TypeError: graph is no Graph.
        ImportError: safetensors is missing; ``pip install 'edgeless[blocks]'``.
        OSError: the file cannot be written.

    Example:
        >>> import tempfile, torch
        >>> from edgeless import Graph, blocks
        >>> graph = Graph.from_edge_index(torch.tensor([[0, 1, 2], [1, 2, 0]]))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     blocks.save(graph, f"{folder}/graph.blocks")
        ...     blocks.load(graph, f"{folder}/graph.blocks")
    """
    from edgeless import __version__

    call = "blocks.save"
    _expect_graph(call, graph)
    library = safetensors(call, "blocks")
    tensors = {}
    for name, arrays, num_columns in _sides(graph):
        found = blocks_of(*arrays, num_columns)
        tensors.update({f"{name}.{part}": t.cpu() for part, t in zip(Blocks._fields, found)})
    about = {
        **_about(graph),
        "contents": _contents(tensors),
        "written_by": f"edgeless {__version__}, torch {torch.__version__}",
    }
    write(call, library, Path(file), tensors, about)


def load(graph: Graph, file: Union[str, os.PathLike]) -> None:
    """Gives a graph the blocks that :func:`save` wrote for the same graph, so that they are not built again.

    ``edgeless.engine`` still chooses the engine. All that the kernels rely on is checked, so that no file can make them
    read out of bounds.

    Args:
        graph: on the device where the blocks will be used.
        file: a file for a graph with the same sizes and edges, in any order of the edges.
    Raises:
        TypeError: graph is no Graph.
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged or truncated, of another kind, version or graph, or its blocks are invalid.
        ImportError: safetensors is missing.

    Example:
        >>> import tempfile, torch
        >>> from edgeless import Graph, blocks
        >>> graph = Graph.from_edge_index(torch.tensor([[0, 1, 2], [1, 2, 0]]))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     blocks.save(graph, f"{folder}/graph.blocks")
        ...     blocks.load(graph, f"{folder}/graph.blocks")
    """
    call = "blocks.load"
    _expect_graph(call, graph)
    file = Path(file)
    if not file.is_file():
        raise FileNotFoundError(f"{call}: {file} must be a file that edgeless.blocks.save wrote, and is none")
    sides = _sides(graph)
    tensors = _read(call, file, graph, [f"{name}.{part}" for name, _, _ in sides for part in Blocks._fields])
    given = {}
    for name, arrays, num_columns in sides:
        blocks = Blocks(*(tensors[f"{name}.{part}"] for part in Blocks._fields))
        _check(f"{call}: {file}: {name}", blocks, arrays[0].numel() - 1, num_columns, graph.num_edges)
        given[arrays[0].data_ptr(), arrays[1].data_ptr()] = blocks
    graph.format("wsb", lambda _: WsbFormat()).take(graph, given)


def _about(graph: Graph) -> dict[str, str]:
    """Returns the metadata that identify the format and the graph of a file."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "height": str(HEIGHT),
        "columns": str(COLUMNS),
        "num_src": str(graph.num_src),
        "num_dst": str(graph.num_dst),
        "num_edges": str(graph.num_edges),
        "fingerprint": graph.fingerprint,
    }


def _contents(tensors: dict[str, Tensor]) -> str:
    contents = Fingerprint()
    for name in sorted(tensors):
        contents.add(tensors[name].reshape(-1))
    return str(contents)


_MEANINGS = {
    "format": "be a file that edgeless.blocks.save wrote, with the format",
    "version": "be saved anew: this edgeless reads the version",
    "height": "have windows of as many rows as the kernels:",
    "columns": "have blocks of as many columns as the kernels:",
    "fingerprint": "be of this graph, with the fingerprint",
}


def _read(call: str, file: Path, graph: Graph, names: list[str]) -> dict[str, Tensor]:
    """Reads a file's tensors to the graph's device; raises ValueError if it is of another graph or was altered."""
    with opened(call, safetensors(call, "blocks"), file, str(graph.device)) as held:
        about: dict[str, Any] = held.metadata() or {}
        for key, expected in _about(graph).items():
            if about.get(key) != expected:
                meaning = _MEANINGS.get(key, f"be of this graph, with {key}")
                raise ValueError(f"{call}: {file} must {meaning} {expected}, got {about.get(key)}")
        if sorted(held.keys()) != sorted(names):
            raise ValueError(f"{call}: {file} must hold {', '.join(names)}, got {', '.join(held.keys())}")
        tensors = {name: held.get_tensor(name) for name in names}
    for name, tensor in tensors.items():
        if tensor.dtype != torch.int32:
            raise ValueError(f"{call}: {file}: {name} must be torch.int32, got {tensor.dtype}")
    if (found := _contents(tensors)) != about.get("contents"):
        expected = about.get("contents")
        raise ValueError(
            f"{call}: {file} must have contents with the fingerprint {expected}, got {found}: it is damaged"
        )
    return tensors


def _check(where: str, blocks: Blocks, num_rows: int, num_columns: int, num_edges: int) -> None:
    """Raises ValueError unless the kernels can read these blocks of a direction with these sizes."""
    first, order, columns, bits = blocks
    num_windows, num_blocks = -(-num_rows // HEIGHT), columns.shape[0] if columns.dim() else 0
    words = (4, HEIGHT // 16, COLUMNS // 8)
    shapes = ((num_windows + 1,), (num_windows,), (num_blocks, COLUMNS), (num_blocks, *words))
    for name, tensor, shape in zip(Blocks._fields, blocks, shapes):
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{where}.{name} must have shape {list(shape)}, got {list(tensor.shape)}")
    if int(first[0]) != 0 or int(first[-1]) != num_blocks or bool((first.diff() < 0).any()):
        raise ValueError(
            f"{where}.first must rise from 0 to {num_blocks} blocks, got {int(first[0])} to {int(first[-1])}"
            + " with a fall" * bool((first.diff() < 0).any())
        )
    if not torch.equal(order.sort().values, torch.arange(num_windows, dtype=order.dtype, device=order.device)):
        raise ValueError(f"{where}.order must list each of {num_windows} windows once")
    low, high = (int(columns.min()), int(columns.max())) if num_blocks else (0, -1)
    if low < 0 or high >= num_columns:
        raise ValueError(f"{where}.columns must be in [0, {num_columns}), got {low} to {high}")
    if (found := _num_bits(bits)) != num_edges:
        raise ValueError(f"{where}.bits must have a bit for each of {num_edges} edges, got {found}")


def _num_bits(bits: Tensor) -> int:
    """Returns the number of set bits."""
    table = torch.tensor([bin(byte).count("1") for byte in range(256)], dtype=torch.uint8, device=bits.device)
    as_bytes = bits.reshape(-1).view(torch.uint8)
    return sum(int(table[part.int()].sum()) for part in as_bytes.split(1 << 24))

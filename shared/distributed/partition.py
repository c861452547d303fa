"""Partitions a graph with its node and edge data, and writes the parts to files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Optional, Union

import torch
from torch import Tensor

from ..checks import check_edge_index, check_ids, check_num_nodes
from ..files.tensor_files import keeps
from ..graph.fingerprint import Fingerprint
from ..graph.handle import Graph
from ..reordering.methods import metis_parts
from ..reordering.neighbors import neighbors_of
from .store import MANIFEST, library, write_manifest, write_part
from .store_checks import part_name

__all__ = ["partition"]

METHODS = ("metis", "random", "contiguous")


def partition(
    edge_index: Union[Tensor, Graph],
    num_nodes: int,
    num_parts: int,
    directory,
    *,
    method: Union[str, Tensor] = "metis",
    node_data: Optional[Mapping[str, Tensor]] = None,
    edge_data: Optional[Mapping[str, Tensor]] = None,
    seed: int = 0,
) -> dict:
    """Partitions a graph and writes the parts to a folder for :func:`edgeless.distributed.load`.

    A part has the in-edges of its nodes. Runs in one process. Any number of processes that divides num_parts can load
    the parts.

    Args:
        edge_index: ``[2, E]`` integers, sources in row 0 and destinations in row 1; or a square Graph.
        num_nodes: N.
        num_parts: number of parts, at least 1.
        directory: a folder that is empty or does not exist yet.
        method: ``"metis"`` cuts few edges (needs pymetis), ``"random"``, ``"contiguous"`` ranges of ids, or a Tensor
            ``[N]`` of integers with the part of every node. Parts may be empty.
        node_data: tensors ``[N, ...]`` of features, labels and masks by name, split with the nodes.
        edge_data: tensors ``[E, ...]`` by name, split with the edges.
        seed: seed of ``"random"`` and of METIS.
    Returns:
        The manifest: sizes, cut edges, halo rows, fingerprint.
    Raises:
        TypeError, ValueError, IndexError: an argument is not as above.
        FileExistsError: the folder is not empty. No file is ever overwritten.
        OSError: the parts cannot be written, for example on a full disk. The files written so far are removed.
        ImportError: safetensors or pymetis is missing.

    Example:
        >>> import tempfile, torch
        >>> import edgeless.distributed as ed
        >>> edge_index = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     manifest = ed.partition(edge_index, 4, 2, folder, method="contiguous")
        >>> manifest["sizes"], manifest["cut_edges"]
        ([2, 2], 2)
    """
    call = "partition"
    library()
    if isinstance(edge_index, Graph):
        edge_index = edge_index.edge_index()
    check_edge_index(call, edge_index)
    check_num_nodes(call, "num_nodes", num_nodes)
    check_num_nodes(call, "num_parts", num_parts)
    if num_parts < 1:
        raise ValueError(f"{call}: num_parts must be at least 1, got {num_parts}")
    src, dst = edge_index.detach().to(torch.int64).unbind(0)
    check_ids(f"{call}: edge_index[0]", src, "num_nodes", num_nodes)
    check_ids(f"{call}: edge_index[1]", dst, "num_nodes", num_nodes)
    nodes = _check_data(call, "node_data", node_data, num_nodes, "N")
    edges = _check_data(call, "edge_data", edge_data, src.numel(), "E")
    part = _parts(call, src, dst, num_nodes, num_parts, method, seed)
    folder = Path(directory)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{call}: directory must be empty or new, and {folder} holds {_what_is_in(folder)}")
    method = method if isinstance(method, str) else "given"
    with _complete(folder, num_parts):
        return _write(folder, src, dst, part, num_parts, nodes, edges, method)


def _what_is_in(folder: Path) -> str:
    begun = folder.is_dir() and (folder / part_name(0)).exists() and not (folder / MANIFEST).exists()
    return "parts without a manifest, of a call that was killed: remove them" if begun else "something"


@contextlib.contextmanager
def _complete(folder: Path, num_parts: int) -> Iterator[None]:
    """Creates the folder for the block. After an exception removes the block's files and folders, for another try."""
    made = [one for one in (folder, *folder.parents) if not one.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for part in range(num_parts):
            with contextlib.suppress(OSError):
                (folder / part_name(part)).unlink()
        for one in made:
            with contextlib.suppress(OSError):
                one.rmdir()
        raise


def _check_data(call: str, argument: str, data, rows: int, meaning: str) -> dict[str, Tensor]:
    data = {} if data is None else dict(data)
    for name, tensor in data.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise TypeError(f"{call}: {argument} must hold Tensors by name, got {name!r}: {type(tensor).__name__}")
        if tensor.dim() == 0 or tensor.size(0) != rows:
            raise ValueError(
                f"{call}: {argument}[{name!r}] must have {meaning} = {rows} rows, got shape {list(tensor.shape)}"
            )
        if tensor.layout != torch.strided or not keeps(library(), tensor.dtype):
            raise TypeError(
                f"{call}: {argument}[{name!r}] must be dense and of a dtype that safetensors has, "
                f"got {tensor.dtype}, {tensor.layout}"
            )
    return {name: tensor.detach() for name, tensor in data.items()}


def _parts(call, src, dst, num_nodes, num_parts, method, seed) -> Tensor:
    """The part of every node, ``[N]`` int64."""
    if isinstance(method, Tensor):
        if method.dim() != 1 or method.numel() != num_nodes or method.is_floating_point():
            raise ValueError(
                f"{call}: method must be integers of shape [N] = [{num_nodes}], got {method.dtype} {list(method.shape)}"
            )
        part = method.detach().to(src.device, torch.int64)
        check_ids(f"{call}: method", part, "num_parts", num_parts)
        return part
    if method not in METHODS:
        raise ValueError(
            f"{call}: method must be one of {', '.join(map(repr, METHODS))} or a Tensor [N], got {method!r}"
        )
    if method == "metis" and num_parts > 1 and num_nodes > 0:
        return _metis(src, dst, num_nodes, num_parts, seed).to(src.device)
    part = torch.arange(num_nodes, device="cpu") * num_parts // max(num_nodes, 1)
    if method == "random":
        part = part[torch.randperm(num_nodes, generator=torch.Generator().manual_seed(seed), device="cpu")]
    return part.to(src.device)


def _metis(src: Tensor, dst: Tensor, num_nodes: int, num_parts: int, seed: int) -> Tensor:
    remedy = "pip install 'edgeless[distributed]', or choose 'random' or 'contiguous'"
    return metis_parts("partition", neighbors_of(src, dst, num_nodes), num_parts, seed, remedy)


def _write(folder, src, dst, part, num_parts, node_data, edge_data, method) -> dict:
    num_nodes, num_edges = part.numel(), src.numel()
    fingerprint = str(Fingerprint(num_nodes, num_edges, num_parts).add(src, dst).add(part))

    by_part = torch.argsort(part, stable=True)  # place -> node
    place = torch.empty_like(by_part)
    place[by_part] = torch.arange(num_nodes, device=part.device)
    sizes = torch.bincount(part, minlength=num_parts)
    degrees = torch.bincount(src, minlength=num_nodes)
    edges_by_part = torch.argsort(part[dst], stable=True)
    edge_counts = torch.bincount(part[dst], minlength=num_parts)
    is_loop = src == dst
    num_loops = int(is_loop.sum())
    kept_ids = ((~is_loop).cumsum(0) - 1).masked_fill_(is_loop, 0) if num_loops else None

    files, halo, cut = [], [], 0
    nodes_of, edges_of = by_part.split(sizes.tolist()), edges_by_part.split(edge_counts.tolist())
    for number, (nodes, edges) in enumerate(zip(nodes_of, edges_of)):
        tensors = {"nodes": nodes, "src": place[src[edges]], "dst": place[dst[edges]], "edge_ids": edges}
        if kept_ids is not None:
            tensors["kept_ids"] = kept_ids[edges]
        tensors["out_degrees"] = degrees[nodes]
        tensors.update({f"node.{name}": tensor[nodes.to(tensor.device)] for name, tensor in node_data.items()})
        tensors.update({f"edge.{name}": tensor[edges.to(tensor.device)] for name, tensor in edge_data.items()})
        remote = src[edges][part[src[edges]] != number]
        halo.append(remote.unique().numel())
        cut += remote.numel()
        files.append(write_part(folder, number, tensors, fingerprint))
    manifest = {
        "num_nodes": num_nodes,
        "num_edges": num_edges,
        "num_loops": num_loops,
        "num_parts": num_parts,
        "method": method,
        "sizes": sizes.tolist(),
        "edges": edge_counts.tolist(),
        "halo": halo,
        "cut_edges": cut,
        "node_data": {name: [str(t.dtype), list(t.shape[1:])] for name, t in node_data.items()},
        "edge_data": {name: [str(t.dtype), list(t.shape[1:])] for name, t in edge_data.items()},
        "fingerprint": fingerprint,
        "files": files,
    }
    write_manifest(folder, manifest)
    return manifest

"""A partitioned graph on disk: one safetensors file per part, and a manifest that is written last.

Nodes are renumbered so that part p owns the new ids ``offsets[p]`` to ``offsets[p + 1]``. A part holds the in-edges of
its own nodes, in ascending order of their ids, and the data of its nodes and edges.

    nodes [n]          original ids of the part's nodes, ascending
    src, dst [E_p]     new ids of the ends of its edges
    edge_ids [E_p]     ids of its edges
    kept_ids [E_p]     ids of its edges counted without self loops (0 for a loop); only if the graph has self loops
    out_degrees [n]    out-degrees of its nodes in the whole graph
    node.NAME, edge.NAME

The manifest has the sizes of all parts, a fingerprint of every part's tensors and one of itself. Files are checked
against it when they are read (:mod:`edgeless.distributed.store_checks`), so that later code meets only data that
partition() can have written.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..files.json_files import read_json
from ..files.tensor_files import opened, safetensors, write
from ..files.whole_files import whole_file
from ..graph.fingerprint import of_tensors
from .store_checks import FORMAT, VERSION, check_manifest, check_part, contents_of, part_name

__all__ = ["MANIFEST", "VERSION", "read_manifest", "read_part", "write_manifest", "write_part"]

MANIFEST = "manifest.json"


def library():
    """The safetensors module, which stores parts; an ImportError says what to install."""
    return safetensors("edgeless.distributed", "distributed")


def write_part(folder: Path, part: int, tensors: dict[str, Tensor], fingerprint: str) -> dict:
    """Writes one part and returns its entry of the manifest; raises OSError where that fails."""
    file = folder / part_name(part)
    tensors = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
    write("partition", library(), file, tensors, {"fingerprint": fingerprint, "part": str(part)})
    return {"name": file.name, "bytes": file.stat().st_size, "contents": of_tensors(tensors)}


def write_manifest(folder: Path, manifest: dict) -> None:
    """Writes the manifest atomically, after the parts, so that a folder with a manifest is complete."""
    from edgeless import __version__

    versions = {"edgeless": __version__, "torch": str(torch.__version__)}
    whole = {"format": FORMAT, "version": VERSION, "written_by": versions, **manifest}
    text = json.dumps({**whole, "contents": contents_of(whole)}, indent=1)
    with whole_file(folder / MANIFEST) as half:
        half.write_text(text + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a folder.

    Raises:
        FileNotFoundError: the folder has no manifest.
        ValueError: the file is not a manifest, was altered, or is of a newer version.
    """
    file = folder / MANIFEST
    if not file.is_file():
        raise FileNotFoundError(
            f"load: {folder} must hold a {MANIFEST}, which partition() writes last, and there is none"
        )
    try:
        manifest = read_json(file)
    except ValueError as error:
        raise ValueError(f"load: {file} {error}") from None
    try:
        check_manifest(f"load: {file}", manifest)
    except RecursionError:  # JSON can be read at a greater depth than it can be written and printed
        raise ValueError(f"load: {file} must be the manifest of a partition, but it is nested too deeply") from None
    return manifest


def read_part(folder: Path, manifest: dict, part: int) -> dict[str, Tensor]:
    """The tensors of one part.

    Raises:
        FileNotFoundError: its file is missing.
        ValueError: the file is truncated, damaged, altered or of another partition.
    """
    known = manifest["files"][part]
    file = folder / known["name"]
    if not file.is_file():
        raise FileNotFoundError(f"load: {file} is missing")
    if (size := file.stat().st_size) != known["bytes"]:
        raise ValueError(f"load: {file} must have {known['bytes']} bytes, as the manifest says, and has {size}")
    with opened("load", library(), file) as held:
        about = held.metadata() or {}
        if about.get("fingerprint") != manifest["fingerprint"]:
            raise ValueError(
                f"load: {file} must have the manifest's fingerprint {manifest['fingerprint']}, "
                f"got {about.get('fingerprint')}: it belongs to another partition"
            )
        if about.get("part") != str(part):
            raise ValueError(f"load: {file} must be part {part}, got part {about.get('part')}")
        tensors = {name: held.get_tensor(name) for name in held.keys()}  # noqa: SIM118  it is no dict
    check_part(f"load: {file}", manifest, part, tensors)
    return tensors

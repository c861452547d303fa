"""A partitioned graph on disk: one file of safetensors a part, and a manifest that is written last.

Nodes are renumbered so that part p owns the rows ``offsets[p]`` to ``offsets[p + 1]``: a node's place. A part holds the
in-edges of its own nodes, in rising order of their ids, and of its nodes everything that was given along.

    nodes [n]          ids of the part's nodes, rising
    src, dst [E_p]     places of the ends of its edges
    edge_ids [E_p]     ids of its edges
    kept_ids [E_p]     the same counted without self loops (of a loop: 0); only where the graph has some
    out_degrees [n]    of its nodes, in the whole graph
    node.NAME, edge.NAME

The manifest has the sizes of all of them, a fingerprint of every part's tensors and one of itself. What is read is held
against it here (:mod:`edgeless.distributed.store_checks`), so that nothing behind it meets what partition() does not
write.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..fingerprint import of_tensors
from ..json_files import read_json
from ..tensor_files import opened, safetensors, write
from ..whole_files import whole_file
from .store_checks import FORMAT, VERSION, check_manifest, check_part, contents_of, part_name

__all__ = ["MANIFEST", "VERSION", "read_manifest", "read_part", "write_manifest", "write_part"]

MANIFEST = "manifest.json"


def library():
    """The module that keeps parts in files; ImportError says what to install."""
    return safetensors("edgeless.distributed", "distributed")


def write_part(folder: Path, part: int, tensors: dict[str, Tensor], fingerprint: str) -> dict:
    """Writes one part and returns what the manifest says of it; OSError where that fails."""
    file = folder / part_name(part)
    tensors = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
    write("partition", library(), file, tensors, {"fingerprint": fingerprint, "part": str(part)})
    return {"name": file.name, "bytes": file.stat().st_size, "contents": of_tensors(tensors)}


def write_manifest(folder: Path, manifest: dict) -> None:
    """Writes the manifest in one step, after the parts: a folder with a manifest is complete."""
    from edgeless import __version__

    versions = {"edgeless": __version__, "torch": str(torch.__version__)}
    whole = {"format": FORMAT, "version": VERSION, "written_by": versions, **manifest}
    text = json.dumps({**whole, "contents": contents_of(whole)}, indent=1)
    with whole_file(folder / MANIFEST) as half:
        half.write_text(text + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a folder.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is not one, or altered, or of a newer version.
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
    except RecursionError:  # JSON is read to a greater depth than it is written and printed
        raise ValueError(f"load: {file} must be the manifest of a partition, but it is nested too deeply") from None
    return manifest


def read_part(folder: Path, manifest: dict, part: int) -> dict[str, Tensor]:
    """The tensors of one part.

    Raises:
        FileNotFoundError: its file is missing.
        ValueError: the file is cut off, damaged, altered or of another partition.
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

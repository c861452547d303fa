"""A partitioned graph on disk: one file of safetensors a part, and a manifest that is written last.

Nodes are renumbered so that part p owns the rows ``offsets[p]`` to ``offsets[p + 1]``: a node's place. A part holds the
in-edges of its own nodes, in rising order of their ids, and of its nodes everything that was given along.

    nodes [n]          ids of the part's nodes, rising
    src, dst [E_p]     places of the ends of its edges
    edge_ids [E_p]     ids of its edges
    kept_ids [E_p]     the same counted without self loops (of a loop: 0); only where the graph has some
    out_degrees [n]    of its nodes, in the whole graph
    node.NAME, edge.NAME
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..tensor_files import safetensors

__all__ = ["MANIFEST", "VERSION", "read_manifest", "read_part", "write_manifest", "write_part"]

MANIFEST = "manifest.json"
FORMAT, VERSION = "edgeless-parts", 1
_NEEDED = ("num_nodes", "num_edges", "num_loops", "num_parts", "sizes", "edges", "fingerprint", "files")


def library():
    """The module that keeps parts in files; ImportError says what to install."""
    return safetensors("edgeless.distributed", "distributed")


def part_name(part: int) -> str:
    """The file of a part."""
    return f"part-{part:05d}.safetensors"


def write_part(folder: Path, part: int, tensors: dict[str, Tensor], fingerprint: str) -> dict:
    """Writes one part and returns what the manifest says of it."""
    file = folder / part_name(part)
    tensors = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
    library().torch.save_file(tensors, file, {"fingerprint": fingerprint, "part": str(part)})
    return {"name": file.name, "bytes": file.stat().st_size}


def write_manifest(folder: Path, manifest: dict) -> None:
    """Writes the manifest in one step, after the parts: a folder with a manifest is complete."""
    from edgeless import __version__

    versions = {"edgeless": __version__, "torch": torch.__version__}
    text = json.dumps({"format": FORMAT, "version": VERSION, "written_by": versions, **manifest}, indent=1)
    half = folder / (MANIFEST + ".new")
    half.write_text(text + "\n")
    os.replace(half, folder / MANIFEST)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a folder.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is not one, or of a newer version.
    """
    file = folder / MANIFEST
    if not file.is_file():
        raise FileNotFoundError(
            f"load: {folder} must hold a {MANIFEST}, which partition() writes last, and there is none"
        )
    try:
        manifest = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"load: {file} must be JSON, but {error}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ValueError(f"load: {file} must be the manifest of a partition, with the format {FORMAT!r}")
    version = manifest.get("version")
    if not isinstance(version, int) or version > VERSION:
        raise ValueError(
            f"load: {file} has version {version}, and this edgeless reads up to {VERSION}; update edgeless"
        )
    if missing := [name for name in _NEEDED if name not in manifest]:
        raise ValueError(f"load: {file} lacks {', '.join(missing)}")
    return manifest


def read_part(folder: Path, manifest: dict, part: int) -> dict[str, Tensor]:
    """The tensors of one part.

    Raises:
        FileNotFoundError: its file is missing.
        ValueError: the file is cut off, damaged or of another partition.
    """
    known = manifest["files"][part]
    file = folder / known["name"]
    if not file.is_file():
        raise FileNotFoundError(f"load: {file} is missing")
    if (size := file.stat().st_size) != known["bytes"]:
        raise ValueError(f"load: {file} must have {known['bytes']} bytes, as the manifest says, and has {size}")
    package = library()
    try:
        with package.safe_open(file, framework="pt") as opened:
            about = opened.metadata() or {}
            if about.get("fingerprint") != manifest["fingerprint"]:
                raise ValueError(
                    f"load: {file} must have the manifest's fingerprint {manifest['fingerprint']}, "
                    f"got {about.get('fingerprint')}: it belongs to another partition"
                )
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  it is no dict
    except package.SafetensorError as error:
        raise ValueError(f"load: {file} is damaged: {error}") from None

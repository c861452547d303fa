"""Loads this process' part of a graph from the files of :func:`edgeless.distributed.partition`."""

from __future__ import annotations

from pathlib import Path
from typing import Optional

import torch
import torch.distributed as dist
from torch import Tensor

from ..checks import as_device, check_choice
from .carriers import CARRIERS, choose
from .exchange import Halo
from .graph import DistGraph
from .process import Ranks
from .store import read_manifest, read_part

__all__ = ["load"]


def load(
    directory,
    device=None,
    *,
    checked: Optional[int] = 64,
    carrier: str = "auto",
    keep_features: Optional[bool] = None,
) -> DistGraph:
    """This process' part of a partitioned graph. All processes of the job call it.

    The number of processes P must divide the number of parts; every process takes the same number of consecutive parts.
    Without a process group P is 1, and the part is the whole graph.

    Args:
        directory: the folder that ``partition`` wrote; every process needs the manifest and the files of its parts.
        device: the device of the part; by default the current GPU under NCCL, else the CPU.
        checked: how many of the first collectives compare beforehand what every rank is about to do; None: all.
        carrier: the transport of halo rows: ``"all_to_all"`` by NCCL or gloo; ``"symmetric"`` by the copy engine over
            symmetric memory, for GPUs of one host on NVLink under NCCL; ``"auto"`` for the latter where supported.
            ``DistGraph.carrier`` is the choice.
        keep_features: whether halo rows of features that need no gradient are fetched once and cached while the
            features live. Without the cache a rank needs less memory, but every epoch exchanges rows again: the
            features where a layer sums them, and mapped rows where it maps them, then with an exchange of gradients in
            the backward. None: cache, unless the carrier is all-to-all and the mapped rows are no wider.
    Raises:
        FileNotFoundError: there is no manifest, or the file of a part is missing.
        ValueError: a file is damaged, altered or newer, in which case the message names it and the field; or the number
            of processes does not fit, or carrier is unknown.
        TypeError: keep_features is not True, False or None.
        RuntimeError: on the other ranks, with the reasons of the ranks that failed; if folders, carriers or
            keep_features differ between ranks; or on every rank, if ``carrier="symmetric"`` is unsupported.

    Example:
        >>> import tempfile, torch
        >>> import edgeless.distributed as ed
        >>> edge_index = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = ed.partition(edge_index, 4, 2, folder, method="contiguous")
        ...     dg = ed.load(folder)  # alone, a process takes all parts
        >>> dg.num_own, dg.num_halo, dg.num_edges
        (4, 0, 4)
    """
    ranks, folder = Ranks(checked), Path(directory)
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if _by_nccl(ranks) else torch.device("cpu")
    manifest = parts = failure = None
    try:
        check_choice("load", "carrier", carrier, CARRIERS)
        if keep_features is not None and not isinstance(keep_features, bool):
            raise TypeError(f"load: keep_features must be True, False or None, got {keep_features!r}")
        device = as_device("load", device)
        manifest = read_manifest(folder)
        parts = _own_parts(folder, manifest, ranks)
    except Exception as error:  # any error: the other ranks must not hang waiting for this one
        failure = error
    reason = None if failure is None else str(failure)
    said = ranks.all_say((reason, manifest and manifest["fingerprint"], carrier, keep_features))
    if failure is not None:
        raise failure
    if failed := [f"rank {rank}: {reason}" for rank, (reason, *_) in enumerate(said) if reason is not None]:
        raise RuntimeError(f"load: other ranks could not load their parts: {'; '.join(failed)}")
    for at, alike in (
        (1, "one partition, but their fingerprints differ"),
        (2, "with one carrier, but they differ"),
        (3, "with one keep_features, but they differ"),
    ):
        if len({one[at] for one in said}) > 1:
            listed = "; ".join(f"rank {rank}: {one[at]}" for rank, one in enumerate(said))
            raise RuntimeError(f"load: all ranks must load {alike}: {listed}")
    return _connect(manifest, parts, ranks, device, carrier, keep_features)


def _by_nccl(ranks: Ranks) -> bool:
    return ranks.size > 1 and "nccl" in str(dist.get_backend())


def _own_parts(folder: Path, manifest: dict, ranks: Ranks) -> dict[str, Tensor]:
    """The tensors of this rank's parts, concatenated; edges in ascending order of their ids."""
    num_parts = manifest["num_parts"]
    if num_parts % ranks.size:
        raise ValueError(
            f"load: the number of processes must divide the {num_parts} parts of {folder}, got {ranks.size} processes"
        )
    each = num_parts // ranks.size
    parts = [read_part(folder, manifest, p) for p in range(ranks.rank * each, (ranks.rank + 1) * each)]
    if each == 1:
        return parts[0]
    found = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    order = torch.argsort(found["edge_ids"])
    by_edge = ("src", "dst", "edge_ids", "kept_ids")
    return {name: t[order] if name in by_edge or name.startswith("edge.") else t for name, t in found.items()}


def _connect(
    manifest: dict,
    parts: dict[str, Tensor],
    ranks: Ranks,
    device: torch.device,
    carrier: str,
    keep_features: Optional[bool],
) -> DistGraph:
    """Finds the halo, exchanges the send lists with its owners, and builds the DistGraph."""
    each = manifest["num_parts"] // ranks.size
    sizes = torch.tensor(manifest["sizes"], dtype=torch.int64, device="cpu").view(ranks.size, each).sum(1)
    bounds = torch.cat((sizes.new_zeros(1), sizes.cumsum(0)))
    first, end = int(bounds[ranks.rank]), int(bounds[ranks.rank + 1])
    num_own = end - first
    src, dst = parts["src"].to(device), parts["dst"].to(device) - first
    remote = (src < first) | (src >= end)
    places, inverse = src[remote].unique(return_inverse=True)  # ascending, and so grouped by owner
    src = src - first
    src[remote] = num_own + inverse
    received = torch.searchsorted(places, bounds.to(device)).diff().tolist()
    isolated = bool((torch.bincount(dst, minlength=num_own) == 0).any())
    said = ranks.all_say((received, isolated))
    sent_by = [[requests[rank] for requests, _ in said] for rank in range(ranks.size)]  # [sender][receiver] -> rows
    sent = sent_by[ranks.rank]
    wanted = torch.empty(sum(sent), dtype=torch.int64, device=device)
    if ranks.size > 1:
        ranks.finish(ranks.all_to_all(wanted, places, sent, received))
    halo = Halo(ranks, num_own, wanted - first, sent, received, keep_features)
    nodes = parts["nodes"].to(device)
    about = {
        "nodes": nodes,
        "halo_nodes": halo.receive(nodes),
        "out_degrees": parts["out_degrees"].to(device),
        "sizes": sizes.tolist(),
        "zero_in_degree": any(isolated for _, isolated in said),
        "total_nodes": manifest["num_nodes"],
        "total_edges": manifest["num_edges"],
        "total_loops": manifest["num_loops"],
        "fingerprint": manifest["fingerprint"],
    }
    halo.carrier = choose(carrier, ranks, sent_by, src.device)  # src.device has an index, which device may lack
    kept_ids = parts["kept_ids"].to(device) if "kept_ids" in parts else None
    dg = DistGraph.build(src, dst, parts["edge_ids"].to(device), kept_ids, halo, about)
    for kind, data in (("node", dg.ndata), ("edge", dg.edata)):
        data.update({name: parts[f"{kind}.{name}"].to(device) for name in manifest[f"{kind}_data"]})
    return dg

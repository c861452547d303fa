"""From the files of :func:`edgeless.distributed.partition` to this process' part of the graph."""

from __future__ import annotations

from pathlib import Path
from typing import Optional

import torch
import torch.distributed as dist
from torch import Tensor

from ..graph_checks import as_device, check_choice
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

    The number of processes P must divide the number of parts: each takes as many consecutive ones. Without a process
    group P is 1, and the graph is whole.

    Args:
        directory: what ``partition`` wrote; every process needs the manifest and its own parts.
        device: where to put the part; by default the current GPU under NCCL, else the CPU.
        checked: how many first exchanges compare beforehand what every rank is about to send; None: all.
        carrier: what brings rows of other processes: ``"all_to_all"``, NCCL's or gloo's; ``"symmetric"``, the copy
            engine over symmetric memory, for GPUs of one host on NVLink, under NCCL; ``"auto"``, the latter where it
            can be had. ``DistGraph.carrier`` says which it is.
        keep_features: whether foreign rows of features that need no gradient are fetched once and kept while the
            features live. Without them a rank needs less memory, and every epoch fetches them again: as they are where
            they are summed, and as what a layer makes of them where they are mapped, with an exchange of gradients in
            the backward. None: yes, unless rows travel by all-to-all and what is made of them is no wider.
    Raises:
        FileNotFoundError: there is no manifest, or the file of a part is missing.
        ValueError: a file is damaged, altered or newer, in which case the message names it and the field; a number of
            processes that does not fit, or no such carrier.
        TypeError: keep_features is neither of the three.
        RuntimeError: on the other ranks, with the reasons of those that failed; where folders, carriers or
            keep_features differ; or on every rank, where ``carrier="symmetric"`` cannot be had.
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
    except Exception as error:  # whatever it is, the other ranks must not wait for this one
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
    """The tensors of this rank's parts, put together; edges in rising order of their ids."""
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
    """Finds the halo and tells its owners what to send."""
    each = manifest["num_parts"] // ranks.size
    sizes = torch.tensor(manifest["sizes"], dtype=torch.int64, device="cpu").view(ranks.size, each).sum(1)
    bounds = torch.cat((sizes.new_zeros(1), sizes.cumsum(0)))
    first, end = int(bounds[ranks.rank]), int(bounds[ranks.rank + 1])
    num_own = end - first
    src, dst = parts["src"].to(device), parts["dst"].to(device) - first
    foreign = (src < first) | (src >= end)
    places, inverse = src[foreign].unique(return_inverse=True)  # rising, and so by owner
    src = src - first
    src[foreign] = num_own + inverse
    received = torch.searchsorted(places, bounds.to(device)).diff().tolist()
    isolated = bool((torch.bincount(dst, minlength=num_own) == 0).any())
    said = ranks.all_say((received, isolated))
    sent_by = [[requests[rank] for requests, _ in said] for rank in range(ranks.size)]  # by a rank, to every other
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
    halo.carrier = choose(carrier, ranks, sent_by, src.device)  # whose device has an index
    kept_ids = parts["kept_ids"].to(device) if "kept_ids" in parts else None
    dg = DistGraph.build(src, dst, parts["edge_ids"].to(device), kept_ids, halo, about)
    for kind, data in (("node", dg.ndata), ("edge", dg.edata)):
        data.update({name: parts[f"{kind}.{name}"].to(device) for name in manifest[f"{kind}_data"]})
    return dg

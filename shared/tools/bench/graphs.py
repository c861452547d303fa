"""Graphs by name: synthetic replicas (twins) of public graphs, files of the user, and small or extreme graphs."""

from __future__ import annotations

import glob
from pathlib import Path
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from edgeless.tools.cli.devices import UsageError
from edgeless.tools.cli.relations import Relations
from edgeless.tools.demo.data import PLANETOID, NodeData, is_symmetric, read_npz, read_planetoid

from . import twins

STAR_EDGES, STAR_LEAVES = 1_000_000, 65_536
RANDOM = {"toy": (1000, 10_000), "tiny": (30, 100)}  # nodes, edges
RANDOM_TYPES = 4  # relations of the random graphs, among nodes of one type
MOLECULES = {f"molecules-{count}": count for count in (1, 8, 32, 64, 4096)}  # name -> graphs in a batch
MOLECULE_NODES = (15, 30)  # least number, exclusive bound
OWN = {
    "star": f"one hub with {STAR_EDGES:,} in-edges from {STAR_LEAVES:,} leaves: no split by rows can balance it",
    "toy": "1,000 nodes and 10,000 edges: to try a command",
    "tiny": "30 nodes and 100 edges: what takes time is Python, dispatch and autograd",
    **{name: f"a batch of {count} molecules, about 23 atoms each" for name, count in MOLECULES.items()},
}


HELP = f"{', '.join(OWN)}, a twin (pokec, hm:community, ...), the path of an .npz, or the name of a file in --data"


class BenchGraph(NamedTuple):
    """Edges run source -> destination, in the order of the file or the twin."""

    name: str
    num_nodes: int
    edge_index: Tensor  # [2, E] int64
    symmetric: Optional[bool]  # True when every (u, v) has its (v, u); None when not checked
    relations: Optional[Relations] = None
    path: Optional[str] = None  # the file, if the graph was named by its path

    @property
    def num_edges(self) -> int:
        return self.edge_index.shape[1]


def load(name: str, data: Optional[Path], device: torch.device) -> BenchGraph:
    """Makes or reads one graph.

    Args:
        name: a twin (``edgeless.tools.bench.twins.NAMES``), with ``:community`` appended if near ids shall be near
            nodes, one of :data:`OWN`, the path of an .npz file, a Planetoid name, or an .npz file's stem.
        data: the folder that holds the last two kinds, anywhere in it.
        device: the device of the edges.

    Raises:
        UsageError: for a name that is none of these.
    """
    twin_name, order = _twin(name)
    if twin_name is not None:
        twin = twins.twin(twin_name, order, device=str(device))
        edge_index = torch.stack([twin.src, twin.dst])
        relations = None
        if twin.etype is not None:
            types = (twin.etype, twin.num_relations, twin.ntype, twins.RELATIONAL[twin_name][2])
            relations = Relations.of(edge_index, *types)
        return BenchGraph(name, twin.num_nodes, edge_index, twin.symmetric, relations)
    if name == "star":
        leaves = 1 + torch.arange(STAR_EDGES, device=device) % STAR_LEAVES
        return BenchGraph(name, 1 + STAR_LEAVES, torch.stack([leaves, torch.zeros_like(leaves)]), False)
    if name in RANDOM:
        num_nodes, num_edges = RANDOM[name]
        draw = torch.Generator().manual_seed(0)
        edge_index = torch.randint(num_nodes, (2, num_edges), generator=draw)
        types = torch.randint(RANDOM_TYPES, (num_edges,), generator=draw)
        relations = Relations.of(edge_index, types, RANDOM_TYPES, torch.zeros(num_nodes, dtype=torch.int64))
        return BenchGraph(name, num_nodes, edge_index.to(device), None, relations.to(device))
    if name in MOLECULES:
        return _molecules(name, device)
    found = _from_files(name, data)
    path = name if _is_path(name) else None
    symmetric = is_symmetric(found.edge_index, len(found.x))
    return BenchGraph(
        Path(name).stem if path else name, len(found.x), found.edge_index.to(device), symmetric, path=path
    )


def check_name(name: str, data: Optional[Path]) -> None:
    """Raises the errors of :func:`load`, without generating graphs."""
    if name not in OWN and _twin(name)[0] is None:
        _from_files(name, data)


def sizes(name: str) -> Optional[tuple[int, int]]:
    """The numbers of nodes and edges of a generated graph, without generating it; None for other names."""
    if name == "star":
        return 1 + STAR_LEAVES, STAR_EDGES
    if name in RANDOM:
        return RANDOM[name]
    twin_name, _ = _twin(name)
    if twin_name in twins.BATCHED:
        graphs, nodes, edges = twins.BATCHED[twin_name]
        return graphs * nodes, graphs * edges
    kinds = (twins.POWER_LAW, twins.ROADS, twins.RELATIONAL)
    return next((kind[twin_name][:2] for kind in kinds if twin_name in kind), None)


def has_relations(name: str) -> bool:
    """Returns whether the graph of that name has types of edges."""
    return name in twins.RELATIONAL or name in RANDOM or name in MOLECULES


def _molecules(name: str, device: torch.device) -> BenchGraph:
    """A batch of small graphs: chains of atoms with a ring of six for every eighth, bonds in both directions."""
    draw, bonds, num_nodes = torch.Generator().manual_seed(0), [], 0
    for _ in range(MOLECULES[name]):
        atoms = torch.arange(int(torch.randint(*MOLECULE_NODES, (1,), generator=draw))) + num_nodes
        rings = atoms[:-5:8]
        bonds += [torch.stack([atoms[:-1], atoms[1:]]), torch.stack([rings, rings + 5])]
        num_nodes += len(atoms)
    one_way = torch.cat(bonds, 1)
    edge_index = torch.cat([one_way, one_way.flip(0)], 1)
    types = torch.randint(RANDOM_TYPES, (one_way.size(1),), generator=draw).repeat(2)
    relations = Relations.of(edge_index, types, RANDOM_TYPES, torch.zeros(num_nodes, dtype=torch.int64))
    return BenchGraph(name, num_nodes, edge_index.to(device), True, relations.to(device))


def _twin(name: str) -> tuple[Optional[str], str]:
    """The twin of that name and the order of its ids; None if there is no such twin."""
    twin, _, order = name.partition(":")
    ordered = order == "community" and (twin in twins.POWER_LAW or twin in twins.ROADS)
    known = twin in twins.NAMES and (name == twin or ordered)
    return (twin, order or "shuffled") if known else (None, "")


def _is_path(name: str) -> bool:
    return name.endswith(".npz")


def _from_files(name: str, data: Optional[Path]) -> NodeData:
    if _is_path(name):
        if not Path(name).is_file():
            raise UsageError(f"--graph {name}: no such file")
        return read_npz(Path(name))
    if data is not None and name in PLANETOID:
        for file in data.rglob(f"ind.{name}.graph"):
            return read_planetoid(file.parent, name)
    if data is not None and name == Path(name).name:  # no pattern may lead out of the folder
        for file in data.rglob(f"{glob.escape(name)}.npz"):
            return read_npz(file)
    where = f"no file of that name in {data}" if data else "of files give the path of an .npz, or --data DIR"
    own = ", ".join([*OWN, *twins.NAMES])
    raise UsageError(f"--graph {name}: not one of {own}; {where}")

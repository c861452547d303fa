"""Graphs with relations: one with classes to learn that is made here, and the triples of WN18RR to predict."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from edgeless.tools.cli.devices import UsageError
from edgeless.tools.cli.relations import Relations

from .data import NodeData

NODE_TYPES = 3  # the first type has half of the nodes, and the labels


def relational_graph(
    num_nodes: int = 6_000,
    num_edges: int = 60_000,
    num_relations: int = 24,
    num_classes: int = 8,
    num_features: int = 32,
    seed: int = 0,
) -> NodeData:
    """A graph whose labels follow from its edges together with their relations.

    Every relation has a shift: seven of ten of its edges lead from a node of class c to one of class c plus the shift,
    the others anywhere. Over all relations the shifts cancel out, so neighbours give little information to a layer that
    ignores relations. A relation's sources are of one type of nodes and its destinations of one, and the second half of
    the relations is the reverse of the first. The features are a class centre under heavy noise. The same seed gives
    the same graph on every machine.

    Args:
        num_nodes: N. Nodes of the first type are labelled, half of them for training, a quarter each for validation and
            test.
        num_edges: E, both directions counted.
        num_relations: R, both directions counted.
        seed: draws everything.
    """
    rng = np.random.default_rng(seed)
    first = np.array([0, num_nodes // 2, num_nodes * 3 // 4, num_nodes])  # the first node of each type
    node_type = np.repeat(np.arange(NODE_TYPES), np.diff(first))
    label = rng.permutation(num_nodes) % num_classes
    group = node_type * num_classes + label
    members = np.argsort(group, kind="stable")
    first_member = np.searchsorted(group[members], np.arange(NODE_TYPES * num_classes + 1))

    half, pairs = num_relations // 2, num_edges // 2
    src_type, dst_type = np.arange(half) % NODE_TYPES, rng.integers(0, NODE_TYPES, half)
    shift = rng.permutation(half) % num_classes
    relation = rng.integers(0, half, pairs)

    def draw(low: np.ndarray, high: np.ndarray) -> np.ndarray:
        return (low + rng.random(pairs) * (high - low)).astype(np.int64)

    kind = src_type[relation]
    # Some nodes more often than others.
    src = (first[kind] + rng.random(pairs) ** 2 * np.diff(first)[kind]).astype(np.int64)
    kind = dst_type[relation]
    wanted = kind * num_classes + (label[src] + shift[relation]) % num_classes
    fitting = members[draw(first_member[wanted], first_member[wanted + 1])]
    dst = np.where(rng.random(pairs) < 0.7, fitting, draw(first[kind], first[kind + 1]))

    edge_index = torch.from_numpy(np.stack([np.concatenate([src, dst]), np.concatenate([dst, src])]))
    edge_type = torch.from_numpy(np.concatenate([relation, relation + half]))
    centres = rng.standard_normal((num_classes, num_features))
    x = 0.15 * centres[label] + rng.standard_normal((num_nodes, num_features))
    part = torch.from_numpy(np.where(node_type == 0, rng.random(num_nodes), np.nan))
    return NodeData(
        f"graph with relations (seed {seed})",
        torch.from_numpy(x).float(),
        torch.from_numpy(label),
        edge_index,
        part < 0.5,
        (part >= 0.5) & (part < 0.75),
        part >= 0.75,
        Relations.of(edge_index, edge_type, 2 * half, torch.from_numpy(node_type), NODE_TYPES),
    )


class LinkData(NamedTuple):
    """Triples (head, relation, tail), ``[T, 3]`` int64 each.

    The graph's edges are the training triples, in both directions: the reverse of relation r is ``num_relations + r``.
    """

    name: str
    num_nodes: int
    num_relations: int
    train: Tensor
    val: Tensor
    test: Tensor

    @property
    def size(self) -> str:
        """The size as text for a heading."""
        edges, relations = 2 * len(self.train), 2 * self.num_relations
        return f"{self.num_nodes:,} nodes, {edges:,} edges, {relations} relations"

    def edges(self) -> tuple[Tensor, Relations]:
        """(edge_index ``[2, E]``, relations)."""
        head, relation, tail = self.train.t()
        edge_index = torch.stack([torch.cat([head, tail]), torch.cat([tail, head])])
        edge_type = torch.cat([relation, relation + self.num_relations])
        node_type = torch.zeros(self.num_nodes, dtype=torch.int64)
        return edge_index, Relations.of(edge_index, edge_type, 2 * self.num_relations, node_type)


WN18RR = ("entities.dict", "relations.dict", "train.txt", "valid.txt", "test.txt")


def read_wn18rr(root: Path) -> LinkData:
    """Reads WN18RR from ``root`` or ``root/wn18rr``: lines "id name" in two dictionaries, "head relation tail" in three
    files of triples.

    Raises:
        UsageError: a file is missing or cannot be read, or a triple has a name that the dictionaries lack.
    """
    root = Path(root)
    folder = next((f for f in (root, root / "wn18rr") if all((f / name).is_file() for name in WN18RR)), None)
    if folder is None:
        raise UsageError(f"--root {root}: WN18RR has the files {', '.join(WN18RR)}; they are not all in it")
    try:
        entities, relations = ({name: int(i) for i, name in _lines(folder / file, 2)} for file in WN18RR[:2])
        triples = [
            torch.tensor([(entities[h], relations[r], entities[t]) for h, r, t in _lines(folder / file, 3)])
            for file in WN18RR[2:]
        ]
        for names, what in ((entities, WN18RR[0]), (relations, WN18RR[1])):
            if sorted(names.values()) != list(range(len(names))):
                raise ValueError(f"{what} does not number its names from 0")
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"--root {root}: cannot be read as WN18RR ({error!r})") from error
    return LinkData("WN18RR", len(entities), len(relations), *triples)


def _lines(file: Path, words: int) -> list[list[str]]:
    lines = [line.split() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    for line in lines:
        if len(line) != words:
            raise ValueError(f"{file.name} has a line of {len(line)} words, not {words}")
    return lines

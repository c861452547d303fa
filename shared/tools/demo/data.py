"""Graphs with features, labels and a split: made here, or read from files that the user has."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from pathlib import Path
from typing import NamedTuple, Optional

import numpy as np
import torch
from torch import Tensor

from edgeless.tools.cli.devices import UsageError
from edgeless.tools.cli.relations import Relations

MOST_CLASSES = 1 << 16


class NodeData(NamedTuple):
    """A node classification task. Edges run source -> destination; undirected ones stand in both directions."""

    name: str
    x: Tensor  # [N, F] float32
    y: Tensor  # [N] int64
    edge_index: Tensor  # [2, E] int64
    train: Tensor  # [N] bool
    val: Tensor  # [N] bool
    test: Tensor  # [N] bool
    relations: Optional[Relations] = None

    @property
    def num_nodes(self) -> int:
        return len(self.x)

    @property
    def size(self) -> str:
        """For a heading."""
        size = f"{self.num_nodes:,} nodes, {self.edge_index.shape[1]:,} edges, {self.x.shape[1]} features"
        return size if self.relations is None else f"{size}, {self.relations.num_types} relations"

    @property
    def num_classes(self) -> int:
        return int(self.y.max()) + 1


def community_graph(
    num_nodes: int = 12_000, num_edges: int = 1_000_000, num_classes: int = 16, num_features: int = 128, seed: int = 0
) -> NodeData:
    """A graph of communities, one per class, that takes both features and neighbours to learn.

    About a third of the edges stay within a community and the others run anywhere; the degrees are skewed (the
    popularity of a node falls with the square root of its rank). The features are a class centre under noise too
    heavy to tell the class from one node alone. The same seed gives the same graph on every machine.

    Args:
        num_nodes: N. The split is half for training, a quarter each for validation and test.
        num_edges: directed edges aimed at, both directions counted; the few pairs drawn twice are kept once.
        num_classes: communities, of equal size.
        num_features: F.
        seed: draws everything.
    """
    rng = np.random.default_rng(seed)
    label = rng.permutation(np.arange(num_nodes) * num_classes // num_nodes)
    members = np.argsort(label, kind="stable")  # nodes, community by community
    first = np.searchsorted(label[members], np.arange(num_classes + 1))

    def draw(low: np.ndarray, high: np.ndarray) -> np.ndarray:
        """One node per pair out of members[low:high], the popular ones more often."""
        return members[low + (rng.random(len(low)) ** 2 * (high - low)).astype(np.int64)]

    pairs = int(num_edges / 2 * 1.1)  # some are loops or drawn twice
    everywhere = (np.zeros(pairs, np.int64), np.full(pairs, num_nodes))
    u = members[rng.integers(0, num_nodes, pairs)]
    own = label[u]
    inside = rng.random(pairs) < 0.35
    v = np.where(inside, draw(first[own], first[own + 1]), rng.permutation(num_nodes)[draw(*everywhere)])
    keys = np.unique(np.minimum(u, v) * num_nodes + np.maximum(u, v))
    keys = keys[keys // num_nodes != keys % num_nodes]
    keys = rng.permutation(keys)[: num_edges // 2]
    u, v = keys // num_nodes, keys % num_nodes

    centres = rng.standard_normal((num_classes, num_features))
    x = 0.15 * centres[label] + rng.standard_normal((num_nodes, num_features))
    part = rng.random(num_nodes)
    return NodeData(
        f"community graph (seed {seed})",
        torch.from_numpy(x).float(),
        torch.from_numpy(label),
        torch.from_numpy(np.stack([np.concatenate([u, v]), np.concatenate([v, u])])),
        torch.from_numpy(part < 0.5),
        torch.from_numpy((part >= 0.5) & (part < 0.75)),
        torch.from_numpy(part >= 0.75),
    )


# What an .npz may call its arrays: as the heterophilous graphs do, or as PyG's Data does.
NAMES = {
    "node_features": "x",
    "node_labels": "y",
    "edges": "edge_index",
    "train_masks": "train_mask",
    "val_masks": "val_mask",
    "test_masks": "test_mask",
}


def read_npz(file: Path) -> NodeData:
    """Reads node_features [N, F], node_labels [N], edges [E, 2] and {train,val,test}_masks, or the arrays of PyG's
    Data: x, y, edge_index [2, E] and {train,val,test}_mask.

    ``edges`` stands for undirected ones, each once, and is read in both directions, unless the file has them already.
    ``edge_index`` is directed and read as it stands. The name of the graph says what was done. The masks are [N], or
    [S, N] for S splits, of which the first is taken ([N, S] with PyG's names).

    Raises:
        UsageError: the file cannot be read, an array is missing, or its shape, dtype or values do not fit.
    """
    try:
        with open(file, "rb") as stream, zipfile.ZipFile(stream) as archive:
            have = {name.removesuffix(".npy") for name in archive.namelist()}
            wanted = (*NAMES.values(),) if len(have & {*NAMES.values()}) > len(have & {*NAMES}) else (*NAMES,)
            missing = [name for name in wanted if name not in have]
            arrays = {name: _array(archive, name) for name in wanted if name in have}
    except Exception as error:  # NumPy and zipfile raise whatever the bytes lead them to
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0] or type(error).__name__
        raise UsageError(f"{file}: cannot be read as an .npz of arrays ({reason})") from error
    if missing:
        other = ", ".join(NAMES.values() if wanted[0] in NAMES else NAMES)
        text = f"{file}: expected arrays {', '.join(wanted)}; {', '.join(missing)} missing"
        raise UsageError(text if have & {*wanted} else f"{text} (or {other})")
    directed = wanted[0] not in NAMES
    x, y, edges = (arrays[name] for name in wanted[:3])

    def expect(fits: bool, name: str, expected: str, came: object) -> None:
        if not fits:
            raise UsageError(f"{file}: {name} must {expected}, got {came}")

    for name, array in arrays.items():
        kinds, meaning = ("biuf", "numbers") if name != wanted[2] else ("iu", "integers")
        expect(array.dtype.kind in kinds, name, f"be {meaning}", array.dtype)
    features, labels, ends = wanted[:3]
    expect(x.ndim == 2 and x.size > 0, features, "have shape [N, F]", list(x.shape))
    nodes = len(x)
    expect(bool(np.isfinite(x).all()), features, "be finite", "infinities or NaN")
    expect(y.shape == (nodes,), labels, f"have shape [N] = [{nodes}]", list(y.shape))
    classes = f"be integers in [0, {MOST_CLASSES})"
    expect(0 <= y.min() <= y.max() < MOST_CLASSES, labels, classes, f"{y.min()} to {y.max()}")
    expect(bool((y == np.floor(y)).all()), labels, classes, "fractions")
    fits = edges.ndim == 2 and edges.shape[0 if directed else 1] == 2
    expect(fits, ends, f"have shape {'[2, E]' if directed else '[E, 2]'}", list(edges.shape))
    expect(edges.size > 0, ends, "be at least one", "none")
    known = 0 <= edges.min() <= edges.max() < nodes
    expect(known, ends, f"be node ids in [0, {nodes})", f"{edges.min()} to {edges.max()}")
    splits = []
    for name in wanted[3:]:
        mask = arrays[name].T if directed else arrays[name]
        fits = mask.ndim in (1, 2) and mask.shape[-1] == nodes and len(mask) > 0
        shape = "[N, S]" if directed else "[S, N]"
        expect(fits, name, f"have shape [N] or {shape} with N = {nodes}", list(arrays[name].shape))
        splits.append(torch.from_numpy(np.atleast_2d(mask)[0].astype(bool)))
        expect(bool(splits[-1].any()), name, "choose a node", "none")
    edge_index, how = torch.from_numpy(np.ascontiguousarray((edges if directed else edges.T).astype(np.int64))), ""
    if not directed and not is_symmetric(edge_index, nodes):
        edge_index, how = torch.cat([edge_index, edge_index.flip(0)], 1), " (each edge in both directions)"
    values, classes = (torch.from_numpy(array.astype(kind)) for array, kind in ((x, np.float32), (y, np.int64)))
    name = os.fsencode(Path(file).stem).decode(errors="replace") + how
    return NodeData(name, values, classes, edge_index, *splits)


def is_symmetric(edge_index: Tensor, nodes: int) -> bool:
    """Returns whether every edge has its reverse, as often; loops alone are no sign of it."""
    src, dst = edge_index
    keys, reverse = (src * nodes + dst).sort().values, (dst * nodes + src).sort().values
    return bool((src != dst).any()) and torch.equal(keys, reverse)


def _array(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    with archive.open(f"{name}.npy") as stream:
        return np.lib.format.read_array(stream, allow_pickle=False)


def read_planetoid(root: Path, name: str) -> NodeData:
    """Reads Cora, CiteSeer or PubMed from ``root/Name/raw/ind.name.*``, the layout of PyG's Planetoid data set.

    The split is the standard one: 20 training nodes per class, 500 for validation, the listed 1,000 for the test.
    Neither PyG nor SciPy is needed, and the pickles may contain nothing but arrays.
    """
    folders = [Path(root) / title / "raw" for title in (name, name.capitalize(), PLANETOID[name])] + [Path(root)]
    folder = next((f for f in folders if (f / f"ind.{name}.graph").is_file()), None)
    if folder is None:
        raise UsageError(
            f"--root {root}: no {PLANETOID[name]}/raw/ind.{name}.graph in it; PyG's Planetoid puts it there"
        )
    try:
        return _planetoid(folder, name)
    except UsageError:
        raise
    except Exception as error:  # whatever a pickle cut short, or of other things, leads to
        raise UsageError(f"--root {root}: cannot be read as {PLANETOID[name]} ({error!r})") from error


def _planetoid(folder: Path, name: str) -> NodeData:
    x, tx, allx, y, ty, ally, graph = (
        _unpickle(folder / f"ind.{name}.{part}") for part in ("x", "tx", "allx", "y", "ty", "ally", "graph")
    )
    order = np.loadtxt(folder / f"ind.{name}.test.index", dtype=np.int64)
    n = max(len(graph), order.max() + 1)
    features, labels = np.zeros((n, allx.shape[1]), np.float32), np.zeros((n, ally.shape[1]), np.float32)
    features[: len(allx)], labels[: len(ally)] = allx, ally
    features[order], labels[order] = tx, ty  # CiteSeer: isolated test nodes stay zero
    features /= np.maximum(features.sum(1, keepdims=True), 1)
    edges = np.array([(u, v) for u, neighbours in graph.items() for v in neighbours], np.int64)
    edges = np.unique(np.concatenate([edges, edges[:, ::-1]]), axis=0)
    edges = edges[edges[:, 0] != edges[:, 1]]

    def mask(ids) -> Tensor:
        chosen = torch.zeros(n, dtype=torch.bool)
        chosen[ids] = True
        return chosen

    return NodeData(
        PLANETOID[name],
        torch.from_numpy(features),
        torch.from_numpy(labels.argmax(1)),
        torch.from_numpy(edges).t().contiguous(),
        mask(slice(len(y))),
        mask(slice(len(y), len(y) + 500)),
        mask(torch.from_numpy(order)),
    )


PLANETOID = {"cora": "Cora", "citeseer": "CiteSeer", "pubmed": "PubMed"}


class _SparseRows:
    """Stands in for SciPy's csr_matrix while a pickle is read."""

    def dense(self) -> np.ndarray:
        shape = self.__dict__.get("_shape", self.__dict__.get("shape"))
        out = np.zeros(shape, np.float32)
        out[np.repeat(np.arange(shape[0]), np.diff(self.indptr)), self.indices] = self.data
        return out


class _ArrayUnpickler(pickle.Unpickler):
    """Reads arrays, sparse rows and containers; refuses to import anything else."""

    def find_class(self, module: str, name: str):
        if name == "csr_matrix" and module.startswith("scipy.sparse"):
            return _SparseRows
        if (module.split(".")[0], name) in {("numpy", "ndarray"), ("numpy", "dtype"), ("numpy", "_reconstruct")}:
            return super().find_class(module.replace("numpy.core", "numpy._core") if _NUMPY_2 else module, name)
        if (module, name) == ("collections", "defaultdict"):
            return super().find_class(module, name)
        if (module, name) in {("__builtin__", "list"), ("builtins", "list")}:
            return list
        raise UsageError(f"a Planetoid file asks for {module}.{name}, which is no array: it is not read")


_NUMPY_2 = int(np.__version__.split(".")[0]) >= 2


def _unpickle(file: Path):
    value = _ArrayUnpickler(io.BytesIO(file.read_bytes()), encoding="latin1").load()
    return value.dense() if isinstance(value, _SparseRows) else value

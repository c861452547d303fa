"""Batches of small graphs: the number of chords of a molecule is its class.

The upstream side has PyG's loader and batches. Ours has those of :class:`edgeless.pyg.loader.PaddedLoader`, and
:func:`edgeless.capture_step`, which replays steps on a GPU and runs them as they are written on the CPU.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import edgeless
from edgeless.padding import convert_batchnorm, real_rows

from .models import Net

BATCH = 128
MOST_CHORDS = 6
ATOMS = (10, 31)  # least number, exclusive bound
FEATURES = 8  # the first is the degree, the others are noise


class MoleculeData(NamedTuple):
    """PyG's ``Data`` with x, edge_index and y ``[1]``; half for training, a quarter each for validation and test."""

    name: str
    graphs: list[Any]

    @property
    def num_nodes(self) -> int:
        """The approximate number of atoms of a batch."""
        return BATCH * sum(ATOMS) // 2

    @property
    def size(self) -> str:
        """The size as text for a heading."""
        return f"{len(self.graphs):,} graphs of {ATOMS[0]} to {ATOMS[1] - 1} nodes, batches of {BATCH}"


def molecules(count: int, seed: int = 0) -> MoleculeData:
    """Rings of atoms with up to six chords, bonds in both directions. The same seed gives the same ones anywhere."""
    from torch_geometric.data import Data

    draw, graphs = torch.Generator().manual_seed(seed), []
    for _ in range(count):
        atoms = int(torch.randint(*ATOMS, (), generator=draw))
        chords = int(torch.randint(MOST_CHORDS + 1, (), generator=draw))
        ring, begin = torch.arange(atoms), torch.randint(atoms, (chords,), generator=draw)
        end = (begin + torch.randint(2, atoms - 1, (chords,), generator=draw)) % atoms
        bonds = torch.stack((torch.cat((ring, begin)), torch.cat(((ring + 1) % atoms, end))))
        x = torch.randn(atoms, FEATURES, generator=draw)
        x[:, 0] = torch.bincount(bonds.flatten(), minlength=atoms)
        graphs.append(Data(x=x, edge_index=torch.cat((bonds, bonds.flip(0)), 1), y=torch.tensor([chords])))
    return MoleculeData(f"molecules (seed {seed})", graphs)


class MoleculeNet(torch.nn.Module):
    """The demo's two layers, each with a batch norm, the sum over the atoms of a molecule, and a linear map."""

    def __init__(self, config: dict):
        super().__init__()
        width = config["heads"] * config["hidden"]
        names = (config["framework"], config["side"], config["layer"])
        sizes = {name: config[name] for name in ("hidden", "heads", "dropout")}
        self.begin = torch.nn.Linear(FEATURES, width)
        self.encoder = Net(*names, features=width, classes=width, **sizes)
        self.norm = torch.nn.BatchNorm1d(width)
        self.head = torch.nn.Linear(width, MOST_CHORDS + 1)

    @property
    def conv1(self) -> torch.nn.Module:
        """The first layer."""
        return self.encoder.conv1

    def forward(self, batch: Any) -> Tensor:
        """``[num_graphs, classes]``"""
        from torch_geometric.nn import global_add_pool

        x = self.norm(self.encoder(self.begin(batch.x), batch.edge_index)).relu()
        return self.head(global_add_pool(x, batch.batch, batch.num_graphs))


class Molecules:
    """Classification of graphs: cross entropy of batches, in a new order every epoch; accuracy on the others."""

    def __init__(self, data: MoleculeData, config: dict, device: torch.device):
        from torch_geometric.loader import DataLoader

        self.config, self.device, self.ours = config, device, config["side"] == "edgeless"
        half, last = len(data.graphs) // 2, len(data.graphs) * 3 // 4
        self.graphs = data.graphs
        self.val, self.test = (DataLoader(part, BATCH) for part in (data.graphs[half:last], data.graphs[last:]))
        training = data.graphs[:half]
        if self.ours:
            from edgeless.pyg.loader import PaddedLoader

            self.loader = PaddedLoader(training, BATCH, shuffle=True, device=device)
        else:
            self.loader = DataLoader(training, BATCH, shuffle=True)
        self.step: Any = None  # the captured step of the network that is being trained

    def toy(self) -> Molecules:
        """The same task on eight molecules."""
        return Molecules(MoleculeData("toy", self.graphs[:8]), self.config, self.device)

    def net(self) -> torch.nn.Module:
        """A new network."""
        self.step = None
        net = MoleculeNet(self.config).to(self.device)
        return convert_batchnorm(net) if self.ours else net

    def epoch(self, net: torch.nn.Module, optimizer: torch.optim.Optimizer, epoch: int) -> float:
        """Trains on every batch once; returns the mean of their losses."""
        net.train()
        if self.step is None:
            self.step = self._captured(net, optimizer) if self.ours else self._stock(net, optimizer)
        return torch.stack([self.step(batch.to(self.device)) for batch in self.loader]).mean().item()

    def _stock(self, net: torch.nn.Module, optimizer: torch.optim.Optimizer):
        def step(batch: Any) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(batch), batch.y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    def _captured(self, net: torch.nn.Module, optimizer: torch.optim.Optimizer):
        @edgeless.capture_step(model=net, optimizer=optimizer)
        def step(batch: Any) -> Tensor:
            optimizer.zero_grad()
            with real_rows(batch):
                losses = F.cross_entropy(net(batch), batch.y, reduction="none")
            loss = torch.where(batch.graph_mask, losses, 0).sum() / batch.graph_mask.sum()
            loss.backward()
            optimizer.step()
            return loss

        return step

    def scores(self, net: torch.nn.Module) -> dict[str, float]:
        """The fractions of molecules that are classified right."""
        return {"val": self._right(net, self.val), "test": self._right(net, self.test)}

    def _right(self, net: torch.nn.Module, loader: Any) -> float:
        parts = [net(batch).argmax(1) == batch.y for batch in (batch.to(self.device) for batch in loader)]
        return torch.cat(parts).float().mean().item()

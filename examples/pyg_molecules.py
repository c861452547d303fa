"""Training on batches of small graphs: padded to few sizes, the whole step replayed from CUDA graphs on a GPU.

Without a GPU the step runs as it is written. The data are rings with chords; the target is the number of chords.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import global_add_pool

import edgeless
from edgeless.padding import convert_batchnorm, real_rows
from edgeless.pyg.loader import PaddedLoader
from edgeless.pyg.nn import GATv2Conv

GRAPHS, BATCH, EPOCHS = 2_000, 128, 8


def molecule() -> Data:
    """A ring of 10 to 30 atoms with up to six chords."""
    atoms, chords = int(torch.randint(10, 31, ())), int(torch.randint(7, ()))
    ring = torch.arange(atoms)
    src = torch.cat((ring, torch.randint(atoms, (chords,))))
    dst = torch.cat(((ring + 1) % atoms, (src[atoms:] + torch.randint(2, atoms - 1, (chords,))) % atoms))
    edge_index = torch.cat((torch.stack((src, dst)), torch.stack((dst, src))), 1)
    degree = torch.bincount(edge_index[1], minlength=atoms).float()
    x = torch.stack((degree, torch.ones(atoms)), 1)
    return Data(x=x, edge_index=edge_index, y=torch.tensor([float(chords)]))


class Net(torch.nn.Module):
    """Two layers of GATv2, with sums over the atoms of a molecule."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = GATv2Conv(2, 16, heads=4), GATv2Conv(64, 16, heads=4)
        self.norm = torch.nn.BatchNorm1d(64)
        self.head = torch.nn.Linear(64, 1)

    def forward(self, batch: Data) -> Tensor:
        """``[num_graphs]``"""
        x = self.norm(self.first(batch.x, batch.edge_index)).relu()
        x = self.second(x, batch.edge_index).relu()
        return self.head(global_add_pool(x, batch.batch, batch.num_graphs)).flatten()


def main() -> None:
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loader = PaddedLoader([molecule() for _ in range(GRAPHS)], batch_size=BATCH, shuffle=True)
    model = convert_batchnorm(Net()).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    @edgeless.capture_step(model=model, optimizer=optimizer)
    def step(batch: Data) -> Tensor:
        optimizer.zero_grad()
        with real_rows(batch):
            out = model(batch)
        errors = (out - batch.y).square()
        loss = torch.where(batch.graph_mask, errors, 0).sum() / batch.graph_mask.sum()
        loss.backward()
        optimizer.step()
        return loss

    for epoch in range(EPOCHS):
        start = time.perf_counter()
        losses = [step(batch.to(device)) for batch in loader]
        mean = torch.stack(losses).mean().item()
        print(f"epoch {epoch}: loss {mean:.3f}, {time.perf_counter() - start:.2f} s")
        scheduler.step()
    print(loader.sizes)
    print(step)


if __name__ == "__main__":
    main()

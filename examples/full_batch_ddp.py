"""Full-batch training on one graph over several processes or GPUs; needs the extra [distributed].

    torchrun --nproc-per-node 2 examples/full_batch_ddp.py

Started without torchrun it does the same in one process, and the losses are the same.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import edgeless.distributed as ed
from edgeless.pyg.nn import GATv2Conv, SAGEConv

NODES, EDGES, CLASSES, FEATURES, PARTS = 4_000, 60_000, 4, 16, 2


class Net(torch.nn.Module):
    """GATv2 with attention dropout -> batch norm -> ReLU -> SAGE: the model does not depend on the partition."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = GATv2Conv(FEATURES, 8, heads=4, dropout=0.2)
        self.norm = torch.nn.BatchNorm1d(32)
        self.conv2 = SAGEConv(32, CLASSES)

    def forward(self, x: Tensor, graph) -> Tensor:
        return self.conv2(self.norm(self.conv1(x, graph)).relu(), graph)


def write_parts(folder: Path) -> None:
    """A random graph that mostly joins nodes of one class. A real one is partitioned once, in a script of its own."""
    draw = torch.Generator().manual_seed(0)
    y = torch.randint(CLASSES, (NODES,), generator=draw)
    src, dst = torch.randint(NODES, (2, 4 * EDGES), generator=draw)
    kept = (y[src] == y[dst]) | (torch.rand(4 * EDGES, generator=draw) < 0.05)
    edge_index = torch.stack([src, dst])[:, kept][:, :EDGES]
    x = torch.randn(CLASSES, FEATURES, generator=draw)[y] + 3 * torch.randn(NODES, FEATURES, generator=draw)
    data = {"x": x, "y": y, "train": torch.rand(NODES, generator=draw) < 0.5}
    ed.partition(
        edge_index, NODES, PARTS, folder, method="random", node_data=data
    )  # "metis" for a graph with structure


def train(device: torch.device) -> None:
    first = not dist.is_initialized() or dist.get_rank() == 0
    with tempfile.TemporaryDirectory() as folder:
        where = [folder]
        if first:
            write_parts(Path(folder) / "parts")
        if dist.is_initialized():
            dist.broadcast_object_list(where)  # the processes of this host share the folder
        dg = ed.load(Path(where[0]) / "parts", device)
        torch.manual_seed(0)
        model = ed.convert_batchnorm(Net().to(device))
        if dg.size > 1:
            model = DistributedDataParallel(model, static_graph=True, gradient_as_bucket_view=True)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for epoch in range(1, 21):
            torch.manual_seed(epoch)  # for dropout masks; the first process' seed counts
            optimizer.zero_grad()
            out = model(dg.ndata["x"], dg)
            loss = ed.mean(F.cross_entropy(out, dg.ndata["y"], reduction="none"), dg.ndata["train"], dg)
            loss.backward()
            optimizer.step()
            if first and epoch % 5 == 0:
                print(f"epoch {epoch}: loss {loss.item():.6f} on {dg.size} of {dg!r}")


def main() -> None:
    train(ed.init(timeout=120))
    # The model is gone by now: where DDP is the last to hold the group, ending it can hang.
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Mini-batches with DGL's NeighborSampler under DistributedDataParallel: every process trains on seeds of its own.

torchrun --nproc-per-node 2 examples/dgl_minibatch_ddp.py
"""

from __future__ import annotations

import os

os.environ.setdefault("DGLBACKEND", "pytorch")  # otherwise DGL writes a configuration file at its first import

import dgl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from edgeless.dgl.nn import SAGEConv  # in place of: from dgl.nn import SAGEConv

NODES, EDGES, CLASSES, FEATURES = 5_000, 100_000, 4, 32


def make_data() -> tuple[dgl.DGLGraph, Tensor, Tensor]:
    """A graph that mostly joins nodes of one class, noisy features ``[N, F]``, labels ``[N]``."""
    y = torch.randint(CLASSES, (NODES,))
    x = torch.randn(CLASSES, FEATURES)[y] + 3 * torch.randn(NODES, FEATURES)
    src, dst = torch.randint(NODES, (2, 4 * EDGES))
    kept = (y[src] == y[dst]) | (torch.rand(4 * EDGES) < 0.05)
    return dgl.graph((src[kept][:EDGES], dst[kept][:EDGES]), num_nodes=NODES), x, y


class Net(torch.nn.Module):
    """SAGE -> ReLU -> SAGE, each on a block of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = SAGEConv(FEATURES, 32, "mean")
        self.conv2 = SAGEConv(32, CLASSES, "mean")

    def forward(self, blocks: list, x: Tensor) -> Tensor:
        return self.conv2(blocks[1], self.conv1(blocks[0], x).relu())


def train(rank: int, world: int, device: torch.device) -> None:
    torch.manual_seed(0)  # the same graph and the same parameters in every process
    graph, x, y = make_data()
    model = Net().to(device)
    # Equal numbers of seeds: a process with fewer batches would leave the others waiting for its gradients.
    own = torch.randperm(NODES)[: NODES // world * world].view(world, -1)[rank]
    sampler = dgl.dataloading.NeighborSampler([5, 10])  # from the input to the output
    loader = dgl.dataloading.DataLoader(graph, own, sampler, batch_size=256, shuffle=True)
    if world > 1:
        model = DistributedDataParallel(model, static_graph=True, gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    torch.manual_seed(rank)
    dgl.seed(rank)
    for epoch in range(1, 4):
        total = torch.zeros((), device=device)
        for inputs, seeds, blocks in loader:
            blocks = [block.to(device) for block in blocks]
            optimizer.zero_grad()
            loss = F.cross_entropy(model(blocks, x[inputs].to(device)), y[seeds].to(device))
            loss.backward()
            optimizer.step()
            total += loss.detach() * len(seeds)
        if world > 1:
            dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: loss {total.item() / (world * len(own)):.3f} on {world} processes")


def main() -> None:
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local) if torch.cuda.device_count() > local else torch.device("cpu")
    if world > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    train(rank, world, device)
    # The model is gone by now: where DDP is the last to hold the group, ending it can hang.
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

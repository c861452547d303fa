"""Mini-batches with NeighborLoader under DistributedDataParallel: every process samples and trains on its own seeds.

    torchrun --nproc-per-node 2 examples/pyg_minibatch_ddp.py

PyG samples and torch averages the gradients: edgeless.distributed is not needed. static_graph and
gradient_as_bucket_view save most of DDP's cost on small batches. edgeless.prefetch builds the next batch's graph on a
stream of its own; otherwise the host would wait for the GPU at every new graph, and so for the other processes'
gradients. The loader needs pyg-lib or torch_sparse.
"""

from __future__ import annotations

import importlib.util
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader

from edgeless import Graph, prefetch
from edgeless.pyg.nn import GATv2Conv

NODES, EDGES, CLASSES, FEATURES = 5_000, 100_000, 4, 32


def make_data() -> Data:
    """A random graph that mostly joins nodes of one class; the same in every process."""
    torch.manual_seed(0)
    y = torch.randint(CLASSES, (NODES,))
    x = torch.randn(CLASSES, FEATURES)[y] + 3 * torch.randn(NODES, FEATURES)
    src, dst = torch.randint(NODES, (2, 4 * EDGES))
    kept = (y[src] == y[dst]) | (torch.rand(4 * EDGES) < 0.05)
    return Data(x=x, y=y, edge_index=torch.stack([src, dst])[:, kept][:, :EDGES].contiguous())


class Net(torch.nn.Module):
    """GATv2 -> ReLU -> GATv2."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = GATv2Conv(FEATURES, 8, heads=4)
        self.conv2 = GATv2Conv(32, CLASSES)

    def forward(self, x: Tensor, graph: Graph) -> Tensor:
        return self.conv2(self.conv1(x, graph).relu(), graph)


def train(rank: int, world: int, device: torch.device) -> None:
    data = make_data()
    # Equal numbers of seeds: a process with fewer batches would leave the others waiting for its gradients.
    seeds = torch.randperm(NODES)[: NODES // world * world].view(world, -1)[rank]
    on_gpu = device.type == "cuda"  # copies from pinned memory do not block the host
    loader = NeighborLoader(data, [10, 5], batch_size=256, input_nodes=seeds, shuffle=True, pin_memory=on_gpu)

    def prepare(batch: Data) -> tuple[Tensor, Graph, Tensor]:
        # The graph first: the host waits for it, and would wait for the features too if their copies were in flight.
        edge_index = batch.edge_index.to(device, non_blocking=True)
        size = (batch.num_nodes, batch.num_nodes)
        graph = Graph.from_edge_index(edge_index, *size, self_loops=True)  # GATv2Conv would add these loops
        x, y = (t.to(device, non_blocking=True) for t in (batch.x, batch.y[: batch.batch_size]))
        return x, graph, y

    model = Net().to(device)
    if world > 1:
        model = DistributedDataParallel(model, static_graph=True, gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    torch.manual_seed(rank)  # other neighbours and other dropout in every process
    for epoch in range(1, 4):
        total = torch.zeros((), device=device)
        for x, graph, y in prefetch(loader, prepare, device):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x, graph)[: len(y)], y)  # the seeds come first
            loss.backward()
            optimizer.step()
            total += loss.detach() * len(y)
        if world > 1:
            dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: loss {total.item() / (world * len(seeds)):.3f} on {world} processes")


def main() -> None:
    if not any(map(importlib.util.find_spec, ("pyg_lib", "torch_sparse"))):
        print("skipped: NeighborLoader needs pyg-lib or torch_sparse, and neither is installed")
        return
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local) if torch.cuda.device_count() > local else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    train(rank, world, device)
    # The model is gone by now: where DDP is the last to hold the group, ending it can hang.
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

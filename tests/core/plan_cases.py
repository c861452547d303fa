"""A call so small that its memory traffic is counted by hand, for the tests of reports.

Five sources, three destinations, seven edges, ids of 4 bytes: no two counts are equal, so none can pass for another.
"""

import torch

from edgeless import Graph
from edgeless.plan import steps as plan
from edgeless.plan.recording import record
from edgeless.plan.steps import DEVICES

S, D, E, ID = 5, 3, 7, 4  # sources, destinations, edges, bytes of an id
ENDS = torch.tensor([[0, 1, 2, 3, 4, 0, 2], [0, 0, 0, 1, 1, 2, 2]])
NUMBERS = {torch.float32: 4, torch.bfloat16: 2, torch.float16: 2, torch.float64: 8}
H200 = DEVICES["h200"]


def graph():
    return Graph.from_edge_index(ENDS, S, D)


def leaf(*shape, dtype=torch.float32):
    return torch.randn(shape).to(dtype).requires_grad_()


def said(call, *inputs):
    """(op, step, bytes) of every step of a call and of its backward."""
    return [(step.op, step.step, step.bytes) for step in record(call, inputs)]


def ids(*counts):
    return [torch.empty(count, dtype=torch.int32, device="meta") for count in counts]


def on_meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def said_to_be_on(monkeypatch, device):
    """Makes reports take every tensor to be on this device."""
    monkeypatch.setattr(plan.Device, "of", lambda _: device)

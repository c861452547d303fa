"""Training steps that tests capture, and their trajectories with and without capture_step."""

import copy

import torch
from tape import TapeGraphs
from torch import nn

from edgeless.capture.step import CapturedStep

GENERATOR = torch.Generator().manual_seed(0)
BATCHES = [(torch.randn(6, 4, generator=GENERATOR), torch.randn(6, 2, generator=GENERATOR)) for _ in range(12)]


class Net(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.dropout = dropout
        self.scale = 1.0

    def forward(self, x):
        x = nn.functional.dropout(self.norm(self.first(x)).relu(), self.dropout, self.training)
        return self.second(x) * self.scale


def taped_step(function, model=(), optimizer=(), warmup=2, most=16):
    """A step whose recordings are tapes."""
    models = [model] if isinstance(model, nn.Module) else list(model)
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
    return CapturedStep(function, models, optimizers, warmup, most, TapeGraphs())


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


class Run:
    """A model, its optimizer and a step."""

    def __init__(self, make, step=None, wrap=None, optimizer=sgd):
        torch.manual_seed(0)
        self.model = make()
        self.optimizer = optimizer(self.model.parameters())
        self.plain = (step or plain_step)(self.model, self.optimizer)
        self.step = self.plain if wrap is None else wrap(self.plain, self.model, self.optimizer)

    def everything(self):
        """What a step may have changed."""
        states = [v for state in self.optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
        return [*self.model.state_dict().values(), *states, *(p.grad for p in self.model.parameters())]


def plain_step(model, optimizer):
    """The usual step, written by a user."""

    def step(x, y):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


def two_runs(make, step=None, **options):
    """The same twice: as it is, and captured."""
    return Run(make, step, **options), Run(make, step, wrap=taped_step, **options)


def same(a, b):
    """Whether two lists of tensors, or of None, are equal bit by bit."""
    return len(a) == len(b) and all(x is y is None or torch.equal(x, y) for x, y in zip(a, b, strict=True))


def follow(eager, captured, batches, between=lambda run, number: None):
    """Runs both on the batches and compares them after every step; ``between`` is called before each."""
    for number, batch in enumerate(batches):
        losses = []
        for run in (eager, captured):
            torch.manual_seed(number)
            between(run, number)
            losses.append(run.step(*copy.copy(batch)))
        losses = [loss if isinstance(loss, (tuple, list)) else [loss] for loss in losses]
        assert same(*[[t.detach() for t in loss] for loss in losses]), number
        assert same(eager.everything(), captured.everything()), number

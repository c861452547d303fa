"""edgeless.capture_step on a GPU: replays of CUDA graphs against the step itself, bit by bit."""

import copy
import importlib

import pytest
import torch
from step_cases import same
from torch.nn import functional as F

import edgeless

pytestmark = pytest.mark.cuda


def ends_of(num_nodes=200, count=900, seed=0):
    made = torch.Generator().manual_seed(seed)
    src = torch.randint(num_nodes, (count,), generator=made)
    dst = (src + torch.randint(1, num_nodes, (count,), generator=made)) % num_nodes
    return torch.stack((src, dst)).cuda()


def features(seed=1, num_nodes=200):
    return torch.randn(num_nodes, 16, generator=torch.Generator().manual_seed(seed)).cuda()


class Net(torch.nn.Module):
    def __init__(self, name="GATv2Conv", dropout=0.0, **options):
        super().__init__()
        pytest.importorskip("torch_geometric")
        layer = getattr(importlib.import_module("edgeless.pyg.nn"), name)
        self.first, self.second = layer(16, 8, **options), layer(8 * options.get("heads", 1), 8)
        self.norm = torch.nn.BatchNorm1d(8 * options.get("heads", 1))
        self.dropout = dropout

    def forward(self, x, edge_index):
        x = F.relu(self.norm(self.first(x, edge_index)))
        return self.second(F.dropout(x, self.dropout, self.training), edge_index)


def adam(parameters):
    lr = torch.full((), 0.01, device="cuda")
    return torch.optim.Adam(parameters, lr=lr, capturable=True)


def step_of(model, optimizer):
    def step(x, edge_index):
        optimizer.zero_grad()
        loss = model(x, edge_index).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


class Twins:
    """A model that trains with its step as it is, and one whose step is captured."""

    def __init__(self, make=Net, optimizer=adam, step=step_of):
        torch.manual_seed(0)
        model = make().cuda()
        self.models = model, copy.deepcopy(model)
        self.optimizers = [optimizer(model.parameters()) for model in self.models]
        plain = [step(*given) for given in zip(self.models, self.optimizers, strict=True)]
        self.captured = edgeless.capture_step(plain[1], model=self.models[1], optimizer=self.optimizers[1])
        self.steps = plain[0], self.captured

    def follow(self, batches, between=lambda number, model, optimizer: None):
        losses = [], []
        for which in (0, 1):
            torch.manual_seed(7)
            for number, batch in enumerate(batches):
                between(number, self.models[which], self.optimizers[which])
                losses[which].append(self.steps[which](*batch).detach())
        assert same(*losses), next(i for i, (a, b) in enumerate(zip(*losses, strict=True)) if not torch.equal(a, b))
        assert same(*[list(model.state_dict().values()) for model in self.models])


@pytest.mark.parametrize("optimizer", [adam, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)])
@pytest.mark.parametrize(
    "name,options", [("GATv2Conv", {"heads": 4}), ("GATConv", {"heads": 4}), ("GCNConv", {}), ("SAGEConv", {})]
)
def test_200_steps_on_one_graph(name, options, optimizer):
    twins, edge_index, x = Twins(lambda: Net(name, dropout=0.5, **options), optimizer), ends_of(), features()
    twins.follow([(x, edge_index)] * 200)
    assert twins.captured.num_captured == 1 and twins.captured.num_replays == 197, twins.captured.report()


@pytest.mark.parametrize("name", ["GATv2Conv", "GCNConv", "SAGEConv", "TransformerConv"])
def test_200_steps_on_new_graphs(name):
    twins = Twins(lambda: Net(name, dropout=0.5))
    twins.follow([(features(seed), ends_of(seed=seed)) for seed in range(200)])
    assert twins.captured.num_captured == 1 and twins.captured.num_replays >= 190, twins.captured.report()


def test_an_optimizer_is_made_capturable_and_follows_its_scheduler():
    def make(parameters):
        return torch.optim.Adam(parameters, lr=0.01)

    schedulers = {}

    def between(number, model, optimizer):
        if number == 0:
            schedulers[id(optimizer)] = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5)
        else:
            schedulers[id(optimizer)].step()

    twins, edge_index, x = Twins(optimizer=make), ends_of(), features()
    twins.optimizers[0].param_groups[0].update(capturable=True, lr=torch.full((), 0.01, device="cuda"))
    twins.follow([(x, edge_index)] * 60, between)
    assert twins.captured.num_captured == 1 and twins.captured.num_replays >= 55, twins.captured.report()
    assert float(twins.optimizers[1].param_groups[0]["lr"]) == pytest.approx(0.01 * 0.5**5)


def scaled_step(model, optimizer):
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0, growth_interval=5)

    def step(x, edge_index):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = model(x, edge_index).float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss

    return step


def test_a_scaler_with_a_fused_optimizer():
    def make(parameters):
        return torch.optim.Adam(parameters, lr=torch.full((), 0.01, device="cuda"), fused=True, capturable=True)

    twins, edge_index = Twins(optimizer=make, step=scaled_step), ends_of()
    twins.follow([(features(seed), edge_index) for seed in range(60)])
    assert twins.captured.num_replays >= 50, twins.captured.report()


CHANGES = {
    "a mode": lambda model, optimizer: model.eval(),
    "an attribute": lambda model, optimizer: setattr(model, "dropout", 0.25),
    "a parameter's data": lambda model, optimizer: setattr(model.norm.bias, "data", torch.ones_like(model.norm.bias)),
    "a frozen parameter": lambda model, optimizer: model.norm.bias.requires_grad_(False),
    "a loaded optimizer": lambda model, optimizer: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())),
    "a hyperparameter": lambda model, optimizer: optimizer.param_groups[0].update(weight_decay=0.1),
    "a hook": lambda model, optimizer: model.first.register_forward_hook(lambda *given: given[2] * 2),
    "a value": lambda model, optimizer: model.norm.bias.data.fill_(2.0),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_whatever_changes_is_noticed(change):
    twins, edge_index, x = Twins(lambda: Net(dropout=0.5)), ends_of(), features()
    twins.follow([(x, edge_index)] * 20, lambda number, *given: change(*given) if number == 10 else None)
    assert twins.captured.num_replays >= 6, twins.captured.report()


def test_a_graph_that_was_written_to_is_another():
    twins, edge_index, x = Twins(), ends_of(), features()
    twins.follow([(x, edge_index)] * 6)
    edge_index[0, :400] = 7
    edge_index[1, :400] = 9
    twins.follow([(x, edge_index)] * 6)
    assert twins.captured.num_captured == 1 and twins.captured.num_replays >= 5, twins.captured.report()


def test_wrong_ids_are_reported_and_kernels_stay_within_their_arrays():
    twins = Twins()
    twins.follow([(features(seed), ends_of(seed=seed)) for seed in range(6)])
    wrong = ends_of()
    wrong[0, 5], wrong[1, 7] = 10**6, -3
    replays = twins.captured.num_replays
    twins.captured(features(), wrong)
    torch.cuda.synchronize()
    assert twins.captured.num_replays == replays + 1
    with pytest.raises(IndexError, match="in a call before, .* had an id out of range"):
        twins.captured(features(), ends_of())
    twins.captured(features(), ends_of())


def test_steps_that_cannot_be_captured_run_as_they_are():
    def waiting(model, optimizer):
        inner = step_of(model, optimizer)

        def step(x, edge_index):
            loss = inner(x, edge_index)
            return loss if float(loss) > 0 else loss * 2

        return step

    twins, edge_index, x = Twins(step=waiting), ends_of(), features()
    twins.follow([(x, edge_index)] * 8)
    assert twins.captured.num_replays == 0 and "the step" in twins.captured.report()
    assert torch.cuda.get_sync_debug_mode() == 0
    other = Twins()
    other.follow([(x, edge_index)] * 8)
    assert other.captured.num_replays >= 4  # the GPU is well


def test_memory_is_flat():
    twins = Twins(lambda: Net(dropout=0.5))
    sizes = [150, 200, 250]
    batches = [(features(seed, sizes[seed % 3]), ends_of(sizes[seed % 3], seed=seed)) for seed in range(60)]
    for batch in batches[:30]:
        twins.captured(*batch)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(30):
        for batch in batches:
            twins.captured(*batch)
    torch.cuda.synchronize()
    assert twins.captured.num_captured == 3 and torch.cuda.memory_allocated() <= before + 4096


def test_two_streams():
    twins, edge_index, x = Twins(), ends_of(), features()
    twins.follow([(x, edge_index)] * 6)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        twins.follow([(x, edge_index)] * 6)
        torch.cuda.synchronize()
    assert twins.captured.num_captured == 2, twins.captured.report()

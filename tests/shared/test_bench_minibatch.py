"""The benchmark of sampled training: peers train the same thing, on graphs that are new at every step."""

import itertools
import json

import pytest
import torch

import edgeless
from edgeless.__main__ import main
from edgeless.tools.bench import graphs, minibatch
from edgeless.tools.bench.work import Case
from edgeless.tools.cli.devices import UsageError

TOY = graphs.load("toy", None, torch.device("cpu"))
SAMPLING = minibatch.Sampling(batch_size=64, fanout=(5, 4))
LAYERS = ("sage-mean", "sage-max", "gatv2", "rgcn", "rgat", "hgt")


def needs(peer):
    reason = minibatch.why_not(peer)
    if reason is not None:
        pytest.skip(reason)


def built(layer, peer):
    needs(peer)
    if peer.endswith("dgl") and layer == "rgat":
        pytest.skip("DGL has no such layer")
    return minibatch.build(Case("minibatch", layer, "fp32", features=16, heads=2, channels=8), peer, TOY, SAMPLING)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("framework", ["pyg", "dgl"])
def test_both_sides_train_alike(layer, framework):
    mine, stock = built(layer, f"edgeless-{framework}"), built(layer, framework)
    batches = list(itertools.islice(stock.draw(), 4))
    losses = [[float(peer.step(batch)) for batch in batches] for peer in (mine, stock)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert len(set(losses[0])) == len(batches)


@pytest.mark.parametrize("framework", ["pyg", "dgl"])
def test_a_batch_has_the_seeds_and_their_neighbours(framework):
    peer = built("sage-mean", f"edgeless-{framework}")
    for batch in itertools.islice(peer.draw(), 2):
        chosen, x, y = batch
        assert len(y) == SAMPLING.batch_size
        assert x.shape[1] == 16
        if framework == "pyg":
            assert chosen[0] is chosen[1]
            assert SAMPLING.batch_size < len(x) < TOY.num_nodes
            continue
        assert chosen[1].num_dst_nodes() == SAMPLING.batch_size
        for block, most in zip(chosen, reversed(SAMPLING.fanout), strict=True):
            assert int(block.in_degrees().max()) <= most


def test_every_batch_is_a_graph_that_the_cache_has_not_seen():
    peer = built("sage-mean", "edgeless-pyg")
    edgeless.clear_cache()
    for count, batch in enumerate(itertools.islice(peer.draw(), 5), 1):
        peer.step(batch)
        info = edgeless.cache_info()
        assert (info.misses, info.hits) == (count, count)  # built by the first layer, found by the second
    assert info.graphs <= 2


def test_the_figures_of_a_turn_belong_to_the_same_batches(monkeypatch):
    """A new batch takes 4 ms, a known one 1 ms, drawing 2 ms."""
    now, seen, numbers = [0.0], set(), itertools.count()

    def step(self, batch):
        now[0] += 1.0 if batch[0] in seen else 4.0
        seen.add(batch[0])

    def draw():
        for number in numbers:
            now[0] += 2.0
            yield number, None, None

    monkeypatch.setattr(minibatch, "clock_of", lambda device: lambda: now[0])
    monkeypatch.setattr(minibatch.Peer, "step", step)
    monkeypatch.setattr(minibatch, "why_not", lambda peer: None)
    peer = minibatch.Peer(draw, torch.nn.Linear(1, 1), True)
    monkeypatch.setattr(minibatch, "build", lambda *args: peer)
    (found,) = minibatch.measure(TOY, Case("minibatch", "gatv2", "fp32"), ["edgeless-pyg"], 2, SAMPLING)
    assert (found.sampling_ms, found.step_ms, found.again_ms, found.new_graph_ms) == (2.0, 4.0, 1.0, 3.0)
    assert found.batches == 2 * minibatch.TURN


def test_a_peer_without_its_sampler_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(minibatch.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(minibatch, "installed", lambda framework: framework == "pyg")
    assert main(["bench", "--graph", "toy", "--minibatch", "sage-mean", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "pyg: NeighborLoader needs pyg-lib, or: pip install --no-build-isolation torch_scatter torch_sparse" in out
    assert "edgeless-dgl: needs dgl: pip install 'edgeless[dgl]'" in out


def test_peers_and_fanouts_that_do_not_fit_are_refused():
    with pytest.raises(UsageError, match="for --minibatch there are pyg, edgeless-pyg, dgl, edgeless-dgl"):
        minibatch.peers_of(["plain"])
    assert main(["bench", "--graph", "toy", "--minibatch", "gatv2", "--fanout", "5"]) != 0


def test_the_command_measures_and_writes_what_it_prints(tmp_path, capsys):
    peers = [peer for peer in minibatch.PEERS if minibatch.why_not(peer) is None]
    if not peers:
        pytest.skip("needs a sampler")
    file = tmp_path / "steps.json"
    options = ["--batch-size", "64", "--fanout", "5,4", "--features", "16", "--heads", "2", "--channels", "8"]
    command = ["bench", "--graph", "toy", "--minibatch", "sage-max", "--device", "cpu", "--rounds", "1", *options]
    assert main([*command, "--peers", *peers, "--json", str(file)]) == 0
    assert "training two layers of sage-max, 16 -> 2 x 8 -> 40, batches of 64" in capsys.readouterr().out
    rows = json.loads(file.read_text())["results"]
    assert [row["peer"] for row in rows] == peers
    for row in rows:
        assert row["failed"] is None
        assert row["step_ms"] > 0
        assert row["sampling_ms"] > 0

"""One graph over several processes: what needs no framework. The layers are in tests/pyg and tests/dgl."""

import json
import math
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

pytest.importorskip("safetensors")
pytest.importorskip("pymetis")

from carrier_cases import carried
from part_cases import FEATURES, NODES, edge_data, edges, node_data, partitions, spawn, ways, write_partitions
from part_training import averages, fail, lose_one, loss_of, new_net, same_bits, train, train_whole, write_damaged
from processes import forking

import edgeless
import edgeless.distributed as ed
from edgeless import functional
from edgeless.distributed.exchange import Halo
from edgeless.functional import layer

needs_gloo = pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo")


@pytest.mark.parametrize("method", ("random", "contiguous", "metis"))
def test_a_default_device_is_not_looked_at(tmp_path, method):
    """A user's ``torch.set_default_device("cuda")``, for which "meta" stands: nothing is made there unasked."""
    edge_index, data = edges("loops"), node_data()
    expected = ed.partition(edge_index, NODES, 2, tmp_path / "before", method=method, node_data=data)
    with torch.device("meta"):
        found = ed.partition(edge_index, NODES, 2, tmp_path / "after", method=method, node_data=data)
        part = ed.load(tmp_path / "after", device="cpu")
    assert found == expected and part.device.type == "cpu"
    assert torch.equal(part.edge_index(), ed.load(tmp_path / "before", device="cpu").edge_index())


# Several processes -----------------------------------------------------------------------------------------------


@needs_gloo
@pytest.mark.slow
@pytest.mark.parametrize("world", (2, 3))
def test_training_and_checkpoints(tmp_path, world):
    write_partitions(tmp_path, world)
    _, whole = train_whole()
    data, graph = node_data(), edgeless.Graph.from_edge_index(edges("loops"), NODES, NODES)
    torch.save(whole.state_dict(), tmp_path / "of-1.pt")
    whole.eval()
    torch.save(whole(data["x"], graph).detach(), tmp_path / "out-of-1.pt")
    assert not spawn(train, world, tmp_path)
    again = new_net()
    again.load_state_dict(torch.load(tmp_path / f"of-{world}.pt"))
    again.eval()
    torch.testing.assert_close(again(data["x"], graph), whole(data["x"], graph), rtol=1e-8, atol=1e-10)


def test_two_and_three_processes_share_all_ways():
    """Those in which the layers' tests run their cases on parts."""
    worlds = [SimpleNamespace(size=size, device=torch.device("cpu")) for size in (2, 3)]
    for partition in partitions(2):
        for number in range(4):
            halves = [ways(number, partition, dg, shared=True) for dg in worlds]
            whole = ways(number, partition, worlds[0], shared=False)
            assert sorted(map(str, sum(halves, []))) == sorted(map(str, whole))
            assert partition != "random" or len(halves[0]) == len(halves[1]) == 2


@needs_gloo
@pytest.mark.slow
@pytest.mark.parametrize("world", (2, 3))
def test_gradients_are_averaged_in_one_go(tmp_path, world):
    assert not spawn(averages, world, tmp_path)


@pytest.mark.cuda
def test_gradients_are_averaged_over_gpus(tmp_path):
    if torch.cuda.device_count() < 2 or not dist.is_nccl_available():
        pytest.skip("needs two GPUs and NCCL")
    assert not spawn(averages, 2, tmp_path, "cuda", backend="nccl")


def test_one_process_has_nothing_to_average():
    net = torch.nn.Linear(2, 2)
    ed.average_gradients(net)
    assert net.weight.grad is None


@pytest.mark.cuda
def test_two_gpus_give_the_same_bits_again(tmp_path):
    if torch.cuda.device_count() < 2 or not dist.is_nccl_available():
        pytest.skip("needs two GPUs and NCCL")
    write_partitions(tmp_path, 2)
    assert not spawn(carried, 2, tmp_path, "all_to_all", same_bits, backend="nccl")


@needs_gloo
@pytest.mark.slow
def test_failures_reach_every_rank(tmp_path):
    write_partitions(tmp_path, 2)
    write_damaged(tmp_path, 2)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert not spawn(fail, 2, tmp_path)
    assert all(path.read_bytes() == contents for path, contents in before.items())


@needs_gloo
@pytest.mark.slow
def test_a_killed_rank_ends_the_others_with_the_reason(tmp_path):
    write_partitions(tmp_path, 2)
    context = mp.get_context(forking())
    words = context.SimpleQueue()
    inputs = (str(tmp_path), str(tmp_path / "store"), words)
    processes = [context.Process(target=lose_one, args=(rank, *inputs)) for rank in range(2)]
    begun = time.monotonic()
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, -9]
    assert time.monotonic() - begun < 120
    assert "Another rank has ended" in words.get()


# One process -----------------------------------------------------------------------------------------------------


@pytest.fixture
def parts(tmp_path):
    write_partitions(tmp_path, 2)
    return tmp_path


@pytest.mark.parametrize("name", ("random", "contiguous", "metis", "merged", "apart", "empty"))
def test_one_process_needs_no_group(parts, name):
    dg = ed.load(parts / name)
    kind = {"contiguous": "plain", "apart": "apart"}.get(name, "loops")
    data, edge_index = node_data(), edges(kind)
    assert (dg.rank, dg.size, dg.num_own, dg.num_halo) == (0, 1, NODES, 0)
    for key, tensor in data.items():
        assert torch.equal(ed.gather(dg.ndata[key], dg), tensor)
    assert torch.equal(dg.edata["w"], edge_data(edge_index)["w"])  # of one process: in the order of the ids
    assert torch.equal(dg.edge_index(), edge_index)
    graph = edgeless.Graph.from_edge_index(edge_index, NODES, NODES)
    for norm in ("none", "left", "both"):
        out = functional.spmm(dg, dg.ndata["x"], norm=norm)
        torch.testing.assert_close(ed.gather(out, dg), functional.spmm(graph, data["x"], norm=norm), rtol=1e-12, atol=0)
    looped, whole = dg.with_self_loops(), graph.with_self_loops()
    assert looped.num_edges == whole.num_edges == looped.total_edges
    assert torch.equal(looped.edge_ids.sort()[0], torch.arange(whole.num_edges))
    assert torch.equal(ed.gather(looped.out_degrees(), dg), whole.out_degrees())
    assert torch.equal(looped.edge_index()[:, looped.edge_ids.argsort()], whole.edge_index())


def test_powers_of_degrees_are_told_apart_by_every_option(parts):
    plain = {"side": "dst", "power": -0.5, "dtype": torch.float32, "isolated": 1.0}
    options = [{**plain, **change} for change in (
        {}, {"side": "src"}, {"power": -1.0}, {"dtype": torch.float64}, {"isolated": 0.0},
    )]  # fmt: skip
    edge_index = edges("loops")
    graph = edgeless.Graph.from_edge_index(edge_index, NODES, NODES)
    for order in (options, options[::-1]):
        dg = ed.load(parts / "merged")
        for one in order:
            scale, whole = ed.gather(dg.degree_scale(**one), dg), graph.degree_scale(**one)
            assert scale.dtype == whole.dtype
            torch.testing.assert_close(scale, whole)
            assert dg.degree_scale(**one) is dg.degree_scale(**one)


def test_masks_and_losses_are_those_of_the_whole_graph(parts):
    net, dg = new_net(), ed.load(parts / "random")
    torch.manual_seed(50)
    loss = loss_of(net, dg)
    assert loss.item() == pytest.approx(train_whole()[0][0], rel=1e-12)


def test_a_mean_over_no_node_is_nan(parts):
    dg = ed.load(parts / "random")
    assert ed.mean(torch.ones(NODES), torch.zeros(NODES, dtype=torch.bool), dg).isnan()
    assert ed.mean(torch.full((NODES,), 3.0), None, dg).item() == 3


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_outside_of_the_mask_may_be_anything(parts, value):
    """A node without a label, whose loss nobody asked for, changes neither the mean nor a gradient."""
    dg = ed.load(parts / "random")
    mask = torch.arange(NODES) % 3 == 0
    loss = torch.arange(NODES, dtype=torch.float64)
    expected = loss[mask].mean()
    loss = torch.where(mask, loss, value).requires_grad_()
    mean = ed.mean(loss, mask, dg)
    assert mean.item() == pytest.approx(expected.item())
    mean.backward()
    assert torch.equal(loss.grad, mask.double() / mask.sum())
    assert not ed.mean(loss, None, dg).isfinite()


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"num_parts": 0}, ValueError, "partition: num_parts must be at least 1, got 0"),
        ({"num_parts": 2.5}, TypeError, "partition: num_parts must be an int, got float"),
        ({"num_nodes": 7}, IndexError, "edge_index[0] has id"),
        ({"method": "best"}, ValueError, "method must be one of 'metis', 'random', 'contiguous' or a Tensor [N]"),
        ({"method": torch.zeros(3, dtype=torch.int64)}, ValueError, "method must be integers of shape [N] = [45]"),
        ({"method": torch.full((NODES,), 2)}, IndexError, "method has id 2"),
        ({"node_data": {"x": torch.ones(3)}}, ValueError, "node_data['x'] must have N = 45 rows, got shape [3]"),
        (
            {"node_data": {"z": torch.ones(NODES, dtype=torch.complex128)}},
            TypeError,
            "['z'] must be dense and of a dtype",
        ),
        ({"node_data": {"s": torch.ones(NODES, 2).to_sparse()}}, TypeError, "got torch.float32, torch.sparse_coo"),
        ({"edge_data": {"w": [1.0]}}, TypeError, "edge_data must hold Tensors by name, got 'w': list"),
    ],
)
def test_partition_says_what_is_wrong_and_writes_nothing(tmp_path, change, kind, words):
    given = {"edge_index": edges("loops"), "num_nodes": NODES, "num_parts": 2, "directory": tmp_path / "new", **change}
    with pytest.raises(kind) as caught:
        ed.partition(**given)
    assert words in str(caught.value)
    assert not (tmp_path / "new").exists()


def test_partition_writes_over_nothing(tmp_path):
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(FileExistsError, match="must be empty or new"):
        ed.partition(edges("loops"), NODES, 2, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_the_manifest_says_what_is_there(parts):
    manifest = json.loads((parts / "metis" / "manifest.json").read_text())
    assert manifest["num_nodes"] == NODES == sum(manifest["sizes"])
    assert manifest["num_edges"] == edges("loops").size(1) == sum(manifest["edges"])
    assert manifest["num_loops"] == int((edges("loops")[0] == edges("loops")[1]).sum())
    assert manifest["version"] == 1
    assert set(manifest["written_by"]) == {"edgeless", "torch"}
    random = json.loads((parts / "random" / "manifest.json").read_text())
    assert manifest["fingerprint"] != random["fingerprint"]
    assert manifest["cut_edges"] < random["cut_edges"]


def test_partition_takes_a_graph_and_other_integers(tmp_path):
    edge_index = edges("loops")
    graph = edgeless.Graph.from_edge_index(edge_index, NODES, NODES)
    one = ed.partition(graph, NODES, 2, tmp_path / "a", method="contiguous")
    other = ed.partition(edge_index.int(), NODES, 2, tmp_path / "b", method=torch.arange(NODES) * 2 // NODES)
    assert one["fingerprint"] == other["fingerprint"]


def test_received_rows_are_those_of_the_same_unwritten_tensor():
    rows, received = torch.ones(3, 2), torch.ones(1, 2)
    halo = Halo(None, 3, torch.tensor([0]), [0, 1], [0, 1])
    halo.remember(rows, False, received)
    assert halo.knows(rows) and not halo.knows(rows.clone()) and not halo.knows(rows[:])
    rows.add_(1)
    assert not halo.knows(rows)
    halo.remember(rows, True, received)
    assert halo.knows(rows) and not halo.knows(rows.requires_grad_())
    halo.forget()
    assert not halo.knows(rows.detach_())


def test_a_loss_of_another_shape_is_refused(parts):
    dg = ed.load(parts / "random")
    with pytest.raises(ValueError, match=r"loss must have shape \[n\] = \[45\], got \[\]; use reduction='none'"):
        ed.mean(torch.ones(()), None, dg)
    with pytest.raises(ValueError, match="mask must be bool"):
        ed.mean(torch.ones(NODES), torch.ones(NODES), dg)


def test_functions_still_refuse_what_is_no_graph():
    with pytest.raises(TypeError, match="graph must be an edgeless.Graph, got list"):
        functional.spmm([], torch.ones(3, FEATURES))
    with pytest.raises(TypeError, match="graph must be an edgeless.Graph, got list"):
        functional.neighbor_reduce([], torch.ones(3, FEATURES), "max")
    with pytest.raises(TypeError, match="graph must be an edgeless.Graph, got list"):
        functional.gat_attention([], torch.ones(3, 1, FEATURES), torch.ones(3, 1))


def test_a_part_is_never_one_op(parts):
    dg, x = ed.load(parts / "random"), SimpleNamespace(is_cuda=True, size=lambda _: NODES)
    assert layer._is_one_op(edgeless.Graph.from_edge_index(edges("loops"), NODES, NODES), x)
    assert not layer._is_one_op(dg, x) and not layer._is_one_op(dg.local, x)


def test_under_the_reference_backend_functions_give_the_same(parts):
    dg, x = ed.load(parts / "metis"), torch.randn(NODES, 2, 3, dtype=torch.float64)
    found = []
    for name in ("fused", "reference"):
        with edgeless.backend(name):
            torch.manual_seed(3)
            found.append(functional.dot_attention(dg, x, x, x, dropout=0.5, return_weights="dropped"))
    for have, want in zip(*found, strict=True):
        torch.testing.assert_close(have, want, rtol=1e-12, atol=1e-12)


def test_batch_norm_keeps_its_state(parts):
    net = torch.nn.Sequential(torch.nn.BatchNorm1d(FEATURES))
    names = list(net.state_dict())
    assert ed.convert_batchnorm(net) is net
    assert isinstance(net[0], torch.nn.BatchNorm1d)
    assert list(net.state_dict()) == names
    x = node_data()["x"].float()
    assert torch.equal(net(x), torch.nn.BatchNorm1d(FEATURES)(x))

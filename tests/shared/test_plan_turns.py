"""``python -m edgeless plan --turns``: the sizes with which another kernel is chosen."""

import pytest
import torch

from edgeless.__main__ import main
from edgeless.plan.steps import DEVICES, Step
from edgeless.tools.bench import plans
from edgeless.tools.bench.plans import Sizes
from edgeless.tools.cli.plan_turns import FARTHEST, turns

GRAPH = Sizes(1000, 1000, 30_000)


def step(kernel, slices=1):
    return Step("op", "forward", "rowsplit", kernel, slices, 0, None, header="a.cuh", expression="edgeless::cuda::k")


@pytest.mark.parametrize("least", [20_000, 29_999, 30_001, 30_000 * FARTHEST])
def test_the_nearest_size_is_exact(least):
    """A plan that turns at one number of edges, whatever the nodes."""
    plan = lambda sizes: [step("long" if sizes.num_edges >= least else "short")]  # noqa: E731
    (turn,) = turns(plan, GRAPH)
    assert (turn.quantity, turn.grows) == ("edges", least > 30_000)
    assert turn.size == (least if turn.grows else least - 1)
    assert str(turn).endswith(f"edges: rowsplit: {'long' if turn.grows else 'short'} (k)")


def test_nodes_of_both_sides_change_together():
    plan = lambda sizes: [step("x"), step("y", 1 + (sizes.num_src + sizes.num_dst > 3000))]  # noqa: E731
    (turn,) = turns(plan, GRAPH)
    assert (turn.step, turn.quantity, turn.size) == (1, "nodes", 1501) and "y in 2 slices" in turn.then


def test_a_grid_that_follows_the_sizes_is_no_turn():
    plan = lambda sizes: [step(f"plain; {sizes.num_edges} blocks (4 resident), merges hubs")]  # noqa: E731
    assert turns(plan, GRAPH) == []


def test_a_step_that_disappears_is_one():
    plan = lambda sizes: [step("x"), step("y")][: 1 + (sizes.num_edges > 1000)]  # noqa: E731
    (turn,) = turns(plan, GRAPH)
    assert (turn.step, turn.size, turn.then) == (1, 1000, "no such step")


def test_an_empty_graph_has_none():
    plan = lambda sizes: [step("long" if sizes.num_edges else "short")]  # noqa: E731
    assert turns(plan, Sizes(0, 0, 0)) == []


def test_a_sum_turns_at_the_threshold_of_its_batches():
    """kLongSums of core_cuda/common/thresholds.h: batches of eight edges from a mean degree of 16 on."""
    sizes = Sizes(100_000, 100_000, 800_000)
    plan = lambda sizes: plans.steps_of("spmm_none_F64", torch.float32, sizes, DEVICES["h200"])  # noqa: E731
    found = {(turn.step, turn.quantity, turn.grows): turn for turn in turns(plan, sizes)}
    assert found[0, "edges", True].size == 1_600_000 and "0, 8>" in found[0, "edges", True].then
    assert found[0, "nodes", False].size == 50_000


def test_the_command_prints_them(capsys):
    assert main(["plan", "spmm_none_F64", "--nodes", "100000", "--edges", "800000", "--turns"]) == 0
    assert "  forward, with at least 1,600,000 edges: rowsplit: " in capsys.readouterr().out
    assert main(["plan", "--layer", "rgcn", "--graph", "aifb", "--turns"]) == 2
    assert "--turns has no meaning beside it" in capsys.readouterr().err

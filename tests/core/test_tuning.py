"""Decisions on engines: what is measured and when, what is read from the user's file, and what a plan says of it."""

import copy
import gc
import json
import os
import subprocess
import sys

import pytest
import torch
from test_wsb import ends_of, graph_of, near_and_far, rows, run

import edgeless
from edgeless import _C, Graph, functional
from edgeless.choices import engines, tuning
from edgeless.choices.engines import ENGINES
from edgeless.choices.tuning import Shape, Tuner, sides_of
from edgeless.choices.tuning_file import TuningFile, default_file
from edgeless.plan.recording import record
from edgeless.plan.steps import table
from edgeless.tools.tuning_measure import EXPECTED_USES, Measured, break_even, choose, entry_of, measure

SUM = Shape("spmm", torch.float32, 8, False)


FOUND = Measured({"rowsplit": 2.0, "wsb": 1.0, "cusparse": 3.0}, 5.0)


def write(file, graph, *shapes, found=FOUND):
    """Decisions on every side of a graph that there is, as the tune command writes them."""
    entries = [
        entry_of(graph, shape, side, found) for shape in shapes or [SUM] for side in sorted(sides_of(graph, shape))
    ]
    TuningFile(file, ENGINES).add(entries)


class Tuning(Tuner):
    """A tuner that prepares nothing, and says what it would prepare."""

    def __init__(self, file, mode="cached"):
        self.prepared, self.may = [], True
        prepare = lambda graph, name: self.prepared.append(name)  # noqa: E731
        super().__init__(ENGINES, prepare, mode=mode, file=TuningFile(file, ENGINES), may_wait=lambda: self.may)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "cache" / "tuning.json"


def small_graph():
    """A graph that has both directions."""
    graph = graph_of("random")
    graph.csc_arrays(False)
    return graph


def decided(graph, shape=SUM):
    found = {side: _C.decision(list(arrays), *shape) for side, arrays in sides_of(graph).items()}
    return {side: None if one is None else ENGINES[one[0]] for side, one in found.items()}


def use(tuner, graph, times, shape=SUM):
    return [tuner.may_decide(graph) and tuner.decide(graph, shape) for _ in range(times)]


# The choice ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ms,build_ms,engine",
    [
        ({"rowsplit": 2.0}, None, "rowsplit"),
        ({"rowsplit": 2.0, "wsb": 1.0, "cusparse": 1.5}, 50.0, "wsb"),
        ({"rowsplit": 2.0, "wsb": 1.0, "cusparse": 1.5}, 1.0 + EXPECTED_USES, "cusparse"),
        ({"rowsplit": 2.0, "wsb": 2.5, "cusparse": 1.97}, 1.0, "rowsplit"),
        ({"rowsplit": 2.0, "cusparse": 1.0}, None, "cusparse"),
    ],
)
def test_the_fastest_that_pays_is_chosen(ms, build_ms, engine):
    assert choose(Measured(ms, build_ms)) == engine


def test_when_an_engine_has_paid():
    found = Measured({"rowsplit": 2.0, "wsb": 1.5, "cusparse": 1.0}, 5.0)
    assert (break_even(found, "wsb"), break_even(found, "cusparse"), break_even(found, "rowsplit")) == (10, 0, None)


def test_blocks_pay_within_as_many_uses_as_are_expected_and_no_more():
    for build_ms, engine in ((EXPECTED_USES * 0.5, "wsb"), (EXPECTED_USES * 0.5 + 0.01, "rowsplit")):
        assert choose(Measured({"rowsplit": 2.0, "wsb": 1.5}, build_ms)) == engine


# Modes ---------------------------------------------------------------------------------------------------------------


def test_off_decides_nothing(file):
    graph = small_graph()
    write(file, small_graph())
    assert not any(use(Tuning(file, "off"), graph, 3))
    assert "tuned" not in graph._formats and "fingerprint" not in graph._formats


def test_without_a_file_nothing_is_decided_and_none_is_made(file):
    graph = small_graph()
    assert not any(use(Tuning(file), graph, 3)) and not file.exists()
    assert "tuned" not in graph._formats and "fingerprint" not in graph._formats


def test_what_was_measured_is_taken_before_the_first_call(file):
    graph, tuner = small_graph(), Tuning(file)
    write(file, small_graph())
    assert use(tuner, graph, 3) == [True] * 3
    assert decided(graph) == {"by_dst": "wsb", "by_src": "wsb"} and set(tuner.prepared) == {"wsb"}
    assert decided(graph, SUM._replace(width=16)) == {"by_dst": None, "by_src": None}
    assert use(tuner, graph, 1, SUM._replace(width=16)) == [False]
    origin = _C.decision(list(sides_of(graph)["by_dst"]), *SUM)[1]
    assert origin.startswith("measured on 20") and origin.endswith(str(file))


def test_other_graphs_and_dtypes_are_not_decided(file):
    write(file, small_graph())
    tuner, of_other_size, of_same_size = Tuning(file), graph_of("sparse"), graph_of("random", seed=1)
    for other in (of_other_size, of_same_size):
        assert not any(use(tuner, other, 3))
    assert "fingerprint" not in of_other_size._formats and "fingerprint" in of_same_size._formats
    assert use(tuner, small_graph(), 1, SUM._replace(dtype=torch.float64)) == [False]


def test_nothing_is_looked_up_in_a_capture(file):
    graph, tuner = small_graph(), Tuning(file)
    write(file, small_graph())
    tuner.may = False
    assert not any(use(tuner, graph, 2)) and "tuned" not in graph._formats
    tuner.may = True
    assert use(tuner, graph, 1) == [True]
    tuner.may = False
    assert use(tuner, graph, 1) == [True]  # it is decided already


def test_the_gradient_is_decided_when_it_comes(file):
    write(file, small_graph())
    graph, tuner = Graph.from_edge_index(*ends_of("random")), Tuning(file)
    assert use(tuner, graph, 1)[-1] and decided(graph) == {"by_dst": "wsb"}
    graph.csc_arrays(False)
    assert use(tuner, graph, 1)[-1]
    assert decided(graph) == {"by_dst": "wsb", "by_src": "wsb"}
    _ = graph.csc  # other arrays take the place of those without edge ids
    assert decided(graph)["by_src"] is None
    assert use(tuner, graph, 1) == [True] and decided(graph)["by_src"] == "wsb"


@pytest.mark.parametrize("name", ["device", "edgeless", "torch", "cuda", "dtype", "fingerprint"])
def test_decisions_are_of_one_device_and_versions(name, file):
    write(file, small_graph())
    held = json.loads(file.read_text())
    for entry in held["decisions"]:
        entry[name] = "another"
    file.write_text(json.dumps(held))
    same = small_graph()
    assert use(Tuning(file), same, 2) == [False] * 2 and decided(same)["by_dst"] is None


def test_without_memory_for_what_was_decided_rowsplit_stays(file):
    write(file, small_graph())

    def prepare(graph, name):
        raise torch.OutOfMemoryError("none left")

    tuner, graph = Tuning(file), small_graph()
    tuner._prepare = prepare
    assert use(tuner, graph, 2) == [False] * 2 and decided(graph)["by_dst"] is None


@pytest.mark.parametrize("mode", ["maybe", "on"])
def test_a_wrong_mode_is_refused(mode, file):
    with pytest.raises(ValueError, match=f"EDGELESS_TUNING must be off or cached, got '{mode}'"):
        Tuning(file, mode)
    done = subprocess.run(
        [sys.executable, "-c", "import edgeless"],
        env={**os.environ, "EDGELESS_TUNING": mode},
        capture_output=True,
        text=True,
    )
    assert f"EDGELESS_TUNING must be off or cached, got '{mode}'" in done.stderr


def test_sums_over_large_graphs_on_a_gpu_are_looked_up(file, monkeypatch):
    class Rows:  # all that is looked at before anything is decided
        is_cuda, dtype = True, torch.float32

        def element_size(self):
            return 4

        def numel(self):
            return 150 * 8

        def size(self, dim):
            return 150

    graph = small_graph()
    write(file, small_graph())
    monkeypatch.setattr(engines, "tuner", Tuning(file))
    with edgeless.engine("rowsplit"):
        engines.keep_plans(graph, Rows())
    several_heads = torch.ones(graph.num_edges, 2)
    for least, how in ((graph.num_edges + 1, {}), (0, {"sampled": True}), (0, {"weight": several_heads})):
        monkeypatch.setattr(engines, "LEAST_EDGES", least)
        engines.keep_plans(graph, Rows(), **how)
        assert "tuned" not in graph._formats
    engines.keep_plans(graph, Rows())
    assert decided(graph)["by_dst"] == "wsb"


# Attention -----------------------------------------------------------------------------------------------------------

FORWARD, BACKWARD = (tuning.shape_of_dot(torch.bfloat16, 4, 64, backward=backward) for backward in (False, True))


def test_attention_is_decided_by_pass(file):
    """The backward walks both directions and is one decision, which waits until the graph has both."""
    write(file, small_graph(), FORWARD, BACKWARD)
    assert [e["op"] for e in json.loads(file.read_text())["decisions"]] == ["dot_D64", "dot_backward_D64"]
    graph, tuner = Graph.from_edge_index(*ends_of("random")), Tuning(file)
    _ = graph.csr
    assert use(tuner, graph, 1, FORWARD)[-1]
    assert not sides_of(graph, BACKWARD)
    graph.csc_arrays(False)
    assert use(tuner, graph, 1, BACKWARD)[-1]
    assert decided(graph, FORWARD) == decided(graph, BACKWARD) == {"by_dst": "wsb", "by_src": None}
    assert decided(graph, tuning.shape_of_dot(torch.bfloat16, 2, 128, backward=False))["by_dst"] is None


@pytest.mark.parametrize("backward", [False, True])
def test_measuring_attention_leaves_the_graph_alone(backward, short_turns):
    graph, state = small_graph(), torch.get_rng_state()
    before = tuple(graph._formats)
    found = measure(graph, BACKWARD if backward else FORWARD, ["by_dst"], 1, 1)
    assert list(found["by_dst"].ms) == ["rowsplit"] and found["by_dst"].ms["rowsplit"] > 0
    assert tuple(graph._formats) == before and torch.equal(torch.get_rng_state(), state)


def test_attention_over_large_graphs_on_a_gpu_is_looked_up(file, monkeypatch):
    class Rows:  # all that is looked at
        is_cuda = True

    graph = small_graph()
    write(file, small_graph(), FORWARD, BACKWARD)
    monkeypatch.setattr(engines, "tuner", Tuning(file))
    monkeypatch.setattr(engines, "LEAST_EDGES", 0)
    for dtype, head_dim in ((torch.float32, 64), (torch.bfloat16, 48)):  # which blocks do not know
        engines.keep_blocks(graph, Rows(), dtype, 4, head_dim)
    assert "tuned" not in graph._formats
    engines.keep_blocks(graph, Rows(), torch.bfloat16, 4, 64)
    assert decided(graph, FORWARD)["by_dst"] == decided(graph, BACKWARD)["by_dst"] == "wsb"


def test_the_plan_of_attention_says_where_a_decision_is_from(file):
    graph = small_graph()
    k = torch.randn(150, 4, 64, dtype=torch.bfloat16, requires_grad=True)

    def steps():
        return {step.step: step for step in record(lambda: functional.dot_attention(graph, k[:130], k, k), [k])}

    assert {step.origin for step in steps().values()} == {""}
    write(file, small_graph(), FORWARD, BACKWARD)
    use(Tuning(file), graph, 1, FORWARD)
    assert steps()["forward"].origin.endswith(str(file)) and steps()["by source"].origin == ""
    use(Tuning(file), graph, 1, BACKWARD)
    found = steps()
    assert all(step.origin.endswith(str(file)) for step in found.values())
    assert {step.refused for step in found.values()} == {"wsb: the tensors are not on a GPU"}


# What a graph keeps --------------------------------------------------------------------------------------------------


def test_decisions_go_with_the_graph(file):
    graph = small_graph()
    write(file, small_graph())
    use(Tuning(file), graph, 1)
    arrays = sides_of(graph)["by_dst"]
    twin = Graph(graph.csr, None, graph.num_src, graph.num_dst)
    assert decided(twin) == {"by_dst": "wsb"}  # the same arrays
    before = graph.memory_bytes()
    assert "tuned" not in copy.deepcopy(graph)._formats and graph.memory_bytes() == before
    assert "tuned" not in graph.reverse()._formats
    del graph
    gc.collect()
    assert _C.decision(list(arrays), *SUM) is None


def test_the_first_decision_stands():
    graph = small_graph()
    held = graph.format("tuned", lambda _: tuning.DecisionsFormat()).held
    held.decide(*sides_of(graph)["by_dst"], *SUM, ENGINES.index("wsb"), "first")
    held.decide(*sides_of(graph)["by_dst"], *SUM, ENGINES.index("cusparse"), "second")
    assert _C.decision(list(sides_of(graph)["by_dst"]), *SUM) == (ENGINES.index("wsb"), "first")
    assert held.num_entries() == 1 and graph._formats["tuned"].num_formats() == 1


def test_the_plan_says_where_a_decision_is_from(file):
    graph = small_graph()
    x = torch.randn(150, 8)
    expected = functional.spmm(graph, x)
    assert [step.origin for step in record(lambda: functional.spmm(graph, x), [])] == [""]
    write(file, small_graph())
    use(Tuning(file), graph, 1)
    assert torch.equal(functional.spmm(graph, x), expected)
    (step,) = record(lambda: functional.spmm(graph, x), [])
    assert step.origin.endswith(str(file)) and step.refused == "wsb: the tensors are not on a GPU"
    assert "(engine by measured on 20" in table([step])
    with edgeless.engine("rowsplit"):
        (step,) = record(lambda: functional.spmm(graph, x), [])
    assert (step.origin, step.refused) == ('edgeless.engine("rowsplit")', "")


# The file ------------------------------------------------------------------------------------------------------------


def test_where_the_file_is(monkeypatch, tmp_path):
    monkeypatch.delenv("EDGELESS_TUNING_FILE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if sys.platform == "linux":
        assert default_file() == tmp_path / "edgeless" / "tuning.json"
    monkeypatch.setenv("EDGELESS_TUNING_FILE", str(tmp_path / "mine.json"))
    assert default_file() == tmp_path / "mine.json"


@pytest.mark.skipif(sys.platform == "win32", reason="Windows keeps homes elsewhere")
def test_a_user_without_a_home_has_no_file(monkeypatch):
    for name in ("EDGELESS_TUNING_FILE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    assert default_file() is None
    for mode in tuning.MODES:
        assert not Tuner(ENGINES, lambda *_: None, mode=mode, may_wait=lambda: True).active
    with pytest.raises(FileNotFoundError, match="this user has no home for it; EDGELESS_TUNING_FILE may name a file"):
        TuningFile(default_file(), ENGINES).add([])


def test_a_file_that_is_named_and_cannot_be_costs_a_warning(monkeypatch):
    monkeypatch.setenv("EDGELESS_TUNING_FILE", "/" + "x" * 300)
    graph = small_graph()
    tuner = Tuner(ENGINES, lambda *_: None, mode="cached", may_wait=lambda: True)
    assert tuner.active
    with pytest.warns(UserWarning, match="no decision is taken from /xxx.*name too long") as warned:
        assert use(tuner, graph, 5) == [False] * 5
    assert len(warned) == 1


def test_the_file_is_looked_for_at_the_first_sum_on_a_gpu(file, monkeypatch):
    entries_of(file)
    monkeypatch.setenv("EDGELESS_TUNING_FILE", str(file))
    tuner = Tuner(ENGINES, lambda *_: None, mode="cached")
    monkeypatch.setattr(engines, "tuner", tuner)
    graph, x = small_graph(), torch.ones(150, 8)
    monkeypatch.setattr(engines, "LEAST_EDGES", 0)
    engines.keep_plans(graph, x)
    engines.keep_blocks(graph, x.bfloat16(), torch.bfloat16, 1, 64)
    assert not {"file", "active"} & set(vars(tuner))
    assert tuner.active and len(tuner.file.entries()) == 2


def entries_of(file):
    write(file, small_graph())
    return json.loads(file.read_text())


@pytest.mark.parametrize(
    "change,message",
    [
        (lambda text: text[:-20], "it must be JSON, but"),
        (lambda text: "[" * 200_000, "it must be JSON, but it is nested too deeply"),
        (
            lambda text: text.replace('"wsb"', "[" * 900 + "]" * 900, 1),
            "decision 0 must have a engine of its kind, got ",
        ),
        (lambda text: "[]", "it must have the format 'edgeless-tuning'"),
        (lambda text: text.replace("edgeless-tuning", "other"), "it must have the format 'edgeless-tuning'"),
        (
            lambda text: text.replace('"version": 1', '"version": 2'),
            "it has version 2, and .* reads up to 1",
        ),
        (lambda text: text.replace('"version": 1', '"version": "x"'), "it has version x"),
        (lambda text: text.replace('"width": 8', '"width": "8"'), "decision 0 must have a width of its kind, got '8'"),
        (
            lambda text: text.replace('"width": 8', '"width": true'),
            "must have a width of its kind, got True",
        ),
        (lambda text: text.replace('"engine": "wsb"', '"engine": "gpu"'), "must name one of auto, .*got 'gpu'"),
        (lambda text: text.replace("2.0", '"a"'), "must have numbers for ms"),
        (lambda text: '{"format": "edgeless-tuning", "version": 1, "decisions": 3}', "must be a list, got int"),
        (lambda text: '{"format": "edgeless-tuning", "version": 1, "decisions": [3]}', "decision 0 must have a "),
    ],
)
def test_a_file_that_cannot_be_used_costs_one_warning(change, message, file):
    entries_of(file)
    damaged = change(file.read_text())
    file.write_text(damaged)
    graph, tuner = small_graph(), Tuning(file)
    with pytest.warns(UserWarning, match=f"no decision is taken from .*tuning.json: .*{message}") as warned:
        assert not any(use(tuner, graph, 5))
    assert len(warned) == 1
    with pytest.raises(ValueError, match=message):
        write(file, graph)
    assert file.read_text() == damaged


def test_decisions_are_added_to_what_others_wrote(file):
    first = entries_of(file)["decisions"]
    held = TuningFile(file, ENGINES)
    assert len(held.entries()) == 2
    other = {**first[0], "fingerprint": "f" * 16}
    TuningFile(file, ENGINES).add([other])
    changed = {**first[1], "engine": "cusparse"}
    held.add([changed])
    assert json.loads(file.read_text())["decisions"] == [first[0], other, changed]
    assert [path.name for path in file.parent.iterdir()] == ["tuning.json"]
    assert len(file.read_text().splitlines()) == 5  # a line for each, to read


def test_the_file_does_not_grow_for_ever(file, monkeypatch):
    monkeypatch.setattr("edgeless.choices.tuning_file.MOST", 3)
    (first, _) = entries_of(file)["decisions"]
    held = TuningFile(file, ENGINES)
    held.add([{**first, "width": width} for width in (1, 2, 3)])
    assert [entry["width"] for entry in json.loads(file.read_text())["decisions"]] == [1, 2, 3]


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        write(tmp_path / "file" / "tuning.json", small_graph())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("weighted", [False, True])
def test_measuring_leaves_the_graph_and_the_draws_alone(dtype, weighted, short_turns, monkeypatch):
    graph, state = small_graph(), torch.get_rng_state()
    if weighted:
        _ = graph.csc
    before = tuple(graph._formats)
    found = measure(graph, Shape("spmm", dtype, 8, weighted), ["by_dst", "by_src"], 1, 1)
    assert {side: list(one.ms) for side, one in found.items()} == {"by_dst": ["rowsplit"], "by_src": ["rowsplit"]}
    assert tuple(graph._formats) == before and torch.equal(torch.get_rng_state(), state)
    assert (found["by_dst"].build_ms is None) or dtype == torch.bfloat16
    monkeypatch.setattr(
        "edgeless.tools.tuning_measure._sum", lambda *args: (_ for _ in ()).throw(torch.OutOfMemoryError())
    )
    assert measure(graph, Shape("spmm", dtype, 8, weighted), ["by_dst"]) == {}


# On CUDA -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def tuned(file, monkeypatch):
    """Makes a tuner of the file the process' own."""

    def make():
        tuner = Tuner(ENGINES, engines._prepare, mode="cached", file=TuningFile(file, ENGINES))
        monkeypatch.setattr(engines, "tuner", tuner)

    return make


def measured(file, graph, *shapes, found=None):
    """Measures as the tune command does, and writes ``found`` in place of the times where it is given."""
    for shape in shapes:
        times = measure(graph, shape, sorted(sides_of(graph, shape)))
        assert all(len(one.ms) > 1 and min(one.ms.values()) > 0 for one in times.values())
        entries = [entry_of(graph, shape, side, found or one) for side, one in times.items()]
        TuningFile(file, ENGINES).add(entries)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_engines_are_measured_and_taken(dtype, tuned, file):
    shape = Shape("spmm", dtype, 64, False)
    graph, x = near_and_far("cuda")[0], rows(12000, 64, dtype=dtype)
    expected, state = run("auto", graph, x), torch.cuda.get_rng_state()
    measured(file, graph, shape)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    tuned()
    same = near_and_far("cuda")[0]
    found = run("auto", same, x)
    engine = decided(same, shape)["by_dst"]
    assert engine is not None
    tolerance = 1e-5 if dtype == torch.float32 else torch.finfo(dtype).eps
    for a, b in zip(found, expected, strict=True):
        assert float((a.double() - b.double()).norm() / b.double().norm()) <= tolerance
    assert all(torch.equal(a, b) for a, b in zip(run("auto", same, x), found, strict=True))
    steps = record(lambda: functional.spmm(same, x), [x])
    assert all(step.origin.endswith(str(file)) for step in steps) and steps[0].engine == engine


@pytest.mark.cuda
def test_engines_of_attention_are_measured_and_taken(tuned, file):
    graph = near_and_far("cuda")[0]
    q, k, v = (rows(12000, 4, 64, seed=seed) for seed in range(3))

    def call():
        out = functional.dot_attention(graph, q, k, v)
        return out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    expected = call()
    # Blocks win, whatever the clock says.
    measured(file, graph, FORWARD, BACKWARD, found=Measured({"rowsplit": 2.0, "wsb": 1.0}, 1.0))
    tuned()
    found = call()
    assert decided(graph, FORWARD)["by_dst"] == decided(graph, BACKWARD)["by_dst"] == "wsb"
    for a, b in zip(found, expected, strict=True):
        assert float((a.double() - b.double()).norm() / b.double().norm()) <= 2 * torch.finfo(torch.bfloat16).eps
    assert all(torch.equal(a, b) for a, b in zip(call(), found, strict=True))
    steps = record(lambda: functional.dot_attention(graph, q, k, v), [q, k, v])
    assert {step.engine for step in steps} == {"wsb"} and all(step.origin.endswith(str(file)) for step in steps)


@pytest.mark.cuda
def test_the_user_s_choice_goes_before_what_was_measured(tuned, file):
    graph, x = near_and_far("cuda")[1], rows(12000, 64)
    run("auto", graph, x)
    write(file, graph, Shape("spmm", torch.bfloat16, 64, False), found=Measured({"rowsplit": 2.0, "wsb": 1.0}, 1.0))
    tuned()
    assert {step.engine for step in record(lambda: functional.spmm(graph, x), [x])} == {"wsb"}
    assert all(torch.equal(a, b) for a, b in zip(run("auto", graph, x), run("wsb", graph, x), strict=True))
    with edgeless.engine("rowsplit"):
        assert {step.engine for step in record(lambda: functional.spmm(graph, x), [x])} == {"rowsplit"}


@pytest.mark.cuda
def test_blocks_that_were_only_measured_are_given_back():
    graph, x = near_and_far("cuda")[1], rows(12000, 64).detach()
    for _ in range(2):
        functional.spmm(graph, x)
    gc.collect()
    before, kept = torch.cuda.memory_allocated(), tuple(graph._formats)
    assert measure(graph, Shape("spmm", torch.bfloat16, 64, False), ["by_dst"])
    gc.collect()
    assert tuple(graph._formats) == kept and torch.cuda.memory_allocated() <= before + 4096

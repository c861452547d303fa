"""Decisions on engines: what is measured and when, what is read from the user's file, and what a plan says of it."""

import concurrent.futures
import copy
import gc
import json
import os
import subprocess
import sys
import threading

import pytest
import torch
from test_wsb import ends_of, graph_of, near_and_far, rows, run

import edgeless
from edgeless import _C, Graph, engines, functional, tuning
from edgeless.engines import ENGINES
from edgeless.plan import table
from edgeless.plan_recording import record
from edgeless.tuning import EXPECTED_USES, USES, Measured, Shape, Tuner, break_even, choose, sides_of
from edgeless.tuning_file import TuningFile, default_file
from edgeless.tuning_measure import measure

SUM = Shape("spmm", torch.float32, 8, False)


class Fake:
    """A clock that has its own opinion."""

    def __init__(self, ms=None, build_ms=5.0):
        self.found = Measured(ms or {"rowsplit": 2.0, "wsb": 1.0, "cusparse": 3.0}, build_ms)
        self.calls, self.prepared, self.may = [], [], True

    def measure(self, graph, shape, sides):
        self.calls.append((shape, sides))
        return dict.fromkeys(sides, self.found), {}

    def tuner(self, mode, file):
        prepare = lambda graph, name: self.prepared.append(name)  # noqa: E731
        return Tuner(
            ENGINES, self.measure, prepare, mode=mode, file=TuningFile(file, ENGINES), may_wait=lambda: self.may
        )


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
    fake, graph = Fake(), small_graph()
    fake.tuner("on", file).store([])
    assert not any(use(fake.tuner("off", file), graph, 3 * USES))
    assert "tuned" not in graph._formats and "fingerprint" not in graph._formats and not fake.calls


def test_cached_measures_nothing(file):
    fake, graph = Fake(), small_graph()
    tuner = fake.tuner("cached", file)
    assert not any(use(tuner, graph, 3 * USES)) and not fake.calls and not file.exists()
    assert "tuned" not in graph._formats and "fingerprint" not in graph._formats


def test_on_measures_once_after_enough_uses(file):
    fake, graph = Fake(), small_graph()
    tuner = fake.tuner("on", file)
    assert use(tuner, graph, 3 * USES) == [False] * USES + [True] * (2 * USES)
    assert fake.calls == [(SUM, ["by_dst", "by_src"])]
    assert decided(graph) == {"by_dst": "wsb", "by_src": "wsb"} and set(fake.prepared) == {"wsb"}
    other = SUM._replace(width=16)
    assert decided(graph, other) == {"by_dst": None, "by_src": None}
    use(tuner, graph, 2 * USES, other)
    assert len(fake.calls) == 2
    entries = json.loads(file.read_text())["decisions"]
    assert [(e["op"], e["side"], e["width"], e["engine"]) for e in entries] == [
        ("spmm", side, width, "wsb") for width in (8, 16) for side in ("by_dst", "by_src")
    ]
    assert entries[0]["fingerprint"] == graph.fingerprint and entries[0]["ms"]["cusparse"] == 3.0


def test_graphs_of_a_few_uses_are_never_measured(file):
    fake = Fake()
    tuner = fake.tuner("on", file)
    for seed in range(5):
        use(tuner, graph_of("random", seed=seed), USES)
    assert not fake.calls


def test_nothing_is_measured_or_looked_up_in_a_capture(file):
    fake, graph = Fake(), small_graph()
    tuner = fake.tuner("on", file)
    fake.may = False
    assert not any(use(tuner, graph, 2 * USES)) and "tuned" not in graph._formats
    fake.may = True
    use(tuner, graph, USES)
    fake.may = False
    assert not any(use(tuner, graph, 5)) and not fake.calls
    fake.may = True
    assert use(tuner, graph, 1) == [True]


def test_nothing_is_measured_while_a_plan_is_made(file, monkeypatch):
    fake, graph = Fake(), small_graph()
    tuner = fake.tuner("on", file)
    monkeypatch.setattr(engines, "tuner", tuner)
    record(lambda: use(tuner, graph, 2 * USES), [])
    assert not fake.calls
    assert use(tuner, graph, 1) == [True] and len(fake.calls) == 1


def test_plans_of_other_threads_keep_nothing_from_being_measured(file):
    """Not while they are made, and not when two of them, begun one after the other, have ended in that order."""
    fake, graph = Fake(), small_graph()
    tuner = fake.tuner("on", file)
    first, second = concurrent.futures.ThreadPoolExecutor(1), concurrent.futures.ThreadPoolExecutor(1)
    with first, second:
        blocks = tuner.resting(), tuner.resting()
        for pool, block in zip((first, second), blocks, strict=True):
            pool.submit(block.__enter__).result()
        assert use(tuner, graph, USES + 1)[-1] and len(fake.calls) == 1
        for pool, block in zip((first, second), blocks, strict=True):
            pool.submit(block.__exit__, None, None, None).result()
    use(tuner, graph, USES + 1, SUM._replace(width=16))
    assert len(fake.calls) == 2


def test_what_cannot_be_measured_is_not_tried_again(file):
    fake, graph = Fake(), small_graph()
    fake.measure = lambda *args: (fake.calls.append(args), ({}, {}))[1]
    assert not any(use(fake.tuner("on", file), graph, 5 * USES)) and len(fake.calls) == 1 and not file.exists()


def test_the_gradient_is_measured_when_it_comes(file):
    fake, graph = Fake(), Graph.from_edge_index(*ends_of("random"))
    tuner = fake.tuner("on", file)
    assert use(tuner, graph, 2 * USES)[-1] and decided(graph) == {"by_dst": "wsb"}
    graph.csc_arrays(False)
    assert use(tuner, graph, 2 * USES)[-1]
    assert [sides for _, sides in fake.calls] == [["by_dst"], ["by_src"]]
    assert decided(graph) == {"by_dst": "wsb", "by_src": "wsb"}
    _ = graph.csc  # other arrays take the place of those without edge ids
    assert decided(graph)["by_src"] is None
    assert use(tuner, graph, 1) == [True] and decided(graph)["by_src"] == "wsb" and len(fake.calls) == 2


def test_another_process_takes_what_was_measured(file):
    fake, graph = Fake(), small_graph()
    use(fake.tuner("on", file), graph, 2 * USES)
    later, same = Fake(), small_graph()
    assert use(later.tuner("cached", file), same, 3) == [True] * 3 and not later.calls
    assert decided(same) == {"by_dst": "wsb", "by_src": "wsb"} and "wsb" in later.prepared
    origin = _C.decision(list(sides_of(same)["by_dst"]), *SUM)[1]
    assert origin.startswith("measured on 20") and origin.endswith(str(file))
    tuner = later.tuner("cached", file)
    of_other_size, of_same_size = graph_of("sparse"), graph_of("random", seed=1)
    for other in (of_other_size, of_same_size):
        assert not any(use(tuner, other, 3))
    assert "fingerprint" not in of_other_size._formats and "fingerprint" in of_same_size._formats
    assert use(tuner, same, 1, SUM._replace(dtype=torch.float64)) == [False]


@pytest.mark.parametrize("name", ["device", "edgeless", "torch", "cuda", "dtype", "fingerprint"])
def test_decisions_are_of_one_device_and_versions(name, file):
    fake, graph = Fake(), small_graph()
    use(fake.tuner("on", file), graph, 2 * USES)
    held = json.loads(file.read_text())
    for entry in held["decisions"]:
        entry[name] = "another"
    file.write_text(json.dumps(held))
    same = small_graph()
    assert use(fake.tuner("cached", file), same, 2) == [False] * 2 and decided(same)["by_dst"] is None


def test_without_memory_for_what_was_decided_rowsplit_stays(file):
    fake = Fake()
    use(fake.tuner("on", file), small_graph(), 2 * USES)

    def prepare(graph, name):
        raise torch.OutOfMemoryError("none left")

    tuner, graph = fake.tuner("cached", file), small_graph()
    tuner._prepare = prepare
    assert use(tuner, graph, 2) == [False] * 2 and decided(graph)["by_dst"] is None


def test_a_wrong_mode_is_refused(file):
    with pytest.raises(ValueError, match="EDGELESS_TUNING must be off, cached or on, got 'maybe'"):
        Fake().tuner("maybe", file)
    done = subprocess.run(
        [sys.executable, "-c", "import edgeless"],
        env={**os.environ, "EDGELESS_TUNING": "sometimes"},
        capture_output=True,
        text=True,
    )
    assert "EDGELESS_TUNING must be off, cached or on, got 'sometimes'" in done.stderr


def test_threads_measure_once(file):
    fake, graph = Fake(), small_graph()
    tuner = fake.tuner("on", file)
    threads = [threading.Thread(target=use, args=(tuner, graph, 2 * USES)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fake.calls) == 1


def test_sums_over_large_graphs_on_a_gpu_ask(file, monkeypatch):
    class Rows:  # all that is looked at before anything is decided
        is_cuda, dtype = True, torch.float32

        def element_size(self):
            return 4

        def numel(self):
            return 150 * 8

        def size(self, dim):
            return 150

    fake, graph = Fake(), small_graph()
    monkeypatch.setattr(engines, "tuner", fake.tuner("on", file))
    for least, sampled, calls in ((graph.num_edges + 1, False, 0), (0, True, 0), (0, False, 1)):
        monkeypatch.setattr(engines, "LEAST_EDGES", least)
        for _ in range(USES + 1):
            engines.keep_plans(graph, Rows(), sampled=sampled)
        assert len(fake.calls) == calls
    assert fake.calls[0][0] == SUM and decided(graph)["by_dst"] == "wsb"
    several_heads = torch.ones(graph.num_edges, 2)
    for _ in range(2 * USES):
        engines.keep_plans(graph, Rows(), several_heads)
    with edgeless.engine("rowsplit"):
        engines.keep_plans(graph, Rows())
    assert len(fake.calls) == 1


# Attention -----------------------------------------------------------------------------------------------------------

FORWARD, BACKWARD = (tuning.shape_of_dot(torch.bfloat16, 4, 64, backward=backward) for backward in (False, True))


def test_attention_is_decided_by_pass(file):
    """The backward walks both directions and is one decision, which waits until the graph has both."""
    fake, graph = Fake(), Graph.from_edge_index(*ends_of("random"))
    _ = graph.csr
    tuner = fake.tuner("on", file)
    assert use(tuner, graph, 2 * USES, FORWARD)[-1]
    graph.csc_arrays(False)
    assert use(tuner, graph, 2 * USES, BACKWARD)[-1]
    assert fake.calls == [(FORWARD, ["by_dst"]), (BACKWARD, ["by_dst"])]
    assert decided(graph, FORWARD) == decided(graph, BACKWARD) == {"by_dst": "wsb", "by_src": None}
    assert decided(graph, tuning.shape_of_dot(torch.bfloat16, 2, 128, backward=False))["by_dst"] is None
    same = small_graph()
    later = Fake().tuner("cached", file)
    assert use(later, same, 1, FORWARD) + use(later, same, 1, BACKWARD) == [True, True]
    assert decided(same, BACKWARD)["by_dst"] == "wsb"


@pytest.mark.parametrize("backward", [False, True])
def test_measuring_attention_leaves_the_graph_alone(backward, short_turns):
    graph, state = small_graph(), torch.get_rng_state()
    before = tuple(graph._formats)
    found, made = measure(graph, BACKWARD if backward else FORWARD, ["by_dst"], 1, 1)
    assert list(found["by_dst"].ms) == ["rowsplit"] and found["by_dst"].ms["rowsplit"] > 0 and set(made) == {"wsb"}
    assert tuple(graph._formats) == before and torch.equal(torch.get_rng_state(), state)


def test_attention_over_large_graphs_on_a_gpu_asks(file, monkeypatch):
    class Rows:  # all that is looked at
        is_cuda = True

    fake, graph = Fake(), small_graph()
    monkeypatch.setattr(engines, "tuner", fake.tuner("on", file))
    monkeypatch.setattr(engines, "LEAST_EDGES", 0)
    for dtype, head_dim in ((torch.float32, 64), (torch.bfloat16, 48)):  # which blocks do not know
        for _ in range(2 * USES):
            engines.keep_blocks(graph, Rows(), dtype, 4, head_dim)
    assert not fake.calls
    for _ in range(USES + 1):
        engines.keep_blocks(graph, Rows(), torch.bfloat16, 4, 64)
    assert fake.calls == [(FORWARD, ["by_dst"]), (BACKWARD, ["by_dst"])]


def test_the_plan_of_attention_says_where_a_decision_is_from(file):
    fake, graph = Fake(), small_graph()
    k = torch.randn(150, 4, 64, dtype=torch.bfloat16, requires_grad=True)

    def steps():
        return {step.step: step for step in record(lambda: functional.dot_attention(graph, k[:130], k, k), [k])}

    assert {step.origin for step in steps().values()} == {""}
    tuner = fake.tuner("on", file)
    use(tuner, graph, 2 * USES, FORWARD)
    assert steps()["forward"].origin.endswith("by this process") and steps()["by source"].origin == ""
    use(tuner, graph, 2 * USES, BACKWARD)
    found = steps()
    assert all(step.origin.endswith("by this process") for step in found.values())
    assert {step.refused for step in found.values()} == {"wsb: the tensors are not on a GPU"}


# What a graph keeps --------------------------------------------------------------------------------------------------


def test_decisions_go_with_the_graph(file):
    fake, graph = Fake(), small_graph()
    use(fake.tuner("on", file), graph, 2 * USES)
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
    fake, graph = Fake(), small_graph()
    x = torch.randn(150, 8)
    expected = functional.spmm(graph, x)
    assert [step.origin for step in record(lambda: functional.spmm(graph, x), [])] == [""]
    use(fake.tuner("on", file), graph, 2 * USES)
    assert torch.equal(functional.spmm(graph, x), expected)
    (step,) = record(lambda: functional.spmm(graph, x), [])
    assert step.origin.endswith("by this process") and step.refused == "wsb: the tensors are not on a GPU"
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
    fake, graph = Fake(), small_graph()
    make = lambda mode: Tuner(ENGINES, fake.measure, lambda *_: None, mode=mode, may_wait=lambda: True)  # noqa: E731
    assert not make("cached").active and not make("off").active
    with pytest.warns(UserWarning, match="not kept in a file of decisions: this user has no home for it; EDGELESS_TUN"):
        assert use(make("on"), graph, 2 * USES)[-1]


@pytest.mark.parametrize("mode", ["cached", "on"])
def test_a_file_that_is_named_and_cannot_be_costs_a_warning(mode, monkeypatch):
    monkeypatch.setenv("EDGELESS_TUNING_FILE", "/" + "x" * 300)
    fake, graph = Fake(), small_graph()
    tuner = Tuner(ENGINES, fake.measure, lambda *_: None, mode=mode, may_wait=lambda: True)
    assert tuner.active
    with pytest.warns(UserWarning, match="no decision is taken from /xxx.*name too long") as warned:
        assert use(tuner, graph, 5) == [False] * 5
    assert len(warned) == 1


def test_the_file_is_looked_for_at_the_first_sum_on_a_gpu(file, monkeypatch):
    entries_of(file)
    monkeypatch.setenv("EDGELESS_TUNING_FILE", str(file))
    tuner = Tuner(ENGINES, Fake().measure, lambda *_: None, mode="cached")
    monkeypatch.setattr(engines, "tuner", tuner)
    graph, x = small_graph(), torch.ones(150, 8)
    monkeypatch.setattr(engines, "LEAST_EDGES", 0)
    engines.keep_plans(graph, x)
    engines.keep_blocks(graph, x.bfloat16(), torch.bfloat16, 1, 64)
    assert not {"file", "active"} & set(vars(tuner))
    assert tuner.active and len(tuner.file.entries()) == 2


def entries_of(file):
    use(Fake().tuner("on", file), small_graph(), 2 * USES)
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
    fake, graph = Fake(), small_graph()
    tuner = fake.tuner("on", file)
    with pytest.warns(UserWarning, match=f"no decision is taken from .*tuning.json: .*{message}") as warned:
        use(tuner, graph, USES)
    assert len(warned) == 1
    with pytest.warns(UserWarning, match="decisions are not kept in .*tuning.json"):
        assert use(tuner, graph, 2)[-1]  # it is decided for this process
    assert file.read_text() == damaged


def test_decisions_are_added_to_what_others_wrote(file):
    first = entries_of(file)["decisions"]
    tuner = Fake().tuner("on", file)
    assert len(tuner.file.entries()) == 2
    other = {**first[0], "fingerprint": "f" * 16}
    TuningFile(file, ENGINES).add([other])
    changed = {**first[1], "engine": "cusparse"}
    tuner.store([changed])
    assert json.loads(file.read_text())["decisions"] == [first[0], other, changed]
    assert [path.name for path in file.parent.iterdir()] == ["tuning.json"]
    assert len(file.read_text().splitlines()) == 5  # a line for each, to read


def test_the_file_does_not_grow_for_ever(file, monkeypatch):
    monkeypatch.setattr("edgeless.tuning_file.MOST", 3)
    (first, _) = entries_of(file)["decisions"]
    held = TuningFile(file, ENGINES)
    held.add([{**first, "width": width} for width in (1, 2, 3)])
    assert [entry["width"] for entry in json.loads(file.read_text())["decisions"]] == [1, 2, 3]


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    tuner = Fake().tuner("on", tmp_path / "file" / "tuning.json")
    with pytest.warns(UserWarning, match="edgeless: "):
        assert use(tuner, small_graph(), 2 * USES)[-1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("weighted", [False, True])
def test_measuring_leaves_the_graph_and_the_draws_alone(dtype, weighted, short_turns, monkeypatch):
    graph, state = small_graph(), torch.get_rng_state()
    if weighted:
        _ = graph.csc
    before = tuple(graph._formats)
    found, made = measure(graph, Shape("spmm", dtype, 8, weighted), ["by_dst", "by_src"], 1, 1)
    assert {side: list(one.ms) for side, one in found.items()} == {"by_dst": ["rowsplit"], "by_src": ["rowsplit"]}
    assert tuple(graph._formats) == before and torch.equal(torch.get_rng_state(), state)
    assert ("wsb" in made) == (dtype == torch.bfloat16 and not weighted)
    monkeypatch.setattr("edgeless.tuning_measure._sum", lambda *args: (_ for _ in ()).throw(torch.OutOfMemoryError()))
    assert measure(graph, Shape("spmm", dtype, 8, weighted), ["by_dst"]) == ({}, {})


# On CUDA -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def tuned(file, monkeypatch):
    """Makes a tuner of a mode the process' own."""

    def make(mode, **options):
        tuner = Tuner(ENGINES, engines._measure, engines._prepare, mode=mode, file=TuningFile(file, ENGINES), **options)
        monkeypatch.setattr(engines, "tuner", tuner)
        return tuner

    return make


def both(graph, x, engine="auto"):
    return run(engine, graph, x)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_engines_are_measured_and_taken(dtype, tuned, file):
    graph, x = near_and_far("cuda")[0], rows(12000, 64, dtype=dtype)
    tuned("on")
    expected = both(graph, x)
    state = torch.cuda.get_rng_state()
    for _ in range(USES + 1):
        both(graph, x)
    engine = decided(graph, Shape("spmm", dtype, 64, False))["by_dst"]
    assert engine is not None and torch.equal(torch.cuda.get_rng_state(), state)
    found = both(graph, x)
    tolerance = 1e-5 if dtype == torch.float32 else torch.finfo(dtype).eps
    for a, b in zip(found, expected, strict=True):
        assert float((a.double() - b.double()).norm() / b.double().norm()) <= tolerance
    assert all(torch.equal(a, b) for a, b in zip(both(graph, x), found, strict=True))
    steps = record(lambda: functional.spmm(graph, x), [x])
    assert all("by this process" in step.origin for step in steps) and steps[0].engine == engine
    tuned("cached")
    same = near_and_far("cuda")[0]
    assert all(torch.equal(a, b) for a, b in zip(both(same, x), found, strict=True))
    steps = record(lambda: functional.spmm(same, x), [x])
    assert all(step.origin.endswith(str(file)) for step in steps)


@pytest.mark.cuda
def test_engines_of_attention_are_measured_and_taken(tuned, file):
    graph = near_and_far("cuda")[0]
    q, k, v = (rows(12000, 4, 64, seed=seed) for seed in range(3))

    def call():
        out = functional.dot_attention(graph, q, k, v)
        return out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    tuner = tuned("on")
    expected = call()
    measured = tuner._measure

    def as_if(graph, shape, sides):  # blocks win, whatever the clock says; it runs all the same
        found, made = measured(graph, shape, sides)
        assert {"rowsplit", "wsb"} == set(found["by_dst"].ms) and found["by_dst"].build_ms > 0
        return dict.fromkeys(sides, Measured({"rowsplit": 2.0, "wsb": 1.0}, 1.0)), made

    tuner._measure = as_if
    for _ in range(USES + 1):
        call()
    assert decided(graph, FORWARD)["by_dst"] == decided(graph, BACKWARD)["by_dst"] == "wsb"
    found = call()
    for a, b in zip(found, expected, strict=True):
        assert float((a.double() - b.double()).norm() / b.double().norm()) <= 2 * torch.finfo(torch.bfloat16).eps
    assert all(torch.equal(a, b) for a, b in zip(call(), found, strict=True))
    steps = record(lambda: functional.dot_attention(graph, q, k, v), [q, k, v])
    assert {step.engine for step in steps} == {"wsb"} and all("by this process" in step.origin for step in steps)


@pytest.mark.cuda
def test_the_user_s_choice_goes_before_what_was_measured(tuned, file):
    graph, x = near_and_far("cuda")[1], rows(12000, 64)
    tuner = tuned("on")
    tuner._measure = lambda graph, shape, sides: ({s: Measured({"rowsplit": 2.0, "wsb": 1.0}, 1.0) for s in sides}, {})
    for _ in range(USES + 1):
        both(graph, x)
    assert {step.engine for step in record(lambda: functional.spmm(graph, x), [x])} == {"wsb"}
    assert all(torch.equal(a, b) for a, b in zip(both(graph, x), both(graph, x, "wsb"), strict=True))
    with edgeless.engine("rowsplit"):
        assert {step.engine for step in record(lambda: functional.spmm(graph, x), [x])} == {"rowsplit"}


@pytest.mark.cuda
def test_a_capture_measures_nothing(tuned):
    graph, x = near_and_far("cuda")[1], rows(12000, 64).detach()
    tuned("on")
    functional.spmm(graph, x)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        for _ in range(USES + 2):
            functional.spmm(graph, x)
    assert decided(graph, Shape("spmm", torch.bfloat16, 64, False))["by_dst"] is None
    compiled = torch.compile(lambda x: functional.spmm(graph, x), backend="eager", fullgraph=True)
    for _ in range(USES + 2):
        compiled(x)
    assert decided(graph, Shape("spmm", torch.bfloat16, 64, False))["by_dst"] is None


@pytest.mark.cuda
def test_blocks_that_were_only_measured_are_given_back(tuned):
    graph, x = near_and_far("cuda")[1], rows(12000, 64).detach()
    for _ in range(2):
        functional.spmm(graph, x)
    gc.collect()
    before = torch.cuda.memory_allocated()
    tuner = tuned("on")
    measure = tuner._measure
    tuner._measure = lambda *args: ({s: Measured({"rowsplit": 1.0}) for s in measure(*args)[0]}, {})
    for _ in range(USES + 2):
        functional.spmm(graph, x)
    gc.collect()
    assert "wsb" not in {*graph._formats} or graph._formats["wsb"].num_formats() == 0
    assert torch.cuda.memory_allocated() <= before + 4096

"""Random message functions are refused, or right on several graphs with one program."""

from __future__ import annotations

import logging
import os

import pytest
from drawn_runs import run
from on_host import MODES, running

from edgeless.pyg.generated.calls import PROGRAMS

TIMES = int(os.environ.get("EDGELESS_DRAWN_TIMES", "1"))
GROUPS, OF_A_GROUP = 4 * TIMES, 10


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.ERROR)
    PROGRAMS.clear()
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.parametrize("seed", range(100, 100 + 6 * TIMES))
def test_drawn_messages_as_compiled_code(seed, mode):
    with running(mode):
        assert not any("generator fails" in outcome for outcome in run(seed))


@pytest.mark.parametrize("group", range(GROUPS))
def test_drawn_messages(group):
    said = [outcome for seed in range(OF_A_GROUP * group, OF_A_GROUP * (group + 1)) for outcome in run(seed)]
    refused = [outcome for outcome in said if outcome != "taken"]
    assert len(refused) < 0.5 * len(said), refused
    assert not any("generator fails" in outcome for outcome in refused), refused

import itertools
import math

import pytest

from ftd.shm.state import NEXT, State, judge

WRITTEN = [State.LOADING, State.READY, State.DRAINING, State.FAILED, State.STOPPED]
AGES = [0.0, 29.9, 30.0, 30.1, 1e9]


@pytest.mark.parametrize(("locked", "written", "age_s"), list(itertools.product([True, False], [None, *WRITTEN], AGES)))
def test_the_one_rule(locked: bool, written: State | None, age_s: float) -> None:
    seen = judge(locked=locked, written=written, heartbeat_age_s=age_s, hung_after_s=30.0)
    if not locked:  # death is proved by the kernel, and no heartbeat says otherwise
        expected = State.FAILED if written is State.FAILED else State.STOPPED
    elif written in (State.FAILED, State.STOPPED):  # its last words need no heartbeat
        expected = written
    else:
        # it has the lock and no words yet: the first take a moment, so it is as late as any other
        expected = State.HUNG if age_s > 30.0 else written or State.LOADING
    assert seen is expected


@pytest.mark.parametrize("written", [None, *WRITTEN])
def test_a_holder_is_never_dead_however_late_it_is(written: State | None) -> None:
    seen = judge(locked=True, written=written, heartbeat_age_s=math.inf, hung_after_s=1.0)
    assert seen is not State.STOPPED or written is State.STOPPED


def test_nobody_writes_that_it_hangs() -> None:
    assert set(NEXT) == set(WRITTEN)
    assert all(State.HUNG not in following for following in NEXT.values())


def test_the_table_of_states() -> None:
    assert {state.value: sorted(following) for state, following in NEXT.items()} == {
        "loading": ["draining", "failed", "ready"],
        "ready": ["draining", "failed"],
        "draining": ["stopped"],
        "failed": [],
        "stopped": [],
    }


def test_states_print_as_the_contract_has_them() -> None:
    assert [str(state) for state in State] == ["loading", "ready", "draining", "failed", "stopped", "hung"]

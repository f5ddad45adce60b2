import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftd.plan.cost import CopyCost, Sample
from ftd.plan.errors import PlanError

#: FACTS, "The link": bytes and GB/s.
FACTS = {256 * 2**10: 23.0, 2**20: 48.0, 4 * 2**20: 53.0, 16 * 2**20: 55.0, 64 * 2**20: 55.4}


def _measured(noise: float = 0.0, copies: int = 1, seed: int = 0) -> list[Sample]:
    rng = random.Random(seed)
    return [
        Sample(nbytes, nbytes / rate * (1 + noise * rng.expovariate(1)))
        for nbytes, rate in FACTS.items()
        for _ in range(copies)
    ]


@pytest.mark.parametrize("small_rate", [17.0, 23.0, 30.0])
def test_the_measured_link_is_met_within_5_percent_from_1_mib_on(small_rate: float) -> None:
    cost = CopyCost.fit([*_measured()[1:], Sample(256 * 2**10, 256 * 2**10 / small_rate)])
    for nbytes, rate in FACTS.items():
        if nbytes >= 2**20:
            assert cost.copy_ns(nbytes) == pytest.approx(nbytes / rate, rel=0.05)
    assert cost.bytes_per_s == pytest.approx(55.4e9, rel=0.01)
    assert 2000 < cost.latency_ns < 6000


def test_a_line_is_found_exactly() -> None:
    cost = CopyCost.fit([(n, 3000 + n * 0.02) for n in (1000, 10**6, 10**8)])
    assert cost.latency_ns == pytest.approx(3000, rel=1e-6)
    assert cost.bytes_per_s == pytest.approx(50e9, rel=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_slow_copies_among_the_samples_move_little(seed: int) -> None:
    samples = _measured(noise=0.02, copies=5, seed=seed)
    rng = random.Random(seed)
    for at in rng.sample(range(len(samples)), 4):
        samples[at] = Sample(samples[at].nbytes, samples[at].elapsed_ns * 20)
    assert CopyCost.fit(samples).bytes_per_s == pytest.approx(55.4e9, rel=0.05)


@given(st.lists(st.tuples(st.integers(1, 10**10), st.floats(1, 1e10)), min_size=1, max_size=20))
def test_more_bytes_never_cost_less_whatever_was_measured(samples: list[tuple[int, float]]) -> None:
    cost = CopyCost.fit(samples)
    times = [cost.copy_ns(n) for n in (0, 1, 512, 2**20, 2**30, 2**40)]
    assert times[0] == 0
    assert times == sorted(times)


def test_nothing_measured_is_refused() -> None:
    with pytest.raises(PlanError, match="no measured copy"):
        CopyCost.fit([(0, 5.0), (5, 0.0)])


@pytest.mark.parametrize(("latency", "rate"), [(-1.0, 1.0), (0.0, 0.0), (float("nan"), 1.0), (0.0, float("inf"))])
def test_a_cost_that_is_none_is_refused(latency: float, rate: float) -> None:
    with pytest.raises(PlanError, match="measure the link again"):
        CopyCost(latency, rate)

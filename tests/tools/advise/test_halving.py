"""Who stays, and what is a tie, on synthetic times: noise that all plans share, and noise of each step."""

import numpy as np
import pytest

from distdl_jax.tools.advise.measure import CHECKS, Difference, Race, fastest, is_decided, staying, student, ties


def drawn(means: list[float], rounds: int, noise: float, seed: int, shared: float = 0.3) -> np.ndarray:
    """Return times: rounds in which the machine is faster or slower, and in one of ten steps much slower."""
    rng = np.random.default_rng(seed)
    times = np.array(means) * np.exp(noise * rng.standard_normal((rounds, len(means))))
    times *= np.exp(shared * rng.standard_normal((rounds, 1)))
    return times * np.where(rng.random(times.shape) < 0.1, 1 + 4 * noise, 1)


def run(means: list[float], noise: float, seed: int, obvious: tuple[int, ...] = (), seconds: float = 1e9) -> tuple:
    """Run a race whose steps take drawn times, the same on two workers but for one's being faster."""
    race, every = Race(len(means), obvious, seconds), drawn(means, CHECKS[-1], noise, seed)
    following, rows = race.begin({0: (means, False), 1: (means, False)}), []
    while following.order:
        assert sorted(following.order) == sorted(following.plans)
        times = [every[len(rows), plan] if plan in following.order else np.nan for plan in range(len(means))]
        following = race.next({0: (times, False), 1: ([0.9 * time for time in times], False)})
        rows.append(following.times)
    return np.array(rows), following.plans


def test_the_fastest_plan_stays() -> None:
    """Of 100 races of eight plans 2 % apart with 3 % noise, hardly one ends with a plan that is 2 % slower."""
    means = [1.0 + 0.02 * plan for plan in range(8)]
    chosen = []
    for seed in range(100):
        times, plans = run(means, 0.03, seed)
        chosen.append(means[fastest(times, plans)])
        assert np.isfinite(times[:, list(plans)]).all()
    assert np.mean(chosen) < 1.01 and max(chosen) <= 1.04


def test_plans_that_are_much_slower_leave_soon() -> None:
    times, plans = run([1.0, 2.0, 1.5], 0.02, 0)
    assert plans == (0,) and np.isnan(times[CHECKS[1] :, 1:]).all()


def test_the_better_obvious_plan_stays_to_the_end() -> None:
    times, plans = run([1.0, 1.5, 2.0, 1.8], 0.02, 1, obvious=(2, 3))
    assert plans == (0, 3) and np.isfinite(times[:, 3]).all()


def test_the_interval_covers_the_difference() -> None:
    """In 95 of 100 cases, or a little less, since steps that are much slower are no normal noise."""
    for rounds in (3, 6, 12, 24):
        inside = 0
        for seed in range(300):
            times = drawn([1.0, 1.1], rounds, 0.05, seed)
            found = Difference.between(times[:, 1], times[:, 0])
            inside += found.low <= 0.1 <= found.high
        assert inside / 300 > 0.92, rounds


def test_shared_noise_cancels() -> None:
    """Rounds that differ by 30 % tell plans apart that differ by 1 %, if each step is exact."""
    times = drawn([1.0, 1.01], 12, 0.001, 0)
    found = Difference.between(times[:, 1], times[:, 0])
    assert 0.008 < found.low < found.mean < found.high < 0.012
    assert str(found).endswith("12 rounds")


def test_ties() -> None:
    """Equal plans are a tie; one that is surely slower is none, nor one that may be much slower."""
    times = drawn([1.0, 1.0, 1.05], 48, 0.01, 3)
    assert sorted(ties(times, [0, 1, 2])) == [0, 1]
    assert is_decided(times, [0, 1, 2]) and staying(times, [0, 1, 2], ()) == [0, 1]
    two = np.array([[1.0, 1.3], [1.1, 1.0]])
    assert ties(two, [0, 1]) == [0]


def test_a_race_ends_in_time() -> None:
    """After one round at least, and where no other would be over in time."""
    times, plans = run([1.0, 1.0], 0.01, 0, seconds=0.0)
    assert len(times) == 1 and plans == (0, 1)
    found = Difference.between(times[:, 0], times[:, 1])
    assert found.low < -0.99 and "(" not in str(found) and "1 round" in str(found)


def test_any_workers_interrupt_ends_a_race() -> None:
    race = Race(2, (), 1e9)
    assert race.begin({0: ([1.0, 2.0], False), 1: ([3.0, 1.0], False)}).times == (3.0, 2.0)
    following = race.next({0: ([1.0, 2.0], False), 1: ([3.0, 1.0], True)})
    assert following.order == () and following.is_interrupted and following.times == (3.0, 2.0)


@pytest.mark.parametrize(("freedom", "quantile"), [(1, 12.706), (2, 4.303), (3, 3.182), (5, 2.571), (11, 2.201)])
def test_students_quantiles(freedom: int, quantile: float) -> None:
    """Against a published table."""
    assert student(freedom) == pytest.approx(quantile, rel=0.01)

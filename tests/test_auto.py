"""The portfolio, and what a planner may hand to another."""

import os
import time
from contextlib import suppress
from functools import partial

import numpy as np
import pytest

from placewise import apart, driver, planners
from placewise.driver import Budget, plan
from placewise.errors import NoFeasiblePlan, Unsupported
from placewise.planners import planner
from placewise.planners.auto import MEMBERS, SEARCHES, _lanes, _race, _Runner
from placewise.problem import Execution
from problems import problem_of, random_problem


@pytest.fixture(autouse=True)
def only_for_this_test(monkeypatch):
    monkeypatch.setattr(planners, "_registered", planners.available())


def three_ops():
    """1 s each on two devices: 2 s at best, and not below 1.5 s by any simple bound."""
    return problem_of(np.ones((3, 2)))


def test_what_a_member_finds_and_proves_counts():
    @planner("finder")
    def finder(problem, ctx):
        """Finds a better plan, and a bound."""
        assert ctx.best_value == 3.0  # it begins with the incumbent
        ctx.evaluate([0, 1, 1])
        ctx.bound(1.75)

    @planner("boss")
    def boss(problem, ctx):
        """Has one member."""
        ctx.evaluate([0, 0, 0])
        placement, order = ctx.delegate("finder")
        assert (placement.tolist(), order, ctx.best_value) == ([0, 1, 1], None, 2.0)
        assert ctx.lower_bound == 1.75

    found = plan(three_ops(), "boss")
    assert (found.value, found.lower_bound, found.planner, found.found_by) == (2.0, 1.75, "boss", "finder")
    assert found.proved_by == "finder"
    assert found.evaluations == 2
    assert [(count, value) for _, count, value in found.history] == [(1, 3.0), (2, 2.0)]


def test_who_finds_the_best_is_named_even_if_others_follow():
    @planner("boss")
    def boss(problem, ctx):
        """Is better than its member."""
        ctx.evaluate([0, 1, 1])
        ctx.delegate("single")

    found = plan(three_ops(), "boss")
    assert (found.found_by, found.proved_by) == ("boss", "")


def test_a_member_that_does_not_apply_is_passed_over():
    @planner("narrow", supports=lambda problem: "never applies")
    def narrow(problem, ctx):
        """Must not run."""
        raise AssertionError

    @planner("boss")
    def boss(problem, ctx):
        """Asks a member that cannot."""
        ctx.delegate("narrow")
        return [0, 1, 0]

    assert plan(three_ops(), "boss").found_by == "boss"


@pytest.mark.parametrize(("share", "each"), [(0.5, [5, 2, 1]), (1.0, [10])])
def test_a_member_has_a_share_of_what_is_left(share, each):
    seen = []

    @planner("greedy")
    def greedy(problem, ctx):
        """Spends all that it has."""
        while True:
            ctx.evaluate(ctx.rng.integers(0, 2, 3))

    @planner("boss")
    def boss(problem, ctx):
        """Asks the same member again and again."""
        for _ in range(3):
            before = ctx.evaluations
            ctx.delegate("greedy", share=share)
            if ctx.evaluations > before:
                seen.append(ctx.evaluations - before)

    plan(three_ops(), "boss", budget=Budget(evaluations=10))
    assert seen == each


def test_a_member_may_begin_afresh():
    @planner("finder")
    def finder(problem, ctx):
        """Knows nothing of the others."""
        assert ctx.best is None
        ctx.evaluate([0, 0, 0])

    @planner("boss")
    def boss(problem, ctx):
        """Is better than its member."""
        ctx.evaluate([0, 1, 1])
        assert ctx.delegate("finder", afresh=True)[0].tolist() == [0, 0, 0]
        assert ctx.best_value == 2.0

    found = plan(three_ops(), "boss")
    assert (found.value, found.found_by, len(found.history)) == (2.0, "boss", 1)


def test_auto_is_never_worse_than_its_members():
    """Those that end by themselves, strictly; those that search by chance, each with as many evaluations as all have
    together here, in 19 of 20 cases.
    """
    searches, lucky = {"min-cut", *SEARCHES}, []
    for seed in range(20):
        problem, budget = random_problem(np.random.default_rng(seed), max_ops=8), Budget(evaluations=4_000)
        best = plan(problem, "auto", budget=budget)
        assert best.found_by.removeprefix("local search from ") in MEMBERS
        for name in MEMBERS:
            with suppress(NoFeasiblePlan, Unsupported):
                if plan(problem, name, budget=budget).value < best.value * (1 - 1e-9):
                    assert name in searches
                    lucky.append((seed, name))
    assert len({seed for seed, _ in lucky}) <= 1, lucky


def test_auto_is_as_good_as_its_members_on_larger_problems():
    """With as many evaluations, and within 1 % for those that search by chance."""
    for seed in range(3):
        rng = np.random.default_rng(seed)
        problem = random_problem(rng, max_ops=30, objective=("latency", "completion", "latency")[seed], stored=0.0)
        best = plan(problem, "auto", budget=Budget(evaluations=6_000)).value
        for name in MEMBERS:
            with suppress(NoFeasiblePlan, Unsupported):
                alone = plan(problem, name, budget=Budget(evaluations=6_000)).value
                assert best <= alone * (1.01 if name in SEARCHES else 1 + 1e-9), (seed, name)


def test_with_many_ops_too_and_multilevel_begins_before_the_race(monkeypatch):
    raced, run = [], _Runner.run
    monkeypatch.setattr(_Runner, "run", lambda self, *rest: raced.append(self.name) or run(self, *rest))
    rng = np.random.default_rng(0)
    edges = [(int(rng.integers(max(0, i - 20), i)), i) for i in range(1, 620)]
    problem = problem_of(rng.uniform(0.5, 1.5, (620, 3)), edges, sizes=0.3)
    best = plan(problem, "auto", budget=Budget(evaluations=8_000))
    for name in ("multilevel", "m-etf", "m-sct", "tsam", "min-cut", "metis"):
        with suppress(Unsupported):
            assert best.value <= plan(problem, name, budget=Budget(evaluations=8_000)).value, name
    assert best.stopped == "budget"
    assert raced[0] == "multilevel"
    assert "local search from multilevel" in raced
    assert "order-search" not in raced  # 13 evaluations per unit are too few for it


@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("concurrency", ["parallel", "sequential"])
def test_on_one_device_it_matters_which_model_is_first(concurrency, contiguous):
    problem = problem_of(
        [[10.0], [1.0]], [], objective="completion", model=[0, 1], models=["a", "b"],
        execution=Execution(concurrency=concurrency), contiguous=contiguous,
    )  # fmt: skip
    found = plan(problem, "auto")
    assert (found.value, found.lower_bound) == (12.0, pytest.approx(12.0))


@pytest.mark.parametrize("seed", [0, 6, 8])
def test_where_models_share_devices_the_search_for_an_order_begins_at_the_best(seed):
    """The shortest model first is good here, and hard to reach from HEFT's plan with few evaluations."""
    rng = np.random.default_rng(seed)
    edges = [(i - 2, i) for i in range(90) if i % 30 >= 2]
    edges += [(i - 1, i) for i in range(90) if i % 30 >= 1 and rng.random() < 0.4]
    seconds = rng.lognormal(0.0, 1.0, (90, 1)) / rng.uniform(0.3, 1.0, (1, 2))
    models = {"model": np.repeat([0, 1, 2], 30).tolist(), "models": ["a", "b", "c"]}
    problem = problem_of(seconds, edges, sizes=1.0, objective="completion", **models)
    found = plan(problem, "auto", budget=Budget(evaluations=5_000))
    assert found.found_by == "order-search"
    assert found.value < 0.98 * plan(problem, "spt").value


def test_small_problems_are_proved():
    rng = np.random.default_rng(3)
    problem = problem_of(rng.integers(1, 9, (7, 2)).astype(float), [(0, 2), (1, 2), (2, 5), (3, 6)], sizes=1.0)
    found = plan(problem, "auto", budget=Budget(evaluations=200_000))
    assert found.gap < 1e-8


def test_it_says_that_its_budget_has_ended_it():
    @planner("boss")
    def boss(problem, ctx):
        """Leaves all to a member."""
        ctx.delegate("greedy")

    @planner("greedy")
    def greedy(problem, ctx):
        """Spends what it may, and ends by itself."""
        while not ctx.should_stop():
            ctx.evaluate([0, 0, 0])

    assert plan(three_ops(), "boss", budget=Budget(evaluations=5)).stopped == "budget"
    assert plan(three_ops(), "boss", budget=Budget(seconds=0.05)).stopped == "budget"


def finds(value_of_two, wait=0.0):
    """A search that has a plan at once and a better one after a while, and then goes on forever."""

    def search(ctx):
        ctx.evaluate([0, 0, 0])
        yield ctx.best_value
        time.sleep(wait)
        while not ctx.should_stop():
            ctx.evaluate(value_of_two)
            yield ctx.best_value

    return search


def test_there_is_a_plan_however_soon_the_budget_ends():
    assert plan(three_ops(), "auto", budget=Budget(seconds=1e-9)).value <= 3.0


@pytest.mark.skipif(not apart.POSSIBLE, reason="there is no fork here")
def test_what_a_search_elsewhere_finds_counts(monkeypatch):
    monkeypatch.setattr(driver, "cores", lambda: 2)

    @planner("boss")
    def boss(problem, ctx):
        """Waits for another."""
        with ctx.elsewhere("other", finds([0, 1, 1])) as other:
            assert other is not None
            ctx.evaluate([0, 0, 0])
            while ctx.best_value > 2.0 and not ctx.should_stop():
                time.sleep(0.01)
        assert ctx.evaluations > 3

    found = plan(three_ops(), "boss", budget=Budget(seconds=20))
    assert (found.value, found.found_by) == (2.0, "other")
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


@pytest.mark.skipif(not apart.POSSIBLE, reason="there is no fork here")
def test_a_search_elsewhere_ends_with_the_plan_however_that_ends(monkeypatch):
    monkeypatch.setattr(driver, "cores", lambda: 2)

    @planner("boss")
    def boss(problem, ctx):
        """Is interrupted."""
        with ctx.elsewhere("other", finds([0, 0, 0], wait=600)):
            ctx.evaluate([0, 0, 0])
            raise KeyboardInterrupt

    assert plan(three_ops(), "boss", budget=Budget(seconds=600)).stopped == "interrupted"
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


@pytest.mark.skipif(not apart.POSSIBLE, reason="there is no fork here")
def test_each_core_to_spare_takes_one_search(monkeypatch):
    monkeypatch.setattr(driver, "cores", lambda: 3)

    @planner("boss")
    def boss(problem, ctx):
        """Waits for others."""
        with ctx.elsewhere("poor", finds([0, 0, 0])) as one, ctx.elsewhere("other", finds([0, 1, 1])) as two:
            assert None not in (one, two)
            assert ctx.cores_to_spare == 0
            with ctx.elsewhere("third", finds([0, 0, 0])) as three:
                assert three is None
            while ctx.best_value > 2.0 and not ctx.should_stop():
                time.sleep(0.01)
        assert ctx.cores_to_spare == 2

    found = plan(three_ops(), "boss", budget=Budget(seconds=20))
    assert (found.value, found.found_by) == (2.0, "other")


def test_searches_are_dealt_to_the_cores_to_spare():
    small, middle, large = (problem_of(np.ones((ops, 2))) for ops in (3, 400, 20_001))
    for problem in (small, middle, large, problem_of(np.ones((3, 1)))):
        assert _lanes(problem, 0) == []
    assert _lanes(problem_of(np.ones((3, 1))), 1) == []
    assert _lanes(middle, 1) == [["multilevel"]]
    for spare in range(1, 12):
        assert _lanes(large, spare) == [["multilevel"]]
        lanes = _lanes(small, spare)
        assert sorted(name for lane in lanes for name in lane) == sorted(SEARCHES)
        assert len(lanes) == min(spare, len(SEARCHES))
        assert [] not in lanes
        first, *others = _lanes(middle, spare)
        assert first == ["multilevel"]
        assert len(others) == min(spare - 1, len(SEARCHES) - 1)


@pytest.mark.skipif(not apart.POSSIBLE, reason="there is no fork here")
def test_a_race_elsewhere_says_who_found_the_plan(monkeypatch):
    monkeypatch.setattr(driver, "cores", lambda: 2)
    problem = random_problem(np.random.default_rng(3), max_ops=40, objective="latency", stored=0.0)

    @planner("boss")
    def boss(problem, ctx):
        """Leaves all to others."""
        with ctx.elsewhere("race", partial(_race, names=["local-search", "genetic"])) as other:
            while not other.done and not ctx.should_stop():
                time.sleep(0.01)

    assert plan(problem, "boss", budget=Budget(seconds=2)).found_by in ("local-search", "genetic")


@pytest.mark.skipif(not apart.POSSIBLE, reason="there is no fork here")
def test_a_race_elsewhere_tells_what_it_finds_while_a_search_runs(monkeypatch):
    monkeypatch.setattr(driver, "cores", lambda: 2)
    monkeypatch.setitem(SEARCHES, "endless", finds([0, 1, 1]))

    @planner("boss")
    def boss(problem, ctx):
        """Does not wait for the end."""
        with ctx.elsewhere("race", partial(_race, names=["endless"])):
            while ctx.best_value > 2.0 and not ctx.should_stop():
                time.sleep(0.01)

    found = plan(three_ops(), "boss", budget=Budget(seconds=30))
    assert (found.value, found.found_by, found.stopped) == (2.0, "endless", "finished")


@pytest.mark.parametrize(("budget", "cores"), [(Budget(evaluations=9), 2), (Budget(1.0, 9), 2), (Budget(1.0), 1)])
def test_one_core_or_a_budget_in_evaluations_is_one_process(monkeypatch, budget, cores):
    monkeypatch.setattr(driver, "cores", lambda: cores)

    @planner("boss")
    def boss(problem, ctx):
        """Is alone."""
        with ctx.elsewhere("other", finds([0, 1, 1])) as other:
            assert other is None
        return [0, 0, 0]

    assert plan(three_ops(), "boss", budget=budget).value == 3.0


def test_a_search_in_the_race_does_what_it_does_alone():
    """So what it finds with its first share of the budget, auto finds at least."""
    ended = 0
    for seed in range(8):
        problem = random_problem(np.random.default_rng(seed), max_ops=40, objective="latency", stored=0.0)
        best = plan(problem, "auto", budget=Budget(evaluations=12_000), seed=seed).value
        for name in ("local-search", "genetic", "list-search"):
            with suppress(NoFeasiblePlan, Unsupported):
                alone = plan(problem, name, budget=Budget(evaluations=100), seed=seed)
                assert best <= alone.value * (1 + 1e-12), (seed, name)
                ended += alone.stopped == "budget"
    assert ended > 5  # most had more to do


def test_what_runs_beside_counts_at_once_and_has_its_own_clock_and_chance():
    @planner("boss")
    def boss(problem, ctx):
        """Lets another take a turn."""
        beside = ctx.beside("other", lambda: 7.0)
        assert beside.rng.integers(2**31) == ctx.rng.integers(2**31)
        assert beside.seconds == 0.0
        beside.evaluate([0, 1, 1])
        assert (ctx.evaluations, ctx.best_value, beside.evaluations) == (1, 2.0, 1)
        ctx.evaluate([0, 0, 0])
        assert (beside.evaluations, beside.evaluations_left) == (1, 1)
        beside.bound(1.75)
        assert (ctx.lower_bound, ctx.proved_by) == (1.75, "other")
        with beside.aside(problem_of(np.ones((1, 2))), 1.0) as inner:
            inner.evaluate([0])
        assert (ctx.evaluations, ctx.best_value, inner.best_value) == (3, 2.0, 1.0)
        assert beside.should_stop()
        assert ctx.should_stop()

    assert plan(three_ops(), "boss", budget=Budget(evaluations=3)).value == 2.0


def test_auto_finds_a_plan_where_some_member_does():
    problem = problem_of(np.ones((4, 2)), memory=2.0, resident=1.0, sizes=0.0)
    assert plan(problem, "auto", budget=Budget(evaluations=100)).value == 2.0


def test_a_member_that_fails_does_not_end_the_others():
    @planner("broken")
    def broken(problem, ctx):
        """Finds a plan, and fails."""
        ctx.evaluate([0, 1, 1])
        raise ZeroDivisionError

    @planner("boss")
    def boss(problem, ctx):
        """Has a plan already."""
        ctx.evaluate([0, 0, 0])
        with pytest.warns(RuntimeWarning, match="'broken' failed: ZeroDivisionError"):
            ctx.delegate("broken")

    assert plan(three_ops(), "boss").value == 2.0

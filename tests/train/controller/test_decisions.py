"""Restart decisions, failure budgets, and resume decisions."""

from __future__ import annotations

from typing import Any

import pytest

from drawbar.train import FailureConfig, ResumeError
from drawbar.train._controller.decisions import (
    GiveUp,
    Restart,
    UsedBudget,
    count_used_budget,
    decide_after_failure,
    startup_delay,
)
from drawbar.train._driver.resume import (
    ResumeDecision,
    RunDirectoryState,
    decide_resume,
    list_config_changes,
)
from drawbar.train._history.events import AttemptEndCause

NONE, UNFINISHED, FINISHED, DAMAGED = RunDirectoryState


@pytest.mark.parametrize(
    ("cause", "budget", "counter"),
    [
        ("worker", "max_failures", "failures"),
        ("hang", "max_failures", "failures"),
        ("preemption", "max_preemption_failures", "preemptions"),
        ("startup", "max_startup_failures", "startups"),
    ],
)
@pytest.mark.parametrize("limit", [0, 1, 3])
def test_after_failure_restarts_until_budget_is_used(
    cause: AttemptEndCause, budget: str, counter: str, limit: int
) -> None:
    config = FailureConfig(**{budget: limit})  # type: ignore[arg-type]  # the key varies
    used = UsedBudget()
    for number in range(limit):
        decision = decide_after_failure(cause, used, config)
        assert decision == Restart(UsedBudget(**{counter: number + 1}))
        assert isinstance(decision, Restart)
        used = decision.used
    assert decide_after_failure(cause, used, config) == GiveUp(
        f"FailureConfig.{budget}={limit} is used up"
    )


@pytest.mark.parametrize("cause", ["worker", "hang", "preemption", "startup"])
def test_after_failure_with_limit_minus_one_always_restarts(cause: AttemptEndCause) -> None:
    config = FailureConfig(max_failures=-1, max_preemption_failures=-1, max_startup_failures=-1)
    used = UsedBudget(failures=10**6, preemptions=10**6, startups=10**6)
    assert decide_after_failure(cause, used, config) == Restart(used.add(cause))


@pytest.mark.parametrize("cause", ["configuration", "divergence", "storage"])
def test_after_failure_gives_up_on_permanent_errors(cause: AttemptEndCause) -> None:
    config = FailureConfig(max_failures=-1, max_preemption_failures=-1, max_startup_failures=-1)
    assert decide_after_failure(cause, UsedBudget(), config) == GiveUp(
        "it would fail again in the same way"
    )


def test_resize_does_not_use_a_failure_budget() -> None:
    none_left = FailureConfig(max_failures=0, max_preemption_failures=0, max_startup_failures=0)
    assert decide_after_failure("resize", UsedBudget(), none_left) == Restart(UsedBudget())


def test_failure_budgets_are_independent() -> None:
    used = UsedBudget(failures=0, preemptions=5, startups=5)
    assert isinstance(decide_after_failure("worker", used, FailureConfig(max_failures=1)), Restart)
    assert used.add("worker") == UsedBudget(failures=1, preemptions=5, startups=5)


def test_count_used_budget_sums_attempts_of_earlier_drivers() -> None:
    causes: list[AttemptEndCause] = ["worker", "hang", "preemption", "startup", "resize", "storage"]
    assert count_used_budget([]) == UsedBudget()
    assert count_used_budget(causes) == UsedBudget(failures=2, preemptions=1, startups=1)


@pytest.mark.parametrize(
    ("failed_starts", "seconds"),
    [(0, 0), (1, 2), (2, 4), (3, 8), (5, 32), (6, 60), (7, 60), (10**6, 60)],
)
def test_startup_delay_doubles_up_to_a_minute(failed_starts: int, seconds: float) -> None:
    assert startup_delay(failed_starts) == seconds


AUTO_FROM_CHECKPOINT = "training continues from checkpoint c"
AUTO_FROM_START = "training continues from the beginning, since it has no checkpoint"


@pytest.mark.parametrize(
    ("state", "latest", "resume", "fresh", "warning"),
    [
        (NONE, None, "auto", True, ""),
        (NONE, None, "never", True, ""),
        (UNFINISHED, "c", "auto", False, ""),
        (UNFINISHED, None, "auto", False, ""),
        (UNFINISHED, "c", "must", False, ""),
        (FINISHED, "c", "auto", False, f"has already finished; {AUTO_FROM_CHECKPOINT}"),
        (FINISHED, None, "auto", False, f"has already finished; {AUTO_FROM_START}"),
        (FINISHED, "c", "must", False, f"has already finished; {AUTO_FROM_CHECKPOINT}"),
        (DAMAGED, "c", "auto", False, f"has damaged parts; {AUTO_FROM_CHECKPOINT}"),
        (DAMAGED, None, "auto", False, f"has damaged parts; {AUTO_FROM_START}"),
        (DAMAGED, "c", "must", False, f"has damaged parts; {AUTO_FROM_CHECKPOINT}"),
    ],
)
def test_resume_plan_warns_about_finished_and_damaged_runs(
    state: RunDirectoryState, latest: str | None, resume: Any, fresh: bool, warning: str
) -> None:
    plan = decide_resume(state, resume, path="/runs/a", latest=latest)
    assert plan.is_new_run is fresh
    assert warning in plan.warning
    assert bool(plan.warning) is bool(warning)


@pytest.mark.parametrize(
    ("state", "latest", "resume", "message"),
    [
        (NONE, None, "must", r'there is no run in /runs/a\. .* set resume="auto" to start one'),
        (UNFINISHED, "c", "never", r"/runs/a contains an unfinished run\. Choose another name"),
        (UNFINISHED, None, "never", r"/runs/a contains an unfinished run\. Choose another name"),
        (UNFINISHED, None, "must", r"/runs/a has no intact checkpoint\. Set resume"),
        (FINISHED, "c", "never", r"/runs/a contains a finished run\. Choose another name"),
        (FINISHED, None, "never", r"/runs/a contains a finished run\. Choose another name"),
        (FINISHED, None, "must", r"/runs/a has no intact checkpoint\. Set resume"),
        (DAMAGED, "c", "never", r"/runs/a contains a run with damaged parts\. Choose another"),
        (DAMAGED, None, "never", r"/runs/a contains a run with damaged parts\. Choose another"),
        (DAMAGED, None, "must", r"/runs/a has no intact checkpoint\. Set resume"),
    ],
)
def test_resume_plan_with_conflicting_directory_names_the_remedy(
    state: RunDirectoryState, latest: str | None, resume: Any, message: str
) -> None:
    with pytest.raises(ResumeError, match=f'RunConfig.resume="{resume}", but .*{message}'):
        decide_resume(state, resume, path="/runs/a", latest=latest)


@pytest.mark.parametrize("state", [FINISHED, DAMAGED])
def test_resume_plan_with_conflicting_functions_needs_must(state: RunDirectoryState) -> None:
    def plan(resume: Any) -> ResumeDecision:
        return decide_resume(state, resume, path="/runs/a", latest="c", conflict=("f", "g"))

    with pytest.raises(ResumeError, match="training function f, but this trainer has g"):
        plan("auto")
    assert not plan("must").is_new_run


@pytest.mark.parametrize(
    ("before", "now", "changes"),
    [
        ({}, {}, []),
        ({"a": 1}, {"a": 1}, []),
        ({"a": 1}, {"a": 2}, ["a: 1 -> 2"]),
        ({"a": 1}, {"b": "x"}, ["a: 1 -> None", "b: None -> 'x'"]),
        ({"a": {"b": {"c": 1}, "d": 2}}, {"a": {"b": {"c": 3}, "d": 2}}, ["a.b.c: 1 -> 3"]),
        ({"a": {"b": 1}}, {"a": 5}, ["a: {'b': 1} -> 5"]),
    ],
)
def test_list_config_changes_names_changed_keys(before: Any, now: Any, changes: list[str]) -> None:
    assert list_config_changes(before, now) == changes

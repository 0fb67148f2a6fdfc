"""Run random scenarios of interrupted training, and check the samples that each rank consumed.

    python -m benchmarks soak --scenarios 1000 --seed 7
    python -m benchmarks soak --frames 100000 --seed 7
    python -m benchmarks soak --framework accelerate --scenarios 300 --seed 7

Each scenario is a training function with data loaders, and a plan of its interruptions
(`_soak_scenario`). The ranks are threads of this process. One of 50 scenarios runs on Ray workers,
which die by SIGKILL. The recorded samples (`_soak_run`) must agree with docs/data.md
(`_soak_oracle`). `--frames` sends random data to the server of a torchrun group instead
(`_soak_frames`). `--framework` runs scenarios of a framework with its own loaders instead, in this
process (`_soak_restarts`).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import io
import logging
import secrets
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import cloudpickle
import ray

from benchmarks import _soak_loaders, _soak_restarts, _soak_run, _soak_scenario
from benchmarks._soak_frames import check_frames
from benchmarks._soak_oracle import Outcome, find_violations, group_by_epoch
from benchmarks._soak_restarts import check_restarts
from benchmarks._soak_run import Part, Pass, read_orders, run_scenario
from benchmarks._soak_scenario import Attempt, Scenario, draw_scenario

FRAMEWORKS = ("accelerate", "lightning", "transformers")
ON_RAY_EVERY = 50
PROGRESS_EVERY = 100
SHOWN = 3  # violations of a scenario, each up to this length:
SHOWN_LENGTH = 300


def check_scenario(scenario: Scenario) -> list[str]:
    """Run a scenario and its references; return a line for each violation."""
    parts = run_scenario(scenario)
    outcome = Outcome(parts, _read_orders(scenario, parts), _run_uninterrupted(scenario, parts))
    return list(find_violations(scenario, outcome))


def _read_orders(scenario: Scenario, parts: Sequence[Part]) -> dict[str, list[Pass]]:
    epochs, limit = Counter[str](), 0
    for epoch in group_by_epoch(parts):
        epochs[epoch.loader] = max(epochs[epoch.loader], epoch.number + 1)
        batches = (batch for part in epoch.parts for each in part for batch in each.batches)
        limit = max(limit, sum(map(len, batches)))
    return read_orders(scenario, dict(epochs), limit)


def _run_uninterrupted(scenario: Scenario, parts: Sequence[Part]) -> Part | None:
    """Run a scenario without interruptions, if all attempts had the same world size."""
    world_sizes = {len(part) for part in parts}
    if len(world_sizes) > 1:
        return None
    attempt = Attempt(world_size=world_sizes.pop(), checkpoints=(), stop=None, new_fit=True)
    is_on_ray = scenario.is_on_ray and scenario.num_workers > 0  # see draw_scenario
    reference = dataclasses.replace(scenario, attempts=(attempt,), is_on_ray=is_on_ray)
    (part,) = run_scenario(reference)
    return part


def run_soak(scenarios: int, seed: int, only: int | None = None) -> int:
    """Run scenarios and print the violations of each.

    Args:
        scenarios: Number of scenarios.
        seed: Seed from which the scenarios are drawn.
        only: Number of the only scenario to run; None for all.

    Returns:
        Number of scenarios with violations.
    """
    warnings.simplefilter("ignore")
    _pickle_by_value(_soak_loaders, _soak_run, _soak_scenario)
    numbers = [only] if only is not None else sorted(range(scenarios), key=_is_on_ray)
    return _run_scenarios(partial(_check_number, seed), numbers, seed, is_detailed=only is not None)


def _check_number(seed: int, number: int) -> tuple[list[str], object]:
    scenario = draw_scenario(seed, number, is_on_ray=_is_on_ray(number))
    if scenario.is_on_ray and not ray.is_initialized():
        # Ray counts these CPUs, the ranks share the real ones.
        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    return check_scenario(scenario), scenario


def run_framework(name: str, scenarios: int, seed: int, only: int | None = None) -> int:
    """Run scenarios of a framework, and print the violations of each.

    Args:
        name: Name of the framework.
        scenarios: Number of scenarios.
        seed: Seed from which the scenarios are drawn.
        only: Number of the only scenario to run; None for all.

    Returns:
        Number of scenarios with violations.
    """
    warnings.simplefilter("ignore")
    framework: Any = importlib.import_module(f"benchmarks._soak_{name}")
    _pickle_by_value(framework, _soak_restarts, _soak_run, _soak_scenario)
    numbers = [only] if only is not None else range(scenarios)
    check = partial(check_restarts, framework, seed)
    return _run_scenarios(check, numbers, seed, is_detailed=only is not None)


def _run_scenarios(
    check: Callable[[int], tuple[list[str], object]],
    numbers: Sequence[int],
    seed: int,
    *,
    is_detailed: bool,
) -> int:
    """Check scenarios, print the violations of each, and return the number of those with any."""
    failed, begin = 0, time.perf_counter()
    for done, number in enumerate(numbers, start=1):
        console, description = io.StringIO(), None
        try:
            with contextlib.redirect_stdout(console), contextlib.redirect_stderr(console):
                violations, description = check(number)
        except Exception as error:
            violations = [f"{type(error).__name__}: {error}"]
        if violations:
            failed += 1
            print(f"scenario {number} of seed {seed} failed: {description}")
            for violation in violations if is_detailed else violations[:SHOWN]:
                print(f"  {violation if is_detailed else violation[:SHOWN_LENGTH]}")
            print(console.getvalue() if is_detailed else "", end="", flush=True)
        if done % PROGRESS_EVERY == 0:
            seconds = time.perf_counter() - begin
            print(f"{done} scenarios in {seconds:.0f} s, {failed} failed", flush=True)
    return failed


def _pickle_by_value(*modules: ModuleType) -> None:
    """Pickle functions of modules by value, because Ray workers cannot import this package."""
    for module in modules:
        cloudpickle.register_pickle_by_value(module)


def _is_on_ray(number: int) -> bool:
    return number % ON_RAY_EVERY == ON_RAY_EVERY - 1


def main(arguments: Sequence[str]) -> None:
    """Run the command `python -m benchmarks soak`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks soak", description=__doc__)
    parser.add_argument("--scenarios", type=int, default=1000, help="number of scenarios (1000)")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6))
    parser.add_argument("--frames", type=int, help="send random frames instead, this number")
    parser.add_argument("--framework", choices=FRAMEWORKS, help="run scenarios of a framework")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="run a single scenario")
    options = parser.parse_args(arguments)
    logging.getLogger("drawbar").setLevel(logging.ERROR)
    print(f"seed {options.seed}", flush=True)
    if options.frames is not None:
        begin = time.perf_counter()
        violations = check_frames(options.frames, options.seed)
        print(f"{options.frames} frames in {time.perf_counter() - begin:.0f} s")
        print("\n".join(violations) if violations else "all frames passed")
        sys.exit(bool(violations))
    if options.framework is None:
        failed = run_soak(options.scenarios, options.seed, options.only)
    else:
        failed = run_framework(options.framework, options.scenarios, options.seed, options.only)
    print(f"{failed} scenarios failed" if failed else "all scenarios passed")
    sys.exit(failed > 0)

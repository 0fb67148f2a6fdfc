"""`python -m benchmarks [--rounds N] [--only NAME]... [--list] [--results DIR]`.

Other measurements have their own options:

    python -m benchmarks soak       # data loaders
    python -m benchmarks scale      # many ranks
    python -m benchmarks reports    # runs with many reports
    python -m benchmarks ui         # web pages of large runs
    python -m benchmarks goodput    # a run with kills
    python -m benchmarks faults     # causes of thirty injected faults
    python -m benchmarks fault_tolerance # full restarts and in-place recovery
    python -m benchmarks objectives # boosting on several workers and in one process
"""

from __future__ import annotations

import argparse
import compileall
import importlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

import drawbar
from benchmarks._machine import describe_machine
from benchmarks._report import as_json, as_markdown, as_table
from benchmarks._rounds import run_rounds
from benchmarks._scenario import Scenario
from benchmarks._summary import Summary, summarize
from benchmarks.scenarios import SCENARIOS

RESULTS = Path(__file__).parent / "results"
TABLE_WIDTH = 160

MODULES = {
    "soak": "_soak",
    "scale": "_scale",
    "reports": "_reports_scale",
    "ui": "_ui_scale",
    "goodput": "_goodput",
    "faults": "_faults",
    "fault_tolerance": "_fault_tolerance",
    "objectives": "_objectives",
}
"""Modules of the other measurements, by their names on the command line."""


def main() -> None:
    """Run the scenarios, print the table, write the result files."""
    options = _options()
    chosen = [item for item in SCENARIOS if not options.only or item.name in options.only]
    console = Console(highlight=False, soft_wrap=True)
    if options.list:
        for item in chosen:
            console.print(f"{item.name:18} {item.title}")
        return
    _compile_drawbar()
    start = time.perf_counter()
    machine = describe_machine(options.rounds)
    summaries = _run(chosen, options.rounds, options.results, console)
    # A pipe or a log has no width of its own; the table is kept whole there.
    wide = console if console.is_terminal else Console(highlight=False, width=TABLE_WIDTH)
    wide.print(as_table(summaries))
    for summary in summaries:
        for side, text in summary.failures.items():
            console.print(f"{summary.scenario.name}, {side}: {text}", style="red", markup=False)
    (options.results / "results.json").write_text(as_json(summaries, machine))
    (options.results / "results.md").write_text(as_markdown(summaries, machine))
    minutes = (time.perf_counter() - start) / 60
    console.print(f"{minutes:.1f} minutes; also in {options.results}/results.md and .json")


def _compile_drawbar() -> None:
    """Do what pip has done for the other sides: an editable install may have no byte code."""
    for folder in drawbar.__path__:
        compileall.compile_dir(folder, quiet=1)


def _run(
    scenarios: Sequence[Scenario], rounds: int, results: Path, console: Console
) -> list[Summary]:
    logs = results / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    summaries = []
    for scenario in scenarios:
        outcomes = run_rounds(
            scenario, rounds, logs, lambda text: console.print(text, style="dim", markup=False)
        )
        summaries.append(summarize(scenario, outcomes))
    return summaries


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="The same work on Drawbar, on ray.train and on bare processes, in turn.",
    )
    names = [scenario.name for scenario in SCENARIOS]
    parser.add_argument(
        "--rounds", type=_positive, default=2, help="times each side is run, interleaved (2)"
    )
    parser.add_argument(
        "--only", action="append", choices=names, metavar="NAME", help="may be given several times"
    )
    parser.add_argument("--list", action="store_true", help="name the scenarios and end")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for files and logs")
    return parser.parse_args()


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, found {value}")
    return value


if __name__ == "__main__":
    if module := MODULES.get("".join(sys.argv[1:2])):
        # They import PyTorch or Drawbar, which the benchmarks above import in subprocesses.
        importlib.import_module(f"benchmarks.{module}").main(sys.argv[2:])
    else:
        main()

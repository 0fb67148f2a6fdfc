"""drawbar verify: verify the checkpoints of a run, or compare its curves with another run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import typer

from drawbar.cli._arguments import AsJson, RunName, command_errors, open_record
from drawbar.cli._output import CommandError, escape_control_chars, write_json
from drawbar.cli._trajectory import MetricComparison, compare_curves, make_curves
from drawbar.train.runs import RunRecord

DEFAULT_TOLERANCE = 1e-4


def verify(
    run: RunName,
    trajectory: Annotated[
        str | None,
        typer.Option(
            metavar="RUN",
            help="Compare the metrics with this run, instead of checking files.",
        ),
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Metric to compare; can be repeated. Default: all numeric metrics of both runs.",
        ),
    ] = None,
    step: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Metric with the step. Default: the number of the report."
        ),
    ] = None,
    tolerance: Annotated[
        float, typer.Option(metavar="X", min=0, help="Largest relative difference.")
    ] = DEFAULT_TOLERANCE,
    as_json: AsJson = False,
) -> None:
    """Verify the checkpoints of a run, or compare its curves.

    Compares the files of every checkpoint with their recorded sizes and checksums. Exits with code
    1 if a checkpoint, the run's journal, or its reports are damaged.

    With --trajectory, compares the metrics of two runs step by step. Prints the first step that
    differs, and exits with code 1 if there is one.
    """
    record = open_record(run)
    if trajectory is not None:
        _verify_trajectory((record, open_record(trajectory)), metric, step, tolerance, as_json)
        return
    if metric or step is not None or tolerance != DEFAULT_TOLERANCE:
        raise CommandError("--metric, --step, and --tolerance need --trajectory RUN.")
    _verify_checkpoints(record, as_json)


def _verify_checkpoints(record: RunRecord, as_json: bool) -> None:
    damage_by_name: dict[str, str] = {}
    with command_errors():
        for name, damage in record.verify_checkpoints():
            damage_by_name[name] = damage
            if not as_json:
                status = f"damaged: {damage}" if damage else "ok"
                print(escape_control_chars(f"{name}: {status}"), flush=True)
    if as_json:
        write_json({"path": record.path, "damage": record.damage, "checkpoints": damage_by_name})
    else:
        if record.damage:
            print(escape_control_chars(record.damage))
        if not damage_by_name:
            print("No checkpoints.")
    if record.damage or any(damage_by_name.values()):
        raise typer.Exit(1)


def _verify_trajectory(
    records: tuple[RunRecord, RunRecord],
    names: list[str] | None,
    step: str | None,
    tolerance: float,
    as_json: bool,
) -> None:
    with command_errors():
        curves = [make_curves(record.iter_report_rows(), step) for record in records]
    common = [name for name in curves[0] if name in curves[1]]
    for name in names or ():
        if name not in common:
            raise CommandError(
                f"--metric {name} is not a number in both runs. Metrics of both runs: "
                f"{', '.join(common) or 'none'}."
            )
    comparisons = compare_curves(curves, names or common, tolerance)
    # Equal runs have the same metrics.
    missing = {} if names else _find_missing(curves, records)
    if not any(each.num_steps for each in comparisons):
        raise CommandError(
            f"{records[0].name} and {records[1].name} have no numeric metric at the same "
            f"{step or 'report'}. Set --step to a metric that counts the steps in both runs."
        )
    if as_json:
        paths = [record.path for record in records]
        write_json(
            {"runs": paths, "tolerance": tolerance, "metrics": comparisons, "missing": missing}
        )
    else:
        for comparison in comparisons:
            print(escape_control_chars(_format(comparison, records, step or "report")))
        for name, run in missing.items():
            print(escape_control_chars(f"{name}: missing in {run}"))
    if missing or any(each.first_difference for each in comparisons):
        raise typer.Exit(1)


def _find_missing(
    curves: Sequence[Mapping[str, object]], records: tuple[RunRecord, RunRecord]
) -> dict[str, str]:
    """Return the metrics that one run lacks, with the name of this run."""
    first, second = curves
    lacks = [(name, records[1].name) for name in first if name not in second]
    return dict([*lacks, *((name, records[0].name) for name in second if name not in first)])


def _format(
    comparison: MetricComparison, records: tuple[RunRecord, RunRecord], step_name: str
) -> str:
    first = comparison.first_difference
    if first is None:
        return (
            f"{comparison.metric}: equal at {comparison.num_steps} steps, largest relative "
            f"difference {comparison.max_difference:.2g}"
        )
    sides = [
        f"{record.name}: {_format_value(value)}{_format_attempt(record, attempt)}"
        for record, value, attempt in zip(records, first.values, first.attempts, strict=True)
    ]
    return (
        f"{comparison.metric}: differs first at {step_name} {first.step} by "
        f"{first.difference:.2g} (relative)  {', '.join(sides)}"
    )


def _format_value(value: float | None) -> str:
    return "missing" if value is None else f"{value:.8g}"


def _format_attempt(record: RunRecord, attempt: int | None) -> str:
    for each in record.timeline.attempts:
        if each.attempt == attempt:
            workers = "1 worker" if each.world_size == 1 else f"{each.world_size} workers"
            return f" (attempt {attempt}, {workers})"
    return ""

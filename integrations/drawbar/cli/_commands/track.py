"""drawbar track: send the reports of a run to an experiment tracker."""

from __future__ import annotations

import inspect
from typing import Annotated, Any, Literal

import typer

from drawbar.cli._arguments import AsJson, RunName, open_record
from drawbar.cli._output import CommandError, escape_control_chars, write_json

TrackerKind = Literal["tensorboard", "mlflow", "wandb", "trackio"]


def track(
    run: RunName,
    to: Annotated[TrackerKind, typer.Option("--to", help="Tracker that receives the reports.")],
    log_dir: Annotated[
        str | None, typer.Option(metavar="DIR", help="Directory of TensorBoard or W&B.")
    ] = None,
    tracking_uri: Annotated[
        str | None, typer.Option(metavar="URI", help="Tracking server or store of MLflow.")
    ] = None,
    experiment: Annotated[
        str | None, typer.Option(metavar="NAME", help="Experiment of MLflow.")
    ] = None,
    project: Annotated[
        str | None, typer.Option(metavar="NAME", help="Project of W&B or Trackio.")
    ] = None,
    entity: Annotated[str | None, typer.Option(metavar="NAME", help="Team or user of W&B.")] = None,
    mode: Annotated[
        str | None, typer.Option(metavar="MODE", help="Mode of W&B: online or offline.")
    ] = None,
    ranks: Annotated[
        str, typer.Option(metavar="RANKS", help="A rank, mean, min, max, or all.")
    ] = "0",
    from_start: Annotated[
        bool, typer.Option("--from-start", help="Send all reports, also those sent before.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Send the reports that a tracker does not have yet.

    Use it after a tracker has failed during a run, or for a run without a tracker. Use the options
    that the run has used; Drawbar prints them if a tracker fails. If you have deleted the tracker's
    data, use --from-start.
    """
    record = open_record(run)
    options = {
        "log_dir": log_dir,
        "tracking_uri": tracking_uri,
        "experiment": experiment,
        "project": project,
        "entity": entity,
        "mode": mode,
    }
    tracker = _make_tracker(to, ranks, options)
    try:
        count = tracker.send(record.path, from_start=from_start)
    except Exception as error:  # libraries raise any type of error
        raise CommandError(f"{tracker!r} failed: {type(error).__name__}: {error}") from error
    if as_json:
        write_json({"run": record.path, "tracker": to, "reports": count})
    else:
        reports = "1 report" if count == 1 else f"{count} reports"
        print(f"Sent {reports} of {escape_control_chars(record.name)} to {tracker!r}.")


def _make_tracker(kind: str, ranks: str, options: dict[str, str | None]) -> Any:
    from drawbar.trackers import TRACKERS

    set_options = {name: value for name, value in options.items() if value is not None}
    known = inspect.signature(TRACKERS[kind]).parameters
    for name in set_options:
        if name not in known:
            raise CommandError(f"--{name.replace('_', '-')} is not an option of --to {kind}.")
    tracker: Any = TRACKERS[kind]
    try:
        return tracker(ranks=int(ranks) if ranks.isdecimal() else ranks, **set_options)
    except (ImportError, TypeError, ValueError) as error:
        raise CommandError(str(error)) from error

"""drawbar plot: plot metrics in the terminal or to a file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from drawbar.cli._arguments import AsJson, RunName, open_record
from drawbar.cli._output import CommandError, escape_control_chars, terminal_width, write_json
from drawbar.cli._terminal_plot import draw_curve
from drawbar.train.backend import make_import_error

_COLUMNS = 72

Curves: TypeAlias = Mapping[str, Mapping[int, float]]


def plot(
    run: RunName,
    metrics: Annotated[
        list[str] | None,
        typer.Argument(metavar="METRIC", help="Metrics to plot.  [default: all]"),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Write a .png, .svg, or .pdf file instead of plotting in the terminal.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Plot metrics in the terminal or to a file.

    Plots the values that rank 0 reported.
    """
    if as_json and output is not None:
        raise CommandError("Use only one of --json and --output.")
    curves = _select_curves(open_record(run).get_curves(), metrics or [], run)
    if as_json:
        write_json(curves)
    elif output is not None:
        _save_figure(curves, output)
    else:
        for name, points in curves.items():
            print(
                "\n".join(
                    [
                        escape_control_chars(name),
                        *draw_curve(points, terminal_width() or _COLUMNS),
                        "",
                    ]
                )
            )


def _select_curves(curves: Curves, names: list[str], run: str) -> Curves:
    if not curves:
        raise CommandError(f"Run {run} has no numeric metrics.")
    missing = [name for name in names if name not in curves]
    if missing:
        raise CommandError(
            f"Run {run} has no metric {missing[0]!r}. Available: {', '.join(curves)}."
        )
    return {name: curves[name] for name in names or curves}


def _save_figure(curves: Curves, output: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise CommandError(f"--output: {make_import_error('matplotlib', extra='cli')}") from error
    figure = Figure(figsize=(7, 2.2 * len(curves)), layout="constrained")
    for axes, (name, points) in zip(
        figure.subplots(len(curves), sharex=True, squeeze=False)[:, 0], curves.items(), strict=True
    ):
        axes.plot(list(points), list(points.values()))
        axes.set_ylabel(name, parse_math=False)
    axes.set_xlabel("report number")
    try:
        figure.savefig(output)
    except (OSError, ValueError) as error:  # a missing directory, an unknown format
        raise CommandError(f"{output}: {error}") from error

"""`drawbar verify`: whether every checkpoint of a run is whole."""

from __future__ import annotations

import typer

from drawbar.cli._arguments import AsJson, RunName, record_of, refusals_told
from drawbar.cli._output import visible, write_json


def verify(run: RunName, as_json: AsJson = False) -> None:
    """Check the checkpoints of a run.

    Each against its manifest and checksums; the exit code is 1 if one is damaged.
    """
    record = record_of(run)
    found: dict[str, str] = {}
    with refusals_told():
        for name, wrong in record.verify():
            found[name] = wrong
            if not as_json:
                print(visible(f"{name}: {wrong or 'whole'}"), flush=True)
    if as_json:
        write_json({"path": record.path, "damage": record.damage, "checkpoints": found})
    else:
        if record.damage:
            print(visible(record.damage))
        if not found:
            print("no checkpoints")
    if record.damage or any(found.values()):
        raise typer.Exit(1)

"""`drawbar verify`: whether every checkpoint of a run is whole."""

from __future__ import annotations

import typer

from drawbar.cli._arguments import AsJson, RunName, command_errors, open_record
from drawbar.cli._output import escape_control_chars, write_json


def verify(run: RunName, as_json: AsJson = False) -> None:
    """Check the checkpoints of a run.

    Each against its manifest and checksums; the exit code is 1 if one is damaged.
    """
    record = open_record(run)
    found: dict[str, str] = {}
    with command_errors():
        for name, wrong in record.verify_checkpoints():
            found[name] = wrong
            if not as_json:
                print(escape_control_chars(f"{name}: {wrong or 'whole'}"), flush=True)
    if as_json:
        write_json({"path": record.path, "damage": record.damage, "checkpoints": found})
    else:
        if record.damage:
            print(escape_control_chars(record.damage))
        if not found:
            print("no checkpoints")
    if record.damage or any(found.values()):
        raise typer.Exit(1)

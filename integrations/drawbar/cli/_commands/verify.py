"""drawbar verify: verify the checkpoints of a run."""

from __future__ import annotations

import typer

from drawbar.cli._arguments import AsJson, RunName, command_errors, open_record
from drawbar.cli._output import escape_control_chars, write_json


def verify(run: RunName, as_json: AsJson = False) -> None:
    """Verify the checkpoints of a run.

    Compares the files of every checkpoint with their recorded sizes and checksums. Exits with code
    1 if a checkpoint, the run's journal, or its reports are damaged.
    """
    record = open_record(run)
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

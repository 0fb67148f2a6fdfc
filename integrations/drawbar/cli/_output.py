"""What commands write: results to stdout, for people or as JSON, and one line if they cannot."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import msgspec
import typer

AsJson = Annotated[bool, typer.Option("--json", help="Write JSON, for programs.")]


class CommandError(Exception):
    """What was asked for is not there, or cannot be done: one line on stderr, exit code 2."""


def write_json(value: Any) -> None:
    """Write plain data, or structs and dataclasses of it, to stdout as indented JSON."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")

"""Name the options of `drawbar launch` in messages that name settings of the Python API."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from drawbar.cli._arguments import command_errors
from drawbar.cli._output import CommandError

_NAMES = {
    "name": "--name",
    "storage_path": "--storage-path",
    "resume": "--resume",
    "detached": "--detach",
    "max_failures": "--max-failures",
    "hang_timeout": "--hang-timeout",
    "max_time": "--max-time",
    "stop_before": "--stop-before",
    "num_workers": "--num-workers",
    "resources_per_worker": "--cpus-per-worker",
    "use_gpu": "--use-gpu",
}
_CONFIG = r"(?:RunConfig|FailureConfig|ScalingConfig)"
_NAME = "|".join(_NAMES)
_PATTERNS = (
    (r"call fit\(\) again with these arguments of your RunConfig:", "run the command again with"),
    (r"(; None waits without limit|; None is no limit|, or None for no limit)", ""),
    (r"the training function (\S+), but this trainer has", r"the script \1, but this command has"),
    (r"\bfit\(\)", "drawbar launch"),
    (r"\bname and storage_path\b", "--name and --storage-path"),
    (r", --storage-path\b", " --storage-path"),
    (r"\bstorage_path=$", "--storage-path"),
    (r"\bor resources_per_worker\b", "or --cpus-per-worker"),
    (r"--cpus-per-worker\['CPU'\]", "--cpus-per-worker"),
)
_END = "The run ends: "
"""Heading in the error of a run. The description of its failures precedes it."""

_TRACEBACK = "Traceback (most recent call last)"
_EVIDENCE = re.compile(r"  Attempt \d+: ")
"""Begin of a line with the error of a failed attempt, as `FailureHistory` writes it."""

_VALUE = re.compile(rf"""(?<!\w)(?:{_CONFIG}\.)?({_NAME})=(?:True|"(\w+)"|(?=['\d-]))""")
_SETTING = re.compile(rf"{_CONFIG}\.(\w+)")


def name_options(text: str) -> str:
    """Return a message with the options of `drawbar launch` instead of settings of Python.

    Failures of the script are not changed: descriptions before "The run ends: ", and tracebacks.

    Args:
        text: Message, for example about `RunConfig.storage_path`.
    """
    failures, heading, message = text.rpartition(_END)
    if not heading and _TRACEBACK in message:
        return text
    lines = message.splitlines(keepends=True)
    renamed = [line if _EVIDENCE.match(line) else _replace_settings(line) for line in lines]
    return failures + heading + "".join(renamed)


def _replace_settings(text: str) -> str:
    text = re.sub(r"FailureConfig\(max_failures=(\d+)\)", r"--max-failures \1", text)
    text = text.replace(
        "FailureConfig(stop_when_deterministic=False)", "--no-stop-when-deterministic"
    )
    text = _VALUE.sub(lambda match: _join(match), text)
    text = _SETTING.sub(lambda match: _NAMES.get(match[1], match[1]), text)
    for pattern, replacement in _PATTERNS:
        text = re.sub(pattern, replacement, text)
    return text


def _join(match: re.Match[str]) -> str:
    name, value = _NAMES[match[1]], match[2]
    return name if match[0].endswith("True") else f"{name} {value or ''}"


@contextmanager
def launch_errors() -> Iterator[None]:
    """Convert errors as `command_errors` does, and name options in them."""
    try:
        with command_errors():
            yield
    except CommandError as error:
        raise CommandError(name_options(str(error))) from error

"""Destinations of a program's output: the log of its rank, the driver's console, and files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Literal

OutputStream = Literal["stdout", "stderr"]
STREAMS: tuple[OutputStream, ...] = ("stdout", "stderr")

_MAX_LINE_BYTES = 1 << 16
"""A longer line is printed in parts, so that it does not fill the memory."""


@dataclass(frozen=True)
class ProgramOutput:
    """Destinations of a program's output. The log of its rank always contains all of it.

    Attributes:
        console: Streams that the driver prints ("stdout", "stderr"), and the text before each line.
            If the text is empty, the driver prints the output byte for byte.
        files: Additional file for a stream. Existing files are replaced.

    Example:
        >>> ProgramOutput(console={"stderr": "[rank 3] "}, files={"stdout": "/logs/rank-3.out"})
        ProgramOutput(console={'stderr': '[rank 3] '}, files={'stdout': '/logs/rank-3.out'})
    """

    console: Mapping[OutputStream, str] = field(default_factory=dict)
    files: Mapping[OutputStream, str] = field(default_factory=dict)


class OutputWriter:
    """Writes the output of a program. Use it in one thread.

    Args:
        output: Destinations of the output.
        write_to_log: Appends to the log of the rank.
        send: Sends output to the driver, which prints it.

    Raises:
        OSError: A file cannot be created.
    """

    def __init__(
        self,
        output: ProgramOutput,
        write_to_log: Callable[[bytes], None],
        send: Callable[[bytes, OutputStream], None],
    ) -> None:
        self._output = output
        self._write_to_log = write_to_log
        self._send = send
        self._lines: dict[OutputStream, bytearray] = {stream: bytearray() for stream in STREAMS}
        self._files: dict[OutputStream, IO[bytes]] = {}
        for stream, path in output.files.items():
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._files[stream] = open(path, "wb", buffering=0)  # noqa: SIM115  # until close()

    @property
    def piped_streams(self) -> tuple[OutputStream, ...]:
        """Streams whose output must be passed to `write`. The program writes others to the log."""
        return tuple(s for s in STREAMS if s in self._output.console or s in self._files)

    def write(self, data: bytes, stream: OutputStream) -> None:
        """Write output of the program."""
        self._write_to_log(data)
        if stream in self._files:
            self._files[stream].write(data)
        if stream not in self._output.console:
            return
        if not self._output.console[stream]:
            self._send(data, stream)
            return
        line = self._lines[stream]
        line += data
        if b"\n" in data or len(line) > _MAX_LINE_BYTES:
            complete, newline, rest = line.rpartition(b"\n")
            self._lines[stream] = rest if newline else bytearray()
            self._send_lines(complete if newline else rest, stream)

    def _send_lines(self, text: bytes | bytearray, stream: OutputStream) -> None:
        prefix = self._output.console[stream].encode()
        self._send(b"".join(prefix + line + b"\n" for line in text.split(b"\n")), stream)

    def close(self) -> None:
        """Write incomplete lines, and close the files."""
        for stream, line in self._lines.items():
            if line:
                self._send_lines(line, stream)
        for file in self._files.values():
            file.close()

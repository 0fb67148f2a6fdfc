"""Console: plain lines, live terminal line, and notebook card."""

from __future__ import annotations

import io
import logging
import os
import pty
import re
import subprocess
import sys
import termios
from typing import Any

import nbclient
import nbformat
import pytest

from drawbar._console import slow_phases
from drawbar._console.console import Console
from drawbar._console.displays import MAX_COMMIT_LINES, DisplayStatus
from drawbar._process.output_lines import OutputLine
from drawbar._records.events import RunEnded
from drawbar._records.live_events import BytesWritten, LinePrinted, Notice, WorkersFailed
from drawbar.train import WorkerFailure
from tests.train.event_factories import (
    attempt_started,
    committed,
    functions_started,
    reported,
)

FAILURE = WorkerFailure(rank=1, kind="died", type_name="WorkerDied", message="killed by SIGKILL")

RUN_SCRIPT = """
import logging
from drawbar._console.console import Console
from drawbar._console.displays import DisplayStatus
from drawbar._records.events import RunEnded
from drawbar._records.live_events import LinePrinted
from drawbar.train._protocol.messages import OutputLine
from tests.train.event_factories import committed, reported, functions_started

console = Console(logging.INFO, "/runs/mnist")
for event in functions_started(2):
    console.on_event(event)
for step in range(3000):
    console.on_event(reported(0, step, {"loss": 0.123456, "epoch": 1}))
    console.on_event(LinePrinted(0, OutputLine(text=f" {step}/3000", is_redraw=True)))
    if step % 1000 == 0:
        console.on_event(LinePrinted(0, OutputLine(text=f"[b]{step}[/b] " + "wide " * 30 + ".")))
        print("the driver prints", step)
console.on_event(committed("checkpoint_000001", 123_000_000, 0.5))
console.on_event(RunEnded(time=0, outcome="finished"))
console.close()
"""


def make_plain_console(level: int = logging.INFO) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(level, "/runs/mnist", file=file), file


def remove_times(text: str) -> str:
    return re.sub(r"\[drawbar [\d:]+\]", "[drawbar]", text)


def test_running_is_printed_when_all_functions_run_and_slow_phases_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slow_phases, "SLOW_AFTER_S", 0.0)
    console, file = make_plain_console()
    for event in functions_started(2):
        console.on_event(event)
        console._slow_phase.join()
    assert remove_times(file.getvalue()).splitlines() == [
        "[drawbar] importing on 2 workers",
        "[drawbar] joining the process group on 2 workers",
        "[drawbar] run directory /runs/mnist",
        "[drawbar] running on 2 workers",
    ]


def show_everything(console: Console) -> None:
    for event in functions_started(2):
        console.on_event(event)
    console.on_event(reported(0, 7, {"loss": 0.123456789, "note": "warm-up", "table": [1]}))
    console.on_event(reported(1, 7, {"loss": 9.0}))
    console.on_event(committed("checkpoint_000001", 1_234_567_890, 0.52))
    console.on_event(LinePrinted(0, OutputLine(text="hello")))
    console.on_event(LinePrinted(1, OutputLine(text="ERROR user: bad batch", stream="stderr")))
    console.on_event(Notice("waiting for CPU=4"))
    console.on_event(WorkersFailed("worker", [FAILURE], is_final=False))


def test_plain_display_prints_events_as_lines() -> None:
    console, file = make_plain_console()
    show_everything(console)
    assert remove_times(file.getvalue()).splitlines() == [
        "[drawbar] run directory /runs/mnist",
        "[drawbar] running on 2 workers",
        "[drawbar] report 7: loss 0.1235, note warm-up",
        "[drawbar] committed checkpoint_000001 (1.23 GB in 0.5 s)",
        "hello",
        "[rank 1] ERROR user: bad batch",
        "[drawbar] waiting for CPU=4",
        *f"[drawbar] {FAILURE.describe()}".splitlines(),
    ]


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        (logging.WARNING, ["hello", "[rank 1]", "waiting", "WorkerDied"]),
        (logging.ERROR, ["[rank 1]", "WorkerDied"]),
    ],
)
def test_console_level_hides_less_severe_events(level: int, expected: list[str]) -> None:
    console, file = make_plain_console(level)
    show_everything(console)
    console.close()
    everything = ["running", "loss", "committed", "hello", "[rank 1]", "waiting", "WorkerDied"]
    assert [word for word in everything if word in file.getvalue()] == expected


def test_plain_display_of_many_reports_prints_first_and_last() -> None:
    console, file = make_plain_console()
    for index in range(5000):
        console.on_event(reported(0, index, {"loss": index}))
    console.close()
    console.close()
    assert re.findall(r"report (\d+)", file.getvalue()) == ["0", "4999"]


def test_plain_display_prints_commits_up_to_limit_and_the_last_one() -> None:
    console, file = make_plain_console()
    for number in range(100):
        console.on_event(committed(f"checkpoint_{number}", 10, 0.1))
    console.on_event(RunEnded(time=0, outcome="finished"))
    numbers = [int(number) for number in re.findall(r"checkpoint_(\d+)", file.getvalue())]
    assert numbers == [*range(MAX_COMMIT_LINES), 99]
    *_, last, end = file.getvalue().splitlines()
    assert last.endswith("checkpoint_99 (10 B in 0.1 s); 79 commits before it are not shown")
    assert end.endswith("finished")


def test_plain_display_prints_restart_with_attempt_and_budget() -> None:
    console, file = make_plain_console()
    console.on_event(attempt_started(0))
    for attempt in (1, 2):  # attempt 1 fails while it starts
        budget = f"max_failures: {3 - attempt} of 3 left"
        console.on_event(WorkersFailed("worker", [], is_final=False, budget=budget))
        console.on_event(attempt_started(attempt, "/runs/mnist/checkpoint_000001"))
    console.on_event(WorkersFailed("resize", [], is_final=False))
    console.on_event(attempt_started(3))
    assert remove_times(file.getvalue()).splitlines()[1:] == [
        "[drawbar] starting",
        "[drawbar] restarting: attempt 1 from /runs/mnist/checkpoint_000001 "
        "(max_failures: 2 of 3 left)",
        "[drawbar] restarting: attempt 2 from /runs/mnist/checkpoint_000001 "
        "(max_failures: 1 of 3 left)",
        "[drawbar] restarting: attempt 3",
    ]


def test_plain_display_prints_suppressed_metrics_before_restart() -> None:
    console, file = make_plain_console()
    for index in range(3):
        console.on_event(reported(0, index, {"loss": index}))
    console.on_event(attempt_started(1))
    console.on_event(attempt_started(2))
    assert re.findall(r"report \d|attempt \d", file.getvalue()) == [
        "report 0",
        "attempt 1",
        "report 2",
        "attempt 2",
    ]


def test_console_does_not_print_the_failure_that_fit_raises() -> None:
    console, file = make_plain_console()
    for event in functions_started(2):
        console.on_event(event)
    console.on_event(WorkersFailed("worker", [FAILURE], is_final=True))
    console.on_event(RunEnded(time=0, outcome="failed"))
    assert "WorkerDied" not in file.getvalue()
    assert file.getvalue().endswith("failed\n")


def test_console_with_many_redraws_prints_few_lines() -> None:
    console, file = make_plain_console()
    for number in range(1000):
        console.on_event(
            LinePrinted(0, OutputLine(text=f"{number}/1000", stream="stderr", is_redraw=True))
        )
    console.on_event(LinePrinted(0, OutputLine(text="1000/1000", stream="stderr")))
    assert file.getvalue() == "0/1000\n1000/1000\n"


def test_plain_display_prints_state_once_and_again_after_resize() -> None:
    console, file = make_plain_console()
    for count in (2, 2, 1):
        for event in functions_started(count):
            console.on_event(event)
    console.on_event(attempt_started(1, "/runs/mnist/checkpoint_000001"))
    states = [line.split("] ")[1] for line in file.getvalue().splitlines()[1:]]
    assert states == [
        "running on 2 workers",
        "running on 1 worker",
        "restarting: attempt 1 from /runs/mnist/checkpoint_000001",
    ]


@pytest.mark.parametrize(("attempt", "state"), [(0, "starting:"), (3, "resuming: attempt 3")])
def test_plain_display_of_resumed_run_names_attempt_and_checkpoint(
    attempt: int, state: str
) -> None:
    console, file = make_plain_console()
    console.on_event(attempt_started(attempt, "/runs/mnist/checkpoint_000001"))
    last = file.getvalue().splitlines()[-1]
    assert last.endswith(f"] {state} from /runs/mnist/checkpoint_000001")


def test_console_writes_lines_to_their_original_stream(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(logging.INFO, "")
    console.on_event(LinePrinted(0, OutputLine(text="[bold]out[/bold]")))
    console.on_event(LinePrinted(0, OutputLine(text="err", stream="stderr")))
    console.on_event(Notice("a notice"))
    console.close()
    out, err = capsys.readouterr()
    assert out == "[bold]out[/bold]\n"
    assert remove_times(err) == "err\n[drawbar] a notice\n"


def test_console_with_unread_stdout_does_not_block_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    read_end, write_end = os.pipe()
    with os.fdopen(read_end) as reader, os.fdopen(write_end, "w") as writer:
        monkeypatch.setattr(sys, "stderr", writer)
        console = Console(logging.INFO, "")
        for number in range(100):
            console.on_event(Notice(f"{number} " + "wide " * 1000))  # a pipe holds a tenth of this
        numbers = [reader.readline().split()[2] for _ in range(100)]
        console.close()
    assert numbers == [str(number) for number in range(100)]


def test_console_with_closed_file_does_not_raise() -> None:
    console, file = make_plain_console()
    file.close()
    show_everything(console)
    console.close()


def run_on_terminal(code: str, *, columns: int = 80) -> str:
    """Run Python code with stdout and stderr on a terminal and return everything it writes."""
    controller_fd, terminal_fd = pty.openpty()
    termios.tcsetwinsize(terminal_fd, (24, columns))
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    environment["TERM"] = "xterm"
    written = b""
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=terminal_fd,
        stdout=terminal_fd,
        stderr=terminal_fd,
        env=environment,
    ):
        os.close(terminal_fd)
        try:
            while chunk := os.read(controller_fd, 65536):
                written += chunk
        except OSError:  # Linux signals the end of a terminal with EIO
            os.close(controller_fd)
    return written.decode()


def screen(written: str, *, columns: int = 80) -> list[str]:
    """Return the final content of a terminal; a line that the terminal wraps is one line.

    Supports newline, carriage return, cursor up and right, erase line, erase below, and resize.
    When the terminal becomes narrower, lines are wrapped again and the cursor stays at its
    character, as in tmux and kitty.
    """
    # `full`: the cursor is behind the last column.
    lines, row, at, full = [""], 0, 0, False
    for token in re.findall(r"\x1b\[[?\d;]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", written):
        begin, line = at - at % columns, lines[row]
        if token == "\r":
            at, full = begin, False
        elif token == "\n":
            row, at = row + 1, at % columns
            lines += [""] * (row == len(lines))
        elif token == "\x1b[1A":
            row, at = (row, at - columns) if begin else (row - 1, at)
        elif token == "\x1b[C":
            at += 1
        elif token == "\x1b[2K":
            lines[row] = (line[:begin] + " " * columns + line[begin + columns :]).rstrip()
        elif token == "\x1b[J":
            lines[row:] = [line[:at]]
        elif token.startswith("\x1b[8;"):
            columns = int(token[:-1].split(";")[-1])
        elif token[0] != "\x1b":
            at += full
            lines[row] = line[:at].ljust(at) + token + line[at + len(token) :]
            at += len(token)
            full = at % columns == 0
            at -= full
    return lines


def test_terminal_display_keeps_live_line_below_user_lines() -> None:
    written = remove_times(run_on_terminal(RUN_SCRIPT))
    wide = "wide " * 30 + "."
    assert screen(written) == [
        "[drawbar] run directory /runs/mnist",
        f"[b]0[/b] {wide}",
        "the driver prints 0",
        f"[b]1000[/b] {wide}",
        "the driver prints 1000",
        f"[b]2000[/b] {wide}",
        "the driver prints 2000",
        "[drawbar] finished | report 2999: loss 0.1235, epoch 1 | "
        "checkpoint_000001 (123 MB in 0.5 s)",
        "",
    ]
    assert written.count("running on 2 workers") < 20


NARROWED = """
import os, termios, threading
from drawbar._console.console import Console
from drawbar._records.events import RunEnded
from tests.train.event_factories import reported, functions_started

drawn = threading.Semaphore(0)

class Loss:
    def __float__(self):
        drawn.release()
        return 0.5

console = Console(20, "/runs/mnist")
for event in functions_started(2):
    console.on_event(event)
console.on_event(reported(0, 7, {"loss": Loss()}))
for _ in range(2):  # the first live line is visible when the second one is rendered
    drawn.acquire()
termios.tcsetwinsize(1, (24, 30))
os.write(1, b"\\x1b[8;24;30t")
print("the driver prints")
console.on_event(RunEnded(time=0, outcome="finished"))
console.close()
"""


def test_terminal_display_on_narrowed_terminal_erases_live_line() -> None:
    written = run_on_terminal(NARROWED)
    assert "running on 2 workers | report 7: loss 0.5" in written
    assert screen(remove_times(written)) == [
        "[drawbar] run directory /runs/mnist",
        "the driver prints",
        "[drawbar] finished | report 7: loss 0.5",
        "",
    ]


def test_console_writes_program_output_unchanged(
    capsysbinary: pytest.CaptureFixture[bytes],
) -> None:
    console = Console(logging.INFO, "/runs/mnist")
    for data in (b"no end of line", b" yet\r\n\xff\x00", b"none"):
        console.on_event(BytesWritten(data))
    console.close()
    assert capsysbinary.readouterr().out == b"no end of line yet\r\n\xff\x00none"


def test_terminal_display_shows_program_output_above_live_line() -> None:
    chunks = [b"loss 0.5\npart", b" of it\n10%\r", b"100%\n", b"unfinished"]
    written = run_on_terminal(f"""
from drawbar._console.console import Console
from drawbar._records.events import RunEnded
from drawbar._records.live_events import BytesWritten
console = Console(20, "/runs/mnist")
for data in {chunks}:
    console.on_event(BytesWritten(data))
console.on_event(RunEnded(time=0, outcome="finished"))
console.close()
""")
    lines = ["loss 0.5", "part of it", "100%", "[drawbar] run directory /runs/mnist", "unfinished"]
    assert screen(remove_times(written)) == [*lines, "[drawbar] finished", ""]


def test_display_status_puts_redrawn_line_before_metrics() -> None:
    status = DisplayStatus("/runs/mnist")
    status.phase, status.state.num_workers = "running", 2
    status.last_report = (7, {"loss": 0.5})
    status.redrawn_line, status.last_checkpoint = "Epoch 3:  45%", "checkpoint_000001"
    line = "running on 2 workers | Epoch 3:  45% | report 7: loss 0.5 | checkpoint_000001"
    assert remove_times(status.format_line()) == f"[drawbar] {line}"


def test_terminal_display_with_redirected_stdout_omits_user_lines() -> None:
    redirected = "import os\nos.dup2(os.open(os.devnull, os.O_WRONLY), 1)\n"
    written = run_on_terminal(redirected + RUN_SCRIPT)
    assert "finished" in written
    assert "wide" not in written
    assert "the driver prints" not in written


def test_notebook_display_updates_one_card_above_printed_lines() -> None:
    code = f"import threading\nrun = threading.Thread(target=exec, args=({RUN_SCRIPT!r}, {{}}))"
    factory: Any = nbformat.v4  # has no types
    cell = factory.new_code_cell(f"{code}\nrun.start()\nrun.join()")
    notebook = factory.new_notebook(cells=[cell])
    nbclient.NotebookClient(notebook, timeout=300).execute()
    outputs = notebook.cells[0].outputs
    cards = [
        output.data["text/plain"] for output in outputs if output.output_type == "display_data"
    ]
    stdout = "".join(output.text for output in outputs if output.get("name") == "stdout")
    assert len(cards) == 1
    assert "finished | report 2999: loss 0.1235" in cards[0]
    (card,) = (
        output.data["text/html"] for output in outputs if "text/html" in output.get("data", {})
    )
    assert "<b>mnist</b> finished | 00:" in card
    assert "reports 0 to 29" in card
    assert card.count(",") < 2000  # points: thousands of reports are thinned out
    assert "<td>checkpoint_000001</td>" in card.replace(' style="text-align: left"', "")
    assert stdout.count("wide") == 90


def test_console_without_live_display_prints_plain_lines_on_terminal() -> None:
    written = run_on_terminal(
        RUN_SCRIPT.replace('"/runs/mnist")', '"/runs/mnist", is_live=False)', 1)
    )
    assert "\x1b" not in written
    assert "running on 2 workers" in written

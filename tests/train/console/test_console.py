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

from drawbar.train._console.console import Console
from drawbar.train._console.displays import MAX_COMMIT_LINES, DisplayStatus
from drawbar.train._errors import WorkerFailure
from drawbar.train._history.events import BytesWritten, LinePrinted, Notice, RunEnded, WorkersFailed
from drawbar.train._messages import Printed
from tests.train.told import attempt_started, committed, reported, workers_started

FAILURE = WorkerFailure(rank=1, kind="died", type_name="WorkerDied", message="killed by SIGKILL")

A_RUN = """
import logging
from drawbar.train._console.console import Console
from drawbar.train._console.displays import DisplayStatus
from drawbar.train._messages import Printed
from tests.train.told import *

console = Console(logging.INFO, "/runs/mnist")
console.on_event(workers_started(2))
for step in range(3000):
    console.on_event(reported(0, step, {"loss": 0.123456, "epoch": 1}))
    console.on_event(LinePrinted(0, Printed(text=f" {step}/3000", transient=True)))
    if step % 1000 == 0:
        console.on_event(LinePrinted(0, Printed(text=f"[b]{step}[/b] " + "wide " * 30 + ".")))
        print("the driver prints", step)
console.on_event(committed("checkpoint_000001", 123_000_000, 0.5))
console.on_event(RunEnded(time=0, outcome="finished"))
console.close()
"""


def plain(level: int = logging.INFO) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(level, "/runs/mnist", file=file), file


def unstamped(text: str) -> str:
    return re.sub(r"\[drawbar [\d:]+\]", "[drawbar]", text)


def show_everything(console: Console) -> None:
    console.on_event(workers_started(2))
    console.on_event(reported(0, 7, {"loss": 0.123456789, "note": "warm-up", "table": [1]}))
    console.on_event(reported(1, 7, {"loss": 9.0}))
    console.on_event(committed("checkpoint_000001", 1_234_567_890, 0.52))
    console.on_event(LinePrinted(0, Printed(text="hello")))
    console.on_event(LinePrinted(1, Printed(text="ERROR user: bad batch", stream="stderr")))
    console.on_event(Notice("waiting for CPU=4"))
    console.on_event(WorkersFailed("worker", [FAILURE], is_final=False))


def test_plain_lines_tell_the_run() -> None:
    console, file = plain()
    show_everything(console)
    assert unstamped(file.getvalue()).splitlines() == [
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
    ("level", "shown"),
    [
        (logging.WARNING, ["hello", "[rank 1]", "waiting", "WorkerDied"]),
        (logging.ERROR, ["[rank 1]", "WorkerDied"]),
    ],
)
def test_the_level_leaves_out_what_is_less_urgent(level: int, shown: list[str]) -> None:
    console, file = plain(level)
    show_everything(console)
    console.close()
    everything = ["running", "loss", "committed", "hello", "[rank 1]", "waiting", "WorkerDied"]
    assert [word for word in everything if word in file.getvalue()] == shown


def test_thousands_of_reports_are_the_first_and_the_last() -> None:
    console, file = plain()
    for index in range(5000):
        console.on_event(reported(0, index, {"loss": index}))
    console.close()
    console.close()
    assert re.findall(r"report (\d+)", file.getvalue()) == ["0", "4999"]


def test_plain_view_prints_every_commit_up_to_a_limit_and_the_last_one() -> None:
    console, file = plain()
    for number in range(100):
        console.on_event(committed(f"checkpoint_{number}", 10, 0.1))
    console.on_event(RunEnded(time=0, outcome="finished"))
    numbers = [int(number) for number in re.findall(r"checkpoint_(\d+)", file.getvalue())]
    assert numbers == [*range(MAX_COMMIT_LINES), 99]
    *_, last, end = file.getvalue().splitlines()
    assert last.endswith("checkpoint_99 (10 B in 0.1 s); 79 commits before it are not shown")
    assert end.endswith("finished")


def test_plain_view_prints_restart_with_attempt_and_remaining_failures() -> None:
    console, file = plain()
    console.on_event(attempt_started(0))
    for attempt in (1, 2):  # the second one fails in its start-up
        budget = f"max_failures: {3 - attempt} of 3 left"
        console.on_event(WorkersFailed("worker", [], is_final=False, budget=budget))
        console.on_event(attempt_started(attempt, "/runs/mnist/checkpoint_000001"))
    console.on_event(WorkersFailed("resize", [], is_final=False))
    console.on_event(attempt_started(3))
    assert unstamped(file.getvalue()).splitlines()[1:] == [
        "[drawbar] starting",
        "[drawbar] restarting: attempt 1 from /runs/mnist/checkpoint_000001 "
        "(max_failures: 2 of 3 left)",
        "[drawbar] restarting: attempt 2 from /runs/mnist/checkpoint_000001 "
        "(max_failures: 1 of 3 left)",
        "[drawbar] restarting: attempt 3",
    ]


def test_plain_view_prints_held_metrics_before_a_restart() -> None:
    console, file = plain()
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


def test_console_leaves_the_failure_that_fit_raises_to_the_exception() -> None:
    console, file = plain()
    console.on_event(workers_started(2))
    console.on_event(WorkersFailed("worker", [FAILURE], is_final=True))
    console.on_event(RunEnded(time=0, outcome="failed"))
    assert "WorkerDied" not in file.getvalue()
    assert file.getvalue().endswith("failed\n")


def test_a_thousand_redraws_are_few_lines() -> None:
    console, file = plain()
    for number in range(1000):
        console.on_event(
            LinePrinted(0, Printed(text=f"{number}/1000", stream="stderr", transient=True))
        )
    console.on_event(LinePrinted(0, Printed(text="1000/1000", stream="stderr")))
    assert file.getvalue() == "0/1000\n1000/1000\n"


def test_plain_view_prints_a_state_once_and_a_change_of_size_again() -> None:
    console, file = plain()
    for count in (2, 2, 1):
        console.on_event(workers_started(count))
    console.on_event(attempt_started(1, "/runs/mnist/checkpoint_000001"))
    told = [line.split("] ")[1] for line in file.getvalue().splitlines()[1:]]
    assert told == [
        "running on 2 workers",
        "running on 1 worker",
        "restarting: attempt 1 from /runs/mnist/checkpoint_000001",
    ]


@pytest.mark.parametrize(("attempt", "state"), [(0, "starting:"), (3, "resuming: attempt 3")])
def test_plain_view_of_resumed_run_names_attempt_and_checkpoint(attempt: int, state: str) -> None:
    console, file = plain()
    console.on_event(attempt_started(attempt, "/runs/mnist/checkpoint_000001"))
    last = file.getvalue().splitlines()[-1]
    assert last.endswith(f"] {state} from /runs/mnist/checkpoint_000001")


def test_lines_go_to_the_stream_that_they_came_from(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(logging.INFO, "")
    console.on_event(LinePrinted(0, Printed(text="[bold]out[/bold]")))
    console.on_event(LinePrinted(0, Printed(text="err", stream="stderr")))
    console.on_event(Notice("drawbar's own"))
    console.close()
    out, err = capsys.readouterr()
    assert out == "[bold]out[/bold]\n"
    assert unstamped(err) == "err\n[drawbar] drawbar's own\n"


def test_where_nobody_reads_the_run_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    reads, writes = os.pipe()
    with os.fdopen(reads) as reader, os.fdopen(writes, "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        console = Console(logging.INFO, "")
        for number in range(100):
            console.on_event(Notice(f"{number} " + "wide " * 1000))  # a pipe holds a tenth of this
        shown = [reader.readline().split()[2] for _ in range(100)]
        console.close()
    assert shown == [str(number) for number in range(100)]


def test_nothing_is_raised_when_nothing_can_be_shown() -> None:
    console, file = plain()
    file.close()
    show_everything(console)
    console.close()


def run_on_a_terminal(code: str, *, columns: int = 80) -> str:
    """Run Python code with stdout and stderr on a terminal; give all that was written to it."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, columns))
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    environment["TERM"] = "xterm"
    written = b""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    ):
        os.close(theirs)
        try:
            while chunk := os.read(ours, 65536):
                written += chunk
        except OSError:  # how the end of a terminal is told on Linux
            os.close(ours)
    return written.decode()


def screen(written: str, *, columns: int = 80) -> list[str]:
    """Give what a terminal shows in the end, a line that it breaks as one.

    It knows newline, return, cursor up and right, erase line, erase all below, and being resized.
    Narrowed, it breaks lines anew, and the cursor stays at its character, as in tmux and kitty.
    """
    lines, row, at, full = [""], 0, 0, False  # full: the cursor waits behind the last column
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


def test_on_a_terminal_one_live_line_stays_below_the_users_lines() -> None:
    written = unstamped(run_on_a_terminal(A_RUN))
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
from drawbar.train._console.console import Console
from tests.train.told import *

drawn = threading.Semaphore(0)

class Loss:
    def __float__(self):
        drawn.release()
        return 0.5

console = Console(20, "/runs/mnist")
console.on_event(workers_started(2))
console.on_event(reported(0, 7, {"loss": Loss()}))
for _ in range(2):  # when the second is being made, the first is there
    drawn.acquire()
termios.tcsetwinsize(1, (24, 30))
os.write(1, b"\\x1b[8;24;30t")
print("the driver prints")
console.on_event(RunEnded(time=0, outcome="finished"))
console.close()
"""


def test_nothing_is_left_of_the_live_line_on_a_terminal_that_is_made_narrower() -> None:
    written = run_on_a_terminal(NARROWED)
    assert "running on 2 workers | report 7: loss 0.5" in written
    assert screen(unstamped(written)) == [
        "[drawbar] run directory /runs/mnist",
        "the driver prints",
        "[drawbar] finished | report 7: loss 0.5",
        "",
    ]


def test_what_a_program_writes_passes_as_it_is(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    console = Console(logging.INFO, "/runs/mnist")
    for data in (b"no end of line", b" yet\r\n\xff\x00", b"none"):
        console.on_event(BytesWritten(data))
    console.close()
    assert capsysbinary.readouterr().out == b"no end of line yet\r\n\xff\x00none"


def test_what_a_program_writes_stands_by_lines_above_the_live_line() -> None:
    pieces = [b"loss 0.5\npart", b" of it\n10%\r", b"100%\n", b"unfinished"]
    written = run_on_a_terminal(f"""
from drawbar.train._console.console import Console
from drawbar.train._history.events import BytesWritten, RunEnded
console = Console(20, "/runs/mnist")
for data in {pieces}:
    console.on_event(BytesWritten(data))
console.on_event(RunEnded(time=0, outcome="finished"))
console.close()
""")
    lines = ["loss 0.5", "part of it", "100%", "[drawbar] run directory /runs/mnist", "unfinished"]
    assert screen(unstamped(written)) == [*lines, "[drawbar] finished", ""]


def test_a_redrawn_bar_is_not_what_a_narrow_terminal_cuts_off() -> None:
    status = DisplayStatus("/runs/mnist")
    status.phase, status.num_workers, status.last_report = "running", 2, (7, {"loss": 0.5})
    status.redrawn_line, status.last_checkpoint = "Epoch 3:  45%", "checkpoint_000001"
    shown = "running on 2 workers | Epoch 3:  45% | report 7: loss 0.5 | checkpoint_000001"
    assert unstamped(status.format_line()) == f"[drawbar] {shown}"


def test_a_redirected_stdout_gets_the_users_lines_only() -> None:
    redirected = "import os\nos.dup2(os.open(os.devnull, os.O_WRONLY), 1)\n"
    written = run_on_a_terminal(redirected + A_RUN)
    assert "finished" in written
    assert "wide" not in written
    assert "the driver prints" not in written


def test_in_a_notebook_one_output_is_updated_and_lines_follow_it() -> None:
    code = f"import threading\nrun = threading.Thread(target=exec, args=({A_RUN!r}, {{}}))"
    make: Any = nbformat.v4  # has no types
    cell = make.new_code_cell(f"{code}\nrun.start()\nrun.join()")
    notebook = make.new_notebook(cells=[cell])
    nbclient.NotebookClient(notebook, timeout=60).execute()
    outputs = notebook.cells[0].outputs
    live = [output.data["text/plain"] for output in outputs if output.output_type == "display_data"]
    stdout = "".join(output.text for output in outputs if output.get("name") == "stdout")
    assert len(live) == 1
    assert "finished | report 2999: loss 0.1235" in live[0]
    (card,) = (
        output.data["text/html"] for output in outputs if "text/html" in output.get("data", {})
    )
    assert "<b>mnist</b> finished | 00:" in card
    assert "reports 0 to 29" in card
    assert card.count(",") < 2000  # points: thousands of reports are thinned
    assert "<td>checkpoint_000001</td>" in card.replace(' style="text-align: left"', "")
    assert stdout.count("wide") == 90


def test_without_a_live_line_a_terminal_gets_plain_lines() -> None:
    written = run_on_a_terminal(A_RUN.replace('"/runs/mnist")', '"/runs/mnist", is_live=False)', 1))
    assert "\x1b" not in written
    assert "running on 2 workers" in written

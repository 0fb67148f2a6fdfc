from __future__ import annotations

import ctypes
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tqdm import tqdm

from drawbar.train._messages import Printed
from drawbar.train._worker.output import capture_output


@contextmanager
def captured(
    log: Path, *, errors_only: bool = False, redirect_fds: bool = True
) -> Iterator[list[Printed]]:
    said: list[Printed] = []
    with capture_output(log, said.append, errors_only=errors_only, redirect_fds=redirect_fds):
        yield said


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "logs" / "rank_0.log"


def lasting(said: list[Printed]) -> list[str]:
    return [line.text for line in said if not line.transient]


def test_each_line_is_said_once_and_written_at_once(log: Path) -> None:
    with captured(log) as said:
        print("one", end=" ")
        print("two\nthree")
        print("careful", file=sys.stderr)
        assert log.read_text() == "one two\nthree\ncareful\n"
    assert said == [
        Printed(text="one two"),
        Printed(text="three"),
        Printed(text="careful", stream="stderr"),
    ]


def test_what_children_and_c_code_write_is_said_in_its_place(log: Path) -> None:
    with captured(log) as said:
        print("first")
        os.write(2, b"from C++\n")
        subprocess.run([sys.executable, "-c", "print('from a child')"], check=True)
        print("in between")
        subprocess.run(["echo", "told where"], stdout=sys.stdout, check=True)
        os.write(1, b"no new line \xff")
    lines = ["first", "from C++", "from a child", "in between", "told where", "no new line \\xff"]
    assert [line.text for line in said] == lines
    assert {line.text for line in said if line.stream == "stdout"} == {"first", "in between"}
    assert log.read_bytes() == "\n".join(lines).encode().replace(b"\\xff", b"\xff")


def test_what_c_code_has_printed_is_said_at_the_end_and_not_lost(log: Path) -> None:
    libc = ctypes.CDLL(None)
    with captured(log) as said:
        libc.printf(b"Parameters: { max_dept } are not used\n")
    assert said == [Printed(text="Parameters: { max_dept } are not used", stream="stderr")]
    assert log.read_text() == "Parameters: { max_dept } are not used\n"


@pytest.mark.parametrize("errors_only", [False, True])
@pytest.mark.parametrize("redirect_fds", [False, True])
def test_a_log_that_cannot_be_written_is_said_once_and_print_goes_on(
    errors_only: bool, redirect_fds: bool
) -> None:
    full = Path("/dev/full")
    with captured(full, errors_only=errors_only, redirect_fds=redirect_fds) as said:
        print("one", flush=True)
        print("two", file=sys.stderr)
    told = f"{full} does not have all that is printed from here on: [Errno 28] No space left"
    first, *lines = said
    assert first.text.startswith(told)
    assert [line.text for line in lines] == ([] if errors_only else ["one", "two"])


def test_a_child_is_heard_while_python_is_silent(log: Path) -> None:
    heard = threading.Event()
    said: list[Printed] = []

    def say(line: Printed) -> None:
        said.append(line)
        heard.set()

    with capture_output(log, say, errors_only=False, redirect_fds=True):
        subprocess.run(["echo", "a child"], check=True)
        assert heard.wait(10)
    assert said == [Printed(text="a child", stream="stderr")]


def test_a_flood_of_a_child_is_said_in_part(log: Path) -> None:
    with captured(log) as said:
        subprocess.run("yes | head -c 1000000", shell=True, check=True)
    assert 0 < len(said) < 250_000
    assert any(f"more bytes are in {log})" in line.text for line in said)
    assert log.stat().st_size == 1_000_000


def test_the_other_ranks_children_are_not_said(log: Path) -> None:
    with captured(log, errors_only=True) as said:
        subprocess.run(["echo", "a child"], check=True)
    assert said == []
    assert log.read_text() == "a child\n"


def test_a_handler_that_holds_the_old_stream_writes_to_the_file(log: Path) -> None:
    with open(2, "w", closefd=False) as old_stderr:
        handler = logging.StreamHandler(old_stderr)
        with captured(log):
            handler.emit(logging.makeLogRecord({"msg": "from before"}))
    assert log.read_text() == "from before\n"


def test_the_other_ranks_say_errors_only(log: Path) -> None:
    quiet = logging.getLogger("a.library")
    quiet.propagate = False
    with captured(log, errors_only=True) as said:
        print("not said")
        logging.getLogger("user").warning("not said either")
        quiet.error("loss is %s", "nan")
    quiet.error("after the end")
    assert said == [Printed(text="ERROR a.library: loss is nan", stream="stderr", record=True)]
    assert "not said" in log.read_text()


def test_basic_config_still_has_its_effect(log: Path) -> None:
    script = (
        "import logging, pathlib; from drawbar.train._worker.output import capture_output\n"
        f"log = pathlib.Path({str(log)!r})\n"
        "with capture_output(log, print, errors_only=True, redirect_fds=True):\n"
        "  logging.basicConfig(level=logging.INFO); logging.info('configured')"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    assert "INFO:root:configured" in log.read_text()


def test_an_error_record_is_said_with_its_traceback_line_by_line(log: Path) -> None:
    with captured(log, errors_only=True) as said:
        try:
            raise ValueError("boom")
        except ValueError:
            logging.getLogger("user").exception("step failed")
    assert said[0].text == "ERROR user: step failed"
    assert said[-1].text == "ValueError: boom"


def test_a_thousand_redraws_are_a_few_transient_lines(log: Path) -> None:
    began = time.monotonic()
    with captured(log) as said:
        for _ in tqdm(range(1000), mininterval=0):
            pass
    took = time.monotonic() - began
    states = [line for line in said if line.transient]
    assert 1 <= len(states) <= 1 + took / 0.25
    assert len(lasting(said)) == 1
    assert "1000/1000" in lasting(said)[0]
    assert log.read_bytes().count(b"\r") > 900


def test_nested_bars_are_no_flood_either(log: Path) -> None:
    with captured(log) as said:
        for _ in tqdm(range(3), mininterval=0, desc="epoch"):
            for _ in tqdm(range(300), mininterval=0, desc="step", leave=False, position=1):
                pass
        print("done")
    assert len(lasting(said)) <= 4
    assert "done" in lasting(said)
    assert "3/3" in lasting(said)[-1]


def test_a_line_that_was_redrawn_ends_as_its_last_state(log: Path) -> None:
    with captured(log) as said:
        sys.stdout.write("10%\r20%\r30%\r\nwindows\r\n")
    assert lasting(said) == ["30%", "windows"]


def test_an_unfinished_line_is_said_at_the_end(log: Path) -> None:
    with captured(log) as said:
        print("no newline", end="")
        assert said == []
    assert said == [Printed(text="no newline")]


def test_a_forked_child_is_said_once(log: Path) -> None:
    with captured(log) as said:
        child = os.fork()
        if not child:
            print("in the child")
            os._exit(0)
        os.waitpid(child, 0)
        print("after it")
    assert log.read_text() == "in the child\nafter it\n"
    assert said == [Printed(text="in the child", stream="stderr"), Printed(text="after it")]


def test_lines_of_many_threads_are_all_said(log: Path) -> None:
    def print_many(number: int) -> None:
        for _ in range(200):
            sys.stdout.write(f"{number}\n")

    with captured(log) as said:
        threads = [threading.Thread(target=print_many, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(line.text for line in said) == sorted("0123" * 200)


@pytest.mark.parametrize("redirect_fds", [True, False])
def test_everything_is_restored_after_an_exception(log: Path, redirect_fds: bool) -> None:
    before = (sys.stdout, sys.stderr, logging.getLogRecordFactory(), os.fstat(1).st_ino)
    with pytest.raises(ValueError, match="boom"), captured(log, redirect_fds=redirect_fds):
        raise ValueError("boom")
    assert before == (sys.stdout, sys.stderr, logging.getLogRecordFactory(), os.fstat(1).st_ino)


def test_a_stream_kept_by_a_logging_handler_joins_the_next_capture(log: Path) -> None:
    with captured(log):
        handler = logging.StreamHandler()
    with captured(log) as said:
        handler.emit(logging.makeLogRecord({"msg": "second run"}))
    assert said == [Printed(text="second run", stream="stderr")]


def test_in_the_users_own_process_the_streams_write_to_both(
    log: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with capture_output(log, None, errors_only=False, redirect_fds=False):
        print("seen twice")
        assert sys.stdout.encoding.lower() == "utf-8"
    assert log.read_text() == capfd.readouterr().out == "seen twice\n"


def test_the_stream_is_what_libraries_expect(log: Path) -> None:
    with captured(log):
        assert sys.stdout.fileno() == 1
        assert not sys.stdout.isatty()
        assert sys.stdout.encoding == "utf-8"
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # TextIO lacks it
        sys.stdout.buffer.write(b"raw\n")
        print("flushed ☃", flush=True)
    assert log.read_text(encoding="utf-8") == "raw\nflushed ☃\n"

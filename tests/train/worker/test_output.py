"""Tests of drawbar._process.output."""

from __future__ import annotations

import ctypes
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from tqdm import tqdm

from drawbar import train
from drawbar._process.output import capture_output, tee_output
from drawbar._process.output_lines import OutputLine
from tests.train.runs import fit


@contextmanager
def capture(log: Path, *, errors_only: bool = False) -> Iterator[list[OutputLine]]:
    sent: list[OutputLine] = []
    with capture_output(log, sent.append, errors_only=errors_only):
        yield sent


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "logs" / "rank_0.log"


def get_permanent(lines: list[OutputLine]) -> list[str]:
    return [line.text for line in lines if not line.is_redraw]


def test_capture_sends_each_line_once_and_logs_immediately(log: Path) -> None:
    with capture(log) as sent:
        print("one", end=" ")
        print("two\nthree")
        print("careful", file=sys.stderr)
        assert log.read_text() == "one two\nthree\ncareful\n"
    assert sent == [
        OutputLine(text="one two"),
        OutputLine(text="three"),
        OutputLine(text="careful", stream="stderr"),
    ]


def test_capture_sends_output_of_children_and_c_code_in_order(log: Path) -> None:
    with capture(log) as sent:
        print("first")
        os.write(2, b"from C++\n")
        subprocess.run([sys.executable, "-c", "print('from a child')"], check=True)
        print("in between")
        subprocess.run(["echo", "to stdout"], stdout=sys.stdout, check=True)
        os.write(1, b"no new line \xff")
    lines = ["first", "from C++", "from a child", "in between", "to stdout", "no new line \\xff"]
    assert [line.text for line in sent] == lines
    assert {line.text for line in sent if line.stream == "stdout"} == {"first", "in between"}
    assert log.read_bytes() == "\n".join(lines).encode().replace(b"\\xff", b"\xff")


def test_capture_flushes_c_stdout_at_the_end(log: Path) -> None:
    libc = ctypes.CDLL(None)
    with capture(log) as sent:
        libc.printf(b"Parameters: { max_dept } are not used\n")
    assert sent == [OutputLine(text="Parameters: { max_dept } are not used", stream="stderr")]
    assert log.read_text() == "Parameters: { max_dept } are not used\n"


@pytest.mark.parametrize("errors_only", [False, True])
def test_capture_with_full_disk_warns_once_and_sends_lines(errors_only: bool) -> None:
    full = Path("/dev/full")
    with capture(full, errors_only=errors_only) as sent:
        print("one", flush=True)
        print("two", file=sys.stderr)
    warning = f"Output is missing from {full} from this point on: [Errno 28] No space left"
    first, *lines = sent
    assert first.text.startswith(warning)
    assert [line.text for line in lines] == ([] if errors_only else ["one", "two"])


def test_capture_sends_output_of_child_without_python_output(log: Path) -> None:
    is_sent = threading.Event()
    sent: list[OutputLine] = []

    def send(line: OutputLine) -> None:
        sent.append(line)
        is_sent.set()

    with capture_output(log, send, errors_only=False):
        subprocess.run(["echo", "a child"], check=True)
        assert is_sent.wait(300)
    assert sent == [OutputLine(text="a child", stream="stderr")]


def test_output_of_chatty_child_is_truncated_on_console(log: Path) -> None:
    with capture(log) as sent:
        subprocess.run("yes | head -c 1000000", shell=True, check=True)
    assert 0 < len(sent) < 250_000
    assert any(f"more bytes are in {log})" in line.text for line in sent)
    assert log.stat().st_size == 1_000_000


def test_capture_with_errors_only_does_not_send_output_of_children(log: Path) -> None:
    with capture(log, errors_only=True) as sent:
        subprocess.run(["echo", "a child"], check=True)
    assert sent == []
    assert log.read_text() == "a child\n"


def test_capture_logs_output_of_handler_with_previous_stream(log: Path) -> None:
    with open(2, "w", closefd=False) as old_stderr:
        handler = logging.StreamHandler(old_stderr)
        with capture(log):
            handler.emit(logging.makeLogRecord({"msg": "from before"}))
    assert log.read_text() == "from before\n"


def test_capture_with_errors_only_sends_only_error_records(log: Path) -> None:
    library_logger = logging.getLogger("a.library")
    library_logger.propagate = False
    with capture(log, errors_only=True) as sent:
        print("not shown")
        logging.getLogger("user").warning("not shown either")
        library_logger.error("loss is %s", "nan")
    library_logger.error("after the end")
    assert sent == [
        OutputLine(text="ERROR a.library: loss is nan", stream="stderr", is_log_record=True)
    ]
    assert "not shown" in log.read_text()


def test_logging_basic_config_inside_capture_takes_effect(log: Path) -> None:
    script = (
        "import logging, pathlib; from drawbar._process.output import capture_output\n"
        f"log = pathlib.Path({str(log)!r})\n"
        "with capture_output(log, print, errors_only=True):\n"
        "  logging.basicConfig(level=logging.INFO); logging.info('configured')"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    assert "INFO:root:configured" in log.read_text()


def test_capture_sends_error_record_with_traceback_lines(log: Path) -> None:
    with capture(log, errors_only=True) as sent:
        try:
            raise ValueError("boom")
        except ValueError:
            logging.getLogger("user").exception("step failed")
    assert sent[0].text == "ERROR user: step failed"
    assert sent[-1].text == "ValueError: boom"


def test_capture_of_progress_bar_sends_few_transient_lines(log: Path) -> None:
    start = time.monotonic()
    with capture(log) as sent:
        for _ in tqdm(range(1000), mininterval=0):
            pass
    duration = time.monotonic() - start
    states = [line for line in sent if line.is_redraw]
    assert 1 <= len(states) <= 1 + duration / 0.25
    assert len(get_permanent(sent)) == 1
    assert "1000/1000" in get_permanent(sent)[0]
    assert log.read_bytes().count(b"\r") > 900


def test_capture_of_nested_progress_bars_sends_few_lines(log: Path) -> None:
    with capture(log) as sent:
        for _ in tqdm(range(3), mininterval=0, desc="epoch"):
            for _ in tqdm(range(300), mininterval=0, desc="step", leave=False, position=1):
                pass
        print("done")
    assert len(get_permanent(sent)) <= 4
    assert "done" in get_permanent(sent)
    assert "3/3" in get_permanent(sent)[-1]


def test_capture_of_redrawn_line_sends_last_state(log: Path) -> None:
    with capture(log) as sent:
        sys.stdout.write("10%\r20%\r30%\r\nwindows\r\n")
    assert get_permanent(sent) == ["30%", "windows"]


def test_capture_sends_unfinished_line_at_the_end(log: Path) -> None:
    with capture(log) as sent:
        print("no newline", end="")
        assert sent == []
    assert sent == [OutputLine(text="no newline")]


def test_capture_sends_output_of_forked_child_once(log: Path) -> None:
    with capture(log) as sent:
        child = os.fork()
        if not child:
            print("in the child")
            os._exit(0)
        os.waitpid(child, 0)
        print("after it")
    assert log.read_text() == "in the child\nafter it\n"
    assert sent == [OutputLine(text="in the child", stream="stderr"), OutputLine(text="after it")]


def test_capture_sends_lines_of_several_threads(log: Path) -> None:
    def print_many(number: int) -> None:
        for _ in range(200):
            sys.stdout.write(f"{number}\n")

    with capture(log) as sent:
        threads = [threading.Thread(target=print_many, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(line.text for line in sent) == sorted("0123" * 200)


@pytest.mark.parametrize("capture_or_tee", [capture, tee_output])
def test_capture_restores_streams_after_exception(
    log: Path, capture_or_tee: Callable[[Path], AbstractContextManager[object]]
) -> None:
    before = (sys.stdout, sys.stderr, logging.getLogRecordFactory(), os.fstat(1).st_ino)
    with pytest.raises(ValueError, match="boom"), capture_or_tee(log):
        raise ValueError("boom")
    assert before == (sys.stdout, sys.stderr, logging.getLogRecordFactory(), os.fstat(1).st_ino)


def test_capture_receives_output_of_handler_with_earlier_stream(log: Path) -> None:
    with capture(log):
        handler = logging.StreamHandler()
    with capture(log) as sent:
        handler.emit(logging.makeLogRecord({"msg": "second run"}))
    assert sent == [OutputLine(text="second run", stream="stderr")]


def test_tee_writes_to_stream_and_log(log: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with tee_output(log):
        print("seen twice")
        assert sys.stdout.encoding.lower() == "utf-8"
    assert log.read_text() == capfd.readouterr().out == "seen twice\n"


def test_capture_returns_size_of_log_that_grows_with_any_output(log: Path) -> None:
    for errors_only in (False, True):
        with capture_output(log, lambda line: None, errors_only=errors_only) as get_log_size:
            print("without a newline", end="")
            assert get_log_size() == log.stat().st_size
            subprocess.run([sys.executable, "-c", "print('from a child')"], check=True)
            while get_log_size() < log.stat().st_size:  # rank 0 polls the log
                threading.Event().wait(0.01)
        assert get_log_size() == 0


def test_tee_returns_size_of_log(log: Path) -> None:
    with tee_output(log) as get_log_size:
        print("printed")
        assert get_log_size() == len("printed\n")
    assert get_log_size() == 0


def test_tee_with_full_disk_writes_to_stream(capfd: pytest.CaptureFixture[str]) -> None:
    with tee_output(Path("/dev/full")):
        print("printed", flush=True)
    assert capfd.readouterr().out == "printed\n"


def test_captured_stdout_supports_fileno_reconfigure_and_buffer(log: Path) -> None:
    with capture(log):
        assert sys.stdout.fileno() == 1
        assert not sys.stdout.isatty()
        assert sys.stdout.encoding == "utf-8"
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # TextIO lacks it
        sys.stdout.buffer.write(b"raw\n")
        print("flushed ☃", flush=True)
    assert log.read_text(encoding="utf-8") == "raw\nflushed ☃\n"


class HideSecret:
    """Proxy of a stream, as users write them."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> Any:
        return self._stream.write(text.replace("secret", "***"))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def test_console_writes_to_stream_that_the_function_has_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def function() -> None:
        train.report({"first": "a"})
        monkeypatch.setattr(sys, "stderr", HideSecret(sys.stderr))
        with train.checkpoint_dir() as path:
            train.report({}, checkpoint=path, checkpoint_dir_name="secret")

    fit(function, tmp_path)
    error = capfd.readouterr().err
    assert "committed ***" in error
    assert "secret" not in error

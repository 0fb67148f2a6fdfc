"""Entry point of a program's process; uses only the standard library.

`program.Program` starts this file by path, so a script that does not use Drawbar does not import
it. The script runs in the main thread as `__main__`, with the `sys.argv` and `sys.path` of
`python script.py` or `python -m module`. Its exception is printed as Python would print it,
without the frames of this file, and is sent over a socket.

`python program_main.py CONTROL SESSION CORE ARGUMENTS...` has the descriptors of two sockets, the
directory of `drawbar._process`, and the command line after `python`.

    -> {"failed": {...}}    exception that ended the script, as soon as it is raised
    <- "stack"              request for the stacks
    -> {"stack": {...}}     reply
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import runpy
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from types import FrameType, ModuleType, TracebackType

if __package__:
    from drawbar._process import standalone
else:  # this file runs by path
    sys.path.insert(0, sys.argv[3])
    import standalone  # type: ignore[import-not-found, no-redef]

    del sys.path[0], sys.modules["standalone"]  # the script may have a module of this name

SESSION_VARIABLE = "DRAWBAR_SESSION"
"""Process that may report for its rank, and its socket descriptor: `<pid>:<fd>`."""

NO_PYTHON = "--no-python"
"""First argument if the others are the command line of a program that is not a Python script."""

CPUS_VARIABLE = "DRAWBAR_CPUS"
"""CPUs to which the process is bound. The script does not have it."""

_FORK_SERVER = os.path.join("_fork_server", "program_server.py")
_PR_SET_PDEATHSIG = 1  # from <sys/prctl.h>
_SIGINT_EXIT_CODE = 130  # shell's exit code after Ctrl-C
_NOT_EXECUTABLE, _COMMAND_NOT_FOUND = 126, 127  # also as in a shell


def main(control: int, session: int, arguments: Sequence[str]) -> None:
    """Run the script in this process.

    Args:
        control: Descriptor of the socket for failures and stacks.
        session: Descriptor of the socket for the session.
        arguments: Command line after `python`.
    """
    for descriptor in (control, session):
        # Otherwise a child that outlives the script would keep the sockets open, and the rank would
        # keep waiting for their end.
        os.set_inheritable(descriptor, False)
    os.environ[SESSION_VARIABLE] = f"{os.getpid()}:{session}"
    if cpus := os.environ.pop(CPUS_VARIABLE, ""):
        os.sched_setaffinity(0, set(map(int, cpus.split(","))))  # threads are started later
    _reset_signals()
    _end_with_parent()
    connection = socket.socket(fileno=control)
    if arguments[0] == NO_PYTHON:
        # A program in Python may report, as a script may.
        os.set_inheritable(session, True)
        _replace_process(connection, arguments[1:])
    faulthandler.enable()
    # Python writes whole blocks to pipes and files. The last block would be lost in a crash.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # it is a text stream
    # The exit of a forked child concerns only its parent, so the child must not send failures.
    os.register_at_fork(after_in_child=connection.detach)
    threading.Thread(
        target=_serve_stack_requests, args=(connection,), name="drawbar-program", daemon=True
    ).start()
    try:
        if arguments[0] == "-m":
            _run_module(arguments[1:])
        else:
            _run_script(arguments)
    except SystemExit as error:
        # As in Python, only None and the integer 0 are success: sys.exit(0.0) exits with code 1.
        if error.code is not None and not (isinstance(error.code, int) and error.code == 0):
            error.__traceback__ = _drop_runner_frames(error.__traceback__)
            _send_failure(connection, error)
        raise
    except BaseException as error:
        error.__traceback__ = _drop_runner_frames(error.__traceback__)
        _send_failure(connection, error)
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(_SIGINT_EXIT_CODE if isinstance(error, KeyboardInterrupt) else 1)


def _replace_process(connection: socket.socket, command: Sequence[str]) -> None:
    """Execute a program in this process. Does not return."""
    # Python ignores these signals, and the program would inherit that.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], list(command))
    except OSError as error:
        _send_failure(connection, error)
        print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(_COMMAND_NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE)


def _run_script(arguments: Sequence[str]) -> None:
    script = arguments[0]
    sys.argv = list(arguments)
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    names = _create_main_module()
    names["__file__"] = path = os.path.abspath(script)
    with open(script, "rb") as file:
        # Compile bytes, because the file may declare its encoding. Do not inherit this file's
        # `from __future__` imports.
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, names)


def _run_module(arguments: Sequence[str]) -> None:
    sys.argv = list(arguments)
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd()
    _create_main_module()
    # `python -m` calls this function. `run_module` would clear the module's names at its end.
    runpy._run_module_as_main(arguments[0])  # type: ignore[attr-defined]  # not public


def _create_main_module() -> dict[str, object]:
    """Create a new `__main__` module and return its namespace.

    The module is never removed, because exit handlers and pickles look it up.
    """
    sys.modules["__main__"] = ModuleType("__main__")
    names = vars(sys.modules["__main__"])
    names["__builtins__"] = __builtins__
    return names


def _end_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends.

    The sentinel finds processes by their environment, which a script can change.
    """
    with contextlib.suppress(AttributeError, OSError):  # only Linux has prctl
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))


def _reset_signals() -> None:
    """Reset signal handling to a shell's defaults: Ray's workers ignore some signals."""
    # The signal mask is inherited too. With a blocked SIGTERM, only SIGKILL would end the script.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _send_failure(connection: socket.socket, error: BaseException) -> None:
    """Send the exception that ended the script, and set `sys.last_value` for exit handlers."""
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    traceback_exception = traceback.TracebackException.from_exception(error)
    failure = {
        "type_name": type(error).__name__,
        "message": _format_message(error),
        "traceback": "".join(traceback_exception.format()),
        "lines": [
            (frame.filename, frame.lineno, frame.name) for frame in traceback_exception.stack
        ],
        "time": time.time(),
        "is_exit": isinstance(error, SystemExit | KeyboardInterrupt),
        "builtin_type": standalone.get_builtin_type(error),
        **_get_data_position(),
    }
    _send(connection, {"failed": failure})


def _get_data_position() -> dict[str, object]:
    """Return the count and the description of the script's batches, if it uses Drawbar."""
    batches = sys.modules.get("drawbar._process.batch_counter")
    if batches is None:
        return {}
    return {"num_batches": batches.get_num_batches(), "data_position": batches.describe_batch()}


def _format_message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:
        return f"<its __str__ raised {type(broken).__name__}>"


def _drop_runner_frames(tb: TracebackType | None) -> TracebackType | None:
    """Drop the frames above the script; all frames if the script has not started."""
    while tb is not None and _is_runner_frame(tb.tb_frame):
        tb = tb.tb_next
    return tb


def _is_runner_frame(frame: FrameType) -> bool:
    return _is_runner_file(frame.f_code.co_filename)


def _is_runner_file(file: str) -> bool:
    if file in (__file__, runpy.__file__) or file.startswith("<frozen "):
        return True
    return file.endswith(_FORK_SERVER)


def _serve_stack_requests(connection: socket.socket) -> None:
    """Send the stacks of this process for each request."""
    for _ in connection.makefile("rb"):
        lines, text = standalone.collect_stacks(threading.main_thread().ident, _is_runner_file)
        _send(connection, {"stack": {"frames": lines, "text": text}})


def _send(connection: socket.socket, message: dict[str, object]) -> None:
    with contextlib.suppress(OSError):  # the worker process has closed its end
        # Python decodes file names that are not UTF-8 with lone surrogates, which are not valid in
        # JSON.
        text = json.dumps(message, ensure_ascii=False).encode(errors="replace")
        connection.sendall(text + b"\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[4:])

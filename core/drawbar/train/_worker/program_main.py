"""What runs in the process of a program: it becomes the script, and tells its rank how that failed.

`program.Program` starts this file by path, with the standard library alone: a script that knows
nothing of Drawbar imports nothing of it. The script runs in the main thread, as `__main__`, with
the `sys.argv` and `sys.path` that `python script.py` or `python -m module` would give it. What it
raises is printed as Python prints it, without the lines of this file, and told over a socket.

    -> {"failed": {...}}    what has ended the script, as soon as it is known
    <- "stack"              where do you stand?
    -> {"stack": {...}}     the answer
"""

from __future__ import annotations

import contextlib
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

SESSION_VARIABLE = "DRAWBAR_SESSION"
"""Which process may speak for its rank, and by which descriptor: `<pid>:<fd>`."""

_INTERRUPTED = 130  # what a shell says of who was ended by Ctrl-C


def main(control: int, session: int, arguments: Sequence[str]) -> None:
    """Be the script."""
    for descriptor in (control, session):
        # A child of the script that outlives it must not keep the rank waiting for an end.
        os.set_inheritable(descriptor, False)
    os.environ[SESSION_VARIABLE] = f"{os.getpid()}:{session}"
    _take_signals()
    faulthandler.enable()
    # To a pipe or a file Python writes whole blocks, and the last one is lost with the process.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # it is a text stream
    wire = socket.socket(fileno=control)
    # A fork of the script has a fate of its own, which its parent alone hears of, as of any child.
    os.register_at_fork(after_in_child=wire.detach)
    threading.Thread(target=_answer, args=(wire,), name="drawbar-program", daemon=True).start()
    try:
        if arguments[0] == "-m":
            _run_module(arguments[1:])
        else:
            _run_script(arguments)
    except SystemExit as error:
        # As Python does: 0.0 is printed, and the exit code is 1.
        if error.code is not None and not (isinstance(error.code, int) and error.code == 0):
            error.__traceback__ = _of_the_script(error.__traceback__)
            _tell(wire, error)
        raise
    except BaseException as error:
        error.__traceback__ = _of_the_script(error.__traceback__)
        _tell(wire, error)
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(_INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1)


def _run_script(arguments: Sequence[str]) -> None:
    script = arguments[0]
    sys.argv = list(arguments)
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    names = _new_main()
    names["__file__"] = path = os.path.abspath(script)
    with open(script, "rb") as file:
        # Of bytes: the file may say its own encoding. Annotations are as the script has them, not
        # as this file.
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, names)


def _run_module(arguments: Sequence[str]) -> None:
    sys.argv = list(arguments)
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd()
    _new_main()
    # What `python -m` calls. `run_module` would take the names away again when the module ends.
    runpy._run_module_as_main(arguments[0])  # type: ignore[attr-defined]  # not public


def _new_main() -> dict[str, object]:
    """Give the names of a new `__main__`. It stays: exit handlers and pickles look there."""
    sys.modules["__main__"] = ModuleType("__main__")
    names = vars(sys.modules["__main__"])
    names["__builtins__"] = __builtins__
    return names


def _take_signals() -> None:
    """Take all signals, as a process does that a shell starts: Ray's workers ignore some."""
    # The mask is inherited too, and a blocked SIGTERM would leave the script to SIGKILL.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _tell(wire: socket.socket, error: BaseException) -> None:
    """Say what has ended the script; exit handlers find it where Python puts it."""
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    told = traceback.TracebackException.from_exception(error)
    account = {
        "type_name": type(error).__name__,
        "message": _message_of(error),
        "traceback": "".join(told.format()),
        "lines": [(each.filename, each.lineno, each.name) for each in told.stack],
        "time": time.time(),
        "is_exit": isinstance(error, SystemExit | KeyboardInterrupt),
    }
    _send(wire, {"failed": account})


def _message_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:
        return f"<its __str__ raised {type(broken).__name__}>"


def _of_the_script(lines: TracebackType | None) -> TracebackType | None:
    """Leave out the lines that lead to the script; all of them where it has not begun."""
    while lines is not None and _leads_there(lines.tb_frame):
        lines = lines.tb_next
    return lines


def _leads_there(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return file in (__file__, runpy.__file__) or file.startswith("<frozen ")


def _answer(wire: socket.socket) -> None:
    """Say where this process stands, whenever its rank asks."""
    for _ in wire.makefile("rb"):
        _send(wire, {"stack": _stack()})


def _stack() -> dict[str, object]:
    names = {each.ident: each.name for each in threading.enumerate()}
    texts, main = [], []
    for ident, frame in sys._current_frames().items():
        stack = traceback.extract_stack(frame)
        if ident == threading.main_thread().ident:
            main = [(each.filename, each.lineno, each.name) for each in stack]
        texts.append(f"Thread {names.get(ident, ident)}:\n" + "".join(stack.format()))
    return {"lines": main, "text": "\n".join(texts)}


def _send(wire: socket.socket, told: dict[str, object]) -> None:
    with contextlib.suppress(OSError):  # nobody hears it any more
        # Of a name that is not UTF-8 Python makes half pairs of surrogates, which no JSON can hold.
        text = json.dumps(told, ensure_ascii=False).encode(errors="replace")
        wire.sendall(text + b"\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])

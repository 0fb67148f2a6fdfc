"""Fork server for the ranks of one script of `drawbar launch` on this machine.

`python program_server.py LISTENER CORE SCRIPT ARGUMENTS...` does the imports at the top of the
script, and then forks a process for each rank. It has the same protocol as `server.py`. CORE is the
directory of `drawbar._process`.

A forked rank must not differ from `python SCRIPT`. The server therefore forks no ranks if an import
had an effect that the ranks would share: a thread, an open file, a child process, or a value that
depends on the rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Collection, Iterator
from types import ModuleType

if __package__:
    from drawbar._fork_server import forkable, rank_reads, script_imports, server
    from drawbar._process import preloadable, rank_attributes
else:  # this file runs by path
    sys.path[:0] = [os.path.dirname(os.path.abspath(__file__)), sys.argv[2]]
    import forkable  # type: ignore[import-not-found, no-redef]
    import preloadable  # type: ignore[import-not-found, no-redef]
    import rank_attributes  # type: ignore[import-not-found, no-redef]
    import rank_reads  # type: ignore[import-not-found, no-redef]
    import script_imports  # type: ignore[import-not-found, no-redef]
    import server  # type: ignore[import-not-found, no-redef]

    # The script may have modules of these names.
    for module in (forkable, preloadable, rank_attributes, rank_reads, script_imports, server):
        sys.modules.pop(module.__name__, None)
    del sys.path[:2], module

MARKER_VARIABLE = "DRAWBAR_PROGRAM"
"""Marks the processes of a rank. The markers of the server and of all ranks have one length."""

_RESTARTED_THREADS = frozenset({"jemalloc_bg_thd"})
"""Threads that their library starts again after a fork."""

_SITE_DIRECTORIES = frozenset({"site-packages", "dist-packages"})
_PR_SET_PDEATHSIG = 1  # from <sys/prctl.h>


def main(listener: int, arguments: list[str]) -> None:
    """Do the imports of a script, and fork its ranks from then on.

    Args:
        listener: Descriptor of the socket on which the launcher sends connections.
        arguments: Command line of each rank after `python`.
    """
    if not sys.flags.safe_path:
        del sys.path[0]  # the directory of this file
    original_path = list(sys.path)
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    marker = libc.getenv(MARKER_VARIABLE.encode())
    imports = ScriptImports(arguments)
    error = imports.run()
    server_id = os.getpid()
    request = server.serve_until_forked(listener, "", error, imports.files)
    # From here on, this is the process of a rank. The kernel kills it when the server ends.
    libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != server_id:
        os._exit(1)  # the server has ended before
    os.setsid()
    # Children that are only forked are found by `/proc/<pid>/environ`, which shows this memory.
    value = request.environment[MARKER_VARIABLE].encode()
    ctypes.memmove(marker, value, len(value))
    imports.complete_environment(request.environment)
    code = server.become_worker(request, original_path)
    for descriptor, data in imports.output.items():
        with contextlib.suppress(OSError):  # no process reads it
            os.write(descriptor, data)
    rank_attributes.set_rank(request.environment)
    exec(code, vars(sys.modules["__main__"]))


class ScriptImports:
    """Imports at the top of a script.

    Args:
        arguments: Command line of each rank after `python`.

    Attributes:
        files: Files of the script.
        output: Output of the imports, by descriptor.
    """

    def __init__(self, arguments: list[str]) -> None:
        self._arguments = arguments
        self._directory = script_imports.find_script_directory(arguments)
        self.files = script_imports.find_script_files(arguments)
        self._sources = script_imports.find_imports(
            self.files, self._directory, preloadable.PRELOADABLE_PACKAGES
        )
        self.output: dict[int, bytes] = {}
        self._changed_variables: dict[str, str | None] = {}

    def run(self) -> str:
        """Do the imports and return why ranks must not be forked, "" if they may."""
        if not self._sources:
            return "the script does not begin with imports that can be shared"
        if _list_threads():
            return "the interpreter has started with threads, which a fork would lose"
        main_module = self._use_state_of_script()
        open_files = set(forkable.list_open_files())
        state = _read_state()
        with self._record_changed_variables(), rank_reads.track_rank_reads() as readers:
            forkable.prepare_imports()
            try:
                for file, source in self._sources.items():
                    exec(compile(source, file, "exec", dont_inherit=True), vars(main_module))
            except BaseException as error:
                return f"an import raised {type(error).__name__}: {error}"
        self.output = _read_output()
        if _read_state() != state:
            return "the imports changed sys.path, sys.argv, or the working directory"
        return self._find_obstacle(readers, open_files)

    def _use_state_of_script(self) -> ModuleType:
        """Set the state that an import finds in the script, and return the main module."""
        is_module = self._arguments[0] == "-m"
        script, others = self.files[-1], self._arguments[2 if is_module else 1 :]
        sys.argv = [script if is_module else self._arguments[0], *others]
        if not sys.flags.safe_path:
            sys.path.insert(0, self._directory)
        sys.modules["__main__"] = main_module = ModuleType("__main__")
        main_module.__file__ = script
        return main_module

    @contextlib.contextmanager
    def _record_changed_variables(self) -> Iterator[None]:
        """Record the environment variables that the imports set."""
        original = dict(os.environ)
        yield
        names = os.environ.keys() | original.keys()
        self._changed_variables = {
            name: os.environ.get(name)
            for name in names - forkable.SERVER_VARIABLES.keys()
            if os.environ.get(name) != original.get(name)
        }

    def complete_environment(self, environment: dict[str, str]) -> None:
        """Change the environment of a rank as the imports would have."""
        for name, value in self._changed_variables.items():
            environment.pop(name, None)
            if value is not None:
                environment[name] = value

    def _find_obstacle(self, readers: Collection[str], open_files: Collection[str]) -> str:
        if not sys.modules.keys() & preloadable.FRAMEWORKS:
            return "no import is slow"
        findings = {
            "depend on the rank": readers,
            "are in the directory of the script": self._list_local_modules(),
            "are not installed": _list_other_packages(),
            "have opened files": set(forkable.list_open_files()) - set(open_files),
            "have started processes": _list_children(),
            "have started threads": _find_lost_threads(),
        }
        for description, names in findings.items():
            if names:
                return f"imports {description}: {', '.join(sorted(names))}"
        reason = forkable.find_obstacle()
        return f"the imports {reason}" if reason else ""

    def _list_local_modules(self) -> list[str]:
        """Return modules that a fresh process would find in the directory of the script."""
        names = {name for name in sys.modules if "." not in name} - {"__main__"}
        return [
            name
            for name in names - set(sys.builtin_module_names)
            if script_imports.is_local(name, self._directory)
        ]


def _read_state() -> tuple[list[str], list[str], str]:
    """Return the state that each forked process sets again."""
    return list(sys.path), list(sys.argv), os.getcwd()


def _read_output() -> dict[int, bytes]:
    """Return the output of this process, whose standard output and error are files in memory."""
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)
    return {
        descriptor: os.pread(descriptor, os.fstat(descriptor).st_size, 0) for descriptor in (1, 2)
    }


def _list_other_packages() -> list[str]:
    """Return preloaded packages that are not installed: they may be other packages of that name."""
    names = preloadable.PRELOADABLE_PACKAGES - sys.stdlib_module_names
    return [
        name
        for name in names & sys.modules.keys()
        if not _SITE_DIRECTORIES & set((sys.modules[name].__file__ or "").split(os.sep))
    ]


def _list_threads() -> list[str]:
    """Return the names of all threads of this process but the main thread."""
    names = []
    for thread in os.listdir("/proc/self/task"):
        if int(thread) != os.getpid():
            with (
                contextlib.suppress(OSError),  # it has ended
                open(f"/proc/self/task/{thread}/comm") as file,
            ):
                names.append(file.read().strip())
    return names


def _find_lost_threads() -> set[str]:
    """Return the threads that do not survive a fork.

    Some libraries, such as OpenBLAS, end their threads before a fork and start them again later.
    """
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return set(_list_threads()) - _RESTARTED_THREADS


def _list_children() -> list[str]:
    """Return the IDs of child processes."""
    try:
        result = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return []
    return [str(result.si_pid) if result is not None else "running"]


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[3:])

"""Check the path of a script before anything starts."""

from __future__ import annotations

import os
import shlex
import shutil
import stat

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}

_MAX_LINKS = 40  # as Linux follows


def check_script(path: str) -> None:
    """Check that a script is a regular file, which every rank can read.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The path is a directory, standard input, another open file of this process, or
            a special file.
    """
    if path == "-" or _is_open_file(path):
        raise ValueError(
            f"{path} is not a script that every rank can read: it names standard input or an "
            "open file of this process, which can be read once. Save the script to a file and pass "
            "its path."
        )
    try:
        kind = stat.S_IFMT(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        location = "" if os.path.isabs(path) else f" in {os.getcwd()}"
        raise FileNotFoundError(f"No script {path}{location}.") from None
    if kind == stat.S_IFDIR:
        raise ValueError(f"{path} is a directory. Pass a script in it, or -m and a module.")
    if kind != stat.S_IFREG:
        raise ValueError(
            f"{path} is {_KINDS.get(kind, 'a special file')}, but every rank reads the script, so "
            "it must be a regular file. Save the script to a file and pass its path."
        )


def require_executable(name: str) -> None:
    """Check that a program can be executed.

    Args:
        name: Path of the program, or its name in a directory of PATH.

    Raises:
        FileNotFoundError: The program does not exist.
        PermissionError: The file is not executable.
    """
    if shutil.which(name):
        return
    if os.path.isfile(name):
        raise PermissionError(
            f"{name} is not executable. Run 'chmod +x {shlex.quote(name)}', or launch its "
            "interpreter with the file as an argument."
        )
    raise FileNotFoundError(f"No program {name} in {os.getcwd()} or PATH.")


def _is_open_file(path: str) -> bool:
    """Return whether a path names a file descriptor, such as /dev/stdin and /dev/fd/3.

    Links are followed one by one: if standard input is redirected from a regular file, the last
    link points to that file.
    """
    for _ in range(_MAX_LINKS):
        directory = os.path.realpath(os.path.dirname(path) or ".")
        path = os.path.join(directory, os.path.basename(path))
        if path.startswith(("/proc/", "/dev/fd/")):
            return True
        if not os.path.islink(path):
            return False
        path = os.path.join(directory, os.readlink(path))
    return False

"""Where every rank stands: Python stacks, and the difference that names the odd rank out."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path

import msgspec

from drawbar.train._user_code import users_lines


class Frame(msgspec.Struct, frozen=True):
    """One line of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


class Stack(msgspec.Struct, frozen=True, kw_only=True):
    """The training thread's frames, outermost first, and the text of all threads' stacks."""

    frames: tuple[Frame, ...]
    text: str

    @property
    def place(self) -> str:
        """The user's innermost line, and what it called if it stands in there."""
        if not self.frames:
            return "not in the training function"
        users = users_lines([frame.file for frame in self.frames])
        innermost = self.frames[-1]
        users_innermost = self.frames[users[-1]] if users else innermost
        if users_innermost == innermost:
            return str(innermost)
        return f"{users_innermost}, inside {innermost.function} ({_short(innermost.file)})"


def take_stack(thread: threading.Thread | None) -> Stack:
    """Take the stacks of this process; `thread` is the one that runs the training function."""
    frames = sys._current_frames()
    names = {each.ident: each.name for each in threading.enumerate()}
    texts = []
    training: tuple[Frame, ...] = ()
    for ident, frame in frames.items():
        summary = traceback.extract_stack(frame)
        if thread is not None and ident == thread.ident:
            training = tuple(Frame(f.filename, f.lineno or 0, f.name) for f in summary)
        texts.append(f"Thread {names.get(ident, ident)}:\n" + "".join(summary.format()))
    return Stack(frames=training, text="\n".join(texts))


def difference(stacks: Mapping[int, Stack | None]) -> str:
    """Say which ranks stand where, the smallest group first: it holds the odd ranks out."""
    groups = _by_place(stacks)
    odd = odd_ranks(stacks)
    lines = []
    for place, ranks in groups:
        mark = "   <- the odd one out" if ranks == odd else ""
        lines.append(f"  {_ranks(ranks)}: {place}{mark}")
    return "\n".join(lines)


def odd_ranks(stacks: Mapping[int, Stack | None]) -> list[int]:
    """Give the ranks of the smallest group that stands in one place, if just one is smallest."""
    sizes = [len(ranks) for _, ranks in _by_place(stacks)]
    is_odd = len(sizes) > 1 and sizes[0] < sizes[1]
    return _by_place(stacks)[0][1] if is_odd else []


def stand_apart(stacks: Mapping[int, Stack | None]) -> list[int]:
    """Give the odd ranks out; all of them where they differ and none is odd."""
    return odd_ranks(stacks) or (list(stacks) if len(_by_place(stacks)) > 1 else [])


def _by_place(stacks: Mapping[int, Stack | None]) -> list[tuple[str, list[int]]]:
    groups: dict[str, list[int]] = {}
    for rank, stack in sorted(stacks.items()):
        silent = "does not answer: one long call that holds the interpreter, or a dead process"
        groups.setdefault(stack.place if stack else silent, []).append(rank)
    return sorted(groups.items(), key=lambda group: (len(group[1]), group[1]))


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8])) + (f" ... {ranks[-1]}" if len(ranks) > 8 else "")
    return f"ranks {shown} ({len(ranks)})"


def _short(file: str) -> str:
    return "/".join(Path(file).parts[-3:])


def write_stacks(folder: Path, stacks: Mapping[int, Stack | None]) -> str:
    """Write every rank's stacks and their difference below `folder`; gives the difference."""
    folder.mkdir(parents=True, exist_ok=True)
    summary = difference(stacks)
    for rank, stack in stacks.items():
        (folder / f"rank_{rank}.txt").write_text(stack.text if stack else "no answer\n")
    (folder / "difference.txt").write_text(summary + "\n")
    return summary

"""Times of ranks: phases and steps that users mark, and the file `rank_times.jsonl`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from drawbar import train
from drawbar.train import runs
from drawbar.train.testing import run_in_threads
from tests.train.runs import fit


def test_phase_invalid_names_raise() -> None:
    with pytest.raises(ValueError, match="printable"):
        train.phase("\ud800")
    with pytest.raises(ValueError, match="printable"):
        train.phase("")
    with pytest.raises(TypeError, match="string"):
        train.phase(3)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="inside a training function"), train.phase("eval"):
        pass
    with pytest.raises(RuntimeError, match="inside a training function"):
        train.step()


def test_phases_and_steps_of_run_are_recorded(tmp_path: Path) -> None:
    def function() -> None:
        phase = train.phase("eval")
        for _ in range(3):
            with phase, phase:
                pass
            train.step()

        @phase
        def evaluate() -> None:
            pass

        evaluate()

    fit(function, tmp_path)
    (sample,) = runs.find_run(tmp_path / "run").read_rank_times()
    assert sample.ranks[0].steps == 3
    assert "phase:eval" in sample.ranks[0].seconds


def test_phase_of_generator_that_is_closed_after_the_run_ends_silently() -> None:
    def generate() -> Iterator[int]:
        with train.phase("load"):
            yield 1

    def function() -> None:
        generators.append(generate())
        next(generators[0])

    generators: list[Any] = []
    run_in_threads(function, num_workers=1)
    (generator,) = generators
    generator.close()


def test_rank_times_damaged_lines_are_skipped(tmp_path: Path) -> None:
    fit(train.step, tmp_path)
    file = tmp_path / "run" / "rank_times.jsonl"
    line = file.read_text()
    wrong = json.loads(line) | {"ranks": [0, 1]}
    file.write_text(f"{line}x\n{json.dumps(wrong)}\n{line}{line[:20]}")
    assert len(runs.find_run(tmp_path / "run").read_rank_times()) == 2


def test_run_whose_directory_is_deleted_keeps_the_error_of_the_user(tmp_path: Path) -> None:
    def function() -> None:
        import shutil

        # An earlier deletion would be the error of the run: the start could not be recorded.
        while '"function_started"' not in (tmp_path / "run" / "journal.jsonl").read_text():
            os.sched_yield()
        shutil.rmtree(tmp_path / "run")
        raise ValueError("error of the user")

    with pytest.raises(Exception, match="error of the user"):
        fit(function, tmp_path)

"""`drawbar migrate` changes what it is sure of, and lists the rest with line numbers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from drawbar.cli._rewrite import Note, rewrite
from tests.cli.conftest import Command

IDIOMS = sorted((Path(__file__).parents[1] / "migration" / "idioms").glob("*.py"))


@pytest.mark.parametrize("script", IDIOMS, ids=lambda script: script.stem)
def test_what_ray_trains_documentation_teaches_is_rewritten(script: Path) -> None:
    here = script.read_text()
    there = re.sub(r"\bdrawbar\.train\b", "ray.train", here)
    there = re.sub(r"\bfrom drawbar import train\b", "from ray import train", there)
    assert rewrite(there).text == here


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("import ray.train as rt\n", "import drawbar.train as rt\n"),
        ("from ray import train, tune\n", "from drawbar import train\nfrom ray import tune\n"),
        ("if 1:\n  from ray import train as t, data\n",
         "if 1:\n  from drawbar import train as t\n  from ray import data\n"),
        ("import ray\nray.train.report({})\n",
         "import drawbar.train\nimport ray\ndrawbar.train.report({})\n"),
        ("import ray.train\nray.init()\n", "import ray\nimport drawbar.train\nray.init()\n"),
        ("from ray.air import RunConfig\n", "from drawbar.train import RunConfig\n"),
        ("from ray.tune.integration.ray_train import TuneReportCallback\n",
         "from drawbar.tune import TuneReportCallback\n"),
        ('x = "ü", 1; import ray.train  # é\r\n', 'x = "ü", 1; import drawbar.train  # é\r\n'),
    ],
)  # fmt: skip
def test_names_are_replaced_where_they_stand(before: str, after: str) -> None:
    assert rewrite(before).text == after


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("from ray.train import SyncConfig", "leave it out"),
        ("from ray.train.torch import Nothing", "drawbar.train.torch has no Nothing"),
        ("from ray.train.torch.config import TorchConfig", "there is no drawbar.train.torch.con"),
        ("from ray.air import session", "call drawbar.train.report"),
        ("RunConfig(verbose=0)", "RunConfig takes no verbose"),
        ("tune.Tuner(trainer)", "trainer.as_trainable()"),
        ("x = 'RAY_TRAIN_V2_ENABLED'", "no environment variable"),
        ("import_module('ray.train')", "text names ray.train"),
        ("def f(ray): ray.train.report()", "is this ray.train the module's?"),
    ],
)
def test_what_cannot_be_decided_is_listed(script: str, told: str) -> None:
    (note,) = rewrite(f"\n{script}\n").notes
    assert note.line == 2
    assert told in note.text


def test_files_are_changed_only_when_told(drawbar: Command, tmp_path: Path) -> None:
    script, broken = tmp_path / "train.py", tmp_path / "wrong.py"
    script.write_text("import ray.train\nray.train.report({})\n")
    broken.write_text("def\n")
    shown = drawbar("migrate", tmp_path).out
    assert "-import ray.train\n" in shown
    assert "+import drawbar.train\n" in shown
    assert f"{broken}:1: no Python" in shown
    assert script.read_text().startswith("import ray.train\n")
    told = json.loads(drawbar("migrate", tmp_path, "--write", "--json").out)
    assert [Path(each["path"]).name for each in told] == ["train.py", "wrong.py"]
    assert script.read_text() == "import drawbar.train\ndrawbar.train.report({})\n"
    assert drawbar("migrate", script).out == "nothing to change\n"
    assert drawbar("migrate", tmp_path / "none.py").code == 2


def test_a_note_is_told_once() -> None:
    assert rewrite("Tuner(t); Tuner(t)\n").notes == [
        Note(1, "Tuner takes trainer.as_trainable(), if it was given a trainer")
    ]

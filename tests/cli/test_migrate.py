"""`drawbar migrate` changes what it is sure of, and lists the rest with line numbers."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from drawbar.cli._migrate.rewriter import MigrationNote, rewrite
from tests.cli.conftest import Command

IDIOMS = sorted((Path(__file__).parents[1] / "migration" / "idioms").glob("*.py"))


@pytest.mark.parametrize("script", IDIOMS, ids=lambda script: script.stem)
def test_what_ray_trains_documentation_teaches_is_rewritten(script: Path) -> None:
    here = script.read_text()
    there = re.sub(r"\bdrawbar\.train\b", "ray.train", here)
    there = re.sub(r"\bfrom drawbar import train\b", "from ray import train", there)
    done = rewrite(there)
    assert done.text == here
    assert [note for note in done.notes if "text names ray.train" not in note.text] == []


@pytest.mark.parametrize(
    "script",
    [
        "from ray.train.v2.jax import JaxTrainer",
        "from ray.train.tensorflow.keras import ReportCheckpointCallback",
        "from ray.train.huggingface.transformers import prepare_trainer",
        "from ray.train import torch",
        "tune.RunConfig(verbose=0)",
        "from ray.tune import RunConfig\nRunConfig(verbose=0)",
    ],
)
def test_what_is_there_is_not_listed(script: str) -> None:
    assert rewrite(script).notes == []


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
        ("import ray, ray.train, ray.tune\nray.init()\n",
         "import ray, drawbar.train, ray.tune\nray.init()\n"),
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


@pytest.mark.parametrize(
    ("config", "is_told"), [("tune.RunConfig()", False), ("RunConfig()", True)]
)
def test_a_tuner_is_given_configs_of_ray_tune(config: str, is_told: bool) -> None:
    notes = rewrite(f"tune.Tuner(trainer, run_config={config})").notes
    assert any("CheckpointConfig of ray.tune" in note.text for note in notes) == is_told


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


def test_a_folder_is_looked_through_but_for_what_is_not_its_own(
    drawbar: Command, tmp_path: Path
) -> None:
    old, project = "import ray.train\n", tmp_path / "project"
    own = project / "package" / "train.py"
    others = [
        project / place / "theirs.py"
        for place in (".hidden", "env/lib", "lib/site-packages/ray", "folder.py/node_modules")
    ]
    for path in (own, *others, tmp_path / "linked.py"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(old)
    (project / "env" / "pyvenv.cfg").touch()
    (project / "link.py").symlink_to(tmp_path / "linked.py")
    (project / "latin.py").write_bytes("x = 'ü'".encode("latin-1"))
    (project / "nul.py").write_text("x = '\0'")
    os.mkfifo(project / "fifo.py")
    own.chmod(0o755)
    told = drawbar("migrate", project, "--write")
    assert own.read_text() == "import drawbar.train\n"
    assert own.stat().st_mode & 0o777 == 0o755
    assert {path.read_text() for path in (*others, tmp_path / "linked.py")} == {old}
    assert f"{project}/latin.py:0: it cannot be rewritten: 'utf-8' codec" in told.out
    assert f"{project}/nul.py:" in told.out
    assert told.code == 0


def test_a_script_keeps_its_byte_order_mark_and_its_open_end(
    drawbar: Command, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text("\ufeffimport ray.train")
    assert drawbar("migrate", script).out.endswith(
        "-\ufeffimport ray.train\n\\ No newline at end of file\n"
        "+\ufeffimport drawbar.train\n\\ No newline at end of file\n"
    )
    drawbar("migrate", script, "--write")
    assert script.read_text() == "\ufeffimport drawbar.train"


def notebook(*cells: str, **metadata: object) -> dict[str, object]:
    shown = {"output_type": "stream", "name": "stdout", "text": ["ray.train as it was\n"]}
    return {
        "cells": [
            {"cell_type": "markdown", "metadata": {}, "source": ["# ray.train\n"]},
            *(
                {
                    "cell_type": "code",
                    "execution_count": 1,
                    "metadata": {},
                    "outputs": [shown],
                    "source": cell.splitlines(keepends=True),
                }
                for cell in cells
            ),
        ],
        "metadata": metadata,
        "nbformat": 4,
        "nbformat_minor": 5,
    }


@pytest.mark.parametrize("layout", [{"indent": 1}, {"indent": 2, "ensure_ascii": False}, {}])
def test_a_notebook_is_rewritten_cell_by_cell(
    drawbar: Command, tmp_path: Path, layout: dict[str, Any]
) -> None:
    path = tmp_path / "train.ipynb"
    before = notebook(
        "%pip install -q \\\n  ray\nimport ray\nname = !hostname",
        "%%bash\nif true; then\n  export PATH=ray.train\nfi",
        "%%time\ntext = {1:\n'%ü'\n}\nray.train.report({})\n",
        "from ray import train, tune\nawait x\nRunConfig(verbose=0)",
        "def broken(:\n",
        "",
    )
    after = notebook(
        "%pip install -q \\\n  ray\nimport drawbar.train\nimport ray\nname = !hostname",
        "%%bash\nif true; then\n  export PATH=ray.train\nfi",
        "%%time\ntext = {1:\n'%ü'\n}\ndrawbar.train.report({})\n",
        "from drawbar import train\nfrom ray import tune\nawait x\nRunConfig(verbose=0)",
        "def broken(:\n",
        "",
    )
    path.write_text(json.dumps(before, **layout) + "\n")
    told = drawbar("migrate", path, "--write")
    assert f"{path}:cell 5:3: RunConfig takes no verbose" in told.out
    assert f"{path}:cell 6:1: no Python: " in told.out
    assert path.read_text() == json.dumps(after, **layout) + "\n"


def test_what_is_no_notebook_of_pythons_stays(drawbar: Command, tmp_path: Path) -> None:
    path = tmp_path / "train.ipynb"
    path.write_text(json.dumps(notebook("import ray.train", kernelspec={"language": "R"})))
    assert drawbar("migrate", path).out == "nothing to change\n"
    for text in ("[]", "{", '{"cells": [1], "metadata": {}}'):
        path.write_text(text)
        assert f"{path}:0: it cannot be rewritten: " in drawbar("migrate", path, "--write").out
        assert path.read_text() == text


def test_a_note_is_told_once() -> None:
    assert rewrite("Tuner(t); Tuner(t)\n").notes == [
        MigrationNote(1, "Tuner takes trainer.as_trainable(), if it was given a trainer")
    ]

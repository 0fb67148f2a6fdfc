"""Tests of `drawbar migrate`."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Command

Rewrite = Callable[[str], tuple[str, list[dict[str, Any]]]]

IDIOMS = sorted((Path(__file__).parents[1] / "migration" / "idioms").glob("*.py"))


@pytest.fixture
def rewrite(cli: Command, tmp_path: Path) -> Rewrite:
    """Return a function that rewrites a script, and returns its new text and the notes."""

    def rewrite(text: str) -> tuple[str, list[dict[str, Any]]]:
        script = tmp_path / "script.py"
        script.write_bytes(text.encode())
        (result,) = json.loads(cli("migrate", script, "--write", "--json").out)
        return script.read_bytes().decode(), result["notes"]

    return rewrite


@pytest.mark.parametrize("script", IDIOMS, ids=lambda script: script.stem)
def test_rewrite_of_ray_train_idioms_is_complete(rewrite: Rewrite, script: Path) -> None:
    expected = script.read_text()
    original = re.sub(r"\bdrawbar\.train\b", "ray.train", expected)
    original = re.sub(r"\bfrom drawbar import train\b", "from ray import train", original)
    text, notes = rewrite(original)
    assert text == expected
    assert [note for note in notes if "string contains 'ray.train'" not in note["text"]] == []


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
def test_rewrite_of_existing_names_has_no_notes(rewrite: Rewrite, script: str) -> None:
    assert rewrite(script)[1] == []


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
def test_rewrite_replaces_names_in_place(rewrite: Rewrite, before: str, after: str) -> None:
    assert rewrite(before)[0] == after


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("from ray.train import SyncConfig", "leave it out"),
        ("from ray.train.torch import Nothing", "drawbar.train.torch has no Nothing"),
        (
            "from ray.train.torch.config import TorchConfig",
            "module drawbar.train.torch.config does",
        ),
        ("from ray.air import session", "such as drawbar.train.report"),
        ("RunConfig(verbose=0)", "RunConfig has no argument 'verbose'"),
        ("tune.Tuner(trainer)", "trainer.as_trainable()"),
        ("x = 'RAY_TRAIN_V2_ENABLED'", "does not read RAY_TRAIN_"),
        ("import_module('ray.train')", "string contains 'ray.train'"),
        ("def f(ray): ray.train.report()", "'ray' may be reassigned"),
        ("import fish as ray; ray.train.report()", "'ray' may be reassigned"),
        ("from sea import ray; ray.train.report()", "'ray' may be reassigned"),
        ("ray.train.report(); from sea import fish as ray", "'ray' may be reassigned"),
    ],
)
def test_rewrite_notes_ambiguous_code(rewrite: Rewrite, script: str, expected: str) -> None:
    (note,) = rewrite(f"\n{script}\n")[1]
    assert note["line"] == 2
    assert expected in note["text"]


@pytest.mark.parametrize(
    ("config", "has_note"), [("tune.RunConfig()", False), ("RunConfig()", True)]
)
def test_rewrite_notes_tuner_with_config_of_train(
    rewrite: Rewrite, config: str, has_note: bool
) -> None:
    _, notes = rewrite(f"tune.Tuner(trainer, run_config={config})")
    assert any("CheckpointConfig of ray.tune" in note["text"] for note in notes) == has_note


def test_migrate_changes_files_only_with_write(cli: Command, tmp_path: Path) -> None:
    script, broken = tmp_path / "train.py", tmp_path / "wrong.py"
    script.write_text("import ray.train\nray.train.report({})\n")
    broken.write_text("def\n")
    shown = cli("migrate", tmp_path).out
    assert "-import ray.train\n" in shown
    assert "+import drawbar.train\n" in shown
    assert f"{broken}:1: invalid Python" in shown
    assert script.read_text().startswith("import ray.train\n")
    data = json.loads(cli("migrate", tmp_path, "--write", "--json").out)
    assert [Path(file["path"]).name for file in data] == ["train.py", "wrong.py"]
    assert script.read_text() == "import drawbar.train\ndrawbar.train.report({})\n"
    assert cli("migrate", script).out == "No changes needed.\n"
    assert cli("migrate", tmp_path / "none.py").code == 2


def test_migrate_of_directory_skips_installed_packages(cli: Command, tmp_path: Path) -> None:
    old, project = "import ray.train\n", tmp_path / "project"
    script = project / "package" / "train.py"
    others = [
        project / directory / "other.py"
        for directory in (".hidden", "env/lib", "lib/site-packages/ray", "folder.py/node_modules")
    ]
    for path in (script, *others, tmp_path / "linked.py"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(old)
    (project / "env" / "pyvenv.cfg").touch()
    (project / "link.py").symlink_to(tmp_path / "linked.py")
    (project / "latin.py").write_bytes("x = 'ü'".encode("latin-1"))
    (project / "nul.py").write_text("x = '\0'")
    os.mkfifo(project / "fifo.py")
    script.chmod(0o755)
    result = cli("migrate", project, "--write")
    assert script.read_text() == "import drawbar.train\n"
    assert script.stat().st_mode & 0o777 == 0o755
    assert {path.read_text() for path in (*others, tmp_path / "linked.py")} == {old}
    assert f"{project}/latin.py:0: cannot be rewritten: 'utf-8' codec" in result.out
    assert f"{project}/nul.py:" in result.out
    assert result.code == 0


def test_migrate_keeps_byte_order_mark_and_missing_newline(cli: Command, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("\ufeffimport ray.train")
    assert cli("migrate", script).out.endswith(
        "-\ufeffimport ray.train\n\\ No newline at end of file\n"
        "+\ufeffimport drawbar.train\n\\ No newline at end of file\n"
    )
    cli("migrate", script, "--write")
    assert script.read_text() == "\ufeffimport drawbar.train"


def notebook(*cells: str, **metadata: object) -> dict[str, object]:
    shown = {"output_type": "stream", "name": "stdout", "text": ["output with ray.train\n"]}
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
def test_migrate_rewrites_notebook_cells(
    cli: Command, tmp_path: Path, layout: dict[str, Any]
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
    result = cli("migrate", path, "--write")
    assert f"{path}:cell 5:3: RunConfig has no argument 'verbose'" in result.out
    assert f"{path}:cell 6:1: invalid Python: " in result.out
    assert path.read_text() == json.dumps(after, **layout) + "\n"


def test_migrate_keeps_notebooks_of_other_languages(cli: Command, tmp_path: Path) -> None:
    path = tmp_path / "train.ipynb"
    path.write_text(json.dumps(notebook("import ray.train", kernelspec={"language": "R"})))
    assert cli("migrate", path).out == "No changes needed.\n"
    for text in ("[]", "{", '{"cells": [1], "metadata": {}}'):
        path.write_text(text)
        assert f"{path}:0: cannot be rewritten: " in cli("migrate", path, "--write").out
        assert path.read_text() == text


def test_rewrite_notes_each_problem_once(rewrite: Rewrite) -> None:
    (note,) = rewrite("Tuner(t); Tuner(t)\n")[1]
    assert note["line"] == 1
    assert note["text"] == "if Tuner receives a trainer, pass trainer.as_trainable() instead"

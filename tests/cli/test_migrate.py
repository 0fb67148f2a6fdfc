"""Tests of `drawbar migrate`."""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray.train

from tests.cli.conftest import Command

Rewrite = Callable[[str], tuple[str, list[dict[str, Any]]]]

IDIOMS = sorted((Path(__file__).parents[1] / "migration" / "idioms").glob("*.py"))
INTERNAL_DIRECTORIES = {"_internal", "tests", "benchmarks", "examples"}
WITHOUT_COUNTERPART = {
    "BaseTrainer",
    "DistributedTrainContext",
    "HorovodConfig",
    "HorovodTrainer",
    "LighthouseServerActor",
    "LocalTrainContext",
    "NCCLHangError",
    "RayReportCallback",
    "RayTorchIterableDataset",
    "RayTrainCallback",
    "SessionMisuseError",
    "SyncConfig",
    "TorchConfigContextManager",
    "TorchWorkerProfiler",
    "TrainingIterator",
    "format_datasets_for_repr",
    "import_lightning",
}
"""Names of Ray Train, each of which Drawbar replaces with another one."""


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
    assert text == re.sub(r"\bdrawbar\.train\.v2\.api\.\w+", "drawbar.train", expected)
    assert [note for note in notes if "string contains 'ray.train'" not in note["text"]] == []


def list_ray_names() -> Iterator[tuple[str, str]]:
    """Yield the classes and functions in the public modules of the installed Ray Train."""
    (root,) = map(Path, ray.train.__path__)
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root).with_suffix("").parts
        if not INTERNAL_DIRECTORIES & set(parts):
            module = ".".join(("ray.train", *parts)).removesuffix(".__init__")
            for node in ast.parse(file.read_text()).body:
                match node:
                    case ast.ClassDef(name=name) | ast.FunctionDef(name=name) if name[0] != "_":
                        yield module, name
                    case ast.Assign(targets=[ast.Name(id="__all__")], value=names):
                        yield from ((module, name) for name in ast.literal_eval(names))
                    case _:
                        pass


@pytest.mark.filterwarnings("ignore")  # of the frameworks, when they are imported
def test_names_of_installed_ray_are_rewritten_or_have_replacements(rewrite: Rewrite) -> None:
    names = list(list_ray_names())
    script = "".join(f"from {module} import {name}\n" for module, name in names)
    text, notes = rewrite(script)
    note_by_line = {note["line"]: note["text"] for note in notes}
    with_sed = script.replace("ray.train", "drawbar.train").splitlines()
    for number, (statement, alias) in enumerate(
        zip(text.splitlines(), with_sed, strict=True), start=1
    ):
        if number in note_by_line:
            _, _, replacement = note_by_line[number].partition(": ")
            assert replacement
            for line in (statement, alias):
                with pytest.raises(ImportError, match=re.escape(replacement)):
                    exec(line)
        else:
            found, aliased = dict[str, Any](), dict[str, Any]()
            exec(statement, found)
            exec(alias, aliased)
            assert found[names[number - 1][1]] is aliased[names[number - 1][1]]
    assert len(names) > 100
    assert {names[number - 1][1] for number in note_by_line} == WITHOUT_COUNTERPART


@pytest.mark.parametrize(
    "script",
    [
        "from ray.train.v2.jax import JaxTrainer",
        "from ray.train.tensorflow.keras import ReportCheckpointCallback",
        "from ray.train.huggingface.transformers import prepare_trainer",
        "from ray.train import torch",
        "from ray.train.torch import config, xla\nconfig.TorchConfig(); xla.TorchXLAConfig()",
        "from ray.train._internal.storage import StorageContext",
        "from ray import train\ndef train(): train.SyncConfig",
        "RunConfig(name=None); ScalingConfig(num_workers=2)",
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
        ("from ray.air import session, Checkpoint\n",
         "from drawbar.train import session, Checkpoint\n"),
        ("from ray.air.integrations.keras import ReportCheckpointCallback\n",
         "from drawbar.train.tensorflow.keras import ReportCheckpointCallback\n"),
        ("from ray.train.torch.config import TorchConfig\n",
         "from drawbar.train.torch import TorchConfig\n"),
        ("from ray.train.v2.torch.torchft_config import TorchftConfig\n",
         "from drawbar.train.torch import TorchftConfig\n"),
        ("import ray.train.torch.config as c\n", "import drawbar.train.torch as c\n"),
        ("import ray.train.torch.xla\nray.train.torch.xla.config.TorchXLAConfig()\n",
         "import drawbar.train.torch\ndrawbar.train.torch.TorchXLAConfig()\n"),
        ("from ray import train as t\nt.context.get_context(); t.torch.config.TorchConfig()\n",
         "from drawbar import train as t\nt.get_context(); t.torch.TorchConfig()\n"),
        ("from ray.train._internal.storage import StorageContext\n",
         "from drawbar.train import StorageContext\n"),
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
        ("import ray.train.horovod", "use drawbar.train.torch.TorchTrainer"),
        ("from ray.train.v2.torch.torchft_config import LighthouseServerActor", "failed workers"),
        ("import torchft", "prepare_model(), prepare_optimizer(), and prepare_data_loader()"),
        ("from torchft.manager import Manager", "instead of torchft's classes"),
        ("from ray.train.constants import X", "has no constants: Drawbar does not read RAY_TRAIN"),
        ("from ray.train._internal.x import Y", "has no _internal: it is internal"),
        ("from ray.train.nothing import X", "module drawbar.train.nothing does not exist"),
        ("from ray import train; train.SyncConfig()", "has no SyncConfig: leave it out"),
        ("import ray.train as t; t.v2.api.SyncConfig()", "has no SyncConfig: leave it out"),
        ("import ray.train; ray.train.torch.Nothing", "drawbar.train.torch has no Nothing"),
        ("from ray.train import session; session.get_world_rank()",
         "call drawbar.train.get_context().get_world_rank()"),
        ("from ray.air import ResourceRequest", "drawbar.train has no ResourceRequest"),
        ("from ray.air.integrations.wandb import setup_wandb", "drawbar.trackers.WandB"),
        ("from ray import air", "its names are in drawbar.train"),
        ("import ray; ray.air.RunConfig()", "its names are in drawbar.train"),
        ("RunConfig(verbose=0)", "RunConfig takes no verbose=: logging_config="),
        ("FailureConfig(max_failure=0)", "did you mean 'max_failures'?"),
        ("tune.Tuner(trainer)", "trainer.as_trainable()"),
        ("x = 'RAY_TRAIN_V2_ENABLED'", "does not read RAY_TRAIN_V2_ENABLED; remove it"),
        ("x = 'RAY_TRAIN_CALLBACKS'", "use RunConfig(callbacks=)"),
        ("import_module('ray.train')", "string contains 'ray.train'"),
        ("def f(ray): ray.train.report()", "'ray' may be reassigned"),
        ("import fish as ray; ray.train.report()", "'ray' may be reassigned"),
        ("from sea import ray; ray.train.report()", "'ray' may be reassigned"),
        ("ray.train.report(); from sea import fish as ray", "'ray' may be reassigned"),
    ],
)  # fmt: skip
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
    assert f"{path}:cell 5:3: RunConfig takes no verbose=: logging_config=" in result.out
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

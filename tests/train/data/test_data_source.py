"""Tests of a `DataSource` that is not part of Drawbar: the one in docs/data.md."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from drawbar import train
from drawbar.train import DataConfig, DataParallelTrainer, RunConfig
from drawbar.xgboost import XGBoostTrainer
from tests.train.rank_data_probe import save, saved
from tests.train.runs import fit

PAGE = Path(__file__).parents[3] / "docs" / "data.md"

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests


def import_page() -> Any:
    """Import the code of the page as the module `lines`, which workers receive by value."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (code,) = [block for block in blocks if "(DataSource)" in block]
    module = sys.modules["lines"] = types.ModuleType("lines")
    exec(compile(code, "lines.py", "exec"), module.__dict__)
    cloudpickle.register_pickle_by_value(module)
    return module


TextLines = import_page().TextLines


class CountedLines(TextLines):  # type: ignore[misc, valid-type]  # from the page
    """Counts the calls of its methods."""

    def open(self, run: train.RunContext) -> None:
        self.calls = [f"open {run.name}"]
        self.metadata = {"num_lines": len(self.path.read_text().splitlines())}
        self.notices = [f"opened {self.path.name}"]

    def assign(self, node_ids: Any, positions: Any) -> Any:
        self.calls.append(f"assign {len(node_ids)} at {positions}")
        return super().assign(node_ids, positions)

    def close(self) -> None:
        self.calls.append("close")


def read(fails: bool) -> list[str]:
    lines = []
    for line in train.get_dataset_shard("train"):
        lines.append(str(line))
        if len(lines) == 2 and not saved():
            save(lines=lines)
        if len(lines) == 3 and fails and train.get_context().get_attempt() == 0:
            raise RuntimeError("failed")
    assert train.get_context().get_metadata() == {"num_lines": 12}
    return lines


def test_data_source_continues_after_restart_and_resume_with_other_num_workers(
    run_config: RunConfig, tmp_path: Path, capfd: pytest.CaptureFixture[str], ray_cluster: object
) -> None:
    path = tmp_path / "lines.txt"
    path.write_text("\n".join(map(str, range(12))))
    source = CountedLines(path)
    result = fit(read, run_config, True, num_workers=2, datasets=source, max_failures=1)
    assert result.return_values == [["4", "6", "8", "10"], ["5", "7", "9", "11"]]
    assert source.calls == ["open run", "assign 2 at {}", "assign 2 at {'lines': 4}", "close"]
    assert result.checkpoint is not None
    assert result.checkpoint.get_metadata() == {"num_lines": 12}
    assert "opened lines.txt" in capfd.readouterr().err

    resumed = fit(
        read, tmp_path / "second", False, datasets=source, resume_from_checkpoint=result.checkpoint
    )
    assert resumed.return_value == [str(line) for line in range(4, 12)]


def test_data_source_with_invalid_arguments_raises(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="missing does not exist"):
        fit(read, tmp_path, False, datasets=TextLines("missing"))
    assert not (tmp_path / "run").exists()
    config = DataConfig(uneven_rows="keep")
    function: Any = read
    with pytest.raises(ValueError, match=r"no effect on a TextLines.* Remove dataset_config"):
        DataParallelTrainer(function, datasets=TextLines("x"), dataset_config=config)
    with pytest.raises(TypeError, match="Only trainers of other frameworks accept a DataSource"):
        XGBoostTrainer(params={}, label_column="y", datasets=TextLines("x"))

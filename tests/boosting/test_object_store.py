"""Rows that are float32 already are used where they lie in Ray's object store."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
import pytest
import ray.data

from drawbar.train import DataConfig, DataParallelTrainer, RunConfig, ScalingConfig
from tests.boosting import shards

for module in (sys.modules[__name__], shards):  # workers cannot import the tests
    cloudpickle.register_pickle_by_value(module)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.data")  # it warns of itself

ROWS = 100_000
"""Enough for a block of each worker's rows to be kept as it comes."""


@pytest.mark.usefixtures("ray_cluster")
def test_columns_of_float32_are_not_copied(tmp_path: Path) -> None:
    def function() -> Any:
        columns = {"label": "y", "categorical": ["word"]}
        first = shards.load_on_rank(columns, folder=tmp_path)
        (block,) = first["train"].list_blocks()
        (again,) = shards.load_on_rank(columns)["train"].list_blocks()
        pairs = zip(block.features, again.features, strict=True)
        addresses = [(one.ctypes.data, other.ctypes.data) for one, other in pairs]
        same_place = [one == other for one, other in addresses]
        return same_place, [float(np.nansum(each)) for each in again.features]

    ramp = np.arange(ROWS, dtype=np.float32)
    holes = pa.array(ramp, mask=ramp % 2 == 0)
    words = np.where(ramp % 2, "odd", "even")
    table = pa.table(
        {
            "single": ramp,
            "double": ramp.astype(np.float64),
            "holes": holes,
            "word": words,
            "y": ramp,
        }
    )
    result = DataParallelTrainer(
        function,
        datasets={"train": ray.data.from_arrow(table)},
        dataset_config=DataConfig(datasets_to_split="all", uneven_rows="keep"),
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(storage_path=tmp_path),
    ).fit()
    ((same_place, sums),) = result.return_values
    assert same_place == [True, False, False, False]
    assert sums == pytest.approx([ramp.sum(), ramp.sum(), ramp[1::2].sum(), ROWS / 2], rel=1e-5)


SCRIPT = """
import sys
import numpy as np, pyarrow as pa, ray, ray.data, xgboost
import drawbar.lightgbm, drawbar.xgboost
from drawbar.train import FailureConfig, RunConfig, ScalingConfig

STORE, PIECES, ROWS, COLUMNS = 80 << 20, 12, 50_000, 40  # the rows are 96 MB

ray.init(address="local", num_cpus=2, object_store_memory=STORE, include_dashboard=False)

def table(seed):
    values = np.random.default_rng(seed).random((COLUMNS, ROWS), dtype="float32")
    return pa.table({**{f"f{i}": column for i, column in enumerate(values)}, "y": values[0] > 0.5})

pieces = [ray.put(table(seed)) for seed in range(PIECES)]
held_out = table(PIECES).drop("y").to_pandas()

def right(library, Trainer, objective, rows, num_workers):
    failures = FailureConfig(max_failures=1)
    fitted = Trainer(
        params={"objective": objective},
        label_column="y",
        datasets={"train": ray.data.from_arrow_refs(pieces)},
        num_boost_round=3,
        scaling_config=ScalingConfig(num_workers=num_workers),
        run_config=RunConfig(storage_path=sys.argv[1], failure_config=failures),
    ).fit()
    model = library.RayTrainReportCallback.get_model(fitted.checkpoint)
    return ((model.predict(rows) > 0.5) == (table(PIECES)["y"].to_numpy())).mean()

print("xgboost", right(
    drawbar.xgboost,
    drawbar.xgboost.XGBoostTrainer,
    "binary:logistic",
    xgboost.DMatrix(held_out),
    num_workers=2,
))
print("lightgbm", right(
    drawbar.lightgbm, drawbar.lightgbm.LightGBMTrainer, "binary", held_out, num_workers=1
))
"""


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the output of a script that trains with both libraries with a small object store."""
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path_factory.mktemp("runs"))],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout


@pytest.mark.parametrize("library", ["xgboost", "lightgbm"])
@pytest.mark.nightly
def test_rows_may_be_more_than_the_object_store_holds(output: str, library: str) -> None:
    (right,) = re.findall(rf"^{library} ([\d.]+)$", output, re.MULTILINE)
    assert float(right) > 0.99, output

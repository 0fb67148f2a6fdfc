"""Peak memory of a worker, relative to the float32 size of its rows.

XGBoost's sketches take about 2 MB per feature however few the rows, so there must be many.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import sys, threading
import numpy as np, pyarrow as pa
from drawbar._boosting.columns import ColumnRoles
from drawbar._boosting.load import load_shards
from drawbar.train.testing import run_in_threads
from drawbar.train import RunConfig
from tests.boosting.shards import TableShard

library, mode, folder, ROWS = *sys.argv[1:4], int(sys.argv[4])
COLUMNS, PIECE = 40, 50_000

if library == "xgboost":
    from drawbar.xgboost import XGBoostConfig as Config
    from drawbar.xgboost._training_spec import XGBoostTrainingSpec as Fit
    objective = "binary:logistic"
else:
    from drawbar.lightgbm import LightGBMConfig as Config
    from drawbar.lightgbm._training_spec import LightGBMTrainingSpec as Fit
    objective = "binary"

def private():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

def table(seed):
    values = np.random.default_rng(seed).random((COLUMNS, PIECE), dtype="float32")
    return pa.table({**{f"f{i}": column for i, column in enumerate(values)}, "y": values[0] > 0.5})

def function():
    fit = Fit(
        params={"objective": objective, "nthread": 1}, columns=ColumnRoles(label="y"),
        num_boost_round=2, external_memory=mode == "external",
    )
    tables = (table(seed) for seed in range(ROWS // PIECE))
    get_shard = lambda _: TableShard(tables)
    fit.train(load_shards(("train",), fit.columns, fit.column_format, get_shard=get_shard))

table(0).to_pandas()  # warm up imports and caches, which are not counted
base, peak, over = private(), 0, threading.Event()

def watch():
    global peak
    while not over.wait(0.005):
        peak = max(peak, private())

watcher = threading.Thread(target=watch)
watcher.start()
run = RunConfig(storage_path=folder)
try:
    run_in_threads(function, num_workers=1, backend_config=Config(), run_config=run)
finally:
    over.set()
    watcher.join()
print("ratio", (peak - base) / (ROWS * COLUMNS * 4))
"""


@pytest.mark.parametrize(
    ("library", "mode", "rows", "bound"),
    [
        ("xgboost", "memory", 1_000_000, 1.6),
        ("xgboost", "external", 2_000_000, 0.6),
        ("lightgbm", "memory", 1_000_000, 1.0),
    ],
)
@pytest.mark.nightly
def test_peak_memory_of_a_worker(
    tmp_path: object, library: str, mode: str, rows: int, bound: float
) -> None:
    output = subprocess.run(
        [sys.executable, "-c", SCRIPT, library, mode, str(tmp_path), str(rows)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
    assert 0 < float(output.rpartition("ratio")[2]) < bound, output

"""What a worker needs in memory, over the float32 bytes of its rows.

XGBoost's sketches take about 2 MB per feature however few the rows, so there must be many.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import sys, threading
import numpy as np, pyarrow as pa, xgboost
from drawbar.boosting import Columns, load
from drawbar.train.testing import run_in_threads
from drawbar.train import RunConfig
from drawbar.xgboost._fit import XGBoostFit

external_memory, folder, ROWS = sys.argv[1] == "external", sys.argv[2], int(sys.argv[3])
COLUMNS, PIECE = 40, 50_000

def private():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

def table(seed):
    values = np.random.default_rng(seed).random((COLUMNS, PIECE), dtype="float32")
    return pa.table({**{f"f{i}": column for i, column in enumerate(values)}, "y": values[0] > 0.5})

def function():
    fit = XGBoostFit(
        params={"objective": "binary:logistic", "nthread": 1}, columns=Columns(label="y"),
        num_boost_round=2, external_memory=external_memory,
    )
    tables = (table(seed) for seed in range(ROWS // PIECE))
    fit.train(load(("train",), fit.columns, source=lambda _: tables, on_disk=True))

table(0).to_pandas()  # what is imported and kept by then is not the rows'
base, peak, over = private(), 0, threading.Event()

def watch():
    global peak
    while not over.wait(0.005):
        peak = max(peak, private())

watcher = threading.Thread(target=watch)
watcher.start()
run_in_threads(function, num_workers=1, run_config=RunConfig(storage_path=folder))
over.set()
watcher.join()
print("ratio", (peak - base) / (ROWS * COLUMNS * 4))
"""


@pytest.mark.parametrize(
    ("mode", "rows", "bound"), [("memory", 1_000_000, 1.6), ("external", 2_000_000, 0.6)]
)
def test_peak_memory_of_a_worker(tmp_path: object, mode: str, rows: int, bound: float) -> None:
    output = subprocess.run(
        [sys.executable, "-c", SCRIPT, mode, str(tmp_path), str(rows)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
    assert 0 < float(output.rpartition("ratio")[2]) < bound, output

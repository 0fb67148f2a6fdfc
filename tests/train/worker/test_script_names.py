"""Child processes of a training function use the functions and classes of the driver's script."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import multiprocessing as mp
import sys
from dataclasses import dataclass
from typing import NamedTuple

from drawbar.train import DataParallelTrainer, RunConfig, ScalingConfig

@dataclass
class Batch:
    x: int

class Pair(NamedTuple):
    x: int

class BadRowError(Exception):
    pass

class Rows:
    def get(self, index):
        if index == 2:
            raise BadRowError("row 2")
        return (Batch, Pair)[index](index + offset)

def set_offset(value):
    global offset
    offset = value

def train_func(config):
    for method in ("fork", "spawn"):
        with mp.get_context(method).Pool(1, set_offset, (10,)) as pool:
            values = [pool.apply_async(config["rows"].get, (i,)) for i in range(3)]
            assert [values[i].get(100) for i in (0, 1)] == [Batch(10), Pair(11)]
            try:
                values[2].get(100)
            except BadRowError as error:
                print(method, error, flush=True)

if __name__ == "__main__":
    DataParallelTrainer(
        train_func,
        train_loop_config={"rows": Rows()},
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(storage_path=sys.argv[1]),
    ).fit()
"""


def test_pools_pickle_classes_functions_and_exceptions_of_the_script(
    tmp_path: Path, ray_cluster: None
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(tmp_path / "runs")]
    env = {**os.environ, "RAY_ADDRESS": "local"}  # not the newest Ray of this machine
    ended = subprocess.run(command, capture_output=True, text=True, timeout=400, env=env)
    assert ended.returncode == 0, ended.stderr
    assert "fork row 2" in ended.stdout
    assert "spawn row 2" in ended.stdout

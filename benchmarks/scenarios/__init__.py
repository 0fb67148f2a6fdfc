"""The scenarios, in the order in which they run. Add one by adding its file to this list."""

from __future__ import annotations

from benchmarks._scenario import Scenario
from benchmarks.scenarios import (
    async_report,
    bytes_written,
    chaos,
    checkpoint,
    data_ingest,
    ddp_steps,
    empty_fit,
    exception,
    first_line,
    import_time,
    jax_steps,
    lightgbm_fit,
    lightning_steps,
    many_workers,
    report,
    resize,
    transformers_steps,
    tune_trial,
    waiting,
    worker_killed,
    xgboost_fit,
    xgboost_report,
)

SCENARIOS: list[Scenario] = [
    import_time.SCENARIO,
    empty_fit.SCENARIO,
    first_line.SCENARIO,
    report.SCENARIO,
    checkpoint.SCENARIO,
    async_report.SCENARIO,
    bytes_written.SCENARIO,
    exception.SCENARIO,
    worker_killed.SCENARIO,
    waiting.SCENARIO,
    resize.SCENARIO,
    ddp_steps.SCENARIO,
    lightning_steps.SCENARIO,
    transformers_steps.SCENARIO,
    jax_steps.SCENARIO,
    data_ingest.SCENARIO,
    tune_trial.SCENARIO,
    many_workers.SCENARIO,
    lightgbm_fit.SCENARIO,
    chaos.SCENARIO,
    xgboost_fit.SCENARIO,
    xgboost_report.SCENARIO,
]

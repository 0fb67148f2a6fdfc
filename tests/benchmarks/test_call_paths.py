"""Tests of the list of files that a report passes through."""

from __future__ import annotations

from benchmarks._call_paths import trace_run


def test_trace_run_follows_report_from_user_code_to_display() -> None:
    fit_files, report_files, num_called = trace_run(num_workers=0)
    assert fit_files[0] == "_trainer.py"
    assert (report_files[0], report_files[-1]) == ("_worker/context.py", "_console/displays.py")
    assert "_controller/attempt.py" in report_files
    assert num_called > len(fit_files)

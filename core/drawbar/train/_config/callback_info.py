"""Arguments of the methods of `UserCallback`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class AttemptInfo:
    """Description of an attempt whose workers have started.

    Attributes:
        attempt: Number of the attempt, from 0. It continues after a resume.
        num_workers: Number of workers of this attempt.
        first_report_index: Number of the first report of this attempt. The attempt replaces
            reports of earlier attempts with this number or a higher one.
        resume_checkpoint: Path or URI of the checkpoint from which the attempt resumes; None if it
            starts from the beginning.

    Example:
        class PrintRestart(UserCallback):
            def on_attempt_start(self, run_context, attempt):
                if attempt.attempt > 0:
                    print("resumed from", attempt.resume_checkpoint)
    """

    attempt: int
    num_workers: int
    first_report_index: int
    resume_checkpoint: str | None = None


@dataclass(frozen=True, kw_only=True)
class RunEndInfo:
    """Outcome of a run, as a callback receives it.

    Attributes:
        status: "finished", "failed", or "stopped".
        error: Error message of a failed run, else "".

    Example:
        class Notify(UserCallback):
            def on_run_end(self, run_context, info):
                print(f"{run_context.name}: {info.status} {info.error}")
    """

    status: str
    error: str = ""

"""Requests take effect at the same call of `should_checkpoint()` on all ranks."""

from __future__ import annotations

import os
import pickle
import random
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Collection
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from drawbar import train
from drawbar._base.time_limits import resolve_stop_before
from drawbar._process.ranks import Ranks
from drawbar._process.training_thread import InterruptScope, ThreadGuard
from drawbar._recovery import time_limit
from drawbar.train import DataParallelTrainer, RunConfig, RunHandle, ScalingConfig, runs
from drawbar.train._controller import controller
from drawbar.train._controller.request_agreement import RequestAgreement
from drawbar.train._protocol.commands import Command, RequestAgreed, RequestAnnounced
from drawbar.train._protocol.messages import RequestSeen
from drawbar.train._worker.active_session import current_session
from drawbar.train._worker.command_queue import CommandQueue
from drawbar.train._worker.rank_requests import RankRequests
from drawbar.train._worker.rank_timer import RankTimer
from drawbar.train.testing import run_in_threads

ALONE = Ranks(
    world_rank=0, world_size=1, local_rank=0, local_world_size=1, node_rank=0, num_nodes=1
)


class ModelRank:
    """A rank that calls `should_checkpoint()` in a loop, one call per `step`."""

    def __init__(self, last_call: int) -> None:
        self.values: list[bool] = []
        self.last_call = last_call
        self.inbox = deque[Command]()
        self.announced: list[int] = []
        self.agreed: dict[int, RequestAgreed] = {}

    @property
    def is_finished(self) -> bool:
        return len(self.values) == self.last_call

    def receive(self) -> RequestSeen | None:
        command = self.inbox.popleft()
        if isinstance(command, RequestAnnounced):
            self.announced.append(command.request_id)
            return RequestSeen(request_id=command.request_id, call=len(self.values) + 1)
        assert isinstance(command, RequestAgreed)
        self.agreed[command.request_id] = command
        return None

    def step(self) -> bool:
        """Make the next call, unless it waits for the controller."""
        if self.is_finished or any(each not in self.agreed for each in self.announced):
            return False
        call = len(self.values) + 1
        self.values.append(any(each.call <= call for each in self.agreed.values()))
        return True


@pytest.mark.parametrize("seed", range(40))
def test_request_in_any_order_of_messages_gives_same_values(seed: int) -> None:
    rng = random.Random(seed)
    ranks = [ModelRank(rng.choice([60, 60, 60, 3])) for _ in range(rng.randint(1, 5))]
    replies = deque[tuple[int, RequestSeen]]()
    unstarted, finished = set(range(len(ranks))), set[int]()

    def broadcast(receivers: Collection[int], command: Command) -> None:
        for receiver in receivers:
            ranks[receiver].inbox.append(command)

    agreement = RequestAgreement(len(ranks), broadcast)
    for turn in range(4000):
        if turn in (20, 25):  # the second request may come before the first one is agreed
            agreement.request()
        number = rng.randrange(len(ranks))
        rank = ranks[number]
        action = rng.random()
        if number in unstarted:
            if action < 0.1:
                unstarted.discard(number)
                agreement.on_started(number)
        elif action < 0.3 and rank.inbox:
            if (reply := rank.receive()) is not None:
                replies.append((number, reply))
        elif action < 0.5 and replies:
            sender, reply = replies.popleft()
            agreement.on_seen(sender, reply, next_report=0)
        elif action < 0.6 and rank.is_finished and number not in finished:
            finished.add(number)
            agreement.on_finished(number)
        else:
            rank.step()
    assert finished == set(range(len(ranks)))  # no rank waited forever
    firsts = {rank.values.index(True) for rank in ranks if True in rank.values}
    assert len(firsts) <= 1
    assert firsts or not any(rank.last_call == 60 for rank in ranks)


def test_request_takes_effect_at_next_call_of_most_advanced_rank() -> None:
    sent: list[tuple[list[int], Command]] = []
    agreement = RequestAgreement(3, lambda ranks, command: sent.append((list(ranks), command)))
    for rank in range(3):
        agreement.on_started(rank)
    agreement.on_finished(2)
    agreement.request()
    agreement.request()  # the same request again
    assert sent == [([0, 1], RequestAnnounced(request_id=1))]
    agreement.on_seen(0, RequestSeen(request_id=1, call=7), next_report=2)
    assert not agreement.is_served_by(2)  # it may be one of an earlier step
    agreement.on_seen(1, RequestSeen(request_id=1, call=5), next_report=3)
    assert len(sent) == 2
    assert sent[1][0] == [0, 1]
    assert isinstance(sent[1][1], RequestAgreed)
    assert sent[1][1].call == 7
    assert [agreement.is_served_by(index) for index in (2, 3)] == [False, True]
    agreement.request(is_repeated=True)
    assert [agreement.is_served_by(index) for index in (2, 3)] == [False, True]


def test_new_process_of_a_rank_receives_the_request_that_was_agreed() -> None:
    sent: list[tuple[list[int], Command]] = []
    agreement = RequestAgreement(2, lambda ranks, command: sent.append((list(ranks), command)))
    for rank in range(2):
        agreement.on_started(rank)
    agreement.request()
    for rank in range(2):
        agreement.on_seen(rank, RequestSeen(request_id=1, call=4), next_report=2)
    agreed = sent[-1][1]
    sent.clear()
    agreement.on_started(1)
    assert sent == [([1], RequestAnnounced(request_id=1)), ([1], agreed)]
    agreement.on_seen(1, RequestSeen(request_id=1, call=1), next_report=0)
    assert len(sent) == 2
    assert not agreement.is_pending
    assert [agreement.is_served_by(index) for index in (1, 2)] == [False, True]


def test_new_process_of_a_rank_receives_request_during_its_start_once() -> None:
    sent: list[tuple[list[int], Command]] = []
    agreement = RequestAgreement(2, lambda ranks, command: sent.append((list(ranks), command)))
    for rank in range(2):
        agreement.on_started(rank)
    agreement.on_lost(1)
    agreement.request()
    agreement.on_started(1)
    announced = RequestAnnounced(request_id=1)
    assert sent == [([0], announced), ([1], announced)]
    agreement.on_seen(0, RequestSeen(request_id=1, call=4), next_report=2)
    assert agreement.is_pending
    agreement.on_seen(1, RequestSeen(request_id=1, call=1), next_report=0)
    assert isinstance(sent[-1][1], RequestAgreed)
    assert (sent[-1][0], sent[-1][1].call) == ([0, 1], 4)


def save(step: int, *, is_rank_zero: bool) -> None:
    with train.checkpoint_dir() as path:
        if is_rank_zero:
            (path / "step").write_text(str(step))
        train.report({"step": step}, checkpoint=path)


_barrier = threading.Barrier(3)
_saves: list[tuple[int, int]] = []


def meet_other_ranks() -> None:
    _barrier.wait(60)


def note_save(rank: int, step: int) -> None:
    _saves.append((rank, step))


def test_stop_while_ranks_wait_for_each_other_saves_same_step(run_config: RunConfig) -> None:
    """The ranks meet at a barrier of which Drawbar knows nothing, as in NCCL, in each step."""

    def function() -> None:
        rank, step = train.get_context().get_world_rank(), 0
        while True:
            step += 1
            sum(range(rank * 1000))  # ranks have different speeds
            meet_other_ranks()
            if step == 20 and rank == 0:
                train.attach(run_path).stop()
            if train.should_checkpoint():
                note_save(rank, step)
                save(step, is_rank_zero=rank == 0)

    assert run_config.storage_path is not None
    run_path = Path(run_config.storage_path, "run")
    result = run_in_threads(function, num_workers=3, run_config=run_config)
    assert result.checkpoint is not None
    step = int((Path(result.checkpoint.path) / "step").read_text())
    assert step >= 20
    assert [min(step for other, step in _saves if other == rank) for rank in range(3)] == [step] * 3


def test_stop_waits_for_checkpoint_of_current_step(run_config: RunConfig) -> None:
    """A checkpoint of an earlier step, which is committed meanwhile, does not end the run."""

    def function() -> None:
        assert not train.should_checkpoint()
        mode = train.CheckpointUploadMode.ASYNC
        with train.checkpoint_dir() as path:
            (path / "step").write_text("1")
            train.report({"step": 1}, path, checkpoint_upload_mode=mode)
        handle: RunHandle = train.attach(run_path)
        handle.stop()
        while not train.should_checkpoint():
            pass
        while True:
            save(2, is_rank_zero=True)

    assert run_config.storage_path is not None
    run_path = Path(run_config.storage_path, "run")
    trainer = DataParallelTrainer(
        function, scaling_config=ScalingConfig(num_workers=0), run_config=run_config
    )
    result = trainer.fit()
    assert result.metrics is not None
    assert result.metrics["step"] == 2


def save_until_stopped() -> None:
    while not train.should_checkpoint():
        pass
    save(1, is_rank_zero=train.get_context().get_world_rank() == 0)
    while True:
        train.collective.barrier()


def pause() -> None:
    threading.Event().wait(0.01)


def test_stop_without_further_calls_is_bounded(
    run_config: RunConfig, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(time_limit, "MIN_SAVE_WAIT_S", 0.1)
    monkeypatch.setattr(controller, "STOP_GRACE_SECONDS", 0.1)

    def evaluate_forever() -> None:
        train.should_checkpoint()
        train.attach(train.get_context().get_storage()).stop()
        while True:
            pause()

    run_in_threads(evaluate_forever, run_config=run_config)
    assert "no rank has called report() or should_checkpoint()" in capfd.readouterr().err


def test_stop_waits_for_rank_that_saves_without_further_calls(
    run_config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time_limit, "MIN_SAVE_WAIT_S", 0.01)
    monkeypatch.setattr(controller, "STOP_GRACE_SECONDS", 0.01)

    def save_slowly() -> None:
        train.should_checkpoint()
        with train.checkpoint_dir() as path:
            train.attach(train.get_context().get_storage()).stop()
            while len(current_session("test").requests.get_commands()) < 10:
                pause()
            (path / "step").write_text("1")
            train.report({}, checkpoint=path)
        while True:
            pause()

    assert run_in_threads(save_slowly, num_workers=1, run_config=run_config).checkpoint is not None


def test_request_reports_longest_time_between_calls() -> None:
    sent: list[Any] = []
    queue = CommandQueue(sent.append, InterruptScope())
    requests = RankRequests(ThreadGuard(ALONE), queue, RankTimer())
    requests.get()
    begin = time.monotonic()
    while time.monotonic() < begin + 0.2:
        pause()
    requests.get()
    requests.get()
    requests.handle_command(RequestAnnounced(request_id=1))
    assert sent[0].longest_interval >= 0.2


def test_max_time_ends_run_with_checkpoint(run_config: RunConfig) -> None:
    config = replace(run_config, max_time=0.2)
    result = run_in_threads(save_until_stopped, run_config=config)
    assert result.checkpoint is not None
    assert runs.find_run(result.path).status == "stopped"


def test_stop_before_counts_back_from_end_of_slurm_job(monkeypatch: pytest.MonkeyPatch) -> None:
    margin = RunConfig(stop_before=600).stop_before
    assert margin == timedelta(minutes=10)
    end = datetime.now(UTC).replace(microsecond=0) + timedelta(hours=1)
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(end.timestamp())))
    assert resolve_stop_before(margin) == end - timedelta(minutes=10)
    with pytest.raises(ValueError, match="is in the past, so the run would stop at its start"):
        resolve_stop_before(timedelta(hours=2))
    monkeypatch.delenv("SLURM_JOB_END_TIME")
    with pytest.warns(UserWarning, match="SLURM_JOB_END_TIME is not set"):
        assert resolve_stop_before(margin) is None
    assert resolve_stop_before(end) == end


def test_naive_stop_before_keeps_the_time_zone_of_the_driver() -> None:
    config = RunConfig(stop_before=datetime.now() + timedelta(hours=2))
    assert isinstance(config.stop_before, datetime)
    code = "import pickle, sys; print(pickle.load(sys.stdin.buffer).stop_before.timestamp())"
    timestamp = subprocess.run(
        [sys.executable, "-c", code],
        input=pickle.dumps(config),
        env={**os.environ, "TZ": "Asia/Tokyo"},
        capture_output=True,
        check=True,
    ).stdout
    assert float(timestamp) == config.stop_before.timestamp()

"""Ray actor that runs the training function and streams its messages.

`Worker.run` is a streaming generator. Reports, printed lines, collective calls, and the return
value or error form one ordered stream that the controller awaits. Commands of the controller
arrive in a separate concurrency group. All messages and commands are encoded.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from drawbar.train._protocol.assignment import WORKER_INFO, WorkerAssignment, WorkerInfo
from drawbar.train._protocol.codec import RayValue
from drawbar.train._protocol.commands import COMMANDS
from drawbar.train._protocol.messages import FINAL_MESSAGE_TYPES, MESSAGE_BATCHES, Message
from drawbar.train._serialization import Serialized
from drawbar.train._storage import upkeep
from drawbar.train._storage.run_directory import RunDirectory
from drawbar.train._worker import sentinel
from drawbar.train._worker.addresses import get_node_address
from drawbar.train._worker.outbox import Outbox
from drawbar.train._worker.rank_runner import RankRunner, execute, use_worker_process
from drawbar.train._worker.stack import STACK

if TYPE_CHECKING:
    from ray import ObjectRef


class Worker:
    """Ray actor of one rank. It can run several attempts in sequence.

    Args:
        run_path: Local path of the run directory.
    """

    def __init__(self, run_path: str) -> None:
        self._runner = RankRunner()
        report = RunDirectory(Path(run_path)).get_exit_report_path(os.uname().nodename, os.getpid())
        # On a node that does not share the run directory, no other process creates this path.
        report.parent.mkdir(parents=True, exist_ok=True)
        # Start in a thread: the rest of the initialization would wait about 10 ms for it.
        self._sentinel = threading.Thread(target=sentinel.start, args=(report,), daemon=True)
        self._sentinel.start()
        _restore_default_sigterm()
        # Ray enables it only for the crashing thread. A bug in the training function may crash a
        # library's thread instead, so dump all threads.
        faulthandler.enable(2, all_threads=True)

    def initialize(self, process_setup: Callable[[], object] | None) -> bytes:
        """Run the backend's process setup and return the encoded `WorkerInfo`."""
        if process_setup is not None:
            self._sentinel.join()  # it reports the exit status if the setup crashes
            process_setup()
        import ray

        context = ray.get_runtime_context()
        info = WorkerInfo(
            node_id=context.get_node_id(),
            node_ip=get_node_address(),
            hostname=os.uname().nodename,
            pid=os.getpid(),
            gpu_ids=tuple(context.get_accelerator_ids().get("GPU", ())),
        )
        return WORKER_INFO.encode(info)

    def execute(self, call: Serialized) -> object:
        """Run a serialized (function, args, kwargs) for a backend and return its result."""
        return execute(call)

    def run(
        self, assignment: WorkerAssignment, train_loop: Sequence[ObjectRef[Serialized]]
    ) -> Iterator[RayValue]:
        """Run the training function and yield its messages in encoded batches.

        Args:
            assignment: Rank, checkpoint, and datasets for this attempt.
            train_loop: Sequence with one reference to a serialized `TrainLoop`. Ray does not
                resolve references inside a sequence.
        """
        self._sentinel.join()  # before user code can start a process that must not outlive this one
        outbox = Outbox(assignment.ranks.world_size)
        session = self._runner.start_attempt(assignment, outbox.put)
        run = partial(
            self._runner.run,
            session,
            train_loop[0],
            outbox.put,
            partial(_put_final_message, outbox),
            environment=use_worker_process(session, outbox.put),
            is_process_wide=True,
        )
        thread = threading.Thread(target=run, name="training")
        thread.start()
        while True:
            # Yield in batches, because Ray's cost per item does not depend on its size.
            batch = outbox.take_batch()
            yield MESSAGE_BATCHES.encode_for_ray(batch)
            if isinstance(batch[-1], FINAL_MESSAGE_TYPES):
                # The end of the stream signals the controller that this process can run another
                # attempt. The controller replaces the process if the stream ends too late.
                thread.join()
                session.uploads.async_commits.join()
                return

    def handle_command(self, attempt: int, command: RayValue) -> None:
        """Handle a command (control group). Commands for an attempt that has ended are ignored."""
        self._runner.handle_command(COMMANDS.decode_from_ray(command), attempt)

    def capture_stack(self) -> bytes:
        """Return the encoded stack of the training function or its program (control group)."""
        return STACK.encode(self._runner.capture_stack())

    def shut_down(self) -> None:
        """Run exit handlers and clean up the node; the caller kills the process afterwards."""
        import ray

        atexit.unregister(ray.shutdown)  # it would abort the reply to this call
        atexit._run_exitfuncs()
        session = self._runner.session
        if session is not None and session.should_clean_up_node:
            upkeep.finish_on_node(session.directory, session.assignment.ranks.world_rank)


def _put_final_message(outbox: Outbox, message: Message | None) -> None:
    assert message is not None  # Ctrl-C does not reach the thread of a worker process
    outbox.put(message)


def _restore_default_sigterm() -> None:
    """Restore the default action of SIGTERM, which ends the process.

    Ray's handler asks Python's main thread to exit, but an actor with concurrency groups runs
    nothing in the main thread (ray-project/ray#53771). The process would stay alive while its
    peers wait for it. `signal.signal` only works in the main thread, so call the C library.
    """
    ctypes.CDLL(None).signal(int(signal.SIGTERM), ctypes.c_void_p(None))

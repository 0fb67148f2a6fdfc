"""In-place recovery of a plain PyTorch loop: the surviving ranks stay in `loss.backward()`.

A rank that dies leaves the others in the collectives of their gradients. They keep their own
gradients, connect again with a new process of the dead rank, and average once more. Their training
function sees only a slow backward pass, so no step is lost or repeated on them.

The new process runs the function from its start and receives the state at its first batch: model,
optimizers, schedulers, random generators, and positions of the data, all as they were when the
last step was complete. Each rank captures this `StepState` when it requests a batch after
`optimizer.step()`. In the new process, loaders yield nothing for the epochs and batches before it.
The state is loaded when the function reaches the interrupted iteration, after the code between the
skipped ones.

All ranks vote after they have averaged. So a rank that fails in the vote knows that its gradients
are correct if another rank has passed it, and then passes it, too.
"""

from __future__ import annotations

import io
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from drawbar.torch._attempt_cleanup import on_attempt_end
from drawbar.torch._compat import count_group_activity
from drawbar.torch._data_position import SamplerPositionTracker
from drawbar.torch._gradient_buckets import GradientBuckets
from drawbar.torch._loader_registry import TrackedLoader
from drawbar.torch._replica_group import CollectiveTimeout, ReplicaGroup, open_store
from drawbar.torch._training_state import (
    CannotRecoverError,
    LoaderRecord,
    StepState,
    TrainedObjects,
)
from drawbar.train import collective, get_context
from drawbar.train.backend import (
    RankRecovery,
    attempt_local,
    get_recovery,
    get_worker_address,
)

T = TypeVar("T")

_UNSUPPORTED = ("find_unused_parameters", "process_group", "static_graph", "device_mesh")

_NO_STEP = "the training has not begun its first step"

_NEEDS_OF_PLAIN_LOOP = (
    "In-place recovery needs one backward pass per step, loaders of prepare_data_loader() that "
    "resume within an epoch, a forward pass that does not change trained weights, and, if a rank "
    "dies before the first step of an epoch, code between the epochs that changes no weights"
)


class DifferentSettingsError(RuntimeError):
    """The optimizers of the ranks have different settings, such as learning rates."""


def find_training() -> InPlaceTraining | None:
    """Return the in-place recovery of this rank's training.

    All ranks must call it for the first time at the same place.

    Returns:
        The recovery, the same in each call; None if the run restarts after a death.

    Example:
        >>> training = find_training()
        >>> if training is not None:
        ...     model = training.wrap_model(model, {})
    """
    return None if get_recovery() is None else attempt_local(InPlaceTraining)


class InPlaceTraining:
    """State of one rank's training, and its recovery when another rank has died.

    A loop over prepared loaders needs nothing else. The loop of a framework calls `capture` instead
    at the places at which a new process can continue, and `join` in the new process.

    Attributes:
        needs: Conditions of a recovery, for the message if they are not met.

    Example:
        ```python
        training = find_training()
        if training.is_joining:
            training.join(trainer.load_progress)
        training.capture(trainer.get_progress, repeats_code=False)
        ```
    """

    def __init__(self) -> None:
        self.needs = _NEEDS_OF_PLAIN_LOOP
        recovery, context = get_recovery(), get_context()
        assert recovery is not None  # find_training() checks it
        self._recovery: RankRecovery = recovery
        self._rank, self._size = context.get_world_rank(), context.get_world_size()
        self._timeout = attempt_local(CollectiveTimeout).value
        self._group: ReplicaGroup | None = None
        self._store: object = None  # that this rank has opened; closed with the object
        self._objects = TrainedObjects()
        self._loaders: list[LoaderRecord] = []
        self._last_step: StepState | None = None
        self._checksum: int | None = None  # of the state at the end of an epoch
        self._num_reductions = 0
        self._num_steps = 0  # since the last captured state
        self._has_gradients = False  # that no step has used
        self._has_averages = False  # of the running backward pass
        self._received: dict[str, Any] | None = None  # state of another rank, not loaded yet
        on_attempt_end(self._disconnect)
        address = self._open_store() if self._rank == 0 else ""
        address = collective.broadcast_from_rank_zero(address)
        if not self._recovery.is_joining:
            self._connect(address, "0")

    # -- set up

    def wrap_model(self, model: nn.Module, kwargs: dict[str, Any]) -> DistributedDataParallel:
        """Make a model data-parallel, with the weights of rank 0.

        Raises:
            ValueError: DDP is not supported with these arguments.
        """
        unsupported = sorted(name for name in _UNSUPPORTED if kwargs.get(name))
        if unsupported or any(param.device.type != "cpu" for param in model.parameters()):
            found = (
                f"found {', '.join(unsupported)}" if unsupported else "found one on another device"
            )
            raise ValueError(
                "FailureConfig(recovery='in_place') needs a DDP model on the CPU without "
                f"{', '.join(_UNSUPPORTED)}; {found}. Change the arguments of prepare_model() or "
                "of the strategy, or set recovery='restart'."
            )
        if not self._recovery.is_joining:
            assert self._group is not None
            with torch.no_grad():
                tensors = (*model.parameters(), *model.buffers())
                self._group.broadcast([tensor.data for tensor in tensors], 0)
        # DDP itself uses no other rank. The hook averages the gradients of all ranks.
        own_group = dist.new_group([self._rank], backend="gloo", use_local_synchronization=True)
        wrapped = DistributedDataParallel(model, process_group=own_group, **kwargs)
        get_buffers: Callable[[], Iterable[torch.Tensor]]
        get_buffers = model.buffers if kwargs.get("broadcast_buffers", True) else tuple
        finish = partial(self._finish_backward, get_buffers)
        buckets = GradientBuckets(model, self._size, self._get_group, finish)
        wrapped.register_comm_hook(None, lambda state, bucket: buckets(state, bucket))
        wrapped.register_forward_pre_hook(partial(self._on_forward, buckets))
        self._objects.models.append(model)
        return wrapped

    def _on_forward(self, buckets: GradientBuckets, module: nn.Module, inputs: object) -> None:
        if torch.is_grad_enabled():
            buckets.reset()  # an exception may have ended the previous backward pass
            if not getattr(module, "require_backward_grad_sync", True):
                self._has_gradients = True  # of this rank only; a new process cannot receive them

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the steps of an optimizer, and take part in recoveries from now on."""
        self._objects.optimizers.append(optimizer)
        optimizer.register_step_post_hook(self._on_step)
        self._recovery.set_member(self._leave_collectives, self._recover_between_steps)

    def _on_step(self, optimizer: torch.optim.Optimizer, *arguments: object) -> None:
        self._num_steps += 1
        self._has_gradients = False

    def add_loader(self, tracked: TrackedLoader) -> LoaderRecord:
        """Track a prepared loader."""
        record = LoaderRecord(tracked)
        self._loaders.append(record)
        self._set_targets()
        return record

    def _set_targets(self) -> None:
        """Let the loaders skip batches that the dead process of this rank has consumed."""
        if self._received is not None:
            targets = self._received["step"].loaders
            for record, target in zip(self._loaders, targets, strict=False):
                if record.num_iterations == 0:
                    record.target = target

    # -- iterations and states of steps

    def iterate(self, record: LoaderRecord, start: Callable[[object], Iterator[T]]) -> Iterator[T]:
        """Yield the batches of a new iteration that this rank has not consumed.

        Args:
            record: The loader.
            start: Begins the iteration, at a position if it is not None.
        """
        if self._recovery.is_joining and self._received is None:
            self._join()
        record.num_iterations += 1
        target, position = record.target, None
        if target is not None:
            number = record.num_iterations - target["num_iterations"]
            if number < 0 or (number == 0 and not target["is_running"]):
                record.tracked.skip(target["position"])
                return iter(())
            record.target = None
            position = target["position"] if number == 0 else None
        received = self._received
        if received is not None and self._loaders.index(record) == received["step"].active_loader:
            self._load_state(received)
        return self._track(record, start(position))

    def _track(self, record: LoaderRecord, batches: Iterator[T]) -> Iterator[T]:
        number, record.is_running = record.num_iterations, True
        try:
            while True:
                self._capture_if_complete(record)
                try:
                    batch = next(batches)
                except StopIteration:
                    if self._num_steps == 0 and self._checksum is None:
                        self._checksum = self._objects.compute_checksum()
                    return
                yield batch
        finally:
            if record.num_iterations == number:
                record.is_running = False
            if hasattr(batches, "close"):
                batches.close()

    def _capture_if_complete(self, record: LoaderRecord) -> None:
        """Capture the state if a loader is asked for a batch after a step.

        Code between epochs, such as an evaluation or a checkpoint, is not part of it: a new
        process runs it again.
        """
        if self._has_gradients or not (self._num_steps > 0 or self._last_step is None):
            return
        self._last_step = self._objects.capture(
            has_stepped=self._num_steps > 0,
            num_reductions=self._num_reductions,
            counters=self._recovery.get_counters(),
            loaders=[loader.save() for loader in self._loaders],
            active_loader=self._loaders.index(record),
        )
        self._num_steps, self._checksum = 0, None

    # -- places of other loops

    @property
    def is_joining(self) -> bool:
        """True if this process replaces a dead one and has not received the state yet."""
        return self._recovery.is_joining

    def capture(self, get_loop_state: Callable[[], object], *, repeats_code: bool) -> None:
        """Capture the state at a place at which a new process can continue.

        Nothing is captured during gradient accumulation: a new process repeats its batches.

        Args:
            get_loop_state: Returns the state of the loop, which `join` passes to the new process.
                Later changes of the loop must not change it.
            repeats_code: Whether code follows that a new process repeats, such as a validation. It
                must not change weights.
        """
        if self._has_gradients:
            return
        self._last_step = self._objects.capture(
            has_stepped=True,
            num_reductions=self._num_reductions,
            counters=self._recovery.get_counters(),
            loaders=[],
            active_loader=-1,
            loop_state=get_loop_state(),
        )
        self._num_steps = 0
        self._checksum = self._objects.compute_checksum() if repeats_code else None

    def join(self, load_loop_state: Callable[[Any], None]) -> None:
        """Receive the state of another rank in a new process, and take part in the training.

        Args:
            load_loop_state: Loads the state of the loop that `capture` has received on the other
                rank. It is called before weights and random states are loaded.
        """
        self._join()
        assert self._received is not None  # _join() raises otherwise
        self._load_state(self._received, load_loop_state)

    # -- a backward pass

    def _get_group(self) -> ReplicaGroup:
        if self._group is None:
            raise RuntimeError("This rank is not connected to the others.")
        return self._group

    def _finish_backward(
        self, get_buffers: Callable[[], Iterable[torch.Tensor]], buckets: GradientBuckets
    ) -> None:
        """Average the gradients, also if ranks die, and copy the buffers of rank 0 to all ranks.

        DDP copies the buffers before the next forward pass.
        """
        self._has_gradients = True
        stopped_at: float | None = None
        while True:
            try:
                if not self._has_averages:
                    buckets.reduce()
                    self._get_group().broadcast([buffer.data for buffer in get_buffers()], 0)
                    self._has_averages = True
                self._vote()
                break
            except (CannotRecoverError, DifferentSettingsError):
                raise
            except RuntimeError as error:
                stopped_at = stopped_at or time.monotonic()
                if self._group is not None:
                    self._group.shut_down()  # also ends collectives of this rank that still wait
                buckets.prepare_repetition()
                if self._recover(error):
                    break
                # The new process has not averaged yet, so all ranks do it again.
                self._has_averages = False
        self._has_averages = False
        self._num_reductions += 1
        if stopped_at is not None:
            self._recovery.finish(time.monotonic() - stopped_at)

    def _vote(self) -> None:
        """Wait until all ranks have averaged, and check that their optimizers agree.

        Raises:
            DifferentSettingsError: Ranks would make different steps.
        """
        settings = self._objects.get_settings()
        checksum = zlib.crc32(repr(settings).encode())
        highest, lowest = (
            self._get_group().get_maximum(torch.tensor([checksum, -checksum])).tolist()
        )
        if highest != -lowest:
            raise DifferentSettingsError(
                "The optimizers of the ranks have different settings, for example learning rates. "
                "In a new process that has replaced a rank, a count of the training function may "
                f"be too low. The settings of rank {self._rank} are {settings}."
            )

    # -- recovery

    def _leave_collectives(self) -> str:
        """End the collectives of this rank. Called in another thread when a rank has died."""
        activity = count_group_activity()
        if activity is not None and (
            activity[0] > 0 or activity[1] > 1 + len(self._objects.models)
        ):
            return (
                "the training function calls torch.distributed itself, which a new process cannot "
                "repeat. Use drawbar.train.collective instead"
            )
        if self._group is not None:
            self._group.shut_down()
        return ""

    def _recover_between_steps(self) -> None:
        """Recover while the training function waits in a function of `drawbar.train`."""
        if self._last_step is None:
            # The new process would wait in the next call, which this rank does not reach.
            self._recovery.decline(_NO_STEP)
            raise CannotRecoverError(_NO_STEP)
        begun = time.monotonic()
        self._recover(CannotRecoverError("no group was formed"))
        self._recovery.finish(time.monotonic() - begun)

    def _join(self) -> None:
        """Receive the state of the training from another rank, in a new process."""
        self._recover(CannotRecoverError("no group was formed"))
        self._recovery.finish(0.0)

    def _recover(self, error: RuntimeError) -> bool:
        """Connect with a new process of each dead rank.

        Returns:
            Whether the running backward pass is complete, because others have completed it.
        """
        while True:
            self._disconnect()
            try:
                formed = self._recovery.wait_for_group(self._open_store)
            except TimeoutError:
                raise error from None
            try:
                self._connect(formed.address, str(formed.generation))
                return self._synchronize()
            except CannotRecoverError as reason:
                self._recovery.decline(str(reason))
                raise
            except RuntimeError as failure:
                error = failure  # another rank has died, so that the next group follows

    def _open_store(self) -> str:
        store = open_store(get_worker_address())
        self._store = store
        return f"{store.host}:{store.port}"

    def _connect(self, address: str, name: str) -> None:
        group = ReplicaGroup(address, name, self._rank, self._size, self._timeout)
        if not group.is_complete:
            raise CannotRecoverError(
                "FailureConfig(recovery='in_place') has not found the connections of gloo between "
                "the ranks. Unset TORCH_GLOO_LAZY_INIT, or set recovery='restart'"
            )
        self._group = group
        if self._recovery.has_lost_ranks:
            group.shut_down()

    def _disconnect(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    def _synchronize(self) -> bool:
        """Send the state to new processes. Return whether the backward pass is complete."""
        group, step = self._get_group(), self._last_step
        count = -1 if self._recovery.is_joining else self._num_reductions
        can_send = (
            step is not None
            and step.num_reductions == self._num_reductions
            and self._num_steps == 0
            and all(map(_has_exact_position, self._loaders))
            # A new process would change the weights again: in the code between two epochs, or in
            # the forward pass.
            and (
                self._objects.has_captured_weights()
                if self._checksum is None
                else self._checksum == self._objects.compute_checksum()
            )
        )
        states = group.gather([count, int(self._has_averages), int(can_send)])
        latest = max(state[0] for state in states)
        behind = [state for state in states if 0 <= state[0] < latest]
        if any(state[0] != latest - 1 or not state[1] for state in behind):
            raise CannotRecoverError("the ranks are in different steps")
        new_ranks = [rank for rank, state in enumerate(states) if state[0] < 0]
        if new_ranks:
            sources = [rank for rank, state in enumerate(states) if state[0] == latest and state[2]]
            if not sources:
                raise CannotRecoverError(
                    "no rank is at the start of a step with the state of the last one. "
                    f"{self.needs}"
                )
            if self._rank == sources[0]:
                assert step is not None  # can_send
                data = self._objects.save(step, self._recovery.get_counters())
                for rank in new_ranks:
                    group.send(data, rank)
            elif self._rank in new_ranks:
                # Another rank of this run has sent it.
                received = io.BytesIO(group.receive(sources[0]))
                self._received = torch.load(received, weights_only=False)
                self._set_targets()
        return 0 <= count < latest

    def _load_state(
        self, state: dict[str, Any], load_loop_state: Callable[[Any], None] = lambda state: None
    ) -> None:
        """Load the state of another rank, and take part in the training."""
        try:
            load_loop_state(state["step"].loop_state)
            self._objects.load(state)
        except CannotRecoverError as reason:
            self._recovery.decline(str(reason))
            raise
        step: StepState = state["step"]
        self._num_reductions, self._num_steps, self._has_gradients = step.num_reductions, 0, False
        self._recovery.join(step.counters, state["latest_counters"])
        self._received = None


def _has_exact_position(record: LoaderRecord) -> bool:
    return not record.is_running or isinstance(record.tracked.tracker, SamplerPositionTracker)

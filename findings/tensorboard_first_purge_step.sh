#!/usr/bin/env bash
# Library: tensorboard 2.21.0, tensorboardX 2.6.5 (torch.utils.tensorboard writes the same events).
# Guess: a writer with `purge_step=5` hides all earlier points of the run from step 5, as its
#   documentation states. All readers of TensorBoard agree on it.
# Behaviour: `event_accumulator`, which scripts use, hides them. `plugin_event_accumulator`, which
#   `tensorboard --load_fast=false` uses, ignores the first `purge_step` of a run, because it takes
#   the first start of a session for the start of the run. A writer without `purge_step` writes no
#   such event. The points are hidden if the first writer also has a `purge_step`, such as 0.
# Output (steps, for a run of steps 0 to 7 that was restarted at step 5):
#   event_accumulator, first writer without purge_step: [0, 1, 2, 3, 4, 5, 6]
#   plugin_event_accumulator, first writer without purge_step: [0, 1, 2, 3, 4, 5, 6, 7, 5, 6]
#   plugin_event_accumulator, first writer with purge_step=0: [0, 1, 2, 3, 4, 5, 6]
# Why it matters: after the first restart, the page shows the points of the failed attempt and of
#   the new one for the same steps. Programs that read the same files do not show this.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "tensorboard==2.21.0" "tensorboardX==2.6.5"
cd "$folder"
venv/bin/python - <<'PROGRAM'
import logging
import os
import warnings

warnings.simplefilter("ignore")

from tensorboard.backend.event_processing import event_accumulator, plugin_event_accumulator
from tensorboardX import SummaryWriter

logging.disable(logging.WARNING)


def write(run, attempt, steps, purge_step):
    suffix = f".{attempt}"  # the files are read in the order of their names
    with SummaryWriter(run, purge_step=purge_step, filename_suffix=suffix) as writer:
        for step in steps:
            writer.add_scalar("loss", 1.0, step)
    (path,) = [entry.path for entry in os.scandir(run) if entry.name.endswith(suffix)]
    os.rename(path, f"{run}/events.out.tfevents.{attempt}")


def read_scalars(run):
    events = event_accumulator.EventAccumulator(run).Reload()
    return [event.step for event in events.Scalars("loss")]


def read_tensors(run):  # the server reads scalars as tensors
    events = plugin_event_accumulator.EventAccumulator(run).Reload()
    return [event.step for event in events.Tensors("loss")]


for run, first_purge_step in (("without purge_step", None), ("with purge_step=0", 0)):
    write(run, 1, range(8), purge_step=first_purge_step)
    write(run, 2, range(5, 7), purge_step=5)

purged = [0, 1, 2, 3, 4, 5, 6]
by_script = read_scalars("without purge_step")
by_server = read_tensors("without purge_step")
with_zero = read_tensors("with purge_step=0")
print("event_accumulator, first writer without purge_step:", by_script)
print("plugin_event_accumulator, first writer without purge_step:", by_server)
print("plugin_event_accumulator, first writer with purge_step=0:", with_zero)
assert by_script == with_zero == purged
assert by_server == [0, 1, 2, 3, 4, 5, 6, 7, 5, 6]
PROGRAM

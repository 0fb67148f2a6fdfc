#!/usr/bin/env bash
# Library: datasets 5.2.0.
# Guess: `IterableDataset.load_state_dict` sets where the next iteration starts. The iteration
#   after it is a new epoch and reads all rows, as with `StatefulDataLoader` of torchdata.
# Behaviour: the state is applied again to each later iteration of the object, until `set_epoch`
#   changes the epoch. Without `set_epoch`, which only shuffled data needs, the first 5 rows are
#   never read again.
# Output:
#   no set_epoch: [[5, 6, 7], [5, 6, 7], [5, 6, 7]]
#   set_epoch:    [[5, 6, 7], [0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 5, 6, 7]]
# Why it matters: after a restart in the middle of an epoch, all later epochs train only on the
#   rows that the interrupted epoch had left. The loss looks normal.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "datasets==5.2.0"
cd "$folder"
HF_HOME="$folder/hf" venv/bin/python - <<'PROGRAM'
import itertools

from datasets import Dataset


def make_stream():
    return Dataset.from_dict({"row": list(range(8))}).to_iterable_dataset(num_shards=2)


stream = make_stream()
for _ in itertools.islice(stream, 5):
    state = stream.state_dict()


def resume(with_set_epoch):
    resumed = make_stream()
    resumed.load_state_dict(state)
    epochs = []
    for epoch in range(3):
        if with_set_epoch:
            resumed.set_epoch(epoch)
        epochs.append([example["row"] for example in resumed])
    return epochs


without_call, with_call = resume(False), resume(True)
print("no set_epoch:", without_call)
print("set_epoch:   ", with_call)
assert without_call == [[5, 6, 7]] * 3
assert with_call == [[5, 6, 7], list(range(8)), list(range(8))]
PROGRAM

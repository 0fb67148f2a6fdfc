#!/usr/bin/env bash
# Library: orbax-checkpoint 0.12.8, jax 0.10.2, numpy 2.4.6.
# Guess: each leaf of a tree is stored by its path of keys, so a key may contain a dot. Two leaves
#   that cannot be told apart in the checkpoint raise an error when they are saved.
# Behaviour: arrays are named by their keys, joined with ".". The entry `tree["a.b"]` and the entry
#   `tree["a"]["b"]` have the same name, and `tree["a.0"]` has that of `tree["a"][0]`. Saving and
#   restoring succeed without a warning, and one of the two values is lost. Which one varies.
# Output (different values in the saved tree -> in the restored tree):
#   {'a': {'b': 1}, 'a.b': 2}: 2 -> 1
#   {'a': [1], 'a.0': 2}: 2 -> 1
#   {'a': {'b': 1}, 'a/b': 2}: 2 -> 2
# Why it matters: names with dots come from the parameters of PyTorch models and from metrics. Next
#   to a nested entry with the same path, one of the arrays is lost, although both have a key.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet \
    "orbax-checkpoint==0.12.8" "jax==0.10.2" "jaxlib==0.10.2" "numpy==2.4.6"
cd "$folder"
JAX_PLATFORMS=cpu venv/bin/python - <<'PROGRAM'
import logging
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint

logging.disable(logging.WARNING)


def store(name, tree):
    path = Path(name).absolute()
    arrays = jax.tree.map(lambda number: np.array([number]), tree)
    checkpointer = orbax.checkpoint.StandardCheckpointer()
    checkpointer.save(path, arrays)
    checkpointer.wait_until_finished()
    restored = jax.tree.map(lambda array: int(array[0]), checkpointer.restore(path, arrays))
    saved_values, values = jax.tree.leaves(tree), jax.tree.leaves(restored)
    print(f"{tree}: {len(set(saved_values))} -> {len(set(values))}")
    return values


nested = store("nested", {"a": {"b": 1}, "a.b": 2})
in_list = store("list", {"a": [1], "a.0": 2})
with_slash = store("slash", {"a": {"b": 1}, "a/b": 2})
assert nested[0] == nested[1]
assert in_list[0] == in_list[1]
assert with_slash == [1, 2]
PROGRAM

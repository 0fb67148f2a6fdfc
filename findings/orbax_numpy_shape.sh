#!/usr/bin/env bash
# Library: orbax-checkpoint 0.12.8, jax 0.10.2, numpy 2.4.6.
# Guess: `StandardCheckpointer.restore(path, template)` checks the shape of each array against the
#   template, and raises a ValueError if they differ.
# Behaviour: only a jax.Array in the template is checked. With a NumPy array or a ShapeDtypeStruct,
#   a stored array of shape (4,) is returned for a template of shape (6,) without an error or a
#   warning.
# Output:
#   jax.Array (6,): ValueError
#   np.ndarray (6,): restored with shape (4,)
#   ShapeDtypeStruct (6,): restored with shape (4,)
# Why it matters: state on the host, such as the order of samples or counters per rank, is kept in
#   NumPy arrays. A restart with another number of workers receives arrays of the old size.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet \
    "orbax-checkpoint==0.12.8" "jax==0.10.2" "jaxlib==0.10.2" "numpy==2.4.6"
cd "$folder"
JAX_PLATFORMS=cpu venv/bin/python - <<'PROGRAM'
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint

path = Path("checkpoint").absolute()
checkpointer = orbax.checkpoint.StandardCheckpointer()
checkpointer.save(path, {"order": np.arange(4, dtype=np.float32)})
checkpointer.wait_until_finished()


def restore(name, template):
    try:
        shape = checkpointer.restore(path, {"order": template})["order"].shape
        result = f"restored with shape {shape}"
    except ValueError:
        result = "ValueError"
    print(f"{name} {template.shape}: {result}")
    return result


assert restore("jax.Array", jnp.zeros(6)) == "ValueError"
assert restore("np.ndarray", np.zeros(6, np.float32)) == "restored with shape (4,)"
template = jax.ShapeDtypeStruct((6,), np.float32)
assert restore("ShapeDtypeStruct", template) == "restored with shape (4,)"
PROGRAM

#!/usr/bin/env bash
# Library: safetensors 0.8.0, numpy 2.4.6, torch 2.13.0.
# Guess: a view that is not contiguous is either stored with its own values or rejected. The PyTorch
#   functions reject it with a ValueError, so the NumPy functions do so too or copy the array.
# Behaviour: `safetensors.numpy` stores the bytes in the order of the memory, with the shape of the
#   view. A transposed array is read back with its values in other places, without an error or a
#   warning. `safetensors.torch` rejects a transposed tensor, but stores a conjugate view without
#   the conjugation.
# Output (saved -> loaded):
#   NumPy, transposed:   [[0, 3], [1, 4], [2, 5]] -> [[0, 1], [2, 3], [4, 5]]
#   PyTorch, transposed: ValueError
#   PyTorch, conjugate:  (1-2j) -> (1+2j)
# Why it matters: the weights of linear layers are transposed when they are converted between
#   PyTorch and JAX or Keras. The file has the right names, shapes, and dtypes, but wrong weights.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "safetensors==0.8.0" "numpy==2.4.6" "torch==2.13.0"
cd "$folder"
venv/bin/python -W ignore - <<'PROGRAM'
import numpy as np
import safetensors.numpy
import safetensors.torch
import torch

saved = np.arange(6).reshape(2, 3).T
safetensors.numpy.save_file({"weight": saved}, "numpy.safetensors")
loaded = safetensors.numpy.load_file("numpy.safetensors")["weight"]
print("NumPy, transposed:  ", saved.tolist(), "->", loaded.tolist())
assert saved.tolist() == [[0, 3], [1, 4], [2, 5]]
assert loaded.tolist() == [[0, 1], [2, 3], [4, 5]]

try:
    safetensors.torch.save_file({"weight": torch.from_numpy(saved)}, "torch.safetensors")
    result = "saved"
except ValueError as error:
    assert "non contiguous" in str(error)
    result = "ValueError"
print("PyTorch, transposed:", result)
assert result == "ValueError"

conjugate = torch.tensor([1 + 2j]).conj()
safetensors.torch.save_file({"weight": conjugate}, "conjugate.safetensors")
stored = safetensors.torch.load_file("conjugate.safetensors")["weight"]
print("PyTorch, conjugate: ", conjugate.item(), "->", stored.item())
assert (conjugate.item(), stored.item()) == (1 - 2j, 1 + 2j)
PROGRAM

#!/usr/bin/env bash
# Library: pandas 3.1.1, pyarrow 26.0.1.
# Guess: a column from `pd.cut` (a Categorical of intervals) is stored in Feather, because intervals
#   have an Arrow type and categories are Arrow dictionaries. A type that cannot be stored fails
#   when the file is written.
# Behaviour: writing succeeds. Reading fails with a TypeError that names neither the column nor its
#   type. The file is valid for other columns, but pyarrow cannot even open its schema.
# Output:
#   written: 1 column, Feather
#   read_feather: TypeError: Expected int index, got type '<class 'str'>'
#   open_file: TypeError: Expected int index, got type '<class 'str'>'
# Why it matters: preprocessed data is written once and read by the training workers, where all
#   columns of the file are lost because of one column of bins.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "pandas==3.1.1" "pyarrow==26.0.1"
cd "$folder"
venv/bin/python - <<'PROGRAM'
import pandas as pd
import pyarrow as pa

frame = pd.DataFrame({"age": pd.cut([15, 40, 70], bins=[0, 18, 65, 100])})
frame.to_feather("ages.feather")
print(f"written: {frame.shape[1]} column, Feather")

errors = {}
for read in (pd.read_feather, pa.ipc.open_file):
    try:
        read("ages.feather")
    except TypeError as error:
        errors[read.__name__] = f"{type(error).__name__}: {error}"
        print(f"{read.__name__}: {errors[read.__name__]}")
assert list(errors) == ["read_feather", "open_file"]
assert all("Expected int index" in text for text in errors.values())
PROGRAM

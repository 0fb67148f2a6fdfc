#!/usr/bin/env bash
# Library: pyarrow 26.0.1, fsspec 2026.9.0.
# Guess: `delete_dir(path)` of a pyarrow filesystem deletes the directory with this name. The
#   methods of pyarrow filesystems take paths, never patterns.
# Behaviour: for a filesystem of fsspec, `delete_dir("runs/run?")` also deletes `runs/run1` and
#   `runs/run2`. The handler calls `rm()` of fsspec, whose default implementation reads `*`, `?`,
#   and `[` as patterns. `get_file_info` and `open_input_file` take the same path literally.
# Output:
#   before: ['run1', 'run2', 'run?']
#   file info of 'run?': Directory
#   after:  []
# Why it matters: object stores allow these characters in keys. A cleanup of one run or checkpoint
#   then deletes the checkpoints of other runs.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "pyarrow==26.0.1" "fsspec==2026.9.0"
cd "$folder"
venv/bin/python - <<'PROGRAM'
import fsspec
from pyarrow.fs import FileSelector, FSSpecHandler, PyFileSystem

store = PyFileSystem(FSSpecHandler(fsspec.filesystem("memory")))
store.create_dir("/runs")
for name in ("run?", "run1", "run2"):
    with store.open_output_stream(f"/runs/{name}/model.bin") as file:
        file.write(b"weights")


def list_runs():
    files = store.get_file_info(FileSelector("/runs", allow_not_found=True))
    return sorted(info.base_name for info in files)


before = list_runs()
print("before:", before)
print("file info of 'run?':", store.get_file_info("/runs/run?").type.name)
store.delete_dir("/runs/run?")
after = list_runs()
print("after: ", after)
assert before == ["run1", "run2", "run?"]
assert after == []
PROGRAM

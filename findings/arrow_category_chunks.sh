#!/usr/bin/env bash
# Library: pyarrow 26.0.1, pandas 3.1.1.
# Guess: two tables with the same schema can be concatenated, and the result can be used like any
#   other table. Where categories differ, Arrow unifies the dictionaries.
# Behaviour: pandas stores up to 128 categories with int8 indices. Two tables with 100 different
#   categories each have the same type and can be concatenated. `take`, `combine_chunks`,
#   and `unify_dictionaries` then raise ArrowInvalid, because 200 categories do not fit in int8.
#   Arrow does not choose wider indices. `filter`, `slice`, and `to_pandas` work.
# Output:
#   concatenated: 200 rows
#   filter: 200 rows
#   take: ArrowInvalid
#   combine_chunks: ArrowInvalid
#   unify_dictionaries: ArrowInvalid
# Why it matters: shuffling is `take`. It works for one file of a data set and for files that share
#   their categories, and fails as soon as a worker reads two files that do not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "pyarrow==26.0.1" "pandas==3.1.1"
cd "$folder"
venv/bin/python - <<'PROGRAM'
import pandas as pd
import pyarrow as pa


def make_table(prefix):
    values = [f"{prefix}{number}" for number in range(100)]
    return pa.Table.from_pandas(pd.DataFrame({"user": pd.Categorical(values)}))


first, second = make_table("a"), make_table("b")
assert first.schema == second.schema
table = pa.concat_tables([first, second])
print(f"concatenated: {table.num_rows} rows")


def run(name, *args):
    try:
        result = f"{getattr(table, name)(*args).num_rows} rows"
    except pa.ArrowInvalid as error:
        assert "requires a larger index type" in str(error)
        result = "ArrowInvalid"
    print(f"{name}: {result}")
    return result


assert run("filter", pa.array([True] * 200)) == "200 rows"
assert run("take", [0, 150]) == "ArrowInvalid"
assert run("combine_chunks") == "ArrowInvalid"
assert run("unify_dictionaries") == "ArrowInvalid"
PROGRAM

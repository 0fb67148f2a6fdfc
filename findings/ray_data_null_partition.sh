#!/usr/bin/env bash
# Library: ray 2.60.0 (Ray Data), pyarrow 26.0.1.
# Guess: `write_parquet(partition_cols=["day"])` followed by `read_parquet` returns a missing day
#   as None, because pyarrow reads the same files this way.
# Behaviour: Ray Data writes the directory `day=__HIVE_DEFAULT_PARTITION__`, the standard name for
#   null, but reads it as the text "__HIVE_DEFAULT_PARTITION__". If the column is declared as an
#   integer, reading fails with a ValueError.
# Output:
#   pyarrow:  [(1, 1), (2, 2), (3, None)]
#   Ray Data: [(1, '1'), (2, '2'), (3, '__HIVE_DEFAULT_PARTITION__')]
#   Ray Data, field_types={"day": int}: ValueError
# Why it matters: a model receives the text as one more category instead of a missing value, and
#   data sets with a null partition (also from Spark) cannot be read with an integer column.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "ray[data]==2.60.0" "pyarrow==26.0.1"
cd "$folder"
venv/bin/python - <<'PROGRAM'
import logging

import pyarrow as pa
import pyarrow.parquet
import ray
from ray.data.datasource.partitioning import Partitioning

logging.disable(logging.ERROR)
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
ray.data.DataContext.get_current().enable_progress_bars = False
table = pa.table({"row": [1, 2, 3], "day": pa.array([1, 2, None])})
ray.data.from_arrow(table).write_parquet("table", partition_cols=["day"])


def sort_rows(rows):
    return sorted((row["row"], row["day"]) for row in rows)


by_arrow = sort_rows(pyarrow.parquet.read_table("table").to_pylist())
by_ray = sort_rows(ray.data.read_parquet("table").take_all())
try:
    typed = Partitioning("hive", field_types={"day": int})
    result = str(ray.data.read_parquet("table", partitioning=typed).take_all())
except ValueError as error:
    assert "__HIVE_DEFAULT_PARTITION__" in str(error)
    result = "ValueError"
print("pyarrow: ", by_arrow)
print("Ray Data:", by_ray)
print('Ray Data, field_types={"day": int}:', result)
assert by_arrow == [(1, 1), (2, 2), (3, None)]
assert by_ray == [(1, "1"), (2, "2"), (3, "__HIVE_DEFAULT_PARTITION__")]
assert result == "ValueError"
PROGRAM

#!/usr/bin/env bash
# Library: ray 2.60.0.
# Guess: resources have a precision of 0.0001, as the documentation states, so each number with
#   four decimals is exact. Three bundles of 0.3334 CPUs (1.0002) and two of 0.5001 CPUs (1.0002)
#   do not fit on one CPU.
# Behaviour: the three bundles of 0.3334 are placed, and the two of 0.5001 are not. Ray multiplies
#   by 10,000 and cuts off the decimals: 0.3334 * 10000 = 3333.9999999999995, which is 0.3333.
#   573 of the 9,999 fractions with four decimals lose 0.0001 this way.
# Output:
#   3 x 0.3334 CPUs = 1.0002: placed
#   2 x 0.5001 CPUs = 1.0002: waiting
#   fractions that lose a unit: 573, first: [0.0003, 0.0006, 0.0012]
# Why it matters: a program that adds the requested CPUs to check whether a worker group fits, gets
#   another result than Ray. A request for 0.0003 of a resource reserves a third less.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "ray==2.60.0"
cd "$folder"
venv/bin/python - <<'PROGRAM'
import ray
from ray.util.placement_group import placement_group, remove_placement_group

ray.init(num_cpus=1, include_dashboard=False, logging_level="ERROR")


def place(count, cpus):
    group = placement_group([{"CPU": cpus}] * count)
    is_placed = group.wait(timeout_seconds=10)
    remove_placement_group(group)
    result = "placed" if is_placed else "waiting"
    print(f"{count} x {cpus} CPUs = {count * cpus:.4f}: {result}")
    return is_placed


assert place(3, 0.3334)
ray.shutdown()
ray.init(num_cpus=1, include_dashboard=False, logging_level="ERROR")
assert not place(2, 0.5001)
fractions = [unit / 10000 for unit in range(1, 10000)]
losing = [x for x in fractions if int(x * 10000) != round(x * 10000)]
print(f"fractions that lose a unit: {len(losing)}, first: {losing[:3]}")
assert (len(losing), losing[:3]) == (573, [0.0003, 0.0006, 0.0012])
PROGRAM

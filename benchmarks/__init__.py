"""Compare Drawbar with `ray.train` and bare processes: the same work on each, in turn.

Run it with `python -m benchmarks`. The ratios hold on other machines too; the absolute
medians are printed next to them. To add a scenario, write a file like those in
`benchmarks/scenarios` and add it to the list in `benchmarks/scenarios/__init__.py`.

This is the only place in the repository that imports `ray.train`.
"""

"""Drawbar beside `ray.train` and bare processes: the same work on each, in turn, in one run.

Run it with `python -m benchmarks`. A ratio is what counts, since it holds on other machines; the
absolute medians are printed beside it. To add a scenario, write a file like those in
`benchmarks/scenarios` and add it to the list in `benchmarks/scenarios/__init__.py`.

This is the only place in the repository that imports `ray.train`.
"""

"""Run the launcher tests of other projects with `drawbar launch` in place of their launcher.

Run them with `python -m conformance`. The tests are not part of this repository: each suite reads
them from an installed package or from a path. To add a suite, write a module with a function that
returns a `Report`, and add it to `SUITES` in `conformance/__main__.py`.
"""

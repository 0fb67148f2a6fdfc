"""Run the command line interface with `python -m drawbar.cli`."""

from drawbar.cli import main

main()

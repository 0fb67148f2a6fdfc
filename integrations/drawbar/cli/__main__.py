"""`python -m drawbar.cli` is `drawbar`."""

from drawbar.cli import main

main()

"""Subcommands of `drawbar`, one module per command."""

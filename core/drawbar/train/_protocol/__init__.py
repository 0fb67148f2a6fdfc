"""Messages and commands between the controller and the ranks, as plain data."""

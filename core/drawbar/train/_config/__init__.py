"""What the user sets: frozen, checks itself on the line that makes it."""

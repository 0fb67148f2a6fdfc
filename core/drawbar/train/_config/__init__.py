"""Configuration classes: frozen, and checked when they are created."""

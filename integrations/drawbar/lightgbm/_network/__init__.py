"""LightGBM's own network between the workers: a port of each, and sockets that close at once."""

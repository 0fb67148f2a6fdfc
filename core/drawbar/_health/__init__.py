"""Probes, evaluators, and decisions about the health of nodes, as Ray Train names them."""

"""Run probes on the nodes of a run, and act on the decisions of evaluators."""

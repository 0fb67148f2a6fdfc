"""Events, the journal, reports, results, and other data that is computed from events."""

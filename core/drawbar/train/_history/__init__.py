"""Events of a run, the journal, and everything that is derived from it."""

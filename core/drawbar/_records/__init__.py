"""Events of a run, the journal, the reports, and what is computed from them."""

"""Run functions in threads, and test backends; `drawbar.train.testing` exports the names."""

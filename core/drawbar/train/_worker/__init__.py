"""Worker process: actor, session, report(), output capture, and sentinel."""

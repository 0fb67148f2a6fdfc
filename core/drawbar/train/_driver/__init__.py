"""From a checked configuration to a controller that runs in this process."""

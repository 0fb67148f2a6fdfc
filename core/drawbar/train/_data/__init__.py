"""Split datasets into shards that track their position."""

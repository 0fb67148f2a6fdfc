"""Ray Data datasets to shards that know their position."""

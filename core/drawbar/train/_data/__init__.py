"""Datasets and tables to shards that know their position."""

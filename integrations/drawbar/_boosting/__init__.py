"""Shared implementation of drawbar.xgboost and drawbar.lightgbm. Not public.

Data flow: the trainer splits each dataset. `load_shards` reads a worker's part once (`ColumnRoles`
maps columns to roles), and all ranks agree on one `Schema`. The resulting `Shard` yields `Block`s
of numbers, repeatedly if needed, from which the library builds its dataset.

A library adds a subclass of `TrainingSpec` (checks in the driver, trains on the workers), a
subclass of `BoostingTrainer`, and a callback that calls `RoundReporter` after each round and stores
`BoostingProgress` in checkpoints. This package imports no boosting library.
"""

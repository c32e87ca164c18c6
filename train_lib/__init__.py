"""The one trainer: Task contract, train step, loop, checkpoints, sharding."""

"""The volunteer's process: local training, averaging, outer step, data, snapshots, commands."""

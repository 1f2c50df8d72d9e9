"""The commands of `dilocox`, but for `peer` and `monitor`."""

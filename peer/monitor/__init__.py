"""`dilocox monitor`."""

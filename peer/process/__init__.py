"""`dilocox peer` as a program."""

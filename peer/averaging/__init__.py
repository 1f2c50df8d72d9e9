"""Rounds carried out: the coordinator's thread, and the averaging process that it drives."""

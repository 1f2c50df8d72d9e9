"""The loop that trains."""

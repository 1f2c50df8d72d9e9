"""The history: keep, give, take, replay, roll back."""

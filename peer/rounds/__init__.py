"""The rules and the exchange of one round."""

"""The swarm's peers and what they agreed on: identity, signed records, manifest, bootstrap."""

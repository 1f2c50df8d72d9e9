"""Who is in the swarm and what they agreed on: identity, signed records, manifest, bootstrap."""

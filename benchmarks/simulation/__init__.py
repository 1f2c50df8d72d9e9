"""A swarm under a simulated clock: the product's control code over a network that only counts time.

The coordinator, round keeper, driver, chain follower, announcer, votes and the rule of H are the
product's own. Simulated are what costs time or bytes: the clock (clock.py), the DHT (dht.py), the
averaging process with its matchmaking (averaging.py), and the training loop, of which only steps
and tokens are left (peer.py). world.py puts a swarm together, hurts it as a schedule says
(schedules.py), and judges the run.
"""

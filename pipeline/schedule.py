"""What a stage computes next, and how many microbatches a replica keeps in flight.

Why: over slow links a stage that insists on an order waits for frames while it could compute.
Backward-first takes whatever is there and the older half of the work first, which also frees memory
soonest; 1F1B is the order of data centres and stays for comparison.
"""

import math
from typing import Literal

Policy = Literal["backward_first", "1f1b"]
Action = Literal["forward", "backward"]

# Microbatches wait for each other, because forwards and backwards take different times: in
# simulated chains a window without margin leaves stages idle for up to 15 % of the time.
_MARGIN = 1.5


def next_action(
    policy: Policy,
    *,
    warm_up: int,
    microbatches: int,
    forwards: int,
    backwards: int,
    forward_ready: bool,
    backward_ready: bool,
) -> Action | None:
    """Return what a stage runs now; None if it has to wait for a neighbour.

    Args:
        policy: "backward_first" runs a backward when one is ready, else a forward. "1f1b" runs
            `warm_up` forwards, then a backward and a forward in turns, waiting where need be.
        warm_up: stages from this one on, itself included.
        microbatches: of an inner step.
        forwards, backwards: how many of them ran in this step.
        forward_ready, backward_ready: whether the input of one is there.
    """
    if policy == "1f1b":
        if forwards < microbatches and forwards - backwards < warm_up:
            return "forward" if forward_ready else None
        return "backward" if backward_ready else None
    if backward_ready:
        return "backward"
    return "forward" if forward_ready else None


def window_size(
    *,
    stages: int,
    microbatches: int,
    round_trip_s: float | None,
    compute_s: float,
    limit: int,
) -> int:
    """Return how many microbatches the head keeps in flight.

    Half as many again as the slowest stage finishes (one in `compute_s`) while one travels through
    all stages and back; at least one for every stage, and twice that while nothing is measured.

    Args:
        stages: of the replica.
        microbatches: of an inner step; no more can be in flight.
        round_trip_s: seconds that one microbatch spends on links, down the whole chain and back up,
            transfers included; None while unknown.
        compute_s: seconds of one forward plus one backward on the slowest stage; 0 while unknown.
        limit: what memory or the manifest allows; goes before all the rest, but one is always let
            through.
    """
    if round_trip_s is None or compute_s <= 0:
        wanted = 2 * stages
    else:
        # Little's law: in flight = rate * time = (stages * compute_s + round_trip_s) / compute_s
        on_links = min(round_trip_s / compute_s, microbatches)
        wanted = math.ceil(_MARGIN * (stages + on_links))
    return max(1, min(wanted, microbatches, limit))

"""Which faults a simulated swarm meets: all of it follows from a seed."""

from __future__ import annotations

import random
from dataclasses import replace

from benchmarks.simulation.world import Fault, Scenario

ROUND_END_SHARE = 0.3  # of schedules whose records wait for a round's end


def every_fifth_round(
    heads: int, round_s: float, rounds: int, draw: random.Random
) -> tuple[Fault, ...]:
    """In every fifth round one head is killed, or frozen for up to half a round."""
    faults: list[Fault] = []
    for number in range(2, rounds, 5):
        kill = draw.random() < 0.5
        faults.append(
            Fault(
                kind="kill" if kill else "freeze",
                at_s=(number + draw.random()) * round_s,
                peers=(draw.randrange(heads),),
                seconds=draw.uniform(20.0, max(30.0, round_s / 2)),
            )
        )
    return tuple(faults)


def restless(seed: int, round_s: float = 60.0, fetch_s: float = 0.0) -> Scenario:
    """A stage of few heads, hurt one after another for a third of the run: who is in the last
    records changes all the time. What happens lasts as many rounds, whatever a round lasts.

    fetch_s: that the archive takes for a record.
    """
    draw = random.Random(seed)
    heads = draw.choice((2, 3, 3, 4))
    longer = round_s / 60.0
    faults: list[Fault] = []
    at_s = 100.0
    while at_s < 1500.0:
        kind = draw.choice(("kill", "freeze", "freeze", "partition"))
        peers, seconds = (draw.randrange(heads),), draw.uniform(20, 240)
        faults.append(Fault(kind=kind, at_s=at_s * longer, peers=peers, seconds=seconds * longer))
        at_s += draw.uniform(30, 200)
    joins = [0.0 if n < 1 or draw.random() < 0.3 else draw.uniform(0, 900) for n in range(heads)]
    return Scenario(
        step_s=tuple(draw.uniform(0.7, 1.5) for _ in range(heads)),
        round_s=round_s,
        rounds=60,
        seed=seed,
        fetch_s=fetch_s,
        joins=tuple(at_s * longer for at_s in joins),
        faults=tuple(faults),
    )


def schedule(seed: int) -> Scenario:
    """A small swarm with all that can go wrong: for what must hold whatever happens."""
    draw = random.Random(seed)
    heads = draw.choice((1, 2, 2, 3, 3, 4, 4, 5))
    stages = draw.choice((1, 1, 1, 2))
    round_s = draw.choice((60.0, 60.0, 60.0, 200.0, 600.0))
    rounds = draw.randint(4, 6) if round_s > 60 else draw.randint(5, 9)
    everybody = heads * stages + stages - 1
    span_s = rounds * round_s
    faults: list[Fault] = []
    for _ in range(draw.randint(0, 6)):
        kind = draw.choice(("kill", "freeze", "freeze", "partition"))
        most = max(1, everybody // 2) if kind == "partition" else 1
        faults.append(
            Fault(
                kind=kind,
                at_s=draw.uniform(5.0, 0.9 * span_s),
                peers=tuple(draw.randrange(everybody) for _ in range(draw.randint(1, most))),
                seconds=draw.choice((2.0, 10.0, 40.0, 100.0, round_s)),
            )
        )
    scenario = Scenario(
        step_s=tuple(draw.uniform(0.5, 3.0) for _ in range(heads)),
        round_s=round_s,
        rounds=rounds,
        rtt_s=draw.choice((0.001, 0.05, 0.2, 0.3)),
        seed=seed,
        stages=stages,
        spares=stages - 1,
        loss=draw.choice((0.0, 0.0, 0.05, 0.2)),
        late=draw.choice((0.0, 0.0, 0.1, 0.3)),
        vote_loss=draw.choice((0.0, 0.1, 0.4)),
        write_s=draw.choice((0.0, 0.5, 3.0)),
        tick_s=draw.choice((0.0, 0.0, 0.5, 2.0)),
        joins=tuple(
            0.0 if number < 2 or draw.random() < 0.6 else draw.uniform(0, 0.5 * span_s)
            for number in range(heads)
        ),
        faults=tuple(faults),
    )
    if draw.random() < ROUND_END_SHARE:
        merge = draw.choice(("rebase", "reset"))
        scenario = replace(scenario, apply="round_end", merge=merge)
    return scenario

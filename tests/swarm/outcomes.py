"""How a round that met a fault must end: committed on all survivors with one digest, or void on
all; and the peer that was hurt takes part again, on the same chain."""

from __future__ import annotations

import time
from typing import Any

from tests.swarm.harness import Peer, ProcessSwarm

AIM_LIMIT_S, TELL_LIMIT_S = 120.0, 15.0
BACK_LIMIT_S = 150.0


def halt(swarm: ProcessSwarm, victim: Peer, point: str) -> int:
    """Let the victim halt at this point of the next exchange that comes to it; its round."""
    armed = victim.halt
    assert armed is not None
    armed.arm(point)
    halted_at = swarm.wait(
        lambda: armed.halted_at, AIM_LIMIT_S, f"{victim.name} has come to {point}"
    )

    def sent() -> tuple[int] | None:
        """Of the newest send, unless that one was decided before: the next one is to be told."""
        number: int | None = max((event["round"] for event in victim.of_kind("sent")), default=None)
        end = None if number is None else victim.decided(number)
        return None if number is None or (end and end["time"] < halted_at) else (number,)

    return swarm.wait(sent, TELL_LIMIT_S, "it tells the round of its send")[0]


def others_decide(
    swarm: ProcessSwarm, victim: Peer, number: int, hit_at: float
) -> list[dict[str, Any]]:
    """The others end the round the same way within twice the limits, and commit the next ones.

    Returns how it ended for them: their events, record or void.
    """
    others = [peer for peer in swarm.peers if peer is not victim]
    deadlines = swarm.manifest.deadlines
    limit_s = 2 * (deadlines.exchange_s + deadlines.vote_s)
    swarm.wait(
        lambda: all(peer.decided(number) for peer in others),
        limit_s + hit_at - time.time(),
        f"the others decide round {number}",
    )
    ends = [peer.decided(number) or {} for peer in others]
    assert len({(end["event"], end.get("digest")) for end in ends}) == 1, ends
    attempts = 2 if any(peer.voted(number, attempt=1) for peer in others) else 1
    committed = ends[0]["event"] == "round"
    assert attempts == 2 or not committed or ends[0]["members"] == 3, "the victim was not in it"
    seconds = max(end["time"] for end in ends) - hit_at
    how = f"committed by {ends[0]['members']}" if committed else "void"
    print(f"round {number}: {how} in attempt {attempts}, {seconds:.1f} s after the fault")
    swarm.wait_for_rounds(2, 120, of=others)
    print(f"the others have committed two more {time.time() - hit_at:.1f} s after the fault")
    swarm.assert_equal_chains()
    return ends


def comes_back(swarm: ProcessSwarm, victim: Peer, after_round: int) -> None:
    """The victim's progress enters a record again, on the chain of the others."""
    began = time.time()
    line = swarm.wait_for_counted(victim, after_round=after_round, limit_s=BACK_LIMIT_S)
    print(f"{victim.name} contributes to round {line['round']} {time.time() - began:.1f} s later")
    swarm.wait_for_rounds(1, 120)
    swarm.assert_equal_chains()


def newest_round(swarm: ProcessSwarm) -> int:
    """The newest record that any peer reported."""
    return max(swarm.chain())

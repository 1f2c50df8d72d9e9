"""Which peers of a swarm train together, as they say themselves."""

from __future__ import annotations

import time
from dataclasses import dataclass

from tests.swarm.harness import LocalSwarm
from tests.swarm.peer import Peer

FRESH_S = 3.0  # a peer whose last inner step is older does not train


@dataclass(frozen=True)
class Replica:
    """Its members by stage; the first one is the head."""

    members: tuple[Peer, ...]

    @property
    def steps(self) -> bool:
        """Whether all members (all of them shown) have taken an inner step just now."""
        since = time.time() - FRESH_S
        shown = [peer.shown for peer in self.members]
        return all(each and each.steps and each.steps[-1] > since for each in shown)


def replicas(swarm: LocalSwarm) -> list[Replica]:
    """Those whose members all run and agree on the head; as of their last status."""
    by_id = {peer.peer_id: peer for peer in swarm.peers if peer.expected and peer.status}
    found: list[Replica] = []
    for head in by_id.values():
        ids: list[str] = head.status["members"]
        if ids and all(each in by_id and by_id[each].head == head.peer_id for each in ids):
            found.append(Replica(tuple(by_id[each] for each in ids)))
    return found


def spares(swarm: LocalSwarm, stage: int) -> list[Peer]:
    """The peers of a stage that run, are in no replica, and wait for a head or for members.

    A spare head says that it is blocked: there are no members to be had while nothing is wrong.
    """
    return [
        peer
        for peer in swarm.of_stage(stage)
        if peer.expected and peer.doing == "spare" and (stage == 0 or not peer.status["blocked"])
    ]


def wait_for_replicas(swarm: LocalSwarm, count: int, limit_s: float) -> list[Replica]:
    """Wait until there are so many."""

    def enough() -> list[Replica] | None:
        found = replicas(swarm)
        return found if len(found) >= count else None

    return swarm.wait(enough, limit_s, f"{count} replicas")

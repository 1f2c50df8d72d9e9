"""What can happen to a peer: killed, frozen, without its p2pd, cut off, told to leave."""

from __future__ import annotations

import os
import random
import signal
from dataclasses import dataclass

from tests.swarm.harness import LEAVE_LIMIT_S, LocalSwarm
from tests.swarm.links import Links
from tests.swarm.peer import Peer
from tests.swarm.processes import send_signal

KINDS = ("kill", "freeze", "p2pd", "cut", "leave")
ROLES = ("head", "middle", "last")
PHASES = ("forward", "backward", "between", "averaging")

# Of kinds that last; a frozen peer must be given up by then.
HURT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What is to happen to whom at which moment.

    kind: "kill" the main process, "freeze" all processes, kill "p2pd", "cut" the link, "leave".
    role: of the peer in its replica. phase: what the peer does then; see shown.py, and "averaging":
    it has sent a pseudo-gradient of which it knows no outcome yet.
    """

    kind: str
    role: str
    phase: str


def draw(count: int, seed: int, *, kinds: tuple[str, ...] = KINDS) -> list[Fault]:
    """Different faults in which every kind, role and phase comes about equally often."""
    most = len(kinds) * len(ROLES) * len(PHASES) // 2
    if not 1 <= count <= most:
        raise ValueError(f"{count} faults: draw 1 to {most}")
    randomly = random.Random(seed)
    while True:
        decks = [_deck(each, count, randomly) for each in (kinds, ROLES, PHASES)]
        faults = [
            Fault(kind=kind, role=role, phase=phase)
            for kind, role, phase in zip(*decks, strict=True)
        ]
        if len(set(faults)) == count:
            return faults


def _deck(names: tuple[str, ...], count: int, randomly: random.Random) -> list[str]:
    whole, rest = divmod(count, len(names))
    deck = [*names * whole, *randomly.sample(names, rest)]
    randomly.shuffle(deck)
    return deck


class Injury:
    """One fault done to one peer. All that takes time is done before `strike`."""

    def __init__(self, swarm: LocalSwarm, victim: Peer, kind: str):
        self.victim = victim
        self.kind = kind
        self._swarm = swarm
        # the main process first: in a tick another one could say that it lives
        self._processes = sorted(victim.processes(), key=lambda each: each.pid != victim.child.pid)
        self._p2pd = victim.p2pd().pid

    @property
    def lasts(self) -> bool:
        """Whether it is over only when it is mended."""
        return self.kind in ("freeze", "cut")

    def strike(self) -> None:
        """Let it happen now."""
        match self.kind:
            case "kill":
                self._swarm.kill(self.victim)
            case "freeze":
                send_signal(self._processes, signal.SIGSTOP)
            case "p2pd":
                os.kill(self._p2pd, signal.SIGKILL)
            case "cut":
                self._links.cut(self._swarm.host(self.victim))
            case "leave":
                self.victim.expected = False
                self.victim.child.terminate()
            case _:
                raise ValueError(f"no fault {self.kind}")

    def remedy(self) -> None:
        """Undo it; who has ended is started again, with the same state."""
        swarm, victim = self._swarm, self.victim
        match self.kind:
            case "kill":
                swarm.wait_until_gone(victim)
                swarm.restart(victim)
            case "freeze":
                send_signal(self._processes, signal.SIGCONT)
            case "cut":
                self._links.heal(swarm.host(victim))
            case "leave":
                swarm.wait(
                    lambda: victim.child.returncode is not None,
                    LEAVE_LIMIT_S,
                    f"{victim.name} has left",
                )
                assert victim.child.returncode == 0, victim.log_text()[-2000:]
                swarm.restart(victim)
            case _:
                pass  # without p2pd a peer starts itself again

    @property
    def _links(self) -> Links:
        links = self._swarm.links
        assert isinstance(links, Links), "to cut a link the swarm needs Links"
        return links

"""How a swarm is, in one sentence: rules over what a monitor sees of it and remembers.

ended        the run has trained on all its tokens
paused       the operator has paused it
unreachable  neither a peer nor a bootstrap is to be seen
waiting      nobody has joined yet, or each stage without peers has one that is joining
blocked      a stage has no peer, so no replica can be complete
stalled      all stages have peers, but no round was committed for longer than rounds take
training     everything else

While no bootstrap answers, the sentence says that as well: a run that trains is not well then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from statistics import median
from typing import Literal, get_args

from dilocox.dht.swarm_view import SwarmView
from dilocox.peer.chain.stated_facts import finite
from dilocox.peer.monitor.history import SwarmHistory
from dilocox.peer.monitor.look import SwarmLook

SwarmState = Literal["ended", "paused", "unreachable", "waiting", "blocked", "stalled", "training"]

STATES: tuple[SwarmState, ...] = get_args(SwarmState)
GOOD: tuple[SwarmState, ...] = ("ended", "paused", "training")
IN_MOTION: tuple[SwarmState, ...] = ("stalled", "training")  # in all others no round can come
STALL_ROUNDS = 3.0  # so many usual rounds without a commit are a stall
STALL_AT_LEAST_S = 60.0
MOST_LONGER = 4.0  # than those before, that a round may take by what heads state
MAX_NAMED = 4  # stages that a sentence names
NO_BOOTSTRAP = "no bootstrap answers: nobody can join"


@dataclass(frozen=True)
class Health:
    """The state, and the sentence for people; `blocked`: the stages that stop the run.

    warns: whether the sentence tells of trouble beside the state.
    """

    state: SwarmState
    sentence: str
    blocked: tuple[int, ...] = ()
    warns: bool = False

    @property
    def good(self) -> bool:
        """Whether the state needs nobody; what `warns` tells has an alert of its own."""
        return self.state in GOOD

    def warned(self, trouble: str) -> Health:
        """The same with this in its sentence."""
        return replace(self, sentence=f"{self.sentence}; {trouble}", warns=True)


def health_of(look: SwarmLook, history: SwarmHistory) -> Health:
    """The swarm's health; see the module's text for the states. The history remembers when the
    state was one in which no round can come: rounds are waited for from then on.
    """
    health = _state_of(look, history)
    if health.state not in IN_MOTION:
        history.held_at = look.at
    return health


def _state_of(look: SwarmLook, history: SwarmHistory) -> Health:
    view = SwarmView(me="", stages=look.stages, run_claims=look.claims.get(0, {}))
    if view.says_ended(look.manifest, look.witness):
        return Health("ended", "ended")
    if look.manifest.operation.state == "paused":
        health = Health("paused", "paused")
    elif look.reachable:
        health = _without_hosts(look, history) or _moving(look, history)
    else:
        since = clock(history.seen_at or history.watched_since)
        return Health("unreachable", f"unreachable: nobody answers since {since}")
    return health if any(look.bootstraps.values()) else health.warned(NO_BOOTSTRAP)


def _without_hosts(look: SwarmLook, history: SwarmHistory) -> Health | None:
    """What is said where a stage has no peer that could train."""
    stages = range(len(history.stages))
    present = [look.present(stage) for stage in stages]
    empty = tuple(n for n in stages if not any(each.can_train for each in present[n].values()))
    if not empty:
        return None
    claims = (claim for stage in stages for claim in look.claims.get(stage, {}).values())
    begun = any(each.rounds for each in history.stages) or any(each.round >= 0 for each in claims)
    if not begun and not any(present):
        return Health("waiting", "waiting for the first peers")
    bare = tuple(stage for stage in empty if not present[stage])
    if bare:
        has = "has" if len(bare) == 1 else "have"
        every = len(bare) == len(stages)
        no_peers = "no stage has a peer" if every else f"{_named(bare)} {has} no peer"
        return Health("blocked", f"blocked: {no_peers}", empty)
    return Health("waiting", f"waiting: the peers of {_named(empty)} are joining", empty)


def _moving(look: SwarmLook, history: SwarmHistory) -> Health:
    deadlines = look.manifest.deadlines
    # as planned: an attempt that grows to the longest exchange, eight times that, is worth a look
    patience_s = deadlines.matchmaking_s + 2 * (deadlines.exchange_s + deadlines.vote_s)
    limit_s = max(STALL_AT_LEAST_S, STALL_ROUNDS * _round_s(look, history) + patience_s)
    watched_since = history.watched_since
    # one stage that stands still is enough: the anchors of the others move away from it
    oldest = min(stage.progress_at or watched_since for stage in history.stages)
    # nobody could commit, or was seen to, before that
    oldest = max(oldest, watched_since, history.held_at or watched_since)
    if look.at - oldest <= limit_s:
        return Health("training", "training" if look.replicas else "training: replicas form")
    return Health("stalled", f"stalled since {clock(oldest)}")


def _round_s(look: SwarmLook, history: SwarmHistory) -> float:
    """How long a round takes: as those before, or as many inner steps as it has, as anybody says
    that leads a replica: that is not believed beyond some times those before.
    """
    usual = max(chain.usual_s for chain in history.stages)
    head = history.stages[0].head
    inner_steps = look.manifest.rounds.inner_steps if head is None else head.next_inner_steps
    steps = [finite(each.step_s) for each in look.replicas.values()]
    stated = inner_steps * (median(steps) if steps else 0.0)
    return max(usual, min(stated, MOST_LONGER * usual) if usual else stated)


def clock(seconds: float) -> str:
    """A time of day as sentences have it, from seconds since the epoch."""
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%H:%M UTC")


def _named(stages: Sequence[int]) -> str:
    if len(stages) == 1:
        return f"stage {stages[0]}"
    shown, more = [str(number) for number in stages[:MAX_NAMED]], len(stages) - MAX_NAMED
    last = f"{more} more" if more > 0 else shown.pop()
    return f"stages {', '.join(shown)} and {last}"

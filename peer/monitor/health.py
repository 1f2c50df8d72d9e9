"""How a swarm is, in one sentence: pure rules over what a monitor sees of it.

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
from typing import Literal, get_args

State = Literal["ended", "paused", "unreachable", "waiting", "blocked", "stalled", "training"]

STATES: tuple[State, ...] = get_args(State)
GOOD: tuple[State, ...] = ("ended", "paused", "training")
IN_MOTION: tuple[State, ...] = ("stalled", "training")  # in all others no round can come
STALL_ROUNDS = 3.0  # so many usual rounds without a commit are a stall
STALL_AT_LEAST_S = 60.0
MAX_NAMED = 4  # stages that a sentence names
NO_BOOTSTRAP = "no bootstrap answers: nobody can join"


@dataclass(frozen=True, kw_only=True)
class StageHealth:
    """One stage as the monitor sees it.

    hosts: peers that train or could. joining: peers that fetch state. progress_at: seconds since
    the epoch of its last new round record, None while it has none that the monitor saw come.
    """

    hosts: int
    joining: int
    rounds: int
    progress_at: float | None


@dataclass(frozen=True, kw_only=True)
class SwarmHealth:
    """What the sentence follows from.

    now, watched_since: seconds since the epoch; the monitor knows nothing from before the latter.
    held_at: the last time the state was one in which no round can come, None while it never was.
    round_s: how long a round takes, 0 while nothing tells. patience_s: of an exchange with all its
    deadlines. reachable: whether a peer or a bootstrap is to be seen.
    unreachable_since: the last time that one was. bootstraps: whether one of them answers.
    """

    now: float
    watched_since: float
    stages: Sequence[StageHealth]
    replicas: int
    round_s: float
    patience_s: float
    ended: bool = False
    paused: bool = False
    reachable: bool = True
    unreachable_since: float | None = None
    bootstraps: bool = True
    held_at: float | None = None


@dataclass(frozen=True)
class Health:
    """The state, and the sentence for people; `blocked`: the stages that stop the run.

    warns: whether the sentence tells of trouble beside the state.
    """

    state: State
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


def health_of(swarm: SwarmHealth) -> Health:
    """The swarm's health; see the module's text for the states."""
    if swarm.ended:
        return Health("ended", "ended")
    if swarm.paused:
        return _not_joinable(swarm, Health("paused", "paused"))
    if not swarm.reachable:
        since = swarm.unreachable_since or swarm.watched_since
        return Health("unreachable", f"unreachable: nobody answers since {clock(since)}")
    return _not_joinable(swarm, _without_hosts(swarm) or _moving(swarm))


def _not_joinable(swarm: SwarmHealth, health: Health) -> Health:
    return health if swarm.bootstraps else health.warned(NO_BOOTSTRAP)


def _without_hosts(swarm: SwarmHealth) -> Health | None:
    """What is said where a stage has no peer that could train."""
    empty = tuple(number for number, stage in enumerate(swarm.stages) if not stage.hosts)
    if not empty:
        return None
    none_at_all = len(empty) == len(swarm.stages)
    joining = sum(stage.joining for stage in swarm.stages)
    begun = any(stage.rounds for stage in swarm.stages)
    if none_at_all and not begun and not joining:
        return Health("waiting", "waiting for the first peers")
    bare = tuple(number for number in empty if not swarm.stages[number].joining)
    if bare:
        no_peers = "no stage has a peer" if len(bare) == len(swarm.stages) else _lacks(bare)
        return Health("blocked", f"blocked: {no_peers}", empty)
    return Health("waiting", f"waiting: the peers of {_named(empty)} are joining", empty)


def _moving(swarm: SwarmHealth) -> Health:
    limit_s = max(STALL_AT_LEAST_S, STALL_ROUNDS * swarm.round_s + swarm.patience_s)
    # one stage that stands still is enough: the anchors of the others move away from it
    oldest = min(stage.progress_at or swarm.watched_since for stage in swarm.stages)
    # nobody could commit, or was seen to, before that
    oldest = max(oldest, swarm.watched_since, swarm.held_at or swarm.watched_since)
    if swarm.now - oldest <= limit_s:
        return Health("training", "training" if swarm.replicas else "training: replicas form")
    return Health("stalled", f"stalled since {clock(oldest)}")


def clock(seconds: float) -> str:
    """A time of day as sentences have it, from seconds since the epoch."""
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%H:%M UTC")


def _lacks(stages: Sequence[int]) -> str:
    return f"{_named(stages)} {'has' if len(stages) == 1 else 'have'} no peer"


def _named(stages: Sequence[int]) -> str:
    if len(stages) == 1:
        return f"stage {stages[0]}"
    shown = [str(number) for number in stages[:MAX_NAMED]]
    if len(stages) > MAX_NAMED:
        return f"stages {', '.join(shown)} and {len(stages) - MAX_NAMED} more"
    return f"stages {', '.join(shown[:-1])} and {shown[-1]}"

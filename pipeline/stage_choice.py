"""Which stage a peer hosts: the one with the fewest peers, when it joins and now and then later.

What: `choose_stage` for a joiner; `Mover` tells a spare when it is its turn to move to the stage
that has the fewest peers.
Why: a run has as many replicas as its emptiest stage has peers. All see about the same records and
would move at once, leaving another stage empty, and then all move back.
How: from the same records every peer derives the same target and the same one mover, nobody moves
to a stage that somebody is just joining, a move must level the stages (two peers apart or more, so
the way back is never open), and all that must hold for several looks in a row. Progress that is in
no record stays behind with a move. So a peer with some waits until all of it was sent; but where a
stage has nobody nothing is sent any more, and after many looks it goes all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dilocox.dht.records import StageRecord
from dilocox.dht.swarm_view import own_order
from dilocox.pipeline.candidates import Records

LEVEL = 1  # stages whose peers differ by so many are level: a move would only swap them
HOLD_LOOKS = 3
LONG_LOOKS = 30  # with unsent progress: whoever left may only start again


def choose_stage(records: Records, *, me: str, num_stages: int) -> int:
    """The stage that a joiner takes: the one with the fewest live peers, nobody's first of all.

    records: by stage; a stage whose records are not known is missing, and is chosen only if
    nothing is known. Own old records do not count. Ties are broken by `me`.
    """
    known = [stage for stage in range(num_stages) if stage in records] or list(range(num_stages))
    return min(
        known,
        key=lambda stage: (
            sum(peer != me for peer in live_peers(records.get(stage, {}))),
            own_order(me, stage),
        ),
    )


def live_peers(here: Mapping[str, StageRecord]) -> tuple[str, ...]:
    """The peers of a stage that have not left it: joining, spare or training."""
    return tuple(sorted(peer for peer, record in here.items() if record.present))


def next_move(records: Records, *, num_stages: int, turn: int) -> tuple[str, int] | None:
    """The one peer of the swarm that moves now, and the stage it moves to; None if none should.

    It is a spare in no replica, without unsent progress, of the fullest stage that has one, at
    least two peers fuller than the emptiest stage; where that has nobody, and no such spare is
    there, one with such progress. Nobody moves while a stage is unknown.
    """
    if any(stage not in records for stage in range(num_stages)):
        return None
    counts = {stage: len(live_peers(records[stage])) for stage in range(num_stages)}
    target = min(counts, key=lambda stage: (counts[stage], stage))
    if any(record.state == "joining" for record in records[target].values()):
        return None
    free = [
        (bool(record.tokens), -counts[stage], own_order(peer, turn, target), peer)
        for stage in range(num_stages)
        if counts[stage] - counts[target] > LEVEL
        for peer, record in records[stage].items()
        if record.state == "spare" and not record.replica
        if not record.tokens or not counts[target]
    ]
    return (min(free)[3], target) if free else None


class Mover:
    """Tells one spare when to move; asked once at every look at the DHT.

    hold: looks in a row that must name this peer and the same target; long: of one with unsent
    progress. fits: whether this machine has room for a stage; asked at last, as that may take long.

    Attributes:
        named: whether the last look named this peer: soon it may have to move.
    """

    def __init__(
        self,
        *,
        me: str,
        stage: int,
        num_stages: int,
        hold: int = HOLD_LOOKS,
        long: int = LONG_LOOKS,
        fits: Callable[[int], bool] = lambda stage: True,
    ):
        self._me = me
        self._stage = stage
        self._num_stages = num_stages
        self._hold = hold
        self._long = long
        self._fits = fits
        self._target: int | None = None
        self._held = 0

    @property
    def named(self) -> bool:
        return self._target is not None

    def observe(
        self, records: Records, *, free: bool, turn: int, unsent: bool = False, fresh: bool = True
    ) -> int | None:
        """The stage to move to now, or None.

        free: whether this peer is a spare right now, in no replica and with no send under way, and
        unsent: whether it has unsent progress; what the records say of it is older. turn: a number
        that all peers count alike and that grows slowly, over many looks (the round, or run time in
        units of minutes): should the peer whose turn it is not be able to move, another has its
        turn later. fresh: whether the records are; nobody moves for what was long ago.
        """
        move = next_move(records, num_stages=self._num_stages, turn=turn) if free else None
        target = move[1] if move is not None and move[0] == self._me else None
        # Both would follow from an old record of its own under a stage that it has left.
        if target == self._stage or self._me not in records.get(self._stage, {}):
            target = None
        if unsent and target is not None and live_peers(records[target]):
            target = None
        self._held = self._held + 1 if target is not None and target == self._target else 1
        self._target = target
        due = fresh and self._held >= (self._long if unsent else self._hold)
        return target if due and target is not None and self._fits(target) else None

"""What the coordinator says of a send that is under way, with a chain that a test writes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dilocox.dht.identity import Identity
from dilocox.dht.manifest_sections import OuterSpec
from dilocox.dht.records import ClaimRecord, Record, StageRecord, stage_key
from dilocox.dht.swarm_view import SwarmView
from dilocox.peer.averaging.averager import Applied
from dilocox.peer.averaging.coordinator import Coordinator, WorkerThread
from dilocox.peer.averaging.events import Committed, Resynced
from dilocox.peer.averaging.loop_status import LoopStatus
from dilocox.peer.chain.chain_client import TakenState
from dilocox.peer.rounds.record import SendFacts
from dilocox.pipeline.stage_choice import Mover
from tests.clocks import TestClock
from tests.peer.kept_chains import ChainMaker, manifest_of
from tests.peer.local_peers import MANIFEST, RUN, local_peer
from tests.pipeline.swarms import stage_record

SENT = 5  # the round of the send
OLDER = SENT - 1
DISTANT = "QmOther"


class Sending:
    """The coordinator of a peer whose newest send is open; its looks at the DHT never end, and the
    group of its send meets in an hour, or met before a restart."""

    def __init__(
        self,
        identity: Identity,
        folder: Path,
        *,
        me: str = "",
        resumed: bool = False,
        **outer: Any,
    ):
        """me: if another peer than the one that is in the records."""
        run = replace(manifest_of(), outer=OuterSpec(**outer))
        self.donor = donor = ChainMaker(identity, folder, run)
        self.clock = TestClock()
        averager: Any = SimpleNamespace(
            apply=self._apply,
            encode=lambda plan, last: Future(),
            settle=lambda number, attempt: answered(None),
            fetch_state=lambda peers, wanted: answered("a file"),
            take_state=lambda found: answered(self._state()),
            is_alive=lambda: True,
            check_reach=lambda again: Future(),
        )
        self.looks = list[Callable[[], Any]]()  # at the DHT, that were to be made
        self.local = local = local_peer(
            me or donor.peer,
            manifest=run,
            layout=donor.layout,
            folder=donor.own,
            clock=self.clock,
            dht=SimpleNamespace(
                client_mode=False, running=True, bootstraps=(), local_network=False
            ),
        )

        def submit(look: Callable[[], Any]) -> Future[Any]:
            self.looks.append(look)
            return Future()

        def write(call: Any) -> Any:
            self.announced.append(call.args[0])
            return answered(0.0)

        self.announced = list[dict[str, Record]]()
        self.coordinator = Coordinator(
            local,
            averager,
            watch=cast(Any, SimpleNamespace(manifest=run, follow=lambda *_: False)),
            applied=-1,
            anchor_sha256="b" * 64,
            sent={SENT: 10} if resumed else {},
            reader=cast("WorkerThread", SimpleNamespace(submit=submit)),
            writer=cast("WorkerThread", SimpleNamespace(submit=write)),
        )
        if not resumed:
            meets_at = self.clock.now + 3600.0
            facts = SendFacts(tokens=10, step_s=0.5)
            self.coordinator.submit(SENT, facts, scheduled_at=meets_at, states_taken=0)
        self.tick()

    def tick(self) -> None:
        """The coordinator's thread goes on, as far as it can."""
        for _ in range(4):
            self.coordinator.tick()
            self.clock.now += 0.5

    def hear_of_record(self, round_number: int = OLDER) -> None:
        """A record comes; of the round before, this peer's send is not in it."""
        self.donor.train(round_number)
        self.coordinator.chain.committed(round_number, 1.0, None)
        self.tick()

    def hear_of_state(self) -> None:
        """Others are so far ahead that a state is fewer bytes than their records."""
        claim = ClaimRecord(round=OLDER, digest="d" * 64, chain_tokens=99, record_bytes=10**9)
        view = SwarmView(me=self.donor.peer, claims={DISTANT: claim})
        for _ in range(2):
            self.coordinator.chain.tick(view, exchanging=False)

    def end_round(self) -> Committed | Resynced:
        """The loop lends the anchor, and takes what comes, but for telling so."""
        self.coordinator.events.lease.offer()
        self.tick()
        event = self.coordinator.events.get()
        assert isinstance(event, Committed | Resynced)
        return event

    def _apply(self, round_number: int, *, with_own: bool) -> Any:
        assert with_own is (round_number == SENT)
        digest = self.donor.log.head().digest
        return answered(Applied(digest=digest, anchor_sha256="a" * 64, payload_bytes=1))

    def _state(self) -> TakenState:
        self.donor.train(OLDER)
        head = self.donor.log.head()
        return TakenState(
            round=head.round,
            digest=head.digest,
            anchor_sha256="a" * 64,
            chain_tokens=head.chain_tokens,
        )


def answered(answer: Any) -> Any:
    """What a call of the averaging process came to."""
    future: Future[Any] = Future()
    future.set_result(answer)
    return future


Hears = Callable[[Sending], None]
WAITS = pytest.mark.parametrize(
    "hears", [Sending.hear_of_record, Sending.hear_of_state], ids=["record", "state"]
)


@WAITS
@pytest.mark.parametrize("merge", ["rebase", "reset"])
def test_a_round_ends_with_a_newer_send_open_where_something_older_waits_for_its_end(
    identities: list[Identity], tmp_path: Path, hears: Hears, merge: str
) -> None:
    """The send's exchange waits for it, as it waits for the round's end, which never came."""
    peer = Sending(identities[0], tmp_path, merge=merge, apply="round_end")
    assert peer.coordinator.undecided, "and nothing waits"
    hears(peer)
    assert peer.coordinator.newest_round < SENT == peer.coordinator.driver.sent_round
    assert peer.coordinator.applying and not peer.coordinator.undecided
    event = peer.end_round()
    assert not peer.coordinator.undecided, "the loop has not taken it"
    event.taken.set()
    peer.tick()
    assert not peer.coordinator.applying and peer.coordinator.newest_round == OLDER
    # of a state the loop undoes its send; after a record that is to be decided yet
    assert peer.coordinator.undecided is isinstance(event, Committed)


@WAITS
@pytest.mark.parametrize(
    "outer",
    [{"apply": "arrival"}, {"merge": "none", "apply": "round_end"}],
    ids=["arrival", "none"],
)
def test_where_nothing_waits_for_its_end_a_round_waits_for_the_open_send(
    identities: list[Identity], tmp_path: Path, hears: Hears, outer: dict[str, Any]
) -> None:
    peer = Sending(identities[0], tmp_path, **outer)
    hears(peer)
    assert peer.coordinator.applying and peer.coordinator.undecided


def test_a_round_waits_for_a_send_that_is_not_handed_over_whatever_waits_for_its_end(
    identities: list[Identity], tmp_path: Path
) -> None:
    peer = Sending(identities[0], tmp_path, merge="rebase", apply="round_end")
    peer.hear_of_record()
    peer.coordinator.submit(
        SENT + 1, SendFacts(tokens=10), scheduled_at=peer.clock.now, states_taken=0
    )
    assert peer.coordinator.undecided
    peer.coordinator.tick()
    assert not peer.coordinator.undecided


def test_a_send_whose_record_waited_longer_than_anybody_is_asked_for_it_is_not_void(
    identities: list[Identity], tmp_path: Path
) -> None:
    """It was presumed void as its record was applied; that is what its peer told of itself."""
    peer = Sending(identities[0], tmp_path, resumed=True, apply="round_end")
    peer.hear_of_record(SENT)
    waits_until = peer.clock.now + 2 * peer.donor.manifest.deadlines.record_lifetime_s
    while peer.clock.now < waits_until:
        peer.tick()
    event = peer.end_round()
    event.taken.set()
    peer.tick()
    assert not peer.coordinator.undecided
    assert peer.coordinator.driver.voids == 0 and peer.coordinator.events.get() is None


def test_a_peer_of_a_listed_run_is_reminded_of_the_end_of_its_admission_at_each_look(
    identities: list[Identity], tmp_path: Path
) -> None:
    peer, reminded = Sending(identities[0], tmp_path), list[str]()
    swarm: Any = peer.local.swarm
    swarm.admission = SimpleNamespace(remind=reminded.append)
    swarm.bootstrap_answers = lambda _: True
    swarm.read_many = lambda keys, **_: dict.fromkeys(keys)
    peer.looks[0]()
    assert reminded == [peer.donor.peer]


# ---- looking at other stages --------------------------------------------------------------------
STAGES, PEERS_EACH = 3, 100


class Looking:
    """The coordinator of a peer in a swarm so large that other stages are seldom looked at."""

    def __init__(self, folder: Path, stage: int, mover: Mover | None = None):
        self.clock = TestClock()
        self.asked = Counter[str]()
        self.records: dict[str, dict[str, StageRecord]] = {
            stage_key(RUN, each): {
                f"{each}-{number}": stage_record(replica="h") for number in range(PEERS_EACH)
            }
            for each in range(STAGES)
        }
        self.records[stage_key(RUN, stage)]["me"] = stage_record()
        swarm = SimpleNamespace(
            read_many=self._read_many,
            bootstrap_answers=lambda limit_s: True,
            admission=None,
            refused=Counter(),
        )
        manifest = replace(MANIFEST, stages=STAGES)
        local = local_peer(
            stage=stage, manifest=manifest, swarm=swarm, folder=folder, clock=self.clock
        )
        at_once = cast("WorkerThread", SimpleNamespace(submit=lambda call: answered(call())))
        never = cast("WorkerThread", SimpleNamespace(submit=lambda call: Future()))
        self.coordinator = Coordinator(
            local,
            cast(
                Any,
                SimpleNamespace(
                    is_alive=lambda: True,
                    check_reach=lambda again: Future(),
                    encode=lambda plan, last: Future(),
                    exchange=lambda order: Future(),
                ),
            ),
            watch=cast(Any, SimpleNamespace(manifest=manifest, follow=lambda *_: False)),
            applied=-1,
            anchor_sha256="b" * 64,
            sent={},
            mover=mover,
            reader=at_once,
            writer=never,
        )

    def _read_many(self, keys: dict[str, Any], **_: Any) -> dict[str, Any]:
        self.asked.update(list(keys))
        return {key: dict(self.records.get(key, {})) for key in keys}

    def looks(self, seconds: int, *, at: int) -> int:
        """How often it asks for the peers of that stage."""
        before = self.asked[stage_key(RUN, at)]
        for _ in range(seconds):
            self.coordinator.tick()
            self.clock.now += 1.0
        return self.asked[stage_key(RUN, at)] - before


@pytest.mark.parametrize(("stage", "searches"), [(0, True), (1, False)])
def test_a_head_without_members_looks_who_is_in_the_other_stages_now(
    tmp_path: Path, stage: int, searches: bool
) -> None:
    peer = Looking(tmp_path, stage)
    peer.coordinator.status = LoopStatus(head="h", members=("me", "a", "b"))
    peer.looks(60, at=2)
    assert peer.looks(300, at=2) < 8
    peer.coordinator.status = LoopStatus(blocked="stage 2 has no free peer")
    assert (peer.looks(10, at=2) > 0) is searches
    assert (peer.looks(300, at=2) > 20) is searches


def test_who_is_to_move_looks_first_whether_it_still_should(tmp_path: Path) -> None:
    """It alone is free. Its own stage grows, and so has the emptiest one, since it was seen."""
    peer = Looking(tmp_path, 1, Mover(me="me", stage=1, num_stages=STAGES))
    peer.looks(60, at=2)
    own, other, last = (peer.records[stage_key(RUN, stage)] for stage in (1, 0, 2))
    more = {f"new-{number}": stage_record(replica="h") for number in range(9)}
    own |= more
    other |= more
    last |= more
    moves = list[int | None]()
    for _ in range(300):
        peer.looks(1, at=2)
        moves.append(peer.coordinator.move_to)
    assert set(moves) == {None}
    own |= {f"newer-{number}": stage_record(replica="h") for number in range(9)}
    peer.looks(300, at=2)
    assert peer.coordinator.move_to is not None


@pytest.mark.parametrize(("round_number", "lacks"), [(0, False), (SENT, True)])
def test_who_lacks_the_record_before_its_group_looks_for_it_until_the_group_is_over(
    tmp_path: Path, round_number: int, lacks: bool
) -> None:
    """Where rounds are shorter than a heartbeat it came after all others were further again."""
    peer = Looking(tmp_path, 0)
    peer.looks(2, at=0)
    meets_at, facts = peer.clock.now + 40.0, SendFacts(tokens=10, step_s=0.5)
    peer.coordinator.driver.submit(round_number, facts, scheduled_at=meets_at, states_taken=0)
    assert peer.looks(9, at=0) <= 3
    assert (peer.looks(34, at=0) > 16) is lacks
    peer.looks(10, at=0)
    assert peer.looks(60, at=0) <= 8, "the exchange may take hours"
    assert peer.coordinator.driver.exchanging


@pytest.mark.parametrize("apply", ["arrival", "round_end"])
@pytest.mark.parametrize("took_part", [True, False])
def test_who_was_in_a_record_claims_it_at_once(
    identities: list[Identity], tmp_path: Path, took_part: bool, apply: str
) -> None:
    """Who was not would hear of it with a heartbeat, and where rounds are short too late."""
    peer = Sending(identities[0], tmp_path, me="" if took_part else DISTANT, apply=apply)
    assert len(peer.announced) == 1
    peer.hear_of_record()
    told = [record for records in peer.announced[1:] for record in records.values()]
    assert [getattr(claim, "round", None) for claim in told] == [OLDER] * took_part

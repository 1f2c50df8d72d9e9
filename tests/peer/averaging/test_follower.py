"""What the follower of a chain hands to the training loop."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dilocox.dht.identity import Identity
from dilocox.dht.records import ClaimRecord
from dilocox.dht.rpc import PeerBusy, TooSlow
from dilocox.dht.swarm_view import SwarmView
from dilocox.peer.averaging.averager import AnchorLost, AnchorWrong, Applied
from dilocox.peer.averaging.events import Committed, EventQueue, Resynced
from dilocox.peer.averaging.follower import ChainFollower
from dilocox.peer.chain.chain_client import ChainEnd, NoState, Reached, TakenState, WantedState
from dilocox.peer.chain.fork_choice import Trust
from dilocox.peer.chain.header_client import CountedRounds
from dilocox.peer.rounds.record import RecordRefused
from tests.clocks import TestClock
from tests.peer.kept_chains import ChainMaker, manifest_of

STATE_BYTES = 1000
OTHER = "QmOther"


def answered(answer: Any) -> Any:
    """What a call of the averaging process came to."""
    future: Future[Any] = Future()
    if isinstance(answer, Exception):
        future.set_exception(answer)
    else:
        future.set_result(answer)
    return future


def follower(donor: ChainMaker, averager: Any, events: EventQueue, **facts: Any) -> ChainFollower:
    """The follower of a peer whose log is the donor's, with nothing merged yet."""
    local: Any = SimpleNamespace(
        me=donor.peer,
        open_log=lambda: donor.log,
        manifest=donor.manifest,
        layout=SimpleNamespace(numel=STATE_BYTES // 8),
        witness=facts.pop("witness", ""),
        dht=SimpleNamespace(bootstraps=()),
        clock=facts.pop("clock", TestClock()),
    )
    return ChainFollower(local, averager, events, applied=-1, anchor_sha256="b" * 64, **facts)


@pytest.mark.parametrize("sent", [None, 0])
def test_a_record_is_applied_when_the_loop_has_left_its_buffers(
    identities: list[Identity], tmp_path: Path, sent: int | None
) -> None:
    """And only while its own send is under way the message becomes what the record left of it."""
    donor = ChainMaker(identities[0], tmp_path, manifest_of())
    donor.train(0)

    applied = list[bool]()

    def apply(round_number: int, *, with_own: bool) -> Any:
        applied.append(with_own)
        digest = donor.log.head().digest
        return answered(Applied(digest=digest, anchor_sha256="a" * 64, payload_bytes=1))

    events = EventQueue()
    chain = follower(donor, SimpleNamespace(apply=apply), events)

    def tick() -> None:
        for _ in range(3):
            chain.tick(SwarmView(me=donor.peer), exchanging=False, sent_round=sent)

    tick()
    assert not applied
    assert chain.busy, "an exchange would read what is about to change"
    events.lease.offer()
    tick()
    assert applied == [sent == 0] and events.lease.leased
    event = events.get()
    assert isinstance(event, Committed)
    assert event.remainder == (sent == 0)
    logged = donor.log.read(0)
    assert logged is not None
    assert event.record == replace(logged, means=())


# ---- records, or a state -------------------------------------------------------------------------
@dataclass
class Behind:
    """A follower without a record, whose averager answers as it is told.

    asked: what it was asked to do, with the bytes that records may have or the state's round.
    donors: whom states were asked of, hurried: and whether a slow one was to be given up.
    """

    donor: ChainMaker
    answers: list[Any]
    asked: list[tuple[str, int | None]] = field(default_factory=list[tuple[str, "int | None"]])
    donors: list[str] = field(default_factory=list[str])
    hurried: list[bool] = field(default_factory=list[bool])
    clock: TestClock = field(default_factory=TestClock)
    events: EventQueue = field(default_factory=EventQueue)
    unsettled: tuple[int, ...] = ()
    back_to: list[int | None] = field(default_factory=list["int | None"])
    witness: str = ""
    wanted: WantedState = field(default_factory=WantedState)
    ends: list[ChainEnd | None] = field(default_factory=list["ChainEnd | None"])
    contributors: frozenset[str] = frozenset()  # to the record that the witness claims

    def __post_init__(self) -> None:
        averager = SimpleNamespace(
            apply=lambda number, *, with_own: self._ask("apply", number),
            catch_up=self._catch_up,
            fetch_state=self._fetch_state,
            contributors=lambda end: answered(self.contributors),
            take_state=lambda found: self._ask(found, None),
        )
        self.chain = follower(
            self.donor,
            averager,
            self.events,
            clock=self.clock,
            witness=self.witness,
            unsettled=lambda: self.unsettled,
        )

    def _catch_up(
        self, peers: Sequence[str], digest: str, *, limit_bytes: int | None, back_to: int | None
    ) -> Any:
        self.back_to.append(back_to)
        return self._ask("records", limit_bytes)

    def _fetch_state(self, peers: Sequence[str], wanted: WantedState) -> Any:
        self.wanted = wanted
        self.ends.append(wanted.end)
        self.hurried.append(wanted.hurry)
        self.donors.append(peers[0])
        return self._ask("state", wanted.after_round)

    def _ask(self, what: str, fact: int | None) -> Any:
        self.asked.append((what, fact))
        answer = self.answers.pop(0)
        return answered(answer() if callable(answer) else answer)

    def look(
        self,
        *,
        record_bytes: int = 100,
        rounds: int = 5,
        digest: str = "d" * 64,
        holders: tuple[str, ...] = (OTHER,),
        chain_tokens: int = 99,
    ) -> None:
        """Hear of a chain of so many rounds, begin, and take the answer; two seconds go by."""
        claim = ClaimRecord(
            round=rounds - 1,
            digest=digest,
            chain_tokens=chain_tokens,
            record_bytes=record_bytes,
        )
        self.view = SwarmView(me=self.donor.peer, claims=dict.fromkeys(holders, claim))
        for _ in range(2):
            self.chain.tick(self.view, exchanging=False)
        self.clock.now += 2.0


@pytest.fixture
def behind(identities: list[Identity], tmp_path: Path) -> Behind:
    return Behind(ChainMaker(identities[0], tmp_path, manifest_of()), [])


def nothing(**facts: Any) -> Reached:
    return replace(Reached(fork_round=None, too_far=False), **facts)


def test_records_are_taken_where_they_are_fewer_bytes_than_a_state(behind: Behind) -> None:
    behind.answers = [nothing()]
    behind.look(record_bytes=200, rounds=5)
    assert behind.asked == [("records", STATE_BYTES)]


def test_who_only_follows_says_once_that_it_catches_up(
    behind: Behind, caplog: pytest.LogCaptureFixture
) -> None:
    behind.answers = [nothing() for _ in range(6)]
    with caplog.at_level("INFO", logger="dilocox.peer.averaging.follower"):
        for rounds in (5, 10, 15, 200):
            behind.look(rounds=rounds, record_bytes=1)
        behind.chain.committed(0, 1.0, None)
        for rounds in (1, 5):
            behind.look(rounds=rounds, record_bytes=1)
    said = [record.getMessage().partition(" behind")[0] for record in caplog.records]
    assert said == [f"catching up: {count} rounds" for count in (5, 200)]
    assert len(behind.asked) == 6


def test_only_what_is_vouched_for_is_asked_for(identities: list[Identity], tmp_path: Path) -> None:
    behind = Behind(ChainMaker(identities[0], tmp_path, manifest_of()), [], witness="QmBoot")
    behind.look(holders=("QmStranger",))
    assert not behind.chain.behind(behind.view), "nothing may wait for it"
    behind.answers = [nothing()]
    behind.look(holders=("QmStranger", "QmBoot"))
    assert behind.asked == [("records", STATE_BYTES)]
    behind.answers = [ConnectionError("gone")]
    for _ in range(2):  # who contributed to it is asked first
        behind.look(record_bytes=201, holders=("QmStranger", "QmBoot"))
    end = behind.ends.pop()
    assert end is not None and (end.digest, end.teller) == ("d" * 64, "QmBoot")


def test_who_is_ahead_of_all_who_count_where_the_archive_stands_has_strayed(
    identities: list[Identity], tmp_path: Path
) -> None:
    behind = Behind(ChainMaker(identities[0], tmp_path, manifest_of()), [], witness="QmBoot")
    here = behind.chain.head
    ahead = ClaimRecord(round=0, digest="d" * 64, chain_tokens=99, record_bytes=1)
    ours = replace(ahead, digest=here.digest, chain_tokens=here.chain_tokens)

    def strays(**claims: ClaimRecord) -> dict[str, bool]:
        return behind.chain.strays(SwarmView(me=behind.donor.peer, claims=claims))

    assert strays(QmBoot=ours, other=ahead, third=ours) == {"other": False}
    assert not strays(QmBoot=ahead, other=ahead)
    assert not strays(other=ahead), "the archive is silent"


def test_a_state_is_taken_where_it_is_fewer_bytes_than_the_records(behind: Behind) -> None:
    behind.answers = [ConnectionError("gone"), ConnectionError("gone")]
    behind.look(record_bytes=201, rounds=5)
    behind.look(record_bytes=201, rounds=5)  # and looked for until it is there
    assert behind.asked == [("state", -1)] * 2


def test_rounds_without_a_record_cost_no_bytes(behind: Behind) -> None:
    """A run goes on behind the rounds that a rollback took back: of 200 there is one record."""
    behind.donor.train(0)
    behind.chain.committed(0, 1.0, None)
    behind.chain.applied = 0
    own = behind.donor.log.head().chain_tokens
    behind.answers = [nothing(), ConnectionError("gone")]
    behind.look(record_bytes=201, rounds=206, chain_tokens=2 * own)
    assert behind.asked == [("records", STATE_BYTES)]
    behind.look(record_bytes=201, rounds=206, chain_tokens=6 * own)
    assert behind.asked[1:] == [("state", 0)]


def test_where_no_state_would_help_the_records_are_taken_whatever_they_cost(
    behind: Behind,
) -> None:
    behind.answers = [NoState("none"), nothing(), nothing(), ConnectionError("gone")]
    for _ in range(3):
        behind.look(record_bytes=201, rounds=5)
    assert behind.asked == [("state", -1), ("records", None), ("records", None)]
    behind.clock.now += 30.0  # by now somebody may have one
    behind.look(record_bytes=201, rounds=5)
    assert behind.asked[3:] == [("state", -1)]


def test_a_claim_that_told_of_smaller_records_ends_in_a_state_or_in_records(
    behind: Behind,
) -> None:
    behind.answers = [nothing(costly=True), NoState("none"), nothing()]
    for _ in range(3):
        behind.look()
    assert behind.asked == [("records", STATE_BYTES), ("state", -1), ("records", None)]


def test_a_log_that_does_not_reach_back_makes_a_state_necessary(behind: Behind) -> None:
    behind.answers = [nothing(too_far=True), NoState("none"), NoState("none")]
    for _ in range(3):
        behind.look()
    assert [what for what, _ in behind.asked] == ["records", "state", "state"]


@pytest.mark.parametrize("forked", [True, False])
def test_who_lost_a_fork_begins_anew_where_nobody_has_a_state_yet(
    identities: list[Identity], tmp_path: Path, forked: bool
) -> None:
    """All others are asked before; the bootstrap, even if something of it was refused. Who only
    lacks records waits for a state: the weights of the beginning are what it has.

    Whom it asks is drawn: where that is the bootstrap three times before the other, what it claims
    is passed over for five minutes first.
    """
    behind = Behind(ChainMaker(identities[0], tmp_path, manifest_of()), [], witness="QmBoot")
    behind.contributors = frozenset({"QmTwo"})
    fork = nothing(fork_round=-1, fork_digest="d" * 64, chain_tokens=99)

    def answer() -> Reached | Exception:
        if behind.asked[-1][0] == "records":
            return fork if forked else nothing(too_far=True)
        return RecordRefused("cut off") if behind.donors[-1] == "QmBoot" else NoState("none")

    behind.answers = [answer] * 1800
    asked = list[tuple[str, bool]]()
    while behind.clock.now < 3600.0 and ("QmBoot", True) not in asked:
        behind.look(holders=("QmBoot", "QmTwo"))
        if behind.donors:
            asked.append((behind.donors[-1], behind.wanted.or_initial))
    wanting = [number for number, (_, or_initial) in enumerate(asked) if or_initial]
    assert bool(wanting) is forked
    if forked:
        assert {donor for donor, _ in asked[: wanting[0] + 1]} == {"QmBoot", "QmTwo"}
        assert ("QmBoot", True) in asked


@pytest.mark.parametrize("kept", [3, 2], ids=["from the first record on", "with a gap"])
def test_who_was_killed_while_it_took_records_again_begins_once_more(
    behind: Behind, kept: int
) -> None:
    """Its log was pruned and its snapshot is of the beginning. But who fails at the first record
    makes other initial weights than the run has: they would fail again."""
    behind.donor.train(0, 1, 2)
    behind.donor.log.prune(kept)
    behind.witness = "QmBoot"
    behind.__post_init__()
    behind.answers = [AnchorWrong("another anchor")] + [NoState("none")] * 9
    behind.events.lease.offer()
    for _ in range(4):
        behind.look(holders=("QmBoot",))
    assert {what for what, _ in behind.asked[1:]} == {"state"}
    assert behind.wanted.or_initial is (kept == 2)


@pytest.mark.parametrize("digest", ["9" * 64, "8" * 64], ids=["of the walk", "of another chain"])
def test_who_takes_a_state_to_save_bytes_hears_from_the_headers_what_became_of_its_sends(
    behind: Behind, digest: str
) -> None:
    told = CountedRounds(after=-1, named=frozenset({2, 4}), rounds={"9" * 64: 3, "d" * 64: 4})
    state = TakenState(
        round=3,
        digest=digest,
        anchor_sha256="a" * 64,
        chain_tokens=9,
    )
    behind.unsettled = (2, 1)
    behind.answers = [nothing(costly=True, told=told), "its file"]
    for _ in range(2):
        behind.look(record_bytes=201, rounds=5)
    behind.answers = [state]
    behind.events.lease.offer()
    for _ in range(2):
        behind.chain.tick(behind.view, exchanging=False)
    assert behind.asked == [("records", STATE_BYTES), ("state", -1), ("its file", None)]
    assert behind.back_to == [1]
    event = behind.events.get()
    assert isinstance(event, Resynced)
    if digest == "8" * 64:
        assert event.told is None
    else:
        assert event.told is not None and event.told.named == {2}, "what the state holds"


# ---- whom to doubt -------------------------------------------------------------------------------
def test_a_record_that_nobody_gives_is_looked_for_no_longer_than_a_record_lives(
    behind: Behind,
) -> None:
    behind.answers = [RecordRefused("nonsense")] * 40
    for _ in range(40):
        behind.look()
    assert 15 <= len(behind.asked) <= 17


def test_a_peer_that_is_busy_is_doubted_only_after_ten_times_as_long(behind: Behind) -> None:
    behind.answers = [PeerBusy("later")] * 200
    for _ in range(200):
        behind.look()
    assert 150 <= len(behind.asked) <= 152


@pytest.mark.parametrize("error", [ConnectionError("it stalled"), PeerBusy("later")], ids=repr)
def test_a_state_that_breaks_off_says_nothing_of_the_claim(
    behind: Behind, error: Exception
) -> None:
    """Who gave it up would begin to train from the seed, in a replica of trained stages."""
    behind.answers = [nothing(too_far=True)] + [error] * 160
    for _ in range(161):
        behind.look()
        assert behind.chain.behind(behind.view)
    assert [what for what, _ in behind.asked] == ["records"] + ["state"] * 160


def test_a_claim_whose_states_are_wrong_is_given_up_and_another_one_needs_none(
    behind: Behind,
) -> None:
    behind.answers = [nothing(too_far=True)] + [RecordRefused("nonsense")] * 40
    for _ in range(40):
        behind.look()
    assert 5 <= len(behind.asked) <= 7 and not behind.chain.behind(behind.view)
    behind.answers = [nothing()]
    behind.look(digest="e" * 64)
    assert behind.asked[-1] == ("records", STATE_BYTES)


def test_one_donor_of_wrong_states_is_passed_over_and_the_claim_stands(behind: Behind) -> None:

    def given() -> Exception:
        lies = behind.donors[-1] == OTHER
        return RecordRefused("nonsense") if lies else ConnectionError("it stalled")

    behind.answers = [nothing(too_far=True)] + [given] * 300
    behind.look(holders=(OTHER, "honest"))
    while behind.donors.count(OTHER) == 0:
        behind.look(holders=(OTHER, "honest"))
    behind.answers = [ConnectionError("it stalled")] * 160
    for _ in range(160):
        behind.look(holders=(OTHER, "honest"))
        assert behind.chain.behind(behind.view)
    assert behind.donors.count(OTHER) == 1
    behind.answers = [RecordRefused("nonsense")] * 40  # who lied is asked where nobody else is left
    for _ in range(40):
        behind.look()
    assert behind.donors.count(OTHER) >= 3 and not behind.chain.behind(behind.view)


@pytest.mark.parametrize(
    "error, records, lied",
    [
        (AnchorWrong, 0, True),
        (AnchorWrong, 1, True),
        (AnchorWrong, 2, False),
        (AnchorLost, 0, False),
    ],
)
def test_whose_state_the_next_two_records_do_not_fit_is_asked_where_nobody_else_is_left(
    behind: Behind, error: type[Exception], records: int, lied: bool
) -> None:
    """The first one names the anchor before it, the second what the momentum made of that."""
    donors = ("honest", OTHER)
    taken = SimpleNamespace(round=5, digest="5" * 64, anchor_sha256="a" * 64)
    behind.answers = [nothing(too_far=True), SimpleNamespace(), taken]
    behind.events.lease.offer()
    for _ in range(4):
        behind.look(holders=donors)
    assert behind.chain.states_taken == 1
    event = behind.events.get()
    assert isinstance(event, Resynced)
    event.taken.set()
    (liar,) = behind.donors
    behind.chain.since_state = records
    behind.answers = [error("of another anchor"), *[ConnectionError("it stalled")] * 60]
    for _ in range(30):
        behind.look(holders=donors)
    # before its state proved to be false it may have been asked for one more
    assert len(behind.donors) > 20 and (behind.donors.count(liar) <= 2) == lied


def test_who_joins_takes_the_state_of_those_who_contributed_to_what_is_vouched_for(
    identities: list[Identity], tmp_path: Path
) -> None:
    """Anybody can claim a record that others made, and nobody can check the newest state."""
    behind = Behind(ChainMaker(identities[0], tmp_path, manifest_of()), [], witness="boot")
    behind.contributors = frozenset({"member"})
    strangers = [f"echo {place}" for place in range(12)]
    behind.answers = [nothing(too_far=True)] + [ConnectionError("it stalled")] * 60
    for _ in range(40):
        behind.look(holders=(*strangers, "member", "boot"))
    assert set(behind.donors) == {"member", "boot"}
    behind.contributors = frozenset()  # the witness did not say: then it gives the state itself
    behind.donors.clear()
    for _ in range(9):
        behind.look(digest="e" * 64, holders=(*strangers, "boot"))
    assert set(behind.donors) == {"boot"}


def test_a_slow_donor_is_left_for_others_until_none_is_faster(behind: Behind) -> None:
    donors = (OTHER, "second", "third")
    behind.answers = [nothing(too_far=True)] + [TooSlow("9 bytes/s")] * 3
    for _ in range(4):
        behind.look(holders=donors)
    assert sorted(behind.donors) == sorted(donors) and all(behind.hurried)
    behind.answers = [ConnectionError("it stalled")] * 20
    for _ in range(20):
        behind.look(holders=donors)
    assert not any(behind.hurried[3:]), "the slowest way is better than none"
    behind.answers = [ConnectionError("it stalled")]
    behind.look(holders=(*donors, "fourth"))
    assert (behind.donors[-1], behind.hurried[-1]) == ("fourth", True)


def test_a_bootstrap_that_is_busy_does_not_keep_a_joiner_from_the_others(
    identities: list[Identity], tmp_path: Path
) -> None:
    """It was asked every time, once anybody had given nothing: strangers may hold its places."""
    behind = Behind(ChainMaker(identities[0], tmp_path, manifest_of()), [], witness="QmBoot")
    behind.contributors = frozenset({"QmOne", "QmTwo"})
    behind.answers = [nothing(too_far=True), NoState("none")] + [PeerBusy("later")] * 40
    for _ in range(42):
        behind.look(holders=("QmOne", "QmTwo", "QmBoot"))
    counts = {donor: behind.donors.count(donor) for donor in behind.donors}
    assert counts["QmBoot"] > 0 and counts["QmOne"] + counts["QmTwo"] > 2


def test_who_has_one_donor_is_in_no_hurry(behind: Behind) -> None:
    behind.answers = [nothing(too_far=True), ConnectionError("it stalled")]
    for _ in range(2):
        behind.look()
    assert behind.hurried == [False]


def test_records_that_came_before_the_rest_was_cut_off_count(behind: Behind) -> None:
    """The exchange and the next walk go on from them."""

    def some() -> Exception:
        behind.donor.train(0)
        return ConnectionError("cut off")

    behind.answers = [some]
    behind.look()
    assert behind.chain.head.round == 0
    assert behind.chain.last_record is not None


def test_a_crowd_of_claims_is_not_reckoned_with_each_tick(
    identities: list[Identity], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the most keys that a node keeps it takes half the time of a core, ten times a second."""
    donor = ChainMaker(identities[0], tmp_path, manifest_of())
    counting, calls = Trust.counting, list[float]()

    def counted(*arguments: Any, **named: Any) -> SwarmView:
        calls.append(clock.now)
        return counting(*arguments, **named)

    monkeypatch.setattr(Trust, "counting", counted)
    clock = TestClock()
    chain = follower(donor, SimpleNamespace(), EventQueue(), witness="QmWitness", clock=clock)
    claim = ClaimRecord(round=0, digest="d" * 64, chain_tokens=99, record_bytes=1)
    view = SwarmView(me=donor.peer, claims={f"Qm{n}": claim for n in range(8192)})
    for _ in range(20):
        chain.tick(view, exchanging=False)
        assert not chain.behind(view)
        clock.now += 0.1
    assert 2 <= len(calls) <= 3
    chain.tick(replace(view, claims={}), exchanging=False)
    assert len(calls) <= 4, "the next look is reckoned at once"

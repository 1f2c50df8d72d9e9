"""A stage's chain from one peer: what is asked for, in which order, and when the walk ends."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dilocox.dht.identity import Identity
from dilocox.dht.rpc import CallRefused
from dilocox.peer.chain.chain_client import (
    ChainClient,
    ChainEnd,
    Limits,
    NoState,
    Reached,
    StateFile,
    TakenState,
    WantedState,
)
from dilocox.peer.chain.record_check import RecordCheck
from dilocox.peer.chain.snapshot_files import STATE_FACTS_FILE
from dilocox.peer.chain.store import RoundLog
from dilocox.peer.chain.uploads import Source, find_in_log, open_state
from dilocox.peer.rounds.record import RecordRefused, parse_header
from tests.peer.kept_chains import RUN, ChainMaker
from tests.peer.memory_swarm import MemorySwarm

PEER = "QmPeer"


class Joiner:
    """One with an empty log, and a peer that has a maker's log."""

    def __init__(self, maker: ChainMaker, folder: Path):
        self.maker = maker
        self.swarm = MemorySwarm(QmPeer=maker.find)
        self.check = RecordCheck(RUN, 0, maker.manifest, maker.layout)
        self.log = RoundLog(folder, manifest_digest=maker.manifest.root, codec=maker.codec)

    def chain(self, **options: Any) -> ChainClient:
        client = self.swarm.client(self.check.record_bytes)
        return ChainClient(client, self.check, [PEER], **options)

    def go(
        self, limit_bytes: int | None = None, digest: str = "", *, of: Any = None, **options: Any
    ) -> Reached:
        self.swarm.asked.clear()
        digest = digest or self.maker.digests[-1]
        walk = (of or self.chain()).catch_up(self.log, digest, limit_bytes=limit_bytes, **options)
        return asyncio.run(walk)

    def taken(self, folder: Path) -> TakenState:
        anchor, momentum = (torch.zeros(self.maker.layout.numel) for _ in range(2))
        found = asyncio.run(self.chain().state(PEER, folder, self.log, WantedState()))
        return found.load(anchor, momentum, self.log, self.check)

    @property
    def headers(self) -> list[int]:
        """Rounds of the headers that were given."""
        return self._rounds(self.swarm.asked_for("record", header=True))

    @property
    def records(self) -> list[int]:
        """Rounds of the records that were given."""
        return self._rounds(self.swarm.asked_for("record"))

    def _rounds(self, digests: list[str]) -> list[int]:
        found = (self.maker.log.find(digest) for digest in digests)
        return [number for number in found if number is not None]


def test_records_come_after_their_headers_and_the_oldest_first(
    maker: ChainMaker, tmp_path: Path
) -> None:
    maker.train(0, 1, 2)
    joiner = Joiner(maker, tmp_path / "log")
    joiner.go()
    assert joiner.log.rounds() == [0, 1, 2]
    assert (joiner.headers, joiner.records) == ([2, 1, 0], [0, 1, 2])
    assert joiner.log.head().digest == maker.digests[-1]


def test_a_log_that_does_not_reach_back_costs_headers_only(
    maker: ChainMaker, tmp_path: Path
) -> None:
    maker.train(0, 1, 2, 3)
    maker.log.prune(3)
    joiner = Joiner(maker, tmp_path / "log")
    assert joiner.go().too_far
    assert (joiner.headers, joiner.records) == ([3, 2, 1], [])


def test_records_that_would_be_more_bytes_than_they_may_be_are_not_fetched(
    maker: ChainMaker, tmp_path: Path
) -> None:
    maker.train(0, 1, 2, 3)
    joiner = Joiner(maker, tmp_path / "log")
    total = sum(entry.record_bytes for entry in maker.log.entries())
    reached = joiner.go(limit_bytes=total - 1)
    assert (reached.costly, reached.too_far, joiner.log.rounds()) == (True, False, [])
    assert joiner.records == []
    newest = maker.log.newest()
    assert newest is not None
    assert joiner.go(limit_bytes=newest.record_bytes).costly
    assert joiner.headers == [3, 2]  # the others would change nothing
    joiner.go(limit_bytes=total)
    assert joiner.log.rounds() == [0, 1, 2, 3]


def test_headers_that_take_long_are_no_fault_of_the_chain(
    maker: ChainMaker, tmp_path: Path
) -> None:
    """Of 250 rounds over a long way: it was ignored, and a peer that came back went on alone."""
    now = [0.0]
    maker.train(*range(8))
    joiner = Joiner(maker, tmp_path / "log")

    async def pass_by(_: str, want: dict[str, Any]) -> None:
        now[0] += 25.0 * bool(want.get("header"))

    joiner.swarm.before = pass_by
    reached = joiner.go(of=joiner.chain(now=lambda: now[0]), limit_bytes=1 << 40)
    assert reached.costly and joiner.headers == [7, 6, 5], "a state would be quicker"
    # where only records will do
    assert joiner.go(of=joiner.chain(now=lambda: now[0])).arrived
    assert joiner.log.rounds() == list(range(8))


def test_headers_say_which_records_count_a_peer_though_the_records_cost_too_much(
    maker: ChainMaker, tmp_path: Path, identities: list[Identity]
) -> None:
    maker.train(0, 1, 2, 3)
    joiner = Joiner(maker, tmp_path / "log")
    newest = maker.log.newest()
    assert newest is not None
    member = maker.peer
    for back_to, asked in ((None, [3, 2]), (1, [3, 2, 1]), (-1, [3, 2, 1, 0])):
        reached = joiner.go(limit_bytes=newest.record_bytes, back_to=back_to, me=member)
        assert reached.costly and joiner.headers == asked and joiner.records == []
        assert reached.told is not None and reached.told.named == set(asked)
        assert reached.told.after == asked[-1] - 1
    stranger = joiner.go(limit_bytes=1, back_to=-1, me=identities[2].peer_id)
    assert stranger.told is not None and stranger.told.named == frozenset()
    # of a log that does not reach back it is told as far as it reaches
    maker.log.prune(2)
    assert maker.log.rounds() == [2, 3]
    far = joiner.go(me=member)
    assert far.too_far and far.told is not None and (far.told.after, far.told.named) == (1, {2, 3})


def test_a_chain_whose_rounds_do_not_fall_is_refused_at_once(
    maker: ChainMaker, tmp_path: Path
) -> None:
    maker.train(0, 1, 2, change=lambda record: replace(record, round=7))
    joiner = Joiner(maker, tmp_path / "log")
    with pytest.raises(RecordRefused, match="round 7 comes before round 7"):
        joiner.go()
    assert len(joiner.swarm.asked) == 2


def test_rounds_that_fall_below_the_first_one_are_refused(
    maker: ChainMaker, tmp_path: Path
) -> None:
    maker.train(0, 1, change=lambda record: replace(record, round=record.round - 1))
    joiner = Joiner(maker, tmp_path / "log")
    with pytest.raises(CallRefused, match="greater than or equal to 0"):
        joiner.go()
    assert joiner.records == []


@pytest.mark.parametrize("missing", ["record", "certificate"])
def test_another_record_and_a_missing_certificate_are_refused_records(
    maker: ChainMaker, tmp_path: Path, missing: str
) -> None:
    """Not frames: an operator's metric tells the two apart."""
    maker.train(0, 1)
    joiner = Joiner(maker, tmp_path / "log")
    joiner.swarm.finds[PEER] = lambda want: maker.find_all_but(missing, want)
    with pytest.raises(RecordRefused):
        joiner.go()


def test_what_is_cut_off_goes_on_where_it_was(maker: ChainMaker, tmp_path: Path) -> None:
    maker.train(0, 1, 2, 3)
    joiner = Joiner(maker, tmp_path / "log")

    async def cut(_: str, want: dict[str, Any]) -> None:
        if want["what"] == "certificate" and joiner.records == [0, 1]:
            raise ConnectionError("gone")

    joiner.swarm.before = cut
    with pytest.raises(ConnectionError):
        joiner.go()
    assert joiner.log.rounds() == [0]  # the certificate of the second one did not come
    joiner.swarm.before = None
    joiner.go()
    assert joiner.log.rounds() == [0, 1, 2, 3]
    assert joiner.records == [1, 2, 3]


def test_a_header_that_lies_about_what_is_before_it_leads_nowhere(
    maker: ChainMaker, tmp_path: Path
) -> None:
    maker.train(0, 1, 2)
    joiner = Joiner(maker, tmp_path / "log")
    root, (before, newest) = maker.manifest.root, maker.digests[-2:]

    def lie(want: dict[str, Any]) -> Source | None:
        found = maker.find(want)
        if found is None or not want.get("header"):
            return found
        with found as source:
            return Source.of(source.file.read().replace(before.encode(), root.encode()))

    joiner.swarm.finds[PEER] = lie
    with pytest.raises(RecordRefused):
        joiner.go(digest=newest)
    assert joiner.log.rounds() == []


@pytest.mark.parametrize("fork", [False, True])
def test_one_liar_ends_nobodys_chain(maker: ChainMaker, tmp_path: Path, fork: bool) -> None:
    """By a header that names no record before it, or one that the asker has left behind."""
    maker.train(0, 1)
    joiner = Joiner(maker, tmp_path / "log")
    joiner.go()
    maker.train(2)
    named = maker.manifest.root if fork else "f" * 64

    def lie(want: dict[str, Any]) -> Source | None:
        found = maker.find(want)
        if found is None or not want.get("header"):
            return found
        with found as source:
            return Source.of(source.file.read().replace(maker.digests[-2].encode(), named.encode()))

    joiner.swarm.finds[PEER] = lie
    reached = joiner.go()
    assert (reached.too_far, reached.fork_round) == ((False, -1) if fork else (True, None))
    joiner.swarm.finds["QmKnown"] = maker.find
    assert joiner.go(second=["QmGone"]) == reached, "the other one does not answer"
    assert joiner.go(second=["QmKnown"]).arrived
    assert joiner.log.rounds() == [0, 1, 2]


@pytest.mark.parametrize("slow", ["header", "record", "certificate"])
def test_a_peer_that_never_ends_its_answer_is_given_up(
    maker: ChainMaker, tmp_path: Path, slow: str
) -> None:
    maker.train(0)
    joiner = Joiner(maker, tmp_path / "log")
    deadlines = replace(maker.manifest.deadlines, exchange_s=0.2)
    joiner.check = replace(joiner.check, manifest=replace(maker.manifest, deadlines=deadlines))

    async def forever(_: str, want: dict[str, Any]) -> None:
        if slow == ("header" if want.get("header") else want["what"]):
            await asyncio.sleep(3600)

    joiner.swarm.before = forever
    limits = Limits(headers_s=0.2 if slow == "header" else 60.0, stall_s=0.2)
    with pytest.raises(asyncio.TimeoutError):
        joiner.go(of=joiner.chain(limits=limits))


def test_a_walk_ends_between_two_records_when_its_time_is_over(
    maker: ChainMaker, tmp_path: Path
) -> None:
    now = [0.0]
    maker.train(0, 1, 2)
    joiner = Joiner(maker, tmp_path / "log")

    async def pass_by(_: str, want: dict[str, Any]) -> None:
        now[0] += 601.0 * (want["what"] == "certificate")

    joiner.swarm.before = pass_by
    with pytest.raises(asyncio.TimeoutError):
        joiner.go(of=joiner.chain(now=lambda: now[0]))
    assert joiner.log.rounds() == [0]


def test_a_state_that_stops_coming_is_no_fault_of_the_disk(
    maker: ChainMaker, tmp_path: Path
) -> None:
    """asyncio's TimeoutError is an OSError, too."""
    maker.train(0)
    maker.snapshot()
    joiner = Joiner(maker, tmp_path / "log")

    async def stall(_: str, want: dict[str, Any]) -> None:
        if "sha256" in want:
            raise asyncio.TimeoutError

    joiner.swarm.before = stall
    with pytest.raises(asyncio.TimeoutError):
        joiner.taken(tmp_path)


@pytest.mark.parametrize(
    "lie", [{"size": 1 << 40}, {"size": 0}, {"size": "8"}, {"sha256": "../" + "0" * 61}]
)
def test_an_offer_of_a_state_that_cannot_be_costs_no_byte_of_it(
    maker: ChainMaker, tmp_path: Path, lie: dict[str, Any]
) -> None:
    maker.train(0)
    maker.snapshot()
    joiner = Joiner(maker, tmp_path / "log")

    def lying(want: dict[str, Any]) -> Source | None:
        found = maker.find(want)
        return None if found is None else Source(found.facts | lie, found.file)

    joiner.swarm.finds[PEER] = lying
    with pytest.raises(CallRefused):
        joiner.taken(tmp_path)
    assert [want["what"] for _, want in joiner.swarm.asked] == ["state"]


def test_an_offer_that_comes_with_a_body_costs_no_byte_of_it(
    maker: ChainMaker, tmp_path: Path
) -> None:
    """It would be in memory: 8 bytes a parameter."""
    maker.train(0)
    maker.snapshot()
    joiner = Joiner(maker, tmp_path / "log")

    def lying(want: dict[str, Any]) -> Source | None:
        found = maker.find(want)
        if found is None or want["what"] != "state":
            return found
        found.file.seek(0)
        return Source(found.facts | {"bytes": found.facts["size"]}, found.file)

    joiner.swarm.finds[PEER] = lying
    with pytest.raises(ConnectionError, match="at most 0 are due"):
        joiner.taken(tmp_path)


def test_a_download_that_broke_off_goes_on_with_who_has_the_same_state(
    maker: ChainMaker, tmp_path: Path
) -> None:
    """Snapshots are of other rounds: with anybody else it would begin anew, of gigabytes."""
    maker.train(0, 1)
    joiner, kept = Joiner(maker, tmp_path / "log"), tmp_path / "kept"
    old = maker.snapshot(kept)
    maker.train(2)
    maker.snapshot()

    def same(want: dict[str, Any]) -> Source | None:
        return open_state(kept, want) if want["what"] == "state" else maker.find(want)

    joiner.swarm.finds["QmSame"] = same
    sha256 = json.loads((old / STATE_FACTS_FILE).read_text())["sha256"]

    def taken(after_round: int) -> tuple[str, int]:
        (tmp_path / "states").mkdir(exist_ok=True)
        (tmp_path / "states" / f"{sha256}.state").write_bytes(b"")
        chain = joiner.chain()
        chain.holders = [PEER, "QmGone", "QmSame"]
        wanted = WantedState(after_round=after_round)
        taking = chain.state(PEER, tmp_path / "states", joiner.log, wanted)
        offer = asyncio.run(taking).offer
        return offer.peer, offer.round

    assert taken(-1) == ("QmSame", 1)
    assert taken(1) == (PEER, 2), "that one is too old by now"


@pytest.mark.parametrize("young", [True, False])
def test_who_must_leave_its_chain_begins_anew_where_the_other_one_is_too_young_for_a_state(
    identities: list[Identity], maker: ChainMaker, tmp_path: Path, young: bool
) -> None:
    """It waited for ever, and the others for it: who vouches for that chain may be alone on it."""
    lost = ChainMaker(identities[1], tmp_path / "lost", maker.manifest)
    lost.train(0, 1)
    maker.train(0, 1, 2)
    if not young:  # what leads from the first round is gone by now
        maker.log.prune(2)
    joiner = Joiner(maker, tmp_path / "log")
    joiner.log = lost.log
    end = ChainEnd(digest=maker.digests[-1], round=2, teller=PEER)

    def state(**facts: Any) -> StateFile:
        wanted = WantedState(**{"end": end, "or_initial": True} | facts)
        return asyncio.run(joiner.chain().state(PEER, tmp_path / "states", joiner.log, wanted))

    for facts in ({"or_initial": False}, {"end": replace(end, teller="QmOther")}, {"end": None}):
        with pytest.raises(NoState, match="has no state"):
            state(**facts)
    before = joiner.log.rounds()
    if not young:
        with pytest.raises(NoState, match="do not lead from the initial weights on"):
            state()
        assert joiner.log.rounds() == before and not list((tmp_path / "states").iterdir())
        return
    joiner.swarm.before = breaking_off = Breaking(after=5)
    with pytest.raises(ConnectionError, match="broke off"):
        state()
    assert joiner.log.rounds() == before, "it has its own chain until all of the other one is here"
    breaking_off.after = 100
    maker.snapshot()  # one that will not do now is no reason to begin anew
    with pytest.raises(NoState, match="nobody vouches yet for round 2"):
        state(end=replace(end, digest=maker.digests[2], round=1))
    shutil.rmtree(maker.own / "snapshots")
    found, anchor = state(), torch.ones(maker.layout.numel)
    momentum = torch.ones_like(anchor)
    taken = found.load(anchor, momentum, joiner.log, joiner.check)
    assert (taken.round, taken.digest, taken.chain_tokens) == (-1, maker.manifest.root, 0)
    assert taken.anchor_sha256 == maker.anchors[0] and not momentum.any()
    assert joiner.log.rounds() == [0, 1, 2] and joiner.log.head().digest == end.digest
    assert not list((tmp_path / "states").iterdir())


@dataclass
class Breaking:
    """Lines that break off after so many calls."""

    after: int

    async def __call__(self, _peer: str, _want: dict[str, Any]) -> None:
        self.after -= 1
        if self.after < 0:
            raise ConnectionError("it broke off")


# ---- serving -------------------------------------------------------------------------------------
def test_a_state_must_lead_to_what_is_vouched_for(maker: ChainMaker, tmp_path: Path) -> None:
    maker.train(0, 1, 2, 3)
    joiner = Joiner(maker, tmp_path / "log")
    joiner.swarm.finds["QmWitness"] = maker.find
    digests = maker.digests[1:]

    def check(round_number: int, digest: str, end_round: int) -> None:
        offer: Any = SimpleNamespace(round=round_number, digest=digest, peer="QmLiar")
        end = ChainEnd(digest=digests[end_round], round=end_round, teller="QmWitness")
        asyncio.run(joiner.chain().check_leads_to(end, offer))

    check(3, digests[3], 3)
    check(1, digests[1], 3)
    assert {peer for peer, _ in joiner.swarm.asked} == {"QmWitness"}, "a liar's word proves nothing"
    with pytest.raises(NoState, match="nobody vouches yet for round 3"):
        check(3, digests[3], 2)
    with pytest.raises(CallRefused, match="a chain that nobody vouches for"):
        check(1, "f" * 64, 3)
    with pytest.raises(CallRefused, match="a chain that nobody vouches for"):
        check(-1, "f" * 64, 3)
    maker.log.prune(2)
    with pytest.raises(NoState, match="is unknown"):
        check(0, digests[0], 3)

    async def late(_: str, want: dict[str, Any]) -> None:
        await asyncio.sleep(0.2)

    joiner.swarm.before = late
    end = ChainEnd(digest=digests[3], round=3, teller="QmWitness")
    offer: Any = SimpleNamespace(round=2, digest="e" * 64, peer="QmLiar")
    walk = joiner.chain(limits=Limits(all_headers_s=0.3)).check_leads_to(end, offer)
    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(walk)


def test_of_a_record_only_the_header_is_read_where_that_is_wanted(maker: ChainMaker) -> None:
    maker.train(0)
    entry = maker.log.newest()
    assert entry is not None
    served = find_in_log(maker.log, "record", entry.digest, header=True)
    assert served is not None
    with served as source:
        data = source.file.read()
    assert source.facts == {"bytes": len(data)}
    assert len(data) < entry.record_bytes / 4
    assert parse_header(data) == entry.header()


def test_a_record_is_served_from_its_file(maker: ChainMaker) -> None:
    maker.train(0)
    entry = maker.log.newest()
    assert entry is not None
    served = find_in_log(maker.log, "record", entry.digest)
    assert served is not None
    with served as source:
        assert source.file.fileno() > 0  # what is in memory has none
        maker.record_file(0).unlink()  # as a prune does
        assert source.facts == {"bytes": entry.record_bytes}
        assert len(source.file.read()) == entry.record_bytes

"""Records from one peer's log: what is asked for, in which order, and when the walk ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from dilocox.dht.identity import Identity
from dilocox.dht.rpc import Blob, Client, FrameRefused
from dilocox.peer.chain import catchup, record_check
from dilocox.peer.chain.catchup import Reach, State, catch_up
from dilocox.peer.chain.record_check import RecordCheck
from dilocox.peer.chain.store import RoundLog
from dilocox.peer.rounds.record import RecordRefused, parse_header
from tests.peer.kept_chains import RUN, ChainMaker, manifest_of

PEER = "QmPeer"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def maker(identities: list[Identity], tmp_path: Path) -> ChainMaker:
    return ChainMaker(identities[0], tmp_path / "state", manifest_of())


class Walk:
    """A joiner with an empty log, and a peer without a network that has a maker's log.

    headers, records: rounds of what was asked for, in order. before: called before each answer.
    """

    def __init__(self, maker: ChainMaker, folder: Path):
        self.maker = maker
        self.check = RecordCheck.of(RUN, 0, maker.manifest, maker.layout)
        self.log = RoundLog(folder, manifest_digest=maker.manifest.root, codec=maker.codec)
        self.headers: list[int] = []
        self.records: list[int] = []
        self.before: Callable[[], None] = lambda: None

    def go(
        self,
        limit_bytes: int | None = None,
        digest: str = "",
        back_to: int | None = None,
        me: str = "",
    ) -> Reach:
        return asyncio.run(
            catch_up(
                cast("Client", self),
                self.log,
                PEER,
                digest or self.maker.digests[-1],
                check=self.check,
                compute=asyncio.to_thread,
                limit_bytes=limit_bytes,
                back_to=back_to,
                me=me,
            )
        )

    async def fetch(
        self, peer: str, want: dict[str, Any], *, limit_bytes: int, sink: Any = None
    ) -> Blob | None:
        await asyncio.sleep(0)
        self.before()
        header = bool(want.get("header"))
        found = catchup.find_in_log(self.maker.log, want["what"], want["digest"], header=header)
        if found is None:
            return None
        with found as source:
            data = source.file.read()
        if want["what"] == "record":
            (self.headers if header else self.records).append(parse_header(data).round)
        if sink is not None:
            sink(data)
        return Blob(facts=found.facts, data=data)

    async def fetch_record(self, peer: str, digest: str, *, older: bool = False) -> bytes | None:
        limit = self.check.record_bytes
        blob = await self.fetch(peer, {"what": "record", "digest": digest}, limit_bytes=limit)
        return None if blob is None else blob.data


def test_records_come_after_their_headers_and_the_oldest_first(
    maker: ChainMaker, tmp_path: Path
) -> None:
    maker.train(0, 1, 2)
    walk = Walk(maker, tmp_path / "log")
    assert walk.go().appended == (0, 1, 2)
    assert (walk.headers, walk.records) == ([2, 1, 0], [0, 1, 2])
    assert walk.log.head().digest == maker.digests[-1]


def test_a_log_that_does_not_reach_back_costs_headers_only(
    maker: ChainMaker, tmp_path: Path
) -> None:
    maker.train(0, 1, 2, 3)
    maker.log.prune(3)
    walk = Walk(maker, tmp_path / "log")
    assert walk.go().too_far
    assert (walk.headers, walk.records) == ([3, 2, 1], [])


def test_records_that_would_be_more_bytes_than_they_may_be_are_not_fetched(
    maker: ChainMaker, tmp_path: Path
) -> None:
    maker.train(0, 1, 2, 3)
    walk = Walk(maker, tmp_path / "log")
    total = sum(entry.record_bytes for entry in maker.log.entries())
    reach = walk.go(limit_bytes=total - 1)
    assert (reach.costly, reach.too_far, reach.appended) == (True, False, ())
    assert walk.records == []
    walk.headers.clear()
    newest = maker.log.newest()
    assert newest is not None
    assert walk.go(limit_bytes=newest.record_bytes).costly
    assert walk.headers == [3, 2]  # the others would change nothing
    assert walk.go(limit_bytes=total).appended == (0, 1, 2, 3)


def test_headers_say_which_records_count_a_peer_though_the_records_cost_too_much(
    maker: ChainMaker, tmp_path: Path, identities: list[Identity]
) -> None:
    maker.train(0, 1, 2, 3)
    walk = Walk(maker, tmp_path / "log")
    newest = maker.log.newest()
    assert newest is not None
    member = maker.peer
    for back_to, asked in ((None, [3, 2]), (1, [3, 2, 1]), (-1, [3, 2, 1, 0])):
        walk.headers.clear()
        reach = walk.go(limit_bytes=newest.record_bytes, back_to=back_to, me=member)
        assert reach.costly and walk.headers == asked and walk.records == []
        assert reach.told is not None and reach.told.named == set(asked)
        assert reach.told.after == asked[-1] - 1
    stranger = walk.go(limit_bytes=1, back_to=-1, me=identities[2].peer_id)
    assert stranger.told is not None and stranger.told.named == frozenset()
    # of a log that does not reach back it is told as far as it reaches
    maker.log.prune(2)
    assert maker.log.rounds() == [2, 3]
    far = walk.go(me=member)
    assert far.too_far and far.told is not None and (far.told.after, far.told.named) == (1, {2, 3})


def test_a_chain_whose_rounds_do_not_fall_is_refused_at_once(
    maker: ChainMaker, tmp_path: Path
) -> None:
    maker.train(0, 1, 2, change=lambda record: replace(record, round=7))
    walk = Walk(maker, tmp_path / "log")
    with pytest.raises(RecordRefused, match="round 7 comes before round 7"):
        walk.go()
    assert (walk.headers, walk.records) == ([7, 7], [])


def test_rounds_that_fall_below_the_first_one_are_refused(
    maker: ChainMaker, tmp_path: Path
) -> None:
    maker.train(0, 1, change=lambda record: replace(record, round=record.round - 1))
    walk = Walk(maker, tmp_path / "log")
    with pytest.raises(FrameRefused, match="names no round"):
        walk.go()
    assert walk.records == []


def test_what_is_cut_off_goes_on_where_it_was(maker: ChainMaker, tmp_path: Path) -> None:
    maker.train(0, 1, 2, 3)
    walk = Walk(maker, tmp_path / "log")

    def cut() -> None:
        if walk.records == [0, 1]:
            raise ConnectionError("gone")

    walk.before = cut
    with pytest.raises(ConnectionError):
        walk.go()
    assert walk.log.rounds() == [0]  # the certificate of the second one did not come
    walk.before, walk.records = lambda: None, []
    assert walk.go().appended == (1, 2, 3)
    assert walk.records == [1, 2, 3]


def test_a_header_that_lies_about_what_is_before_it_leads_nowhere(
    maker: ChainMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maker.train(0, 1, 2)
    walk = Walk(maker, tmp_path / "log")
    header_bytes = maker.log.header_bytes
    root, (before, newest) = maker.manifest.root, maker.digests[-2:]

    def lie(round_number: int) -> bytes | None:
        data = header_bytes(round_number)
        return None if data is None else data.replace(before.encode(), root.encode())

    monkeypatch.setattr(maker.log, "header_bytes", lie)
    with pytest.raises(RecordRefused):
        walk.go(digest=newest)
    assert walk.log.rounds() == []


@pytest.mark.parametrize("slow", ["headers", "records", "certificates"])
def test_a_peer_that_never_ends_its_answer_is_given_up(
    maker: ChainMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: str
) -> None:
    monkeypatch.setattr(catchup, "HEADERS_LIMIT_S", 0.2 if slow == "headers" else 60.0)
    for module in (catchup, record_check):
        monkeypatch.setattr(module, "STALL_S", 0.2)
    maker.train(0)
    walk = Walk(maker, tmp_path / "log")
    walk.check = replace(
        walk.check,
        manifest=replace(
            maker.manifest, deadlines=replace(maker.manifest.deadlines, exchange_s=0.2)
        ),
    )
    fetch = walk.fetch

    async def forever(peer: str, want: dict[str, Any], **options: Any) -> Blob | None:
        asked = "header" if want.get("header") else want["what"]
        if slow == f"{asked}s":
            await asyncio.sleep(3600)
        return await fetch(peer, want, **options)

    monkeypatch.setattr(walk, "fetch", forever)
    with pytest.raises(asyncio.TimeoutError):
        walk.go()


def test_a_walk_ends_between_two_records_when_its_time_is_over(
    maker: ChainMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catchup, "RECORDS_LIMIT_S", 3600.0)
    now = [0.0]
    monkeypatch.setattr(catchup, "time", SimpleNamespace(monotonic=lambda: now[0]))
    maker.train(0, 1, 2)
    walk = Walk(maker, tmp_path / "log")

    def pass_by() -> None:
        now[0] += 3601.0 * (walk.records == [0])

    walk.before = pass_by
    with pytest.raises(asyncio.TimeoutError):
        walk.go()
    assert walk.log.rounds() == [0]


def test_a_state_that_stops_coming_is_no_fault_of_the_disk(
    maker: ChainMaker, tmp_path: Path
) -> None:
    """asyncio's TimeoutError is an OSError, too."""
    maker.train(0)
    maker.snapshot()
    walk = Walk(maker, tmp_path / "log")
    fetch = walk.fetch

    async def stalling(peer: str, want: dict[str, Any], **options: Any) -> Blob | None:
        if want["what"] != "state":
            return await fetch(peer, want, **options)
        if "sha256" in want:
            raise asyncio.TimeoutError
        found = catchup.open_state(maker.own / "snapshots", want["offset"], None)
        assert found is not None
        return Blob(facts=found.facts, data=b"")

    walk.fetch = stalling  # type: ignore[method-assign]
    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(taken(walk, tmp_path))


@pytest.mark.parametrize(
    "lie", [{"size": 1 << 40}, {"size": 0}, {"size": "8"}, {"sha256": "../" + "0" * 61}]
)
def test_an_offer_of_a_state_that_cannot_be_costs_no_byte_of_it(
    maker: ChainMaker, tmp_path: Path, lie: dict[str, Any]
) -> None:
    maker.train(0)
    maker.snapshot()
    walk = Walk(maker, tmp_path / "log")
    asked: list[dict[str, Any]] = []

    async def lying(peer: str, want: dict[str, Any], **options: Any) -> Blob | None:
        asked.append(want)
        found = catchup.open_state(maker.own / "snapshots", want["offset"], None)
        assert found is not None
        return Blob(facts=found.facts | lie, data=b"")

    walk.fetch = lying  # type: ignore[method-assign]
    with pytest.raises(FrameRefused):
        asyncio.run(taken(walk, tmp_path))
    assert [want["what"] for want in asked] == ["state"]


def taken(walk: Walk, folder: Path) -> Coroutine[Any, Any, State]:
    numel = walk.maker.layout.numel
    return catchup.fetch_state(
        cast("Client", walk),
        PEER,
        check=walk.check,
        compute=asyncio.to_thread,
        after_round=-1,
        folder=folder,
        anchor=torch.zeros(numel),
        momentum=torch.zeros(numel),
    )


# ---- serving -------------------------------------------------------------------------------------
def test_of_a_record_only_the_header_is_read_where_that_is_wanted(maker: ChainMaker) -> None:
    maker.train(0)
    entry = maker.log.newest()
    assert entry is not None
    served = catchup.find_in_log(maker.log, "record", entry.digest, header=True)
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
    served = catchup.find_in_log(maker.log, "record", entry.digest)
    assert served is not None
    with served as source:
        assert source.file.fileno() > 0  # what is in memory has none
        maker.record_file(0).unlink()  # as a prune does
        assert source.facts == {"bytes": entry.record_bytes}
        assert len(source.file.read()) == entry.record_bytes

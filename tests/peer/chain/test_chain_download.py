"""A stage's chain over the network: from whoever has it, and from nobody's word alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dilocox.dht.errors import EnvironmentFault
from dilocox.dht.identity import Identity
from dilocox.dht.records import ClaimRecord
from dilocox.peer.chain.replay import replay
from dilocox.peer.chain.store import KeptChain, Store
from dilocox.peer.chain.summary import ChainRound
from dilocox.peer.chain.uploads import Source
from dilocox.peer.chain.visitor_download import (
    ClaimedChain,
    claimed_chain,
    download_chain,
    list_chain,
)
from tests.peer.kept_chains import RUN, ChainMaker
from tests.peer.memory_swarm import Find, MemorySwarm
from tests.peer.told_records import told_chain


class Claimed:
    """What holders claim of a maker's chain."""

    def __init__(self, maker: ChainMaker, swarm: MemorySwarm | None = None):
        self.maker = maker
        self.swarm = swarm or MemorySwarm()
        self._claims: dict[str, ClaimRecord] = {}

    def add(self, peer: str, find: Find | None, digest: str | None = None, tokens: int = 0) -> None:
        """A holder that claims this record, the maker's newest by default; gone without `find`."""
        claim = self.maker.claim()
        self._claims[peer] = replace(
            claim, digest=digest or claim.digest, chain_tokens=claim.chain_tokens + tokens
        )
        if find is not None:
            self.swarm.finds[peer] = find

    def listed(self, limit_s: float = 60.0) -> list[ChainRound]:
        async def go() -> list[ChainRound]:
            return await list_chain(await self._claimed(limit_s))

        return asyncio.run(go())

    def download(self, folder: Path, limit_s: float = 60.0) -> tuple[KeptChain, list[str]]:
        async def go() -> tuple[KeptChain, list[str]]:
            return await download_chain(await self._claimed(limit_s), folder)

        return asyncio.run(go())

    async def _claimed(self, limit_s: float) -> ClaimedChain:
        place = self.swarm.place(self.maker.manifest, lambda _: self._claims)
        return await claimed_chain(place, 0, time.monotonic() + limit_s)


def giving(maker: ChainMaker, *rounds: int, older: tuple[int, ...] = ()) -> Find:
    """Answers with these records and the newest snapshot; `older` for who asks for older ones."""

    def find(want: dict[str, Any]) -> Source | None:
        number = None if want["what"] == "state" else maker.log.find(want["digest"])
        due = number is None or number in rounds or (want.get("older") and number in older)
        return maker.find(want) if due else None

    return find


def test_the_whole_chain_is_put_together_from_several_holders(
    maker: ChainMaker, tmp_path: Path
) -> None:
    maker.train(0, 1)
    maker.snapshot()
    maker.train(2, 3)
    claimed = Claimed(maker)
    claimed.add("QmGone", None, tokens=5)
    claimed.add("QmPeer", giving(maker, 1, 2, 3))
    claimed.add("QmArchive", giving(maker, 3, older=(0, 1, 2)))
    listed = claimed.listed()
    assert [each.digest for each in listed] == maker.digests[1:]
    chain, flaws = claimed.download(tmp_path / "got")
    assert (flaws, [entry.round for entry in chain.records]) == ([], [0, 1, 2, 3])
    found = replay(maker.manifest, maker.run, 0, chain.records, chain.states)
    assert (found.flaws, found.replayed, found.confirmed) == ((), (0, 1, 2, 3), (1,))
    assert found.anchor_sha256 == maker.anchors[-1]


def test_where_nobody_has_the_start_a_state_stands_in_for_it(
    maker: ChainMaker, tmp_path: Path
) -> None:
    maker.train(0, 1)
    maker.snapshot()
    maker.train(2, 3)
    claimed = Claimed(maker)
    claimed.add("QmPeer", giving(maker, 1, 2, 3))
    chain, flaws = claimed.download(tmp_path / "got")
    found = replay(maker.manifest, maker.run, 0, chain.records, chain.states)
    assert (flaws, found.flaws, found.replayed) == ([], (), (2, 3))
    assert found.anchor_sha256 == maker.anchors[-1]


def test_a_listing_moves_headers_only(maker: ChainMaker) -> None:
    maker.train(0, 1)
    claimed = Claimed(maker)
    claimed.add("QmPeer", giving(maker, 0, 1))
    listed = claimed.listed()
    sizes = [maker.record_file(each.round).stat().st_size for each in listed]
    assert [each.record_bytes for each in listed] == sizes
    assert claimed.swarm.sent["QmPeer"]["record"] < sum(sizes) / 4


@pytest.mark.parametrize(
    "nonsense",
    [
        b"",
        b"\x05",
        b"\xff" * (1 << 21),
        (1 << 40).to_bytes(8, "little") + b"{" * (1 << 21),
        (2).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (200_000).to_bytes(8, "little") + b"[" * 200_000,
    ],
)
def test_a_holder_that_talks_nonsense_is_passed_over(
    maker: ChainMaker, tmp_path: Path, nonsense: bytes
) -> None:
    maker.train(0)
    claimed = Claimed(maker)

    def talk(want: dict[str, Any]) -> Source:
        return Source.of(nonsense)

    claimed.add("QmA", talk, tokens=5)
    claimed.add("QmB", giving(maker, 0))
    assert len(claimed.listed()) == 1
    chain, flaws = claimed.download(tmp_path / "got")
    assert (flaws, len(chain.records)) == ([], 1)


@pytest.mark.parametrize("name", ["Qm\n", "Qm\x1b[2J", "Qm\u202e", "Qm\ud800"])
def test_a_header_whose_member_has_no_printable_name_is_passed_over(
    maker: ChainMaker, name: str
) -> None:
    maker.train(0)
    (told,) = told_chain(RUN, 0, maker.manifest.root, [{name: 1}])
    claimed = Claimed(maker)
    claimed.add("QmLiar", lambda _: Source.of(told.data), digest=told.digest, tokens=99)
    claimed.add("QmB", giving(maker, 0))
    assert [each.digest for each in claimed.listed()] == maker.digests[1:]


@pytest.mark.parametrize("missing", ["record", "certificate"])
def test_who_does_not_give_what_it_claims_is_no_flaw_of_the_chain(
    maker: ChainMaker, tmp_path: Path, missing: str
) -> None:
    maker.train(0, 1)
    claimed = Claimed(maker)
    claimed.add("QmLiar", lambda want: maker.find_all_but(missing, want))
    chain, flaws = claimed.download(tmp_path / "got")
    assert (flaws, [entry.round for entry in chain.records]) == ([], [1])


class SlowLine(MemorySwarm):
    """A frame takes 25 s of the event loop's time."""

    late_s = 0.0

    async def iterate_protobuf_handler(
        self, peer: Any, _name: str, request: Any, _answer: Any
    ) -> AsyncIterator[Any]:
        frames = await super().iterate_protobuf_handler(peer, _name, request, _answer)
        loop: Any = asyncio.get_running_loop()
        loop.time = lambda: time.monotonic() + self.late_s

        async def slowly() -> AsyncIterator[Any]:
            async for frame in frames:
                self.late_s += 25.0
                for _ in range(10):  # what is due comes first
                    await asyncio.sleep(0)
                yield frame

        return slowly()


def test_on_a_slow_line_the_timeout_alone_ends_a_download(
    maker: ChainMaker, tmp_path: Path
) -> None:
    maker.train(0)
    claimed = Claimed(maker, SlowLine())
    claimed.add("QmPeer", giving(maker, 0))
    chain, flaws = claimed.download(tmp_path / "got", 1e6)
    assert (flaws, len(chain.records)) == ([], 1)


def test_a_claim_of_a_record_that_nobody_has_hides_the_others_not(
    maker: ChainMaker, tmp_path: Path
) -> None:
    maker.train(0)
    claimed = Claimed(maker)
    claimed.add("QmLiar", lambda _: None, digest="f" * 64, tokens=99)
    claimed.add("QmB", giving(maker, 0))
    assert len(claimed.listed()) == 1
    chain, flaws = claimed.download(tmp_path / "got")
    assert (flaws, len(chain.records)) == ([], 1)


def test_a_record_that_no_majority_committed_is_a_flaw(maker: ChainMaker, tmp_path: Path) -> None:
    maker.train(0, 1)
    (maker.own / "log" / "00000000.certificate").write_bytes(b"votes")
    claimed = Claimed(maker)
    claimed.add("QmPeer", giving(maker, 0, 1))
    chain, flaws = claimed.download(tmp_path / "got")
    assert len(flaws) == 1 and flaws[0].startswith("round 0: ")
    assert [entry.round for entry in chain.records] == [1]


def test_rounds_that_do_not_fall_on_the_way_back_end_the_walk(
    maker: ChainMaker, tmp_path: Path
) -> None:
    maker.train(5)
    maker.train(3)
    claimed = Claimed(maker)
    claimed.add("QmPeer", giving(maker, 3, 5), digest=maker.digests[-1])
    assert [each.round for each in claimed.listed()] == [3]
    _, flaws = claimed.download(tmp_path / "got")
    assert flaws == ["round 5 comes before round 3"]


def test_when_nobody_can_be_reached_or_the_time_is_over_that_is_said(
    maker: ChainMaker, tmp_path: Path
) -> None:
    maker.train(0)
    claimed = Claimed(maker)
    claimed.add("QmGone", None)
    with pytest.raises(EnvironmentFault, match="1 peers claim records"):
        claimed.listed()
    with pytest.raises(EnvironmentFault, match="1 peers claim records"):
        claimed.download(tmp_path / "got")
    with pytest.raises(EnvironmentFault, match="--timeout"):
        claimed.listed(limit_s=0.0)


@pytest.mark.parametrize("holders", [1, 2])
def test_a_list_that_is_cut_by_the_time_has_what_came_and_says_so(
    maker: ChainMaker, caplog: pytest.LogCaptureFixture, holders: int
) -> None:
    maker.train(0, 1, 2)
    claimed = Claimed(maker)
    for name in ("QmA", "QmB")[:holders]:
        claimed.add(name, giving(maker, 0, 1, 2))

    async def slow(_peer: str, want: dict[str, Any]) -> None:
        if want["digest"] == maker.digests[1]:
            await asyncio.sleep(60.0)

    claimed.swarm.before = slow
    assert [each.round for each in claimed.listed(limit_s=1.0)] == [1, 2]
    (line,) = [each.message for each in caplog.records if each.levelno == 30]
    assert line.startswith("stage 0: the time is over: rounds before 1 ") and "--timeout" in line


def test_a_state_that_stands_on_no_record_of_the_chain_is_not_taken(
    maker: ChainMaker, identities: list[Identity], tmp_path: Path
) -> None:
    maker.train(0)
    other = ChainMaker(identities[1], tmp_path / "other", maker.manifest)
    other.train(0)
    other.snapshot()
    claimed = Claimed(maker)
    claimed.add("QmA", giving(maker, 0))
    claimed.add("QmB", giving(other, 0), tokens=-5)
    chain, flaws = claimed.download(tmp_path / "got")
    assert (flaws, chain.states) == ([], ())
    assert isinstance(chain.records[0].store, Store)

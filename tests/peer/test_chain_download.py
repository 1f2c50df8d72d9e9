"""A stage's chain over the network: from whoever has it, and from nobody's word alone."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from dilocox.dht.errors import EnvironmentFault
from dilocox.dht.identity import Identity
from dilocox.dht.join import Joined
from dilocox.dht.records import ClaimRecord
from dilocox.dht.rpc import Blob, Client, FrameRefused
from dilocox.peer.chain import catchup
from dilocox.peer.chain.download import ChainHolders, download_chain, list_chain
from dilocox.peer.chain.record_check import RecordCheck
from dilocox.peer.chain.replay import replay
from dilocox.peer.chain.store import KeptChain, RecordFolder
from tests.peer.kept_chains import RUN, ChainMaker, manifest_of

CHUNK_BYTES = 2048  # smaller than a network's, since these records are small

Find = Callable[[dict[str, Any]], catchup.Source | None]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def maker(identities: list[Identity], tmp_path: Path) -> ChainMaker:
    return ChainMaker(identities[0], tmp_path / "state", manifest_of())


class Swarm:
    """Holders without a network. `sent`: bytes that each of them gave away."""

    def __init__(self, maker: ChainMaker):
        self.maker = maker
        self.claims: dict[str, ClaimRecord] = {}
        self.sent: dict[str, int] = {}
        self._finds: dict[str, Find] = {}

    def add(self, peer: str, find: Find, digest: str | None = None, tokens: int = 0) -> None:
        """A holder that claims this record, the maker's newest by default."""
        last = self.maker.last
        assert last is not None
        self.claims[peer] = ClaimRecord(
            round=last.round,
            digest=digest or self.maker.digests[-1],
            tokens=10,
            chain_tokens=last.chain_tokens + tokens,
            record_bytes=1,
        )
        self._finds[peer] = find

    def holders(self, limit_s: float = 60.0) -> ChainHolders:
        place = SimpleNamespace(
            run=RUN,
            manifest=self.maker.manifest,
            swarm=SimpleNamespace(read=lambda *_: self.claims),
        )
        client = cast("Client", self)
        return ChainHolders(cast("Joined", place), 0, client, time.monotonic() + limit_s)

    async def fetch(
        self,
        peer: str,
        want: dict[str, Any],
        *,
        limit_bytes: int,
        sink: Any = None,
        least_bytes_per_s: float = 0.0,
    ) -> Blob | None:
        found = self._finds[peer](want)
        if found is None:
            return None
        size = found.facts["bytes"]
        if size > limit_bytes:
            raise FrameRefused("too much")
        chunks: list[bytes] = []
        with found as source:
            while chunk := source.file.read(CHUNK_BYTES):
                self.sent[peer] = self.sent.get(peer, 0) + len(chunk)
                (sink or chunks.append)(chunk)
        return Blob(facts=found.facts, data=b"".join(chunks))

    async def fetch_record(self, peer: str, digest: str, *, older: bool = False) -> bytes | None:
        blob = await self.fetch(peer, {"what": "record", "digest": digest}, limit_bytes=1 << 31)
        return None if blob is None else blob.data

    def download(self, folder: Path) -> tuple[KeptChain, list[str]]:
        maker = self.maker
        check = RecordCheck.of(RUN, 0, maker.manifest, maker.layout)
        return asyncio.run(download_chain(self.holders(), 0, check, folder))


def giving(maker: ChainMaker, *rounds: int, older: tuple[int, ...] = ()) -> Find:
    """Answers with these records and the newest snapshot; `older` for who asks for older ones."""

    def find(want: dict[str, Any]) -> catchup.Source | None:
        if want["what"] == "state":
            snapshots = maker.own / "snapshots"
            return catchup.open_state(snapshots, want.get("offset", 0), want.get("sha256"))
        number = maker.log.find(want["digest"])
        if number not in rounds and not (want.get("older") and number in older):
            return None
        assert number is not None
        data = (
            maker.log.read_bytes(number)
            if want["what"] == "record"
            else maker.log.certificate(number)
        )
        assert data is not None
        return catchup.Source.of(data)

    return find


def fails(_: dict[str, Any]) -> None:
    raise ConnectionError("gone")


def test_the_whole_chain_is_put_together_from_several_holders(
    maker: ChainMaker, tmp_path: Path
) -> None:
    maker.train(0, 1)
    maker.snapshot()
    maker.train(2, 3)
    swarm = Swarm(maker)
    swarm.add("QmGone", fails, tokens=5)
    swarm.add("QmPeer", giving(maker, 1, 2, 3))
    swarm.add("QmArchive", giving(maker, 3, older=(0, 1, 2)))
    listed = asyncio.run(list_chain(swarm.holders()))
    assert [each.listed.digest for each in listed] == maker.digests[1:]
    chain, flaws = swarm.download(tmp_path / "got")
    assert (flaws, [entry.round for entry in chain.records]) == ([], [0, 1, 2, 3])
    found = replay(maker.manifest, RUN, 0, chain.records, chain.states)
    assert (found.flaws, found.replayed, found.confirmed) == ((), (0, 1, 2, 3), (1,))
    assert found.anchor_sha256 == maker.anchors[-1]


def test_where_nobody_has_the_start_a_state_stands_in_for_it(
    maker: ChainMaker, tmp_path: Path
) -> None:
    maker.train(0, 1)
    maker.snapshot()
    maker.train(2, 3)
    swarm = Swarm(maker)
    swarm.add("QmPeer", giving(maker, 1, 2, 3))
    chain, flaws = swarm.download(tmp_path / "got")
    found = replay(maker.manifest, RUN, 0, chain.records, chain.states)
    assert (flaws, found.flaws, found.replayed) == ([], (), (2, 3))
    assert found.anchor_sha256 == maker.anchors[-1]


def test_a_listing_moves_headers_only(maker: ChainMaker) -> None:
    maker.train(0, 1)
    swarm = Swarm(maker)
    swarm.add("QmPeer", giving(maker, 0, 1))
    listed = asyncio.run(list_chain(swarm.holders()))
    sizes = [maker.record_file(each.listed.round).stat().st_size for each in listed]
    assert [each.listed.record_bytes for each in listed] == sizes
    assert swarm.sent["QmPeer"] < sum(sizes) / 4


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
    swarm = Swarm(maker)

    def talk(want: dict[str, Any]) -> catchup.Source:
        return catchup.Source({"bytes": len(nonsense)}, io.BytesIO(nonsense))

    swarm.add("QmA", talk, tokens=5)
    swarm.add("QmB", giving(maker, 0))
    assert len(asyncio.run(list_chain(swarm.holders()))) == 1
    chain, flaws = swarm.download(tmp_path / "got")
    assert (flaws, len(chain.records)) == ([], 1)


def test_a_claim_of_a_record_that_nobody_has_hides_the_others_not(
    maker: ChainMaker, tmp_path: Path
) -> None:
    maker.train(0)
    swarm = Swarm(maker)
    swarm.add("QmLiar", lambda _: None, digest="f" * 64, tokens=99)
    swarm.add("QmB", giving(maker, 0))
    assert len(asyncio.run(list_chain(swarm.holders()))) == 1
    chain, flaws = swarm.download(tmp_path / "got")
    assert (flaws, len(chain.records)) == ([], 1)


def test_a_record_that_no_majority_committed_is_a_flaw(maker: ChainMaker, tmp_path: Path) -> None:
    maker.train(0, 1)
    (maker.own / "log" / "00000000.certificate").write_bytes(b"votes")
    swarm = Swarm(maker)
    swarm.add("QmPeer", giving(maker, 0, 1))
    chain, flaws = swarm.download(tmp_path / "got")
    assert len(flaws) == 1 and flaws[0].startswith("round 0: ")
    assert [entry.round for entry in chain.records] == [1]


def test_rounds_that_do_not_fall_on_the_way_back_end_the_walk(
    maker: ChainMaker, tmp_path: Path
) -> None:
    maker.train(5)
    maker.train(3)
    swarm = Swarm(maker)
    swarm.add("QmPeer", giving(maker, 3, 5))
    assert [each.listed.round for each in asyncio.run(list_chain(swarm.holders()))] == [3]
    _, flaws = swarm.download(tmp_path / "got")
    assert flaws == ["round 5 comes before round 3"]


def test_when_nobody_can_be_reached_or_the_time_is_over_that_is_said(
    maker: ChainMaker, tmp_path: Path
) -> None:
    maker.train(0)
    swarm = Swarm(maker)
    swarm.add("QmGone", fails)
    with pytest.raises(EnvironmentFault, match="1 peers claim records"):
        asyncio.run(list_chain(swarm.holders()))
    with pytest.raises(EnvironmentFault, match="1 peers claim records"):
        swarm.download(tmp_path / "got")
    with pytest.raises(EnvironmentFault, match="--timeout"):
        asyncio.run(list_chain(swarm.holders(limit_s=0.0)))


def test_a_state_that_stands_on_no_record_of_the_chain_is_not_taken(
    maker: ChainMaker, identities: list[Identity], tmp_path: Path
) -> None:
    maker.train(0)
    other = ChainMaker(identities[1], tmp_path / "other", maker.manifest)
    other.train(0)
    other.snapshot()
    swarm = Swarm(maker)
    swarm.add("QmA", giving(maker, 0))
    swarm.add("QmB", giving(other, 0), tokens=-5)
    chain, flaws = swarm.download(tmp_path / "got")
    assert (flaws, chain.states) == ([], ())
    assert isinstance(chain.records[0].folder, RecordFolder)


def test_what_a_header_cannot_say_is_refused(maker: ChainMaker) -> None:
    from dilocox.peer.chain.summary import LoggedRound

    maker.train(0)
    header, digest = maker.log.header(0), maker.digests[-1]
    assert header is not None
    LoggedRound.of(header, digest, 1)
    lies: list[Any] = [
        replace(header, previous="\x1b[2J"),
        replace(header, next_inner_steps=cast("Any", float("inf"))),
        replace(header, ranks=cast("Any", ("6",))),
        replace(header, members=cast("Any", (1,))),
    ]
    for lie in lies:
        with pytest.raises(ValueError, match=r"record"):
            LoggedRound.of(lie, digest, 1)

"""The bootstrap's archive: it follows, proves, replaces and serves what peers of a stage have."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hivemind.p2p import P2P
from torch import Tensor

from dilocox.dht import bootstrap_node
from dilocox.dht.errors import EnvironmentFault
from dilocox.dht.identity import Identity
from dilocox.dht.manifest import Manifest
from dilocox.dht.records import ClaimRecord
from dilocox.dht.rpc import PeerBusy, chunk_of, pack, unpack
from dilocox.peer.chain import archive_keeper
from dilocox.peer.chain.archive import Generation, StageArchive
from dilocox.peer.chain.archive_keeper import Archive, ArchiveService, Keeper
from dilocox.peer.chain.chain_client import ChainClient, NoState, keep_right_chunks
from dilocox.peer.chain.record_check import RecordCheck
from dilocox.peer.chain.replay import Replayed, replay
from dilocox.peer.chain.snapshot_files import STATE_CHUNK_BYTES, STATE_FILE, state_sha256
from dilocox.peer.chain.store import OLDER_NAME, RoundLog, kept_run
from dilocox.peer.chain.summary import ChainRound
from dilocox.peer.chain.uploads import Source
from dilocox.peer.rounds.outer_step import OuterStep, anchor_sha256
from dilocox.pipeline.stage import build_stage, flatten_parameters, stage_layout
from tests.peer.kept_chains import MODEL, RUN, ChainMaker
from tests.peer.memory_swarm import MemorySwarm, on_any_chain

MANIFEST = Manifest.from_dict(
    {
        "name": "test",
        "model": MODEL | {"vocab_size": 8192},  # so that a state has five chunks
        "end_tokens": 1000,
        "codec": {"scheme": "dense"},
    }
)
ME = "QmArchive"
OUTER = OuterStep(MANIFEST.outer.learning_rate, MANIFEST.outer.momentum)
CHECK = RecordCheck(RUN, 0, MANIFEST, stage_layout(MANIFEST, 0))


class Kept:
    """An archive and the donors that it can reach, by peer."""

    def __init__(
        self,
        folder: Path,
        *donors: ChainMaker,
        record_lifetime_s: float = 60.0,
        keep_bytes: int = 1 << 30,
        now: Callable[[], float] = time.monotonic,
        records_after_state: tuple[int, int] = (2, 2),
        witness: str = "",
    ):
        self.folder = folder
        self.swarm = MemorySwarm(**{donor.peer: donor.find for donor in donors})
        self.disk_full = False
        self.archive = StageArchive(
            folder,
            me=ME,
            witness=witness,
            check=CHECK,
            record_lifetime_s=record_lifetime_s,
            keep_bytes=keep_bytes,
            client=self.swarm.client(),
            compute=self._compute,
            records_after_state=records_after_state,
            pause_s=0.0,
            now=now,
        )

    async def _compute(self, function: Callable[..., Any], *arguments: Any) -> Any:
        if self.disk_full and function is keep_right_chunks:
            raise OSError(28, "No space left on device")
        return await asyncio.to_thread(function, *arguments)

    def look(self, *donors: ChainMaker, times: int = 1, **more: ClaimRecord) -> ClaimRecord | None:
        """Let it see what these claim; what it claims then."""
        claims = {donor.peer: donor.claim() for donor in donors} | more

        async def tend() -> None:
            for _ in range(times):
                await self.archive.tend(claims)
                if beside := asyncio.all_tasks() - {asyncio.current_task()}:
                    await asyncio.wait(beside, timeout=20)
                await self.archive.tend(claims)
            await self.archive.close()  # the next look has another event loop

        asyncio.run(tend())
        return self.archive.claim

    def asked(self, what: str) -> list[str]:
        """Who was asked for this, in order."""
        return [peer for peer, want in self.swarm.asked if want["what"] == what]

    @property
    def generations(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir() if path.name.isdigit())

    @property
    def state_round(self) -> int:
        """Of the state that is given, -1 without one."""
        found = self.archive.find({"what": "state", "offset": 0})
        return -1 if found is None else found.facts["round"]

    def joiner_gets(self, folder: Path, claim: ClaimRecord) -> Tensor:
        """The anchor that a peer has which takes all from the archive, by its own code."""
        chain = ChainClient(MemorySwarm(QmArchive=self.archive.find).client(), CHECK, [ME])
        log = RoundLog(folder / "joined", manifest_digest=MANIFEST.root, codec=CHECK.codec)
        module = build_stage(MANIFEST.model, 0, 1, MANIFEST.seed)
        anchor = flatten_parameters(module, CHECK.layout).detach().clone()
        momentum = torch.zeros_like(anchor)

        async def take() -> tuple[int, ...]:
            with contextlib.suppress(NoState):
                found = await chain.state(ME, folder, after_round=-1, on_chain=on_any_chain)
                state = found.load(anchor, momentum)
                log.start_from(state.record, state.certificate)
            return (await chain.catch_up(log, claim.digest)).appended

        for number in asyncio.run(take()):
            record = log.read(number)
            assert record is not None
            OUTER.apply(anchor, momentum, record.average(CHECK.codec), anchor, momentum)
        assert log.head().digest == claim.digest
        return anchor


def maker(identity: Identity, folder: Path) -> ChainMaker:
    return ChainMaker(identity, folder, MANIFEST)


@pytest.fixture
def donor(identities: list[Identity], tmp_path: Path) -> ChainMaker:
    return maker(identities[0], tmp_path / "donor")


def test_few_records_are_kept_without_a_state_and_lead_a_joiner_to_the_anchor(
    donor: ChainMaker, tmp_path: Path
) -> None:
    kept = Kept(tmp_path / "kept", donor)
    assert kept.look(donor) is None  # there is no record yet
    for round_number in (0, 2):
        donor.train(round_number)
        assert kept.look(donor) == donor.claim()
    assert kept.state_round == -1
    claim = donor.claim()
    kept.swarm.finds.clear()  # all peers of the stage are gone
    assert kept.look() == claim
    assert torch.equal(kept.joiner_gets(tmp_path, claim), donor.anchor)


def test_twenty_records_are_followed_and_replayed_without_any_state_of_a_peer(
    donor: ChainMaker, tmp_path: Path
) -> None:
    kept = Kept(tmp_path / "kept", donor)
    claim, states = None, dict[int, str]()
    for number in range(20):
        donor.train(number)
        states[number] = state_sha256(donor.snapshot() / STATE_FILE)
        claim = kept.look(donor)
        assert claim == donor.claim() and len(kept.generations) == 1
        found = kept.archive.find({"what": "state"})
        assert (found is None) == (kept.state_round < 0)
        if found is not None:  # byte for byte what a peer has that wrote it after the same round
            with found:
                assert found.facts["sha256"] == states[kept.state_round]
    assert kept.state_round == 17 and kept.asked("state") == []
    assert claim is not None
    assert torch.equal(kept.joiner_gets(tmp_path, claim), donor.anchor)


def test_the_history_gets_each_record_once_also_those_before_the_newest_state(
    donor: ChainMaker, tmp_path: Path
) -> None:
    kept = Kept(tmp_path / "kept", donor)
    told = list[ChainRound]()
    for number in range(8):
        donor.train(number)
        kept.look(donor)
        known = {each.digest[:16] for each in told}
        told += kept.archive.rounds_since(known, 99)
        (newest, claim) = told[-1], donor.claim()
        facts = ("round", "digest", "tokens", "chain_tokens", "record_bytes", "rules")
        assert all(getattr(newest, name) == getattr(claim, name) for name in facts)
        assert [peer for peer, _ in newest.contributors] == [donor.peer]
    assert kept.state_round > 2
    assert [each.digest for each in told] == donor.digests[1:]
    assert kept.archive.rounds_since({""}, 99) == told
    assert kept.archive.rounds_since((), 3) == told[-3:]


def test_a_new_state_waits_until_the_records_are_more_bytes_than_one(
    donor: ChainMaker, tmp_path: Path
) -> None:
    kept = Kept(tmp_path / "kept", donor, records_after_state=(2, 64))
    while kept.state_round < 0:
        donor.train(donor.log.head().round + 1)
        kept.look(donor)
    total = sum(entry.record_bytes for entry in donor.log.entries())
    assert CHECK.state_bytes < total < CHECK.state_bytes + 2 * donor.claim().record_bytes
    assert kept.state_round == donor.log.head().round - 2


@pytest.mark.parametrize("wrong", ["anchor", "momentum"])
def test_a_state_that_rotted_on_the_disk_is_never_replayed_into_another_one(
    donor: ChainMaker, tmp_path: Path, wrong: str, caplog: pytest.LogCaptureFixture
) -> None:
    kept = Kept(tmp_path / "kept", donor)
    for number in range(5):
        donor.train(number)
        kept.look(donor)
    assert kept.state_round == 2
    (state,) = tmp_path.glob(f"kept/*/state/*/{STATE_FILE}")
    with state.open("r+b") as file:
        file.seek(5003 if wrong == "anchor" else -5001, os.SEEK_SET if wrong == "anchor" else 2)
        file.write(b"\x3e")
    donor.train(5)
    kept.look(donor)
    assert "what is kept is damaged" in caplog.text and kept.state_round == -1
    claim = kept.look(donor)
    assert claim is not None
    assert torch.equal(kept.joiner_gets(tmp_path, claim), donor.anchor)


def lie(donor: ChainMaker, wrong: str) -> None:
    """Let it serve a state that is off by a little."""
    values = getattr(donor, wrong)
    right = values.clone()
    values[7] += 1e-3
    donor.snapshot()
    values.copy_(right)


def test_where_logs_do_not_reach_back_a_state_is_taken_at_once(
    donor: ChainMaker, tmp_path: Path
) -> None:
    for round_number in range(6):
        donor.train(round_number)
        if round_number == 3:
            donor.snapshot()
    donor.log.prune(keep=3)
    kept = Kept(tmp_path / "kept", donor)
    claim = kept.look(donor)
    assert kept.state_round == 3
    assert claim is not None
    assert torch.equal(kept.joiner_gets(tmp_path, claim), donor.anchor)


def test_a_state_taken_at_once_that_proves_wrong_is_thrown_away(
    donor: ChainMaker, tmp_path: Path
) -> None:
    for round_number in range(4):
        donor.train(round_number)
    lie(donor, "anchor")
    donor.log.prune(keep=1)
    kept = Kept(tmp_path / "kept", donor)
    assert kept.look(donor) is not None  # nothing better is known yet
    for round_number in (4, 5):
        donor.train(round_number)
    assert kept.look(donor) is None
    assert kept.look(donor, times=2) is None  # and it is not taken from the same peer again


def test_a_chain_with_more_tokens_wins_and_one_that_lost_is_not_told(
    identities: list[Identity], tmp_path: Path
) -> None:
    ours, theirs = (maker(each, tmp_path / each.peer_id) for each in identities[:2])
    for round_number in range(2):
        ours.train(round_number)
    for round_number in range(3):
        theirs.train(round_number)
    kept = Kept(tmp_path / "kept", ours, theirs)
    kept.look(ours)
    theirs_claim = theirs.claim()
    del kept.swarm.finds[theirs.peer]
    known: dict[str, Any] = {theirs.peer: theirs_claim}
    assert kept.look(ours, **known) is None  # out of reach, but known
    kept.swarm.finds[theirs.peer] = theirs.find
    fresh = Kept(tmp_path / "other", ours, theirs)
    fresh.look(ours)
    claim = fresh.look(ours, theirs)
    assert claim is not None and claim.digest == theirs.claim().digest
    assert torch.equal(fresh.joiner_gets(tmp_path, claim), theirs.anchor)
    back = fresh.look(ours, theirs)
    assert back is not None and back.digest == theirs.claim().digest


def test_the_operator_s_archive_takes_no_record_of_strangers_and_never_leaves_its_chain(
    donor: ChainMaker, identities: list[Identity], tmp_path: Path
) -> None:
    stranger = maker(identities[1], tmp_path / "stranger")
    kept = Kept(tmp_path / "kept", donor, stranger, witness=ME)
    donor.train(0, 1)
    assert kept.look(donor) == donor.claim()
    stranger.train(*range(20))  # a sound chain of its own: a fork of more tokens
    assert kept.look(donor, stranger) == donor.claim()
    donor.train(2)
    assert kept.look(donor, stranger) == donor.claim()
    assert {peer for peer, _ in kept.swarm.asked} == {donor.peer}, "the stranger is not even asked"


def test_the_operator_s_archive_begins_and_tells_whatever_strangers_claim(
    donor: ChainMaker, tmp_path: Path
) -> None:
    kept = Kept(tmp_path / "kept", donor, witness=ME)
    donor.train(0)
    lies: dict[str, Any] = {
        f"Qm{n}": replace(donor.claim(), digest=f"{n:064x}", chain_tokens=10**9, round=99)
        for n in range(6)
    }
    for _ in range(60):  # it asks for three of seven at a time
        if kept.look(donor, **lies) is not None:
            break
    assert kept.look(donor, **lies) == donor.claim()
    lies = {peer: replace(lie, chain_tokens=10**10) for peer, lie in lies.items()}
    assert kept.look(donor, **lies) == donor.claim()


def test_a_copy_of_the_bootstrap_believes_the_operator_s(
    donor: ChainMaker, identities: list[Identity], tmp_path: Path
) -> None:
    stranger = maker(identities[1], tmp_path / "stranger")
    kept = Kept(tmp_path / "kept", donor, stranger, witness="QmWitness")
    donor.train(0, 1)
    stranger.train(*range(20))
    assert kept.look(donor, stranger) is None, "it has no chain, and nobody vouches for one"
    kept.swarm.finds["QmWitness"] = donor.find
    assert kept.look(donor, stranger, QmWitness=donor.claim()) == donor.claim()


def test_a_claim_that_nobody_can_prove_hides_neither_the_others_nor_ours_for_long(
    donor: ChainMaker, tmp_path: Path
) -> None:
    kept = Kept(tmp_path / "kept", donor, record_lifetime_s=0.0)
    donor.train(0)
    lie = replace(donor.claim(), round=99, chain_tokens=10**9, digest="f" * 64)
    claims = [kept.look(donor, QmLiar=lie) for _ in range(3)]
    assert [claim and claim.digest for claim in claims][-1] == donor.claim().digest


def test_a_peer_that_is_busy_is_asked_again_but_not_for_ever(
    donor: ChainMaker, tmp_path: Path
) -> None:
    now, busy = [0.0], [True]
    kept = Kept(tmp_path / "kept", donor, record_lifetime_s=60.0, now=lambda: now[0])

    async def when_free(_: str, want: dict[str, Any]) -> None:
        if busy[0] and want["what"] == "record" and not want.get("header"):
            raise PeerBusy("8 downloads are served at once")

    kept.swarm.before = when_free
    donor.train(0)
    for _ in range(3):
        assert kept.look(donor) is None
        now[0] += 61.0
    busy[0] = False
    first = kept.look(donor)
    assert first == donor.claim()
    busy[0] = True
    donor.train(1)
    assert kept.look(donor) is None  # somebody is ahead
    now[0] += 601.0
    assert kept.look(donor) == first


def test_what_is_kept_outlives_a_restart_and_what_is_damaged_does_not(
    donor: ChainMaker, tmp_path: Path
) -> None:
    kept = Kept(tmp_path / "kept", donor)
    for round_number in range(6):
        donor.train(round_number)
        kept.look(donor)
    assert kept.state_round == 3
    again = Kept(tmp_path / "kept")
    claim = again.look()
    assert claim is not None and claim == kept.archive.claim
    assert torch.equal(again.joiner_gets(tmp_path, claim), donor.anchor)
    (state,) = tmp_path.glob(f"kept/*/state/*/{STATE_FILE}")
    with state.open("r+b") as file:
        file.seek(5000)
        file.write(b"\xff")
    damaged = Kept(tmp_path / "kept", donor)
    assert damaged.look() is None
    claim = damaged.look(donor)
    assert claim is not None and claim.digest == donor.claim().digest


def test_a_half_made_generation_is_cleared_away(donor: ChainMaker, tmp_path: Path) -> None:
    donor.train(0)
    Kept(tmp_path / "kept", donor).look(donor)
    (tmp_path / "kept" / "00000001.partial" / "log").mkdir(parents=True)
    again = Kept(tmp_path / "kept")
    assert again.look() is not None
    assert not list((tmp_path / "kept").glob("*.partial"))


def test_a_disk_that_is_full_while_a_state_comes_costs_nothing_of_what_is_kept(
    donor: ChainMaker, tmp_path: Path
) -> None:
    donor.train(0, 1, 2)
    donor.snapshot()
    donor.log.prune(keep=1)
    kept = Kept(tmp_path / "kept", donor)
    kept.disk_full = True
    with pytest.raises(EnvironmentFault, match="no space left"):
        kept.look(donor)
    kept.disk_full = False
    assert not list((tmp_path / "kept" / "incoming").iterdir())
    claim = kept.look(donor)
    assert claim is not None
    assert torch.equal(kept.joiner_gets(tmp_path, claim), donor.anchor)


def test_a_disk_that_is_full_while_records_are_replayed_costs_nothing_of_what_is_kept(
    donor: ChainMaker, tmp_path: Path
) -> None:
    kept = Kept(tmp_path / "kept", donor)
    donor.train(0, 1, 2)
    incoming = tmp_path / "kept" / "incoming"
    incoming.mkdir()
    (incoming / "moved").symlink_to("/dev/full")
    with pytest.raises(EnvironmentFault, match="no space left"):
        kept.look(donor)
    assert kept.generations == ["00000000"] and not list(incoming.iterdir())
    claim = kept.look(donor)
    assert claim is not None and kept.state_round == 0
    assert torch.equal(kept.joiner_gets(tmp_path, claim), donor.anchor)


@pytest.mark.parametrize("fault", ["dies", "changes a byte"])
def test_a_download_goes_on_from_another_donor(
    donor: ChainMaker, tmp_path: Path, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    donor.train(0, 1, 2, 3)
    donor.snapshot()
    donor.log.prune(keep=1)
    second = "QmSecond"
    kept = Kept(tmp_path / "kept", donor)
    offsets: list[tuple[str, int]] = []

    def given_by(peer: str, want: dict[str, Any]) -> Source | None:
        found = donor.find(want)
        if found is None or "sha256" not in want or want.get("digests"):
            return found
        offsets.append((peer, want["offset"]))
        if len(offsets) > 1:
            return found
        with found as source:
            data = bytearray(source.file.read())
        if fault == "dies":
            return Source(found.facts, io.BytesIO(data[: 2 * STATE_CHUNK_BYTES + 1000]))
        data[2 * STATE_CHUNK_BYTES + 1000] ^= 1
        return Source(found.facts, io.BytesIO(data))

    for peer in (donor.peer, second):
        kept.swarm.finds[peer] = partial(given_by, peer)
    claim = kept.look(donor, QmSecond=donor.claim())
    (first, began), (other, went_on) = offsets
    assert (began, went_on) == (0, 2 * STATE_CHUNK_BYTES) and {first, other} == {donor.peer, second}
    assert (f"{first} sent chunk 2 of it changed" in caplog.text) == (fault == "changes a byte")
    assert claim is not None
    assert torch.equal(kept.joiner_gets(tmp_path, claim), donor.anchor)


def test_a_broken_download_goes_on_after_a_restart_from_its_last_right_chunk(
    donor: ChainMaker, tmp_path: Path
) -> None:
    donor.train(0, 1, 2, 3)
    donor.snapshot()
    donor.log.prune(keep=1)
    offsets: list[int] = []

    def breaking(want: dict[str, Any]) -> Source | None:
        found = donor.find(want)
        if found is None or "sha256" not in want or want.get("digests"):
            return found
        offsets.append(want["offset"])
        if len(offsets) > 1:
            return found
        with found as source:
            return Source(found.facts, io.BytesIO(source.file.read(3 * STATE_CHUNK_BYTES)))

    kept = Kept(tmp_path / "kept", donor)
    kept.swarm.finds[donor.peer] = breaking
    assert kept.look(donor) is None
    (half,) = (tmp_path / "kept" / "incoming").glob("*.state")
    with half.open("r+b") as file:  # as a power cut may leave it
        file.seek(STATE_CHUNK_BYTES + 5)
        file.write(b"\0" * 1000)
    kept = Kept(tmp_path / "kept", donor)
    kept.swarm.finds[donor.peer] = breaking
    assert kept.look(donor) is not None
    assert offsets == [0, STATE_CHUNK_BYTES]


# ---- the history ---------------------------------------------------------------------------------
def of_run(folder: Path) -> Path:
    """The folder of stage 0 in a bootstrap's state folder."""
    return folder / f"{'0' * 32}-archive-{'a' * 16}" / "stage0"


def history(folder: Path) -> Replayed:
    """What a replay of all that is kept finds."""
    chain = kept_run(folder).stages[0]
    return replay(MANIFEST, RUN, 0, chain.records, chain.states)


def through_generations(kept: Kept, donor: ChainMaker, *rounds: int) -> None:
    """Train and let the archive follow; the donor writes a snapshot every other round."""
    for number in rounds:
        donor.train(number)
        if number % 2:
            donor.snapshot()
        kept.look(donor)


def test_the_whole_run_can_be_replayed_after_many_generations_and_restarts(
    donor: ChainMaker, tmp_path: Path
) -> None:
    kept = Kept(of_run(tmp_path), donor)
    through_generations(kept, donor, *range(8))
    assert kept.state_round > 2
    kept = Kept(of_run(tmp_path), donor)
    through_generations(kept, donor, *range(8, 12))
    assert kept.generations[0] > "00000002"
    found = history(tmp_path)
    assert (found.flaws, found.replayed) == ((), tuple(range(12)))
    assert found.anchor_sha256 == anchor_sha256(donor.anchor)
    assert found.confirmed


def test_a_restart_before_a_new_generation_took_over_keeps_the_whole_history(
    donor: ChainMaker, tmp_path: Path
) -> None:
    kept = Kept(of_run(tmp_path), donor)
    through_generations(kept, donor, *range(8))
    (current,) = Generation.kept(kept.folder, CHECK)
    assert current.state_round > 0 and current.head.round == 7
    file = tmp_path / "moved"
    shutil.copyfile(donor.snapshot() / STATE_FILE, file)
    data, certificate = donor.log.read_bytes(7), donor.log.certificate(7)
    assert data is not None and certificate is not None
    state = file, data, certificate
    Generation.begun(kept.folder, current.number + 1, CHECK, state, before=current)
    Kept(of_run(tmp_path), donor)
    found = history(tmp_path)
    assert (found.flaws, found.replayed) == ((), tuple(range(8)))


def test_older_records_are_given_to_who_asks_for_them_and_to_nobody_else(
    donor: ChainMaker, tmp_path: Path
) -> None:
    kept = Kept(of_run(tmp_path), donor)
    through_generations(kept, donor, *range(8))
    digest = donor.log.entries()[0].digest
    for what, due in (
        ("record", donor.log.read_bytes(0)),
        ("certificate", donor.log.certificate(0)),
    ):
        want = {"what": what, "digest": digest}
        assert kept.archive.find(want) is None  # a peer that is so far behind takes the state
        found = kept.archive.find(want | {"older": True})
        assert found is not None and found.file.read() == due


def test_older_records_make_room_when_they_are_too_many(donor: ChainMaker, tmp_path: Path) -> None:
    kept = Kept(of_run(tmp_path), donor, keep_bytes=1)
    through_generations(kept, donor, *range(12))
    found = history(tmp_path)
    state = kept.state_round
    assert found.flaws == ()
    assert found.checked == tuple(range(state - 4, 12))
    assert found.replayed == tuple(range(state + 1, 12))


def test_a_chain_that_lost_leaves_nothing_in_the_history(
    identities: list[Identity], tmp_path: Path
) -> None:
    ours, theirs = (maker(each, tmp_path / each.peer_id) for each in identities[:2])
    kept = Kept(of_run(tmp_path), ours, theirs)
    through_generations(kept, ours, *range(6))
    assert kept.state_round > 0
    for number in range(0, 20, 2):
        theirs.train(number)
    kept.look(theirs, times=2)
    found = history(tmp_path)
    assert (found.flaws, found.replayed) == ((), tuple(range(0, 20, 2)))
    assert found.anchor_sha256 == anchor_sha256(theirs.anchor)


def test_a_history_that_does_not_lead_to_what_a_restart_finds_is_emptied(
    donor: ChainMaker, tmp_path: Path
) -> None:
    kept = Kept(of_run(tmp_path), donor)
    through_generations(kept, donor, *range(4))
    older, before = of_run(tmp_path) / OLDER_NAME, tmp_path / "before"
    shutil.copytree(older, before)
    through_generations(kept, donor, *range(4, 8))
    shutil.rmtree(older)
    shutil.copytree(before, older)
    number = 8
    Kept(of_run(tmp_path), donor)
    found = history(tmp_path)
    assert (found.flaws, found.checked[-1]) == ((), number - 1)
    assert found.replayed == found.checked[1:]


def test_where_records_are_missing_in_between_the_history_begins_anew(
    donor: ChainMaker, tmp_path: Path
) -> None:
    kept = Kept(of_run(tmp_path), donor)
    through_generations(kept, donor, *range(6))
    for number in range(6, 12):
        donor.train(number)
    donor.snapshot()
    donor.train(12)
    donor.log.prune(keep=2)
    kept.look(donor, times=2)
    found = history(tmp_path)
    assert (found.flaws, found.checked, found.replayed) == ((), (11, 12), (12,))


def test_a_crash_while_records_move_to_the_history_costs_none(
    donor: ChainMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Kept(of_run(tmp_path), donor)
    through_generations(kept, donor, *range(4))

    def crash(_: Generation) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Generation, "remove", crash)
        with pytest.raises(KeyboardInterrupt):
            through_generations(kept, donor, *range(4, 8))
    assert len(kept.generations) == 2
    assert history(tmp_path).flaws == ()
    again = Kept(of_run(tmp_path), donor)
    through_generations(again, donor, 8, 9)
    found = history(tmp_path)
    assert (found.flaws, found.replayed) == ((), found.checked)
    assert found.checked[0] == 0
    assert found.anchor_sha256 == anchor_sha256(donor.anchor)


def test_the_service_answers_as_an_averager_does(donor: ChainMaker, tmp_path: Path) -> None:
    donor.train(0)
    donor.train(1)
    donor.snapshot()
    kept = Kept(tmp_path / "kept", donor)
    kept.look(donor)

    async def find(want: dict[str, Any]) -> Source | None:
        return kept.archive.find(want)

    served, refused = Counter[str](), Counter[str]()

    async def asked(want: dict[str, Any]) -> list[Any]:
        service = ArchiveService(find, served, refused)
        peer: Any = SimpleNamespace(remote_id=donor.peer)
        return [each async for each in service.rpc_get(pack(want), peer)]

    digest = donor.log.head().digest
    facts, *chunks = asyncio.run(asked({"what": "record", "digest": digest}))
    data = b"".join(chunk_of(chunk) for chunk in chunks)
    assert data == donor.log.read_bytes(1)
    assert (served, refused) == ({"record": len(data)}, {})
    assert unpack(facts) == {"bytes": len(data)}
    for nonsense in ({}, {"what": "record", "digest": "f" * 64}, {"what": "vote"}):
        (answer,) = asyncio.run(asked(nonsense))
        assert unpack(answer) == {}
    assert refused == {"nonsense": 1}  # what is not kept is no fault of who asks
    assert [name for name in dir(ArchiveService) if name.startswith("rpc_")] == ["rpc_get"]


def test_the_bootstrap_ticks_what_runs_beside_it_and_closes_it_before_its_node(
    monkeypatch: pytest.MonkeyPatch, identities: list[Identity]
) -> None:
    done: list[str] = []
    stop = threading.Event()

    class Beside:
        def tick(self) -> None:
            done.append("tick")
            if len(done) == 3:
                stop.set()

        def close(self) -> None:
            done.append("closed")

    node = SimpleNamespace(
        running=True,
        visible_addresses=lambda: [f"/ip4/127.0.0.1/tcp/1/p2p/{identities[0].peer_id}"],
        close=lambda: done.append("node closed"),
    )
    monkeypatch.setattr(bootstrap_node, "open_dht", lambda **_: node)
    keeper = SimpleNamespace(run="0" * 32, own=True, due=False, publish=lambda _: True)
    bootstrap_node.run_bootstrap(
        keeper=cast("Any", keeper),
        identity=identities[0],
        listen=(),
        announce=(),
        others=(),
        alone=True,
        stop_event=stop,
        on_ready=lambda _: done.clear(),
        beside=lambda *_: Beside(),
        look_s=0.001,
    )
    assert done == ["tick", "tick", "tick", "closed", "node closed"]


def test_no_fault_of_the_archive_leaves_its_tick(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object, **__: object) -> Any:
        raise TimeoutError

    def of_bootstrap() -> Archive:
        return Archive(
            dht=cast("Any", SimpleNamespace(run_coroutine=gone)),
            swarm=cast("Any", None),
            run=RUN,
            me=ME,
            witness=ME,
            manifest=MANIFEST,
            folder=tmp_path,
        )

    kept = of_bootstrap()
    kept.tick()
    assert "p2pd cannot be reached" in caplog.text
    caplog.clear()
    kept.tick()
    assert not caplog.text  # it waits before it tries again
    monkeypatch.setattr(archive_keeper, "daemon_address", lambda *_: f"/unix/{os.devnull}")
    kept = of_bootstrap()
    kept.tick()
    assert "did not start" in caplog.text
    kept.close()


class OpenedStages:
    """In place of the stages' archives: under which rules each was opened, who has been closed."""

    def __init__(self) -> None:
        self.opened: list[tuple[int, int | None]] = []  # stage, the rules' end of the run
        self.closed: list[int] = []
        self.may_open = threading.Event()
        self.may_open.set()

    def open(self, folder: Path, *, check: RecordCheck, **_: object) -> Any:
        self.opened.append((check.stage, check.manifest.end_tokens))
        assert self.may_open.wait(10)

        async def tend(claims: object) -> None:
            pass

        async def close() -> None:
            self.closed.append(check.stage)
            if check.stage == 0:
                raise RuntimeError("of closing")

        return SimpleNamespace(tend=tend, close=close, claim=None, round=7)


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> OpenedStages:
    stages = OpenedStages()
    monkeypatch.setattr(archive_keeper, "StageArchive", stages.open)
    return stages


def while_it_keeps(folder: Path, test: Callable[[Keeper], None]) -> None:
    """Run the test beside a keeper of two stages that are on the disk, with a p2pd of its own."""
    for stage in range(2):
        (folder / f"stage{stage}").mkdir()
    keeper = Keeper(RUN, ME, ME, replace(MANIFEST, stages=2), folder)

    async def run() -> None:
        p2p = await P2P.create(startup_timeout=60)
        try:
            await asyncio.to_thread(keeper.start, p2p.daemon_listen_maddr)
            await asyncio.to_thread(test, keeper)
        finally:
            await asyncio.to_thread(keeper.close)
            await p2p.shutdown()

    asyncio.run(run())


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_new_rules_move_no_folder_in_which_a_thread_still_works(
    tmp_path: Path, stages: OpenedStages
) -> None:
    before, after = [(0, 1000), (1, 1000)], [(0, 1), (1, 1)]

    def revised(keeper: Keeper) -> None:
        wait_until(lambda: sorted(stages.opened) == before)
        keeper.revise(replace(MANIFEST, stages=2, end_tokens=1))
        time.sleep(0.2)
        assert sorted(stages.opened) == before, "both are still being opened under the old rules"
        stages.may_open.set()
        wait_until(lambda: sorted(stages.opened[2:]) == after)

    stages.may_open.clear()
    while_it_keeps(tmp_path, revised)


def test_a_stage_that_cannot_be_put_down_holds_up_no_new_rules(
    tmp_path: Path, stages: OpenedStages, caplog: pytest.LogCaptureFixture
) -> None:
    def revised(keeper: Keeper) -> None:
        wait_until(lambda: keeper.rounds == {0: 7, 1: 7})
        for end_tokens in (1, 2):
            keeper.revise(replace(MANIFEST, stages=2, end_tokens=end_tokens))
        wait_until(lambda: sorted(stages.opened[-2:]) == [(0, 2), (1, 2)])

    while_it_keeps(tmp_path, revised)
    assert {0, 1} <= set(stages.closed)
    assert "archive of stage 0: " in caplog.text and "of closing" in caplog.text

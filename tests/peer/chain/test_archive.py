"""The bootstrap's archive: it follows, proves, replaces and serves what peers of a stage have."""

from __future__ import annotations

import asyncio
import io
import os
import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from dilocox.dht.errors import EnvironmentFault
from dilocox.dht.identity import Identity
from dilocox.dht.rpc import PeerBusy
from dilocox.peer.chain.generation import Generation
from dilocox.peer.chain.record_check import RecordCheck
from dilocox.peer.chain.snapshot_files import (
    STATE_CHUNK_BYTES,
    STATE_FILE,
    state_sha256,
)
from dilocox.peer.chain.summary import ChainRound
from dilocox.peer.chain.uploads import Source
from tests.clocks import TestClock
from tests.peer.chain.archives import CHECK, ME, Kept, donor_of
from tests.peer.kept_chains import ChainMaker
from tests.peer.memory_swarm import Find


def states_too_large(donor: ChainMaker) -> Find:
    """Answers as the donor does, but that its state is a terabyte, it says."""

    def find(want: dict[str, Any]) -> Source | None:
        found = donor.find(want)
        if found is not None and want["what"] == "state":
            found.facts["size"] = 1 << 40
        return found

    return find


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
        newest, claim = told[-1], donor.claim()
        facts = ("round", "digest", "chain_tokens", "record_bytes", "rules")
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
    (state,) = tmp_path.glob(f"kept/0*/state/*/{STATE_FILE}")
    with state.open("r+b") as file:
        file.seek(5003 if wrong == "anchor" else -5001, os.SEEK_SET if wrong == "anchor" else 2)
        file.write(b"\x3e")
    donor.train(5)
    kept.look(donor)
    assert "what is kept is damaged" in caplog.text and kept.state_round == -1
    claim = kept.look(donor)
    assert claim is not None
    assert torch.equal(kept.joiner_gets(tmp_path, claim), donor.anchor)


def test_a_state_is_proved_while_no_other_stage_has_an_average_in_memory(
    donor: ChainMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bootstrap that started again proved two at once, on a machine for one."""
    kept = Kept(tmp_path / "kept", donor)
    for number in range(6):
        donor.train(number)
        kept.look(donor)
    proved, calls = Generation.proved, list[int]()

    def watched(generation: Generation, check: RecordCheck) -> bool | None:
        calls.append(generation.number)
        return proved(generation, check)

    async def go() -> None:
        lock = asyncio.Lock()
        again = Kept(tmp_path / "kept", donor, replaying=lock)
        async with lock:
            await again.archive.tend({donor.peer: donor.claim()})
            assert not calls and again.archive.claim == donor.claim()
        await again.archive.tend({donor.peer: donor.claim()})
        assert len(calls) == 1

    monkeypatch.setattr(Generation, "proved", watched)
    asyncio.run(go())


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
    ours, theirs = (donor_of(each, tmp_path / each.peer_id) for each in identities[:2])
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
    stranger = donor_of(identities[1], tmp_path / "stranger")
    kept = Kept(tmp_path / "kept", donor, stranger, witness=ME)
    donor.train(0, 1)
    assert kept.look(donor) == donor.claim()
    stranger.train(*range(20))  # a sound chain of its own: a fork of more tokens
    assert kept.look(donor, stranger) == donor.claim()
    donor.train(2)
    assert kept.look(donor, stranger) == donor.claim()
    assert {peer for peer, _ in kept.swarm.asked} == {donor.peer}, "the stranger is not even asked"


def test_nobody_ends_the_operator_s_chain_by_keeping_no_older_records(
    donor: ChainMaker,
    identities: list[Identity],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its members are gone, so it goes on with whoever comes; but not from a state of theirs."""
    stranger, clock = donor_of(identities[1], tmp_path / "stranger"), TestClock()
    donor.train(0, 1)
    stranger.train(*range(6))
    stranger.snapshot()
    stranger.log.prune(keep=2)
    kept = Kept(tmp_path / "kept", donor, stranger, witness=ME, now=clock.monotonic)
    assert kept.look(donor) == donor.claim()
    clock.now += 61.0
    assert kept.look(stranger) == donor.claim()
    assert "state" not in {want["what"] for _, want in kept.swarm.asked}
    donor.train(2)
    assert kept.look(stranger, donor) == donor.claim()
    # nor after it was down; where the operator knows that the run went on so, it begins anew
    again = Kept(tmp_path / "kept", donor, stranger, witness=ME, now=clock.monotonic)
    caplog.clear()
    clock.now += 61.0
    assert again.look(stranger) == donor.claim()
    (alarm,) = (text for text in caplog.messages if "alarm" in text)
    assert f"move {again.folder} elsewhere" in alarm
    again.folder.rename(tmp_path / "elsewhere")
    anew = Kept(again.folder, donor, stranger, witness=ME, now=clock.monotonic)
    assert anew.look(stranger) == stranger.claim()


@pytest.mark.parametrize("how", ["state", "record", "replay", "false state"])
def test_the_operator_s_archive_that_lost_its_chain_takes_none_of_strangers(
    donor: ChainMaker,
    identities: list[Identity],
    tmp_path: Path,
    how: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It forgot who had made it, and believed the first one that came."""
    stranger, clock = donor_of(identities[1], tmp_path / "stranger"), TestClock()
    stranger.train(0)
    kept = partial(Kept, tmp_path / "kept", donor, stranger, witness=ME, now=clock.monotonic)
    archive = kept()
    donor.train(*range(4))
    if how == "false state":
        donor.log.prune(keep=1)
        lie(donor, "anchor")
        archive.look(donor)
    else:
        for number in range(4, 6):
            donor.train(number)
            archive.look(donor)
        kind = "*.record" if how == "record" else STATE_FILE
        file = min(tmp_path.glob(f"kept/0*/**/{kind}"))
        data = bytearray(file.read_bytes())
        data[-5001 if how == "replay" else 5003] ^= 1
        file.write_bytes(data)
        if how != "replay":
            archive = kept()
    donor.train(*range(donor.log.head().round + 1, donor.log.head().round + 3))
    if how in ("replay", "false state"):  # it finds out when records follow
        archive.look(donor)
    assert "alarm" in caplog.text
    lies: dict[str, Any] = {
        f"Qm{n}": replace(stranger.claim(), digest=f"{n:064x}", round=99) for n in range(6)
    }
    for _ in range(5):
        told = archive.look(stranger, **lies)
        assert told is None or told.digest in donor.digests
    clock.now += 100.0  # its members are silent
    told = archive.look(stranger, **lies)
    assert told is None or told.digest in donor.digests
    donor.snapshot()
    assert archive.look(donor, stranger, **lies, times=3) == donor.claim()


def test_an_operator_s_archive_that_begins_anew_believes_its_copies(
    donor: ChainMaker, identities: list[Identity], tmp_path: Path
) -> None:
    """Of a bootstrap that is started elsewhere with the run's key: strangers may be there first."""
    stranger, clock = donor_of(identities[1], tmp_path / "stranger"), TestClock()
    copy = "QmCopy"
    donor.train(0, 1)
    stranger.train(*range(6))
    anew = partial(Kept, witness=ME, copies=frozenset({copy}), now=clock.monotonic)
    kept = anew(tmp_path / "kept", donor, stranger)
    kept.swarm.finds[copy] = donor.find
    assert kept.look(stranger) is None
    told: dict[str, Any] = {copy: donor.claim()}
    assert kept.look(stranger, **told) == donor.claim()
    assert kept.look(stranger) == donor.claim()
    alone = anew(tmp_path / "alone", donor, stranger)
    assert alone.look(donor) is None
    clock.now += 61.0  # no copy is there
    assert alone.look(donor) == donor.claim()
    # one that claims what nobody has does not keep it from beginning for ever
    empty: dict[str, Any] = {copy: replace(donor.claim(), digest="e" * 64)}
    vain = anew(tmp_path / "vain", donor)
    vain.swarm.finds[copy] = lambda want: None
    for _ in range(8):
        clock.now += 61.0
        vain.look(donor, **empty)
    assert vain.look(donor, **empty) == donor.claim()


@pytest.mark.parametrize("lost", [False, True])
def test_a_copy_puts_no_record_into_the_operator_s_chain_when_its_members_are_gone(
    donor: ChainMaker, identities: list[Identity], tmp_path: Path, lost: bool
) -> None:
    """After the end of a run all are; and where a disk has lost the chain they alone count."""
    copy, clock = "QmCopy", TestClock()
    kept = partial(
        Kept, tmp_path / "kept", witness=ME, copies=frozenset({copy}), now=clock.monotonic
    )
    donor.train(0, 1)
    archive = kept(donor)
    archive.swarm.finds[copy] = donor.find
    told: dict[str, Any] = {copy: donor.claim()}
    assert archive.look(donor, **told) == donor.claim()
    ended = donor.claim()
    liar = donor_of(identities[1], tmp_path / "liar")
    if lost:
        newest = max(tmp_path.glob("kept/0*/log/*.record"))
        newest.write_bytes(newest.read_bytes()[:-1] + b"x")
        archive = kept(donor, liar)
        liar.train(*range(4))
        told = {copy: liar.claim()}
    else:
        told = {copy: replace(ended, digest="f" * 64, round=9, chain_tokens=10**6)}
    archive.swarm.finds[copy] = liar.find
    archive.swarm.asked.clear()
    clock.now += 200.0
    found = archive.look(trains=lost, **told, times=3)
    assert found is None if lost else found == ended
    assert not archive.asked("record")


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
    stranger = donor_of(identities[1], tmp_path / "stranger")
    kept = Kept(tmp_path / "kept", donor, stranger, witness="QmWitness")
    donor.train(0, 1)
    stranger.train(*range(20))
    assert kept.look(donor, stranger) is None, "it has no chain, and nobody vouches for one"
    kept.swarm.finds["QmWitness"] = donor.find
    assert kept.look(donor, stranger, QmWitness=donor.claim()) == donor.claim()


def test_a_copy_that_is_on_another_chain_goes_to_the_operator_s_though_it_has_fewer_tokens(
    donor: ChainMaker, identities: list[Identity], tmp_path: Path
) -> None:
    cut_off = donor_of(identities[1], tmp_path / "cut off")
    kept = Kept(tmp_path / "kept", donor, cut_off, witness="QmWitness")
    donor.train(0, 1)
    cut_off.train(0, 1, 2)
    kept.swarm.finds["QmWitness"] = cut_off.find
    assert kept.look(QmWitness=cut_off.claim()) == cut_off.claim()
    kept.swarm.finds["QmWitness"] = donor.find
    others: dict[str, Any] = {"QmWitness": donor.claim()}
    assert kept.look(cut_off, **others) == donor.claim()
    assert kept.look(cut_off, **others) == donor.claim()


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
    (state,) = tmp_path.glob(f"kept/0*/state/*/{STATE_FILE}")
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


def test_who_gave_what_is_no_state_is_asked_again_only_where_nobody_else_has_one(
    donor: ChainMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    donor.train(0, 1, 2, 3)
    donor.snapshot()
    donor.log.prune(keep=1)
    liar = "QmLiar"

    def liar_first(peers: list[str]) -> None:
        peers.sort(key=lambda peer: peer != liar)

    monkeypatch.setattr(random, "shuffle", liar_first)
    kept = Kept(tmp_path / "kept", donor)
    kept.swarm.finds[liar] = states_too_large(donor)
    kept.look(donor, QmLiar=donor.claim(), times=3)
    assert kept.asked("state").count(liar) == 1
    assert kept.archive.claim == donor.claim()


def test_where_liars_alone_have_a_state_it_is_not_asked_for_at_each_look(
    donor: ChainMaker, tmp_path: Path
) -> None:
    donor.train(0, 1, 2, 3)
    donor.snapshot()
    donor.log.prune(keep=1)

    clock = TestClock()
    kept = Kept(tmp_path / "kept", now=clock.monotonic)
    kept.swarm.finds["QmLiar"] = states_too_large(donor)
    kept.look(QmLiar=donor.claim(), times=6)
    assert kept.asked("state").count("QmLiar") == 2  # the second time it is known for it
    clock.now += 31.0  # half a record lifetime
    kept.look(QmLiar=donor.claim(), times=6)
    assert kept.asked("state").count("QmLiar") == 3


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

"""Replaying a chain: an honest one leads to the anchor, and whatever is wrong with one is named."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from dilocox.dht.identity import Identity
from dilocox.peer.chain.replay import Replayed, replay
from dilocox.peer.chain.store import kept_run
from dilocox.peer.rounds.record import RoundRecord
from tests.peer.kept_chains import ChainMaker, Change, another_anchor, manifest_of
from tests.sweeps import sweep


def replayed(maker: ChainMaker) -> Replayed:
    kept = kept_run(maker.own.parent)
    chain = kept.stages[maker.stage]
    return replay(kept.manifest(), kept.run, maker.stage, chain.records, chain.states)


@pytest.mark.parametrize("scheme", ["dense", "low_rank"])
def test_a_chain_from_the_start_leads_to_the_anchor(
    identities: list[Identity], tmp_path: Path, scheme: str
) -> None:
    maker = ChainMaker(identities[0], tmp_path, manifest_of(scheme))
    maker.snapshot()
    maker.train(0, 1, 3)  # stages skip rounds
    maker.snapshot()
    maker.train(4)
    found = replayed(maker)
    assert found == Replayed(
        checked=(0, 1, 3, 4),
        replayed=(0, 1, 3, 4),
        flaws=(),
        anchor_sha256=maker.anchors[-1],
        confirmed=(3,),
    )


def test_the_plan_of_such_a_chain_moves(maker: ChainMaker) -> None:
    maker.train(*range(4))
    headers = [maker.log.header(number) for number in range(4)]
    ranks = [header.next_ranks for header in headers if header is not None]
    steps = [header.next_inner_steps for header in headers if header is not None]
    assert ranks[0] != ranks[1]
    assert steps == [30, 30, 30, 30]  # from 20


def test_a_chain_without_its_start_is_replayed_from_a_state(maker: ChainMaker) -> None:
    maker.train(0, 1, 2)
    maker.snapshot()
    maker.train(3, 4)
    maker.log.prune(keep=4)
    found = replayed(maker)
    assert (found.checked, found.replayed, found.flaws) == ((1, 2, 3, 4), (3, 4), ())
    assert found.anchor_sha256 == maker.anchors[-1]


def test_a_chain_that_begins_after_the_record_of_a_state_is_replayed_from_it(
    maker: ChainMaker,
) -> None:
    maker.train(0, 1)
    maker.snapshot()
    maker.train(2, 3)
    maker.log.prune(keep=2)
    found = replayed(maker)
    assert (found.checked, found.replayed, found.flaws) == ((2, 3), (2, 3), ())
    assert found.anchor_sha256 == maker.anchors[-1]


def test_without_start_and_state_the_records_are_only_checked(maker: ChainMaker) -> None:
    maker.train(0, 1, 2)
    maker.log.prune(keep=2)
    found = replayed(maker)
    assert (found.checked, found.replayed, found.flaws) == ((1, 2), (), ())
    assert found.anchor_sha256 == ""


def test_no_rounds_are_no_flaw(maker: ChainMaker) -> None:
    found = replayed(maker)
    assert (found.checked, found.flaws, found.anchor_sha256) == ((), (), "")


# ---- flaws ---------------------------------------------------------------------------------------
def more_tokens(record: RoundRecord) -> RoundRecord:
    return replace(record, chain_tokens=record.chain_tokens + 1)


def another_predecessor(record: RoundRecord) -> RoundRecord:
    return replace(record, previous="e" * 64)


def another_h(record: RoundRecord) -> RoundRecord:
    return replace(record, next_inner_steps=record.next_inner_steps + 1)


def other_ranks(record: RoundRecord) -> RoundRecord:
    return replace(record, next_ranks=tuple(max(rank - 1, 0) for rank in record.next_ranks))


def another_window(record: RoundRecord) -> RoundRecord:
    return replace(record, window=record.window[1:] or (record.window[0],) * 2)


def other_needs(record: RoundRecord) -> RoundRecord:
    last = record.window[-1]
    return replace(
        record, window=(*record.window[:-1], replace(last, needed=(0,) * len(last.ranks)))
    )


def forgotten_peers(record: RoundRecord) -> RoundRecord:
    return replace(record, standings=())


CHANGES: dict[Change, str] = {
    forgotten_peers: "remembers of peers what does not follow",
    another_anchor: "applies to the anchor ffffffffffff, the records before it make",
    more_tokens: "counts 31 tokens of the chain, they are 30",
    another_predecessor: "follows the record eeeeeeeeeeee, not",
    another_h: "do not follow from its means",
    other_ranks: "do not follow from its means",
    another_window: "do not follow from its means",
    other_needs: "do not follow from its means",
}


@pytest.mark.parametrize(("change", "words"), sweep(CHANGES.items(), 5))
def test_a_record_that_should_not_follow_is_named(
    maker: ChainMaker, change: Change, words: str
) -> None:
    maker.train(0, 1)
    maker.train(2, change=change)
    maker.train(3)
    flaws = replayed(maker).flaws
    assert flaws and flaws[0].startswith("round 2: ")
    assert words in flaws[0]


def test_a_flaw_is_named_once_and_a_state_after_it_tells_the_anchor_again(
    maker: ChainMaker,
) -> None:
    maker.train(0)
    maker.train(1, change=another_anchor)
    maker.train(2)
    maker.snapshot()
    maker.train(3)
    found = replayed(maker)
    assert len(found.flaws) == 1
    assert (found.checked, found.replayed) == ((0, 1, 2, 3), (0, 3))
    assert found.anchor_sha256 == maker.anchors[-1]


def test_ranks_that_were_not_planned_are_named(maker: ChainMaker) -> None:
    maker.train(0)
    assert maker.last is not None
    maker.last = replace(maker.last, next_ranks=maker.codec.limits)
    maker.train(1)
    (flaw,) = replayed(maker).flaws
    assert flaw == "round 1: has other ranks than the record before it names"


def test_a_record_that_is_missing_is_named(maker: ChainMaker) -> None:
    maker.train(0, 1, 2)
    maker.record_file(1).unlink()
    (flaw,) = replayed(maker).flaws
    assert flaw.startswith("round 2: follows the record")


def test_a_record_in_the_file_of_another_round_is_named(maker: ChainMaker) -> None:
    maker.train(0)
    path = maker.record_file(0)
    path.rename(path.with_name(path.name.replace("00000000", "00000001")))
    votes = maker.own / "log" / "00000000.certificate"
    votes.rename(votes.with_name("00000001.certificate"))
    (flaw,) = replayed(maker).flaws
    assert flaw == "round 1: the record in its file is of round 0"


def test_a_damaged_record_is_named_and_ends_the_replay(maker: ChainMaker) -> None:
    maker.train(0, 1, 2)
    path = maker.record_file(1)
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    found = replayed(maker)
    (flaw,) = found.flaws
    assert flaw.startswith("round 1: ") and "damaged on disk" in flaw
    assert (found.checked, found.replayed, found.anchor_sha256) == ((0, 1, 2), (0,), "")


@pytest.mark.parametrize("kind", ["none", "another", "another run's", "another peer's"])
def test_a_record_without_its_votes_is_named(
    maker: ChainMaker, identities: list[Identity], kind: str
) -> None:
    maker.train(0, 1)
    path = maker.own / "log" / "00000001.certificate"
    record = maker.log.header(1)
    assert record is not None
    match kind:
        case "none":
            path.unlink()
        case "another":
            shutil.copy(maker.own / "log" / "00000000.certificate", path)
        case "another run's":
            path.write_bytes(maker.certificate(replace(record, run="f" * 32), maker.digests[-1]))
        case _:
            other = ChainMaker(identities[1], maker.own / "other", maker.manifest)
            path.write_bytes(other.certificate(record, maker.digests[-1]))
    (flaw,) = replayed(maker).flaws
    assert flaw.startswith("round 1: ")


@pytest.mark.parametrize("name", ["anchor", "momentum"])
def test_a_state_that_the_records_do_not_make_is_named(maker: ChainMaker, name: str) -> None:
    maker.train(0, 1)
    values = getattr(maker, name)
    right = values.clone()
    values[7] += 1e-3
    maker.snapshot()
    values.copy_(right)
    found = replayed(maker)
    (flaw,) = found.flaws
    assert f"its {name} is not the one that the records up to round 1 make" in flaw
    assert found.confirmed == ()
    assert found.anchor_sha256 == maker.anchors[-1]


def test_a_damaged_state_is_named(maker: ChainMaker) -> None:
    maker.train(0)
    file = maker.snapshot() / "anchor.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    (flaw,) = replayed(maker).flaws
    assert "does not have the sha256" in flaw


def test_a_chain_under_another_manifest_is_not_taken_for_this_ones(maker: ChainMaker) -> None:
    maker.train(0, 1)
    kept = kept_run(maker.own)
    other = replace(kept.manifest(), seed=7)
    found = replay(other, kept.run, 0, kept.stages[0].records, ())
    assert (found.replayed, found.anchor_sha256) == ((), "")

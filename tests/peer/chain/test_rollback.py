"""A chain over a revision of the manifest is replayed, and the operator's way back is prepared
from the archive and taken by peers and archives, without losing a file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dilocox.dht.errors import InvalidInput
from dilocox.dht.identity import Identity
from dilocox.dht.manifest import Manifest
from dilocox.dht.manifest_revisions import back_to, in_state, revised
from dilocox.peer.chain import rollback
from dilocox.peer.chain.generation import Generation, OlderRecords
from dilocox.peer.chain.record_check import RecordCheck
from dilocox.peer.chain.replay import replay
from dilocox.peer.chain.rollback import (
    archive_goes_back,
    newest_aside,
    peer_goes_back,
    prepare_rollback,
)
from dilocox.peer.chain.store import Store, keep_manifest, kept_run
from tests.peer.kept_chains import RUN, ChainMaker, manifest_of


@pytest.fixture
def maker(identities: list[Identity], tmp_path: Path) -> ChainMaker:
    return ChainMaker(identities[0], tmp_path / "peer", manifest_of("dense"))


def with_rate(manifest: Manifest, rate: float) -> Manifest:
    outer = replace(manifest.outer, learning_rate=rate)
    return revised(manifest, replace(manifest, outer=outer))


def flaws(maker: ChainMaker, manifest: Manifest | None = None) -> tuple[str, ...]:
    chain = kept_run(maker.own.parent).stages[0]
    return replay(manifest or maker.manifest, RUN, 0, chain.records, chain.states).flaws


def whole(stage: Path, maker: ChainMaker, manifest: Manifest) -> list[Generation]:
    """What an archive finds at a start."""
    check = RecordCheck(RUN, 0, manifest, maker.layout)
    return Generation.kept(stage, check, OlderRecords(stage, 1 << 30))


def archive_of(maker: ChainMaker, state: Path) -> Path:
    """What a bootstrap keeps of this chain; the folder of its stage."""
    archive = state / f"{RUN}-archive-{maker.manifest.root[:16]}"
    stage = archive / "stage0"
    Store(stage / "00000000" / "log").share(maker.log, maker.log.rounds())
    keep_manifest(archive, maker.manifest)
    return stage


def roll_back(maker: ChainMaker, state: Path, number: int) -> Manifest:
    """As the operator's command does; the new revision."""
    rules = maker.manifest.operation.revision + 1
    base = prepare_rollback(state, RUN, maker.manifest, number, rules, tell=lambda _: None)
    return back_to(maker.manifest, number, base)


# ---- a revision ----------------------------------------------------------------------------------
def test_a_chain_over_revisions_is_replayed_with_the_newest_one_alone(maker: ChainMaker) -> None:
    maker.train(0, 1)
    maker.revise(with_rate(maker.manifest, 0.3))
    maker.train(2)
    maker.revise(in_state(maker.manifest, "paused"))
    maker.revise(with_rate(maker.manifest, 0.9))
    maker.train(3, 4)
    maker.snapshot()
    chain = kept_run(maker.own.parent).stages[0]
    found = replay(maker.manifest, RUN, 0, chain.records, chain.states)
    assert (found.flaws, found.replayed, found.confirmed) == ((), (0, 1, 2, 3, 4), (4,))


def test_a_record_under_older_rules_than_the_one_before_it_is_found(maker: ChainMaker) -> None:
    maker.train(0)
    maker.revise(with_rate(maker.manifest, 0.3))
    maker.train(1)
    maker.train(2, change=lambda record: replace(record, rules=0))
    assert flaws(maker) == ("round 2: is under older rules than the record before it",)


def test_a_record_of_a_revision_that_is_not_known_yet_is_refused(maker: ChainMaker) -> None:
    first = maker.manifest
    maker.revise(with_rate(first, 0.3))
    maker.train(0)
    (flaw,) = flaws(maker, first)
    assert "made under revision 1 of the manifest, which is not known here yet" in flaw


# ---- the way back --------------------------------------------------------------------------------
def test_the_state_after_an_earlier_round_is_prepared_and_served(
    maker: ChainMaker, tmp_path: Path
) -> None:
    maker.train(0, 2, 3, 5)
    stage = archive_of(maker, tmp_path / "boot")
    newer = roll_back(maker, tmp_path / "boot", 4)
    assert newer.base(0) == maker.digests[3]  # of round 3, the last one not after 4
    archive_goes_back(stage, newer)
    archive_goes_back(stage, newer)  # twice does no harm
    (current,) = whole(stage, maker, newer)
    assert (current.head.round, current.state_round) == (3, 3)
    assert Store(stage / "older").rounds() == [0, 2, 3]
    assert Store(stage / "before-00000001" / "00000000" / "log").rounds() == [0, 2, 3, 5]
    chain = kept_run(stage.parent).stages[0]
    found = replay(newer, RUN, 0, chain.records, chain.states)
    assert (found.flaws, found.confirmed) == ((), (3,))
    assert found.anchor_sha256 == maker.anchors[3]


def test_who_is_killed_at_the_end_of_a_rollback_still_finds_its_state(
    maker: ChainMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maker.train(0, 2, 3)
    stage = archive_of(maker, tmp_path / "boot")
    newer = roll_back(maker, tmp_path / "boot", 2)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    for function in ("_mark", "prepared"):  # before the mark, and between it and the state
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(rollback, function, killed)
            archive_goes_back(stage, newer)
    archive_goes_back(stage, newer)
    (current,) = whole(stage, maker, newer)
    assert (current.head.round, current.state_round) == (2, 2)


def test_a_peer_keeps_what_counts_and_puts_the_rest_aside(
    maker: ChainMaker, tmp_path: Path
) -> None:
    maker.train(0, 1, 2)
    maker.snapshot()
    archive_of(maker, tmp_path / "boot")
    newer = roll_back(maker, tmp_path / "boot", 1)
    assert not peer_goes_back(maker.own, maker.manifest), "nothing to do before the rollback"
    assert peer_goes_back(maker.own, newer)
    assert not peer_goes_back(maker.own, newer), "and only once"
    assert maker.log.rounds() == [0, 1]
    assert not (maker.own / "snapshots").exists()
    aside = maker.own / "before-00000001"
    assert Store(aside / "log").rounds() == [0, 1, 2]
    # a third snapshot beside the two that come would fill the disk of who planned for those
    assert not list((aside / "snapshots").rglob("anchor*"))


def test_a_peer_knows_the_newest_round_that_was_put_aside(
    maker: ChainMaker, tmp_path: Path
) -> None:
    maker.train(0, 1, 2)
    archive_of(maker, tmp_path / "boot")
    assert newest_aside(maker.own) == -1
    newer = roll_back(maker, tmp_path / "boot", 0)
    assert peer_goes_back(maker.own, newer)
    assert (maker.log.rounds(), newest_aside(maker.own)) == ([0], 2)


def test_a_peer_whose_log_lacks_the_start_begins_like_a_joiner(
    maker: ChainMaker, tmp_path: Path
) -> None:
    maker.train(0, 1, 2, 3, 4, 5)
    archive_of(maker, tmp_path / "boot")
    newer = roll_back(maker, tmp_path / "boot", 3)
    maker.log.prune(keep=4)
    assert peer_goes_back(maker.own, newer)
    assert maker.log.rounds() == []


def test_the_abandoned_records_are_refused_and_the_new_ones_are_not(
    maker: ChainMaker, tmp_path: Path
) -> None:
    maker.train(0, 1, 2)
    archive_of(maker, tmp_path / "boot")
    newer = roll_back(maker, tmp_path / "boot", 0)
    (flaw,) = flaws(maker, newer)[:1]
    assert "the operator went back behind round 1" in flaw


def test_back_to_the_initial_weights(maker: ChainMaker, tmp_path: Path) -> None:
    maker.train(0, 1)
    stage = archive_of(maker, tmp_path / "boot")
    newer = roll_back(maker, tmp_path / "boot", -1)
    assert newer.base(0) == maker.manifest.digest
    archive_goes_back(stage, newer)
    (current,) = whole(stage, maker, newer)
    assert current.head.round == -1


def test_a_way_back_that_is_none_is_refused_by_name(maker: ChainMaker, tmp_path: Path) -> None:
    maker.train(0, 1, 2, 3, 4, 5)
    with pytest.raises(InvalidInput, match="--round 3: the archive has no round yet"):
        roll_back(maker, tmp_path / "boot", 3)  # the archive has nothing yet
    stage = archive_of(maker, tmp_path / "boot")
    with pytest.raises(InvalidInput, match="--round 5: the newest round is 5; give an earlier"):
        roll_back(maker, tmp_path / "boot", 5)
    Store(stage / "00000000" / "log").prune(keep=4)
    with pytest.raises(InvalidInput, match="keeps too few records of stage 0 to go back to any"):
        roll_back(maker, tmp_path / "boot", 3)


def test_a_stage_that_is_kept_from_a_later_round_on_does_not_go_back_to_its_beginning(
    maker: ChainMaker, tmp_path: Path
) -> None:
    """As in the archive of a bootstrap that was replaced."""
    maker.train(0, 1, 2)
    stage = archive_of(maker, tmp_path / "boot")
    maker.snapshot(stage / "00000000" / "state")
    maker.train(3, 4, 5)
    log = Store(stage / "00000000" / "log")
    log.share(maker.log, [3, 4, 5])
    for number in (-1, 0, 1):
        assert roll_back(maker, tmp_path / "boot", number)  # its records begin at the beginning
    log.prune(keep=4)
    wanted = "this bootstrap keeps stage 0 from round 2 on; choose a round from 2 on"
    for number in (-1, 0, 1):
        with pytest.raises(InvalidInput, match=f"--round {number}: {wanted}"):
            roll_back(maker, tmp_path / "boot", number)
    assert roll_back(maker, tmp_path / "boot", 2).base(0) == maker.digests[3]


def test_a_stage_of_which_nothing_is_kept_yet_does_not_go_back_to_its_beginning(
    identities: list[Identity], tmp_path: Path
) -> None:
    manifest = replace(manifest_of("dense"), stages=2)
    maker = ChainMaker(identities[0], tmp_path / "peer", manifest)
    maker.train(0, 1, 2, 3, 4, 5)
    stage = archive_of(maker, tmp_path / "boot")
    newer = roll_back(maker, tmp_path / "boot", 4)
    assert newer.base(1) == manifest.root  # nothing of stage 1 was ever committed
    maker.snapshot(stage / "00000000" / "state")
    Store(stage / "00000000" / "log").prune(keep=1)
    with pytest.raises(InvalidInput, match="--round 5: the newest round is 5"):
        roll_back(maker, tmp_path / "boot", 5)
    maker.train(6)
    Store(stage / "00000000" / "log").share(maker.log, [6])
    with pytest.raises(
        InvalidInput, match="--round 5: this bootstrap keeps nothing of stage 1 yet"
    ):
        roll_back(maker, tmp_path / "boot", 5)

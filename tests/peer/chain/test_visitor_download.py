"""Downloading anchors as somebody who is no peer: from logs and snapshots, honest and not."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dilocox.dht.errors import EnvironmentFault
from dilocox.dht.identity import Identity
from dilocox.dht.manifest import Manifest
from dilocox.dht.records import ClaimRecord
from dilocox.peer.chain import visitor_download
from dilocox.peer.chain.visitor_download import (
    AnchorPlace,
    Patience,
    StageAnchor,
    download_anchors,
)
from dilocox.peer.rounds.record import RoundRecord
from tests.clocks import TestClock
from tests.peer.kept_chains import MODEL, ChainMaker, Change, another_anchor
from tests.peer.memory_swarm import MemorySwarm

MANIFEST = Manifest.from_dict(
    {"name": "test", "model": MODEL, "end_tokens": 1000, "codec": {"scheme": "dense"}}
)
TWO_STAGES = replace(MANIFEST, stages=2)
THREE_STAGES = replace(MANIFEST, stages=3, model=MODEL | {"num_hidden_layers": 3})


def take_all(
    *donors: ChainMaker,
    gone: tuple[str, ...] = (),
    timeout_s: float = 20.0,
    look: Callable[[], None] = lambda: None,
    told_s: float = 20.0,
    common_s: float = 60.0,
    have: Sequence[AnchorPlace] = (),
    came: Callable[[StageAnchor], None] = lambda anchor: None,
    swarm: MemorySwarm | None = None,
) -> list[StageAnchor]:
    """Download all stages of a run from these donors.

    The peers in `gone` claim a long chain of stage 0 and do not answer. `look` is called before
    each look at the claims, `came` with each anchor that comes.
    """
    long_chain = replace(donors[0].claim(), round=999)
    swarm = swarm or MemorySwarm()
    swarm.finds |= {donor.peer: donor.find for donor in donors}

    def claims(stage: int) -> dict[str, ClaimRecord]:
        look()
        found = {donor.peer: donor.claim() for donor in donors if donor.stage == stage}
        return found | dict.fromkeys(gone if stage == 0 else (), long_chain)

    place = swarm.place(donors[0].manifest, claims)
    patience = Patience(look_s=0.01, told_s=told_s, common_s=common_s)
    found: dict[int, StageAnchor] = {}

    def keep(anchor: StageAnchor) -> None:
        found[anchor.place.stage] = anchor
        came(anchor)

    with tempfile.TemporaryDirectory() as folder:
        places = download_anchors(
            place,
            keep,
            folder=Path(folder),
            timeout_s=timeout_s,
            have=have,
            patience=patience,
        )
    taken = [found.get(at.stage) for at in places]
    assert all(each is None or each.place == at for each, at in zip(taken, places, strict=True))
    return [each for each in taken if each is not None]


def take(*donors: ChainMaker, gone: tuple[str, ...] = (), timeout_s: float = 20.0) -> StageAnchor:
    """Download the only stage of a run."""
    (found,) = take_all(*donors, gone=gone, timeout_s=timeout_s)
    return found


def test_the_anchor_follows_from_the_log_alone(identities: list[Identity], tmp_path: Path) -> None:
    donor = ChainMaker(identities[0], tmp_path, MANIFEST)
    for round_number in (0, 2, 3):
        donor.train(round_number)
        found = take(donor)  # there is no snapshot yet, or only one that stands on the manifest
        assert torch.equal(found.anchor, donor.anchor)
        if round_number == 0:
            start = ChainMaker(identities[0], tmp_path / "start", MANIFEST)
            start.snapshot(donor.own / "snapshots")
    assert (found.place.round, found.place.chain_tokens) == (3, 30)
    assert found.place.digest == donor.log.head().digest


def test_the_anchor_follows_from_a_snapshot_and_the_records_after_it(
    identities: list[Identity], tmp_path: Path
) -> None:
    donor = ChainMaker(identities[0], tmp_path, MANIFEST)
    for round_number in range(4):
        donor.train(round_number)
        if round_number == 1:
            donor.snapshot()
    donor.log.prune(keep=3)  # the log does not reach back to the initial weights
    assert torch.equal(take(donor).anchor, donor.anchor)
    donor.snapshot()
    assert torch.equal(take(donor).anchor, donor.anchor)  # and none after it


def test_what_an_archive_keeps_besides_is_not_waited_for(
    identities: list[Identity], tmp_path: Path
) -> None:
    donor = ChainMaker(identities[0], tmp_path, MANIFEST)
    donor.train(0, 1)
    donor.snapshot()
    swarm = MemorySwarm(**{donor.peer: donor.find})
    place = swarm.place(MANIFEST, lambda _: {donor.peer: donor.claim()})
    download_anchors(place, lambda _: None, folder=tmp_path, timeout_s=20.0)
    assert not any(want.get("older") for _, want in swarm.asked)


@pytest.mark.parametrize("newer", [False, True])
def test_a_stranger_that_claims_what_is_vouched_for_gives_no_weights(
    identities: list[Identity], tmp_path: Path, newer: bool
) -> None:
    donor = ChainMaker(identities[0], tmp_path / "donor", MANIFEST)
    donor.train(0, 1, 2, 3)
    donor.snapshot()
    donor.log.prune(keep=1)  # the log does not reach back to the initial weights
    false = ChainMaker(identities[1], tmp_path / "false", MANIFEST)
    false.log, false.last, false.digests = donor.log, donor.last, donor.digests
    false.anchor += 1.0
    false.snapshot()
    claim, honest = donor.claim(), donor.anchor.clone()
    if newer:  # than what the archive has
        donor.train(4)
    swarm = MemorySwarm(**{"1": false.find, "boot": donor.find, donor.peer: donor.find})
    place: Any = swarm.place(MANIFEST, lambda _: dict.fromkeys(("1", "boot", donor.peer), claim))
    place.witness = "boot"
    taken: list[StageAnchor] = []
    download_anchors(place, taken.append, folder=tmp_path, timeout_s=20.0)
    assert torch.equal(taken[0].anchor, honest)
    assert "1" not in {peer for peer, _ in swarm.asked}
    place.witness = ""
    download_anchors(place, taken.append, folder=tmp_path, timeout_s=20.0)
    assert not torch.equal(taken[1].anchor, honest), "the stranger is the first"


@pytest.mark.parametrize("archive_first", [False, True])
def test_the_archive_is_asked_before_volunteers_only_where_that_is_wanted(
    identities: list[Identity], tmp_path: Path, archive_first: bool
) -> None:
    donor = ChainMaker(identities[0], tmp_path, MANIFEST)
    donor.train(0)
    donor.snapshot()
    swarm = MemorySwarm(**{"boot": donor.find, donor.peer: donor.find})
    place: Any = swarm.place(MANIFEST, lambda _: dict.fromkeys(("boot", donor.peer), donor.claim()))
    place.witness = "boot"
    download_anchors(
        place, lambda _: None, folder=tmp_path, timeout_s=20.0, archive_first=archive_first
    )
    gave = {peer for peer, counts in swarm.sent.items() if counts["state"]}
    assert gave == {"boot" if archive_first else donor.peer}


def codes_no_codec_writes(record: RoundRecord) -> RoundRecord:
    return replace(record, means=(record.means[0][:-1] + b"\x88",))


def another_run(record: RoundRecord) -> RoundRecord:
    return replace(record, run="q" * 32)


@pytest.mark.parametrize("lie", [codes_no_codec_writes, another_anchor, another_run])
def test_a_donor_whose_chain_is_not_sound_is_passed_over(
    identities: list[Identity], tmp_path: Path, lie: Change
) -> None:
    liar = ChainMaker(identities[0], tmp_path / "liar", MANIFEST)
    honest = ChainMaker(identities[1], tmp_path / "honest", MANIFEST)
    liar.train(0, 1, 2, change=lie)
    honest.train(0, 1)
    found = take(liar, honest, gone=("QmGone",))  # the liar's chain is longer and asked first
    assert torch.equal(found.anchor, honest.anchor)


def test_without_a_sound_donor_the_last_reason_and_the_mend_are_named(
    identities: list[Identity], tmp_path: Path
) -> None:
    liar = ChainMaker(identities[0], tmp_path, MANIFEST)
    liar.train(0, change=another_run)
    began = time.monotonic()
    with pytest.raises(EnvironmentFault, match=r"it is of run qqq.*; try again later"):
        take(liar, timeout_s=0.3)
    assert time.monotonic() - began < 5


def test_a_run_without_a_round_says_that_there_is_none_yet(
    identities: list[Identity], tmp_path: Path
) -> None:
    with pytest.raises(EnvironmentFault, match=r"no committed round yet.*; try again later"):
        take(ChainMaker(identities[0], tmp_path, MANIFEST), timeout_s=0.1)


def test_who_is_gone_is_no_warning_where_another_serves(
    identities: list[Identity],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "dilocox")
    donor = ChainMaker(identities[0], tmp_path, MANIFEST)
    donor.train(0)
    take(donor, gone=("QmGone",))
    assert [(each.levelname, each.message) for each in caplog.records] == [
        ("INFO", "stage 0: QmGone gave no anchor: QmGone is gone")
    ]


def test_what_is_waited_for_is_told_after_a_while_and_once(
    identities: list[Identity],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    donor = ChainMaker(identities[0], tmp_path, TWO_STAGES)
    donor.train(0)

    def warned(timeout_s: float, told_s: float) -> list[str]:
        caplog.clear()
        with pytest.raises(EnvironmentFault, match="nobody who holds its weights is in view"):
            take_all(donor, timeout_s=timeout_s, told_s=told_s)
        return caplog.messages

    assert warned(1.0, 20.0) == []
    (line,) = warned(1.0, 0.0)
    assert line.startswith("stage 1: nobody who holds its weights is in view; check that the run")
    assert re.search(r"; waiting for \d s at most$", line)


# ---- several stages ------------------------------------------------------------------------------
def two_donors(identities: list[Identity], folder: Path) -> list[ChainMaker]:
    return [
        ChainMaker(identities[stage], folder / str(stage), TWO_STAGES, stage=stage)
        for stage in range(2)
    ]


def two_that_passed_each_other(identities: list[Identity], folder: Path) -> list[ChainMaker]:
    """Nobody can have the first one's anchor of round 0 any more, nor the other's of round 1."""
    first, other = two_donors(identities, folder)
    for donor in (first, other):
        donor.train(0)
    first.train(1)
    first.snapshot()
    first.log.prune(keep=1)
    return [first, other]


@pytest.mark.parametrize("ahead", [0, 1])
def test_stages_are_taken_at_the_newest_round_that_all_of_them_have(
    identities: list[Identity], tmp_path: Path, ahead: int
) -> None:
    donors = two_donors(identities, tmp_path)
    for round_number in range(3):
        for donor in donors:
            donor.train(round_number)
        if round_number == 1:
            donors[ahead].snapshot()
    anchors, digest = [donor.anchor.clone() for donor in donors], donors[ahead].log.head().digest
    donors[ahead].train(3)
    found = take_all(*donors)
    assert [each.place.round for each in found] == [2, 2]
    assert [each.place.chain_tokens for each in found] == [30, 30]
    assert found[ahead].place.digest == digest
    for stage in range(2):
        assert torch.equal(found[stage].anchor, anchors[stage])


def test_rounds_that_pass_while_anchors_come_are_not_mixed_and_nothing_comes_twice(
    identities: list[Identity], tmp_path: Path
) -> None:
    donors = two_donors(identities, tmp_path)
    passed = ChainMaker(identities[2], tmp_path / "passed", TWO_STAGES, stage=1)
    for maker in (*donors, passed):
        maker.train(0, 1)
        maker.snapshot()
        maker.train(2)
    anchors = [donor.anchor.clone() for donor in donors]
    came: list[tuple[int, int]] = []
    swarm = MemorySwarm()

    def go_on(anchor: StageAnchor) -> None:
        came.append((anchor.place.stage, anchor.place.round))
        if len(came) == 1:  # that took longer than a round
            donors[1].train(3)
            passed.train(3, 4)
            passed.snapshot()

    found = take_all(passed, *donors, came=go_on, swarm=swarm, common_s=0.0)
    assert came == [(0, 2), (1, 2)]
    assert swarm.sent[passed.peer]["state"] == 0, "a state of a later round is of no use"
    assert all(map(torch.equal, [each.anchor for each in found], anchors))


def test_a_round_that_a_stage_does_not_have_is_not_looked_for_twice_with_whole_states(
    identities: list[Identity], tmp_path: Path
) -> None:
    donors = two_donors(identities, tmp_path)
    donors[0].train(0, 1, 2)
    donors[1].train(0, 1)
    donors[1].snapshot()
    donors[1].train(3)  # its round 2 was void
    came: list[tuple[int, int]] = []

    def go_on(anchor: StageAnchor) -> None:
        came.append((anchor.place.stage, anchor.place.round))
        if len(came) == 2:
            donors[0].train(3)

    found = take_all(*donors, came=go_on)
    assert [each.place.round for each in found] == [3, 3]
    assert came == [(0, 2), (1, 3), (0, 3)]


def test_a_common_round_is_still_waited_for_where_the_first_anchors_took_long(
    identities: list[Identity], tmp_path: Path
) -> None:
    donors = two_that_passed_each_other(identities, tmp_path)
    looks = 0

    def look() -> None:
        nonlocal looks
        looks += 1
        if looks == 5:
            donors[1].train(1)

    def slowly(anchor: StageAnchor) -> None:
        if looks == 1:
            time.sleep(1.0)

    found = take_all(*donors, look=look, came=slowly, common_s=0.9)
    assert [each.place.round for each in found] == [1, 1]


def test_where_a_state_has_passed_the_common_round_the_next_one_is_waited_for(
    identities: list[Identity], tmp_path: Path
) -> None:
    donors = two_that_passed_each_other(identities, tmp_path)
    looks = 0

    def look() -> None:
        nonlocal looks
        looks += 1
        if looks == 6:
            donors[1].train(1)

    found = take_all(*donors, look=look)
    assert [each.place.round for each in found] == [1, 1]
    assert looks >= 6


def test_without_a_common_round_the_newest_anchors_are_taken(
    identities: list[Identity],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    donors = two_donors(identities, tmp_path)
    donors[0].train(0)
    donors[1].train(1)
    found = take_all(*donors, common_s=0.2)
    assert [each.place.round for each in found] == [0, 1]
    assert all(torch.equal(each.anchor, donors[each.place.stage].anchor) for each in found)
    assert "of different rounds: 0, 1" in caplog.text


@pytest.mark.parametrize(
    ("held", "ends", "fault"),
    [
        pytest.param(3, "in time", "", id="all are here"),
        pytest.param(2, "in time", "stage 2: no anchor to be had", id="one never came"),
        pytest.param(3, "on a full disk", "no space", id="one is written again to a full disk"),
    ],
)
def test_where_the_time_ends_while_some_come_again_the_last_of_each_stage_are_given(
    identities: list[Identity],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    held: int,
    ends: str,
    fault: str,
) -> None:
    clock, came = TestClock(), list[tuple[int, int]]()
    monkeypatch.setattr(visitor_download, "time", clock)
    donors = [
        ChainMaker(identities[stage], tmp_path / str(stage), THREE_STAGES, stage=stage)
        for stage in range(held)
    ]
    for donor, round_number in zip(donors, (0, 0, 1), strict=False):
        donor.train(round_number)

    def go_on(anchor: StageAnchor) -> None:
        came.append((anchor.place.stage, anchor.place.round))
        if len(came) == 3:
            donors[0].train(1)
        elif len(came) == 4 and ends == "on a full disk":
            raise EnvironmentFault("no space")
        if len(came) == (2 if held == 2 else 4):
            clock.now += 30.0

    def taken() -> list[int]:
        return [each.place.round for each in take_all(*donors, came=go_on)]

    if fault:
        with pytest.raises(EnvironmentFault, match=fault):
            taken()
    else:
        assert taken() == [1, 0, 1]
        assert came == [(0, 0), (1, 0), (2, 1), (0, 1)]
    assert ("of different rounds: 1, 0, 1" in caplog.text) == (not fault)


@pytest.mark.parametrize("ahead", [False, True])
def test_an_anchor_that_was_taken_before_is_not_asked_for_again_if_its_round_is_to_be_had(
    identities: list[Identity], tmp_path: Path, ahead: bool
) -> None:
    donors = two_donors(identities, tmp_path)
    for donor in donors:
        donor.train(0)
    first = take_all(*donors)[0].place
    for donor in donors:
        donor.train(1)
        if ahead:
            donor.snapshot()
            donor.log.prune(keep=1)
    found = take_all(*donors, have=[first], common_s=5.0)
    places = [(each.place.stage, each.place.round) for each in found]
    assert places == ([(0, 1), (1, 1)] if ahead else [(1, 0)])


def test_anchors_of_all_stages_that_were_taken_before_are_not_taken_for_the_newest(
    identities: list[Identity], tmp_path: Path
) -> None:
    donors = two_donors(identities, tmp_path)
    for donor in donors:
        donor.train(0)
    have = [each.place for each in take_all(*donors)]
    assert [each.place.round for each in take_all(*donors, have=have)] == [0]
    for donor in donors:
        donor.train(1)
        donor.snapshot()
        donor.log.prune(keep=1)
    assert [each.place.round for each in take_all(*donors, have=have)] == [1, 1]

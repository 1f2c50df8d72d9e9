"""Downloading an anchor as somebody who is no peer: from logs and snapshots, honest and not."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dilocox.dht.errors import EnvironmentFault
from dilocox.dht.identity import Identity
from dilocox.peer.chain import download
from dilocox.peer.chain.download import StageAnchor
from dilocox.peer.rounds.record import RoundRecord
from tests.peer.donors import MANIFEST, TWO_STAGES, Change, Donor, take_all


@pytest.fixture
def take(monkeypatch: pytest.MonkeyPatch) -> Callable[..., StageAnchor]:
    """Download the only stage of a run."""

    def go(*donors: Donor, **options: Any) -> StageAnchor:
        (found,) = take_all(monkeypatch, *donors, manifest=MANIFEST, **options)
        return found

    return go


def test_the_anchor_follows_from_the_log_alone(
    identities: list[Identity], tmp_path: Path, take: Callable[..., StageAnchor]
) -> None:
    donor = Donor(identities[0], tmp_path)
    for round_number in (0, 2, 3):
        donor.train(round_number)
        found = take(donor)  # there is no snapshot yet, or only one that stands on the manifest
        assert torch.equal(found.anchor, donor.anchor)
        if round_number == 0:
            donor.snapshot_of_the_start()
    assert (found.round, found.chain_tokens) == (3, 30)
    assert found.digest == donor.log.head().digest


def test_the_anchor_follows_from_a_snapshot_and_the_records_after_it(
    identities: list[Identity], tmp_path: Path, take: Callable[..., StageAnchor]
) -> None:
    donor = Donor(identities[0], tmp_path)
    for round_number in range(4):
        donor.train(round_number)
        if round_number == 1:
            donor.snapshot()
    donor.log.prune(keep=3)  # the log does not reach back to the initial weights
    assert torch.equal(take(donor).anchor, donor.anchor)
    donor.snapshot()
    assert torch.equal(take(donor).anchor, donor.anchor)  # and none after it


def codes_no_codec_writes(record: RoundRecord) -> RoundRecord:
    return replace(record, means=(record.means[0][:-1] + b"\x88",))


def an_anchor_that_never_was(record: RoundRecord) -> RoundRecord:
    return replace(record, anchor_before="f" * 64)


def another_run(record: RoundRecord) -> RoundRecord:
    return replace(record, run="q" * 32)


@pytest.mark.parametrize("lie", [codes_no_codec_writes, an_anchor_that_never_was, another_run])
def test_a_donor_whose_chain_is_not_sound_is_passed_over(
    identities: list[Identity], tmp_path: Path, take: Callable[..., StageAnchor], lie: Change
) -> None:
    liar = Donor(identities[0], tmp_path / "liar", lie)
    honest = Donor(identities[1], tmp_path / "honest")
    for round_number in range(3):
        liar.train(round_number)
    for round_number in range(2):
        honest.train(round_number)
    found = take(liar, honest, gone=("QmGone",))  # the liar's chain is longer and asked first
    assert torch.equal(found.anchor, honest.anchor)


def test_without_a_sound_donor_the_last_reason_and_the_mend_are_named(
    identities: list[Identity], tmp_path: Path, take: Callable[..., StageAnchor]
) -> None:
    liar = Donor(identities[0], tmp_path, another_run)
    liar.train(0)
    began = time.monotonic()
    with pytest.raises(EnvironmentFault, match=r"it is of run qqq.*; try again later"):
        take(liar, timeout_s=0.3)
    assert time.monotonic() - began < 5


def test_a_run_without_a_round_says_that_there_is_none_yet(
    identities: list[Identity], tmp_path: Path, take: Callable[..., StageAnchor]
) -> None:
    with pytest.raises(EnvironmentFault, match=r"no committed round yet.*; try again later"):
        take(Donor(identities[0], tmp_path), timeout_s=0.1)


def test_who_is_gone_is_no_warning_where_another_serves(
    identities: list[Identity],
    tmp_path: Path,
    take: Callable[..., StageAnchor],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "dilocox")
    donor = Donor(identities[0], tmp_path)
    donor.train(0)
    take(donor, gone=("QmGone",))
    assert [(each.levelname, each.message) for each in caplog.records] == [
        ("INFO", "stage 0: QmGone gave no anchor: QmGone is gone")
    ]


def test_what_is_waited_for_is_told_after_a_while_and_once(
    identities: list[Identity],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    donor = Donor(identities[0], tmp_path, manifest=TWO_STAGES)
    donor.train(0)

    def warned(timeout_s: float) -> list[str]:
        caplog.clear()
        with pytest.raises(EnvironmentFault, match="nobody who holds its weights is in view"):
            take_all(monkeypatch, donor, manifest=TWO_STAGES, timeout_s=timeout_s)
        return caplog.messages

    assert warned(3.0) == []
    monkeypatch.setattr(download, "PATIENCE_S", 0.0)
    (line,) = warned(4.0)
    assert line.startswith("stage 1: nobody who holds its weights is in view; check that the run")
    assert re.search(r"; waiting for \d s at most$", line)

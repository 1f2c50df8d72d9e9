"""Downloading the anchors of several stages: of one round, if one is to be had."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dilocox.dht.identity import Identity
from dilocox.peer.chain import download
from tests.peer.donors import TWO_STAGES, Donor, take_all


def two_donors(identities: list[Identity], folder: Path) -> list[Donor]:
    return [
        Donor(identities[stage], folder / str(stage), stage=stage, manifest=TWO_STAGES)
        for stage in range(2)
    ]


@pytest.mark.parametrize("ahead", [0, 1])
def test_stages_are_taken_at_the_newest_round_that_all_of_them_have(
    identities: list[Identity], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    donors = two_donors(identities, tmp_path)
    for round_number in range(3):
        for donor in donors:
            donor.train(round_number)
        if round_number == 1:
            donors[ahead].snapshot()
    anchors, digest = [donor.anchor.clone() for donor in donors], donors[ahead].log.head().digest
    donors[ahead].train(3)
    found = take_all(monkeypatch, *donors, manifest=TWO_STAGES)
    assert [each.round for each in found] == [2, 2]
    assert [each.chain_tokens for each in found] == [30, 30]
    assert found[ahead].digest == digest
    for stage in range(2):
        assert torch.equal(found[stage].anchor, anchors[stage])


def test_where_a_state_has_passed_the_common_round_the_next_one_is_waited_for(
    identities: list[Identity], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    donors = two_donors(identities, tmp_path)
    for donor in donors:
        donor.train(0)
    donors[0].train(1)
    donors[0].snapshot()  # nobody can have its anchor of round 0 any more
    donors[0].log.prune(keep=1)
    looks = 0

    def look() -> None:
        nonlocal looks
        looks += 1
        if looks == 6:
            donors[1].train(1)

    found = take_all(monkeypatch, *donors, manifest=TWO_STAGES, look=look)
    assert [each.round for each in found] == [1, 1]
    assert looks > 6


def test_without_a_common_round_the_newest_anchors_are_taken(
    identities: list[Identity],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    donors = two_donors(identities, tmp_path)
    donors[0].train(0)
    donors[1].train(1)
    monkeypatch.setattr(download, "COMMON_LIMIT_S", 0.2)
    found = take_all(monkeypatch, *donors, manifest=TWO_STAGES)
    assert [each.round for each in found] == [0, 1]
    assert all(torch.equal(each.anchor, donors[each.stage].anchor) for each in found)
    assert "of different rounds: 0, 1" in caplog.text

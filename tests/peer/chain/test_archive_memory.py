"""A bootstrap with little memory keeps the records, and makes states once there is more."""

from __future__ import annotations

from pathlib import Path

import pytest

from dilocox.peer.chain import archive
from dilocox.peer.chain.generation import Generation
from tests.clocks import TestClock
from tests.peer.chain.archives import CHECK, Kept
from tests.peer.kept_chains import ChainMaker

LATER_S = 3600.0
VECTOR = 4 * CHECK.layout.numel


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of memory that are free, in its only item."""
    bytes_free = [VECTOR]  # one vector, and no record beside it
    monkeypatch.setattr(archive, "available_bytes", lambda: bytes_free[0])
    return bytes_free


def alarms(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for text in caplog.messages if "alarm" in text]


def test_without_memory_for_a_state_the_records_go_on_and_one_alarm_says_so(
    donor: ChainMaker, tmp_path: Path, free: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    clock = TestClock()
    kept = Kept(tmp_path / "kept", donor, now=clock.monotonic)
    for number in range(6):
        donor.train(number)
        assert kept.look(donor) == donor.claim()
        clock.now += LATER_S
    assert kept.state_round == -1
    (alarm,) = alarms(caplog)
    assert "give this machine more memory" in alarm and "GB" not in alarm, "a few MB"
    free[0] = 10 * VECTOR
    kept.look(donor)
    assert kept.state_round == 3
    assert kept.look() == donor.claim()


def test_the_first_state_of_a_run_takes_two_vectors_and_a_later_one_does_not(
    donor: ChainMaker, tmp_path: Path, free: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    clock = TestClock()
    kept = Kept(tmp_path / "kept", donor, now=clock.monotonic)
    donor.train(0, 1, 2)
    enough = VECTOR + 2 * donor.claim().record_bytes + VECTOR // 4
    free[0] = enough  # to move a state, but not to make the weights of the seed
    assert enough < 2 * VECTOR
    kept.look(donor)
    assert kept.state_round == -1 and len(alarms(caplog)) == 1
    clock.now += LATER_S
    free[0] = 3 * VECTOR
    kept.look(donor)
    assert kept.state_round == 0
    free[0] = enough
    donor.train(3, 4)
    kept.look(donor)
    donor.train(5)
    kept.look(donor)
    assert kept.state_round == 3 and len(alarms(caplog)) == 1


def test_a_start_without_memory_to_prove_its_state_serves_and_follows(
    donor: ChainMaker,
    tmp_path: Path,
    free: list[int],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free[0] = 3 * VECTOR
    kept = Kept(tmp_path / "kept", donor)
    donor.train(0, 1, 2)
    kept.look(donor)
    assert kept.state_round == 0
    free[0] = VECTOR // 2
    proved, calls = Generation.proved, list[int]()

    def watched(generation: Generation, check: object) -> bool | None:
        calls.append(generation.number)
        return proved(generation, CHECK)

    monkeypatch.setattr(Generation, "proved", watched)
    clock = TestClock()
    again = Kept(tmp_path / "kept", donor, now=clock.monotonic)
    donor.train(3)
    assert again.look(donor) == donor.claim() and again.state_round == 0
    clock.now += LATER_S
    again.look(donor)
    assert not calls and len(alarms(caplog)) == 1
    free[0] = 3 * VECTOR
    clock.now += LATER_S
    again.look(donor)
    assert calls and again.state_round > 0

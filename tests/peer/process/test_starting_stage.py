"""Which stage a peer hosts when it starts: the one asked for, its own one, or the emptiest."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dilocox.dht.errors import EnvironmentFault, InvalidInput
from dilocox.dht.join import Joined
from dilocox.dht.records import StageRecord, parse_key
from dilocox.peer.options import PeerOptions
from dilocox.peer.process import starting_stage
from dilocox.peer.process.starting_stage import LOOKS, chosen_stage, said_to_join
from dilocox.peer.state_folder import StateFolder
from tests.dht.processes import wait_until
from tests.peer.local_peers import INVITE, MANIFEST, RUN, local_peer
from tests.pipeline.swarms import stage_record

Answer = Mapping[int, dict[str, StageRecord]]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting_stage, "JITTER_S", 0.0)
    monkeypatch.setattr(starting_stage, "SECOND_LOOK_S", 0.0)


@pytest.fixture
def folder(tmp_path: Path) -> StateFolder:
    return StateFolder(tmp_path)


class Looks:
    """A swarm whose answers are prepared: one after the other, the last one for good.

    A stage that an answer does not name gives none.
    """

    def __init__(self, *answers: Answer):
        self.answers = list(answers)
        self.count = 0
        self.told: list[tuple[int, str]] = []

    def publish(self, key: str, record: StageRecord, lifetime_s: float, timeout_s: float) -> bool:
        assert lifetime_s >= MANIFEST.deadlines.record_lifetime_s
        assert (record.name, record.team) == ("Ada", "blue"), "known from the first record on"
        self.told.append((parse_key(key).index, record.state))
        return True

    def read_many(
        self, keys: Mapping[str, type[Any]], timeout_s: float
    ) -> dict[str, dict[str, StageRecord] | None]:
        assert set(keys.values()) == {StageRecord}
        self.count += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return {key: answer.get(parse_key(key).index) for key in keys}


def joined(looks: Looks, stages: int = 3) -> Joined:
    return local_peer(swarm=looks, manifest=replace(MANIFEST, stages=stages))


def asked(stage: str) -> PeerOptions:
    """The options of a peer that was started with this `--stage`."""
    return PeerOptions(invite=INVITE, stage=stage, name="Ada", team="blue")


def peers(*counts: int) -> Answer:
    """A swarm with so many peers on each stage."""
    return {
        stage: {f"p{stage}{number}": stage_record() for number in range(count)}
        for stage, count in enumerate(counts)
    }


def test_of_two_that_join_at_once_the_larger_id_chooses_again(folder: StateFolder) -> None:
    """Both saw an empty stage; "aa" comes before "me", "zz" after it."""
    first, rival = peers(1, 0, 1), {"aa": stage_record(state="joining")}
    looks = Looks(first, {**peers(1, 0, 0), 1: rival})
    assert chosen_stage(asked("auto"), joined(looks), folder) == 2
    assert looks.told[:2] == [(1, "joining"), (1, "left")]
    later = Looks(first, {**peers(1, 0, 1), 1: {"zz": stage_record(state="joining")}})
    (folder.path / "other").mkdir()
    other = StateFolder(folder.path / "other")
    assert chosen_stage(asked("auto"), joined(later), other) == 1


# ---- as told -------------------------------------------------------------------------------------
def test_a_stage_that_was_asked_for_is_taken_without_a_look(folder: StateFolder) -> None:
    looks = Looks(peers(0, 0, 9))
    assert chosen_stage(asked("2"), joined(looks), folder) == 2
    assert looks.count == 0
    assert folder.noted_stage(RUN) is None  # it is the volunteer's will, not this peer's home


@pytest.mark.parametrize("option", ["3", "-1", "1.0", "first", "", " "])
def test_a_stage_that_the_run_has_not_is_refused_with_those_it_has(
    folder: StateFolder, option: str
) -> None:
    with pytest.raises(InvalidInput, match=r"--stage .*: the run has the stages 0 to 2; choose"):
        chosen_stage(asked(option), joined(Looks(peers(1, 1, 1))), folder)


def test_in_a_run_of_one_stage_there_is_nothing_to_choose(folder: StateFolder) -> None:
    looks = Looks(peers(1))
    for option in ("auto", "0"):
        assert chosen_stage(asked(option), joined(looks, stages=1), folder) == 0
    assert looks.count == 0
    with pytest.raises(InvalidInput, match=r"--stage 3: the run has stage 0 only; choose"):
        chosen_stage(asked("3"), joined(looks, stages=1), folder)


# ---- auto ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("before", "counts", "chosen"),
    [
        (None, (2, 1, 3), 1),
        (None, (0, 1, 1), 0),
        (None, (2, 2, 0), 2),
        (0, (5, 1, 3), 0),  # though another one has fewer
        # though another one has nobody: after new rules all return at once, and none is there yet
        (0, (1, 0, 3), 0),
        (0, (0, 0, 0), 0),
        (1, (0, 0, 0), 1),
        (2, (0, 0, 0), 2),
        (1, (1, 0, 0), 1),
        (2, (1, 0, 0), 2),
        (2, (1, 1, 0), 2),
        (7, (2, 2, 1), 2),  # of no stage that the run has
        (-1, (2, 2, 1), 2),
    ],
)
def test_a_peer_takes_its_stage_of_before_else_the_one_with_the_fewest_and_notes_it(
    folder: StateFolder, before: int | None, counts: tuple[int, ...], chosen: int
) -> None:
    if before is not None:
        folder.note_stage(RUN, before)
    folder.note_stage("e" * 32, 2)  # another run's
    assert chosen_stage(asked("auto"), joined(Looks(peers(*counts))), folder) == chosen
    assert folder.noted_stage(RUN) == chosen


def test_who_comes_back_says_so_at_once(folder: StateFolder) -> None:
    """Its own records come a while later: else spares would move to where nobody seems left."""
    folder.note_stage(RUN, 1)
    looks = Looks(peers(1, 0, 3))
    assert chosen_stage(asked("auto"), joined(looks), folder) == 1
    assert looks.told == [(1, "joining")]


def test_own_records_of_before_and_of_peers_that_left_count_for_nobody(
    folder: StateFolder,
) -> None:
    answer = {
        0: {"a": stage_record(), "me": stage_record(state="training")},
        1: {"me": stage_record(), "gone": stage_record(state="left")},
        2: {"b": stage_record(state="joining")},
    }
    assert chosen_stage(asked("auto"), joined(Looks(answer)), folder) == 1


# ---- answers that fail ---------------------------------------------------------------------------
def test_a_stage_that_gave_no_answer_is_asked_for_again(folder: StateFolder) -> None:
    looks = Looks({0: peers(2)[0]}, peers(2, 0, 2))
    assert chosen_stage(asked("auto"), joined(looks), folder) == 1
    assert looks.count == 3  # one more for those that join at the same time


def test_a_stage_of_which_nothing_is_known_is_not_taken_for_empty(folder: StateFolder) -> None:
    known = peers(5, 0, 4)
    looks = Looks({0: known[0], 2: known[2]})
    assert chosen_stage(asked("auto"), joined(looks), folder) == 2
    assert looks.count == 2 * LOOKS


def test_without_any_answer_a_stage_is_chosen_all_the_same(folder: StateFolder) -> None:
    assert chosen_stage(asked("auto"), joined(Looks({})), folder) in (0, 1, 2)
    folder.note_stage(RUN, 1)
    assert chosen_stage(asked("auto"), joined(Looks({})), folder) == 1


# ---- a start that lasts --------------------------------------------------------------------------
def test_a_start_that_lasts_is_said_again_and_again_and_one_that_fails_is_taken_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it said lapsed while it read its snapshot, and spares took its place."""
    monkeypatch.setattr(starting_stage, "SAID_AGAIN", 1e4)
    looks = Looks(peers(1, 1, 1))
    with said_to_join(joined(looks), asked("2"), 2):
        wait_until(lambda: len(looks.told) > 3, 20.0)
    told = list(looks.told)
    assert set(told) == {(2, "joining")}
    time.sleep(0.05)
    assert looks.told == told, "from now on its own records say more"
    with pytest.raises(EnvironmentFault), said_to_join(joined(looks), asked("auto"), 1):
        raise EnvironmentFault("the initial weights did not come")
    assert looks.told[-1] == (1, "left")

"""The state before the newest one stays, so that a rollback has somewhere to go back to."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dilocox.dht.errors import InvalidInput
from dilocox.dht.files import bytes_below
from dilocox.dht.manifest_revisions import back_to
from dilocox.peer.chain import generation
from dilocox.peer.chain.generation import Generation, OlderRecords
from dilocox.peer.chain.rollback import archive_goes_back, prepare_rollback
from dilocox.peer.chain.snapshot_files import STATE_FILE, load_state
from dilocox.peer.chain.store import archive_folder, keep_manifest, kept_run
from dilocox.peer.rounds.outer_step import anchor_sha256
from tests.peer.chain.archives import CHECK, MANIFEST, Kept
from tests.peer.kept_chains import RUN, ChainMaker

EVERY = 6  # records, after which a newer state is made
ROUNDS = 20


def stage_of(state: Path) -> Path:
    """The folder of stage 0 in the archive of a bootstrap's state folder."""
    archive = archive_folder(state, RUN, MANIFEST)
    keep_manifest(archive, MANIFEST)
    return archive / "stage0"


def kept_in(state: Path, donor: ChainMaker, *, keep_bytes: int = 1) -> Kept:
    """Keep as good as no older records: those of a real stage are large."""
    every = (EVERY, EVERY)
    return Kept(stage_of(state), donor, keep_bytes=keep_bytes, records_after_state=every)


def followed(state: Path, donor: ChainMaker, *, keep_bytes: int = 1) -> Kept:
    """An archive of some generations."""
    kept = kept_in(state, donor, keep_bytes=keep_bytes)
    for number in range(ROUNDS):
        donor.train(number)
        kept.look(donor)
    return kept


def states(state: Path) -> list[int]:
    return sorted(each.round for each in kept_run(stage_of(state).parent).stages[0].states)


def back(state: Path, number: int) -> str:
    """The sha256 of the anchor to which the operator's command goes back."""
    shutil.rmtree(stage_of(state) / "rollback-00000001", ignore_errors=True)
    prepare_rollback(state, RUN, MANIFEST, number, 1, tell=lambda _: None)
    (file,) = stage_of(state).glob(f"rollback-00000001/state/*/{STATE_FILE}")
    values = CHECK.layout.numel
    anchor, momentum = torch.empty(values), torch.empty(values)
    load_state(file, anchor, momentum)
    return anchor_sha256(anchor)


def test_a_rollback_reaches_back_to_the_state_before_the_newest_one(
    donor: ChainMaker, tmp_path: Path
) -> None:
    """It reached the newest one alone, two rounds ago where that had just been made."""
    kept = followed(tmp_path, donor)
    before, newest = states(tmp_path)
    assert newest == kept.state_round and newest - before >= EVERY - 2
    for number in (before, before + 1, newest - 1, newest, newest + 1):
        assert back(tmp_path, number) == donor.anchors[number + 1]
    with pytest.raises(InvalidInput, match=f"choose a round from {before} on"):
        back(tmp_path, before - 1)


def test_a_rollback_is_replayed_from_the_newest_state_that_is_not_after_it(
    donor: ChainMaker, tmp_path: Path
) -> None:
    """What is damaged before does not matter; where that state is, an earlier one serves."""
    followed(tmp_path, donor, keep_bytes=1 << 30)
    before, newest = states(tmp_path)
    first = min((stage_of(tmp_path) / "older").glob("00000000-*.record"))
    sound = first.read_bytes()
    first.write_bytes(sound[:-1] + b"x")
    assert back(tmp_path, newest + 1) == donor.anchors[newest + 2]
    assert back(tmp_path, before + 1) == donor.anchors[before + 2]
    first.write_bytes(sound)
    (file,) = stage_of(tmp_path).glob(f"previous/state/*/{STATE_FILE}")
    with file.open("r+b") as state:
        state.seek(5000)
        state.write(b"\xff")
    assert back(tmp_path, before + 1) == donor.anchors[before + 2], "of the initial weights"


def test_a_rollback_puts_the_previous_state_aside_too(donor: ChainMaker, tmp_path: Path) -> None:
    followed(tmp_path, donor)
    before, newest = states(tmp_path)
    stage = stage_of(tmp_path)
    base = prepare_rollback(tmp_path, RUN, MANIFEST, before + 1, 1, tell=lambda _: None)
    archive_goes_back(stage, back_to(MANIFEST, before + 1, base))
    assert states(tmp_path) == [before + 1]
    assert len(list(stage.glob(f"before-00000001/*/state/*/{STATE_FILE}"))) == 2
    chain = kept_run(stage.parent).stages[0]
    assert [each.round for each in chain.records][-2:] == [before, before + 1] and newest > before


def test_records_that_two_generations_share_are_counted_once(
    donor: ChainMaker, tmp_path: Path
) -> None:
    followed(tmp_path, donor, keep_bytes=1 << 30)
    records = sum(entry.record_bytes for entry in donor.log.entries())
    states_bytes = 2 * CHECK.state_bytes
    assert bytes_below(stage_of(tmp_path)) < 1.02 * (records + states_bytes)


def killed_at_rename(patch: pytest.MonkeyPatch) -> None:
    rename: Callable[..., Any] = Path.rename

    def renamed(self: Path, target: Path) -> Path:
        if Path(target).name == "previous":
            raise KeyboardInterrupt
        return rename(self, target)

    patch.setattr(Path, "rename", renamed)


def killed_at_removal(patch: pytest.MonkeyPatch) -> None:
    rmtree: Callable[..., Any] = shutil.rmtree

    def removed(path: Path, **more: Any) -> None:
        if path.name == "previous.partial" and path.exists():
            raise KeyboardInterrupt
        rmtree(path, **more)

    patch.setattr(generation.shutil, "rmtree", removed)


@pytest.mark.parametrize("kill", [killed_at_rename, killed_at_removal])
def test_who_is_killed_while_a_state_becomes_the_previous_one_has_both_after_a_start(
    donor: ChainMaker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kill: Callable[[pytest.MonkeyPatch], None],
) -> None:
    kept = followed(tmp_path, donor)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        kill(patch)
        for number in range(ROUNDS, 2 * ROUNDS):
            donor.train(number)
            kept.look(donor)
    again = kept_in(tmp_path, donor)
    assert again.look(donor) == donor.claim()
    before, newest = states(tmp_path)
    assert newest == again.state_round and len(again.generations) == 1
    assert back(tmp_path, before) == donor.anchors[before + 1]
    assert not list(stage_of(tmp_path).glob("*.partial"))


def test_records_that_lost_after_the_newest_state_stay_in_no_previous_one(
    donor: ChainMaker, tmp_path: Path
) -> None:
    """Of two chains that part after it: replayed together they would seem to be damage."""
    kept = kept_in(tmp_path, donor)
    for number in range(3):
        donor.train(number)
    kept.look(donor)
    file = tmp_path / "moved"
    shutil.copyfile(donor.snapshot() / STATE_FILE, file)
    data, certificate = donor.log.read_bytes(2), donor.log.certificate(2)
    assert data is not None and certificate is not None
    donor.train(3, 4)
    kept.look(donor)
    (before,) = Generation.kept(kept.folder, CHECK, OlderRecords(kept.folder, 1))
    assert before.head.round == 4
    state = file, data, certificate
    before.give_way(Generation.begun(kept.folder, 2, CHECK, state))
    chain = kept_run(kept.folder.parent).stages[0]
    assert [each.round for each in chain.records] == [0, 1, 2]

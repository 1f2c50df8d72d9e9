"""The history that an archive keeps behind its newest state: the whole run, and one chain."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dilocox.dht.identity import Identity
from dilocox.peer.chain.generation import Generation, OlderRecords
from dilocox.peer.chain.replay import Replayed, replay
from dilocox.peer.chain.snapshot_files import STATE_FILE
from dilocox.peer.chain.store import OLDER_NAME, kept_run
from dilocox.peer.rounds.outer_step import anchor_sha256
from tests.peer.chain.archives import CHECK, MANIFEST, Kept, donor_of
from tests.peer.kept_chains import RUN, ChainMaker


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
    (current,) = Generation.kept(kept.folder, CHECK, OlderRecords(kept.folder, 1 << 30))
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


def test_a_damaged_one_is_missing_in_the_history_and_hides_no_other(
    donor: ChainMaker, tmp_path: Path
) -> None:
    kept = Kept(tmp_path / "kept", donor)
    for number in range(8):
        donor.train(number)
        kept.look(donor)
    files = sorted((tmp_path / "kept" / OLDER_NAME).glob("*.record"))
    data = bytearray(files[1].read_bytes())
    data[20] ^= 0xFF
    files[1].write_bytes(data)
    assert [row.round for row in kept.archive.rounds_since((), 64)] == [0, 2, 3, 4, 5, 6, 7]


def test_older_records_make_room_when_they_are_too_many(donor: ChainMaker, tmp_path: Path) -> None:
    kept = Kept(of_run(tmp_path), donor, keep_bytes=1)
    through_generations(kept, donor, *range(12))
    found = history(tmp_path)
    state = kept.state_round
    assert found.flaws == ()
    assert found.checked == tuple(range(state - 4, 12))
    assert found.replayed == tuple(range(state, 12)), "from the state before the newest one"


def test_a_chain_that_lost_leaves_nothing_in_the_history(
    identities: list[Identity], tmp_path: Path
) -> None:
    ours, theirs = (donor_of(each, tmp_path / each.peer_id) for each in identities[:2])
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

    def crash(_: Generation, after: Generation) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Generation, "give_way", crash)
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

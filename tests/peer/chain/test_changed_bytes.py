"""One byte of what a peer or a bootstrap keeps is another one: that is refused and named, and the
rest is gone on with.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dilocox.dht.errors import InvalidInput
from dilocox.dht.identity import Identity
from dilocox.dht.invite import run_id
from dilocox.dht.manifest import SignedManifest
from dilocox.dht.manifest_revisions import RevisionFolder, in_state, kept_manifest
from dilocox.peer.chain.generation import Generation, OlderRecords
from dilocox.peer.chain.snapshot_files import (
    STATE_FACTS_FILE,
    Snapshot,
    read_snapshot,
    write_snapshot,
)
from dilocox.peer.chain.store import RoundLog
from dilocox.peer.training.snapshot_taking import Journal, JournaledSend
from tests.peer.chain.archives import CHECK, MANIFEST, Kept
from tests.peer.kept_chains import ChainMaker, names_in
from tests.sweeps import sweep

LAYOUT = "l" * 64
PLACES = 16  # of a long file, beside its beginning and its end
EDGE = 12


def places_of(data: bytes) -> list[int]:
    """Which bytes to change: all of a short file."""
    places = set(range(len(data)))
    if len(data) > PLACES + 2 * EDGE:
        middle = random.Random(0).sample(range(len(data)), PLACES)
        places = {*range(EDGE), *middle, *range(len(data) - EDGE, len(data))}
    return sorted(places)


def changed(path: Path) -> Iterator[int]:
    """Change one byte of a file after the other, and put it back; where it was changed."""
    data = path.read_bytes()
    for place in places_of(data):
        wrong = bytearray(data)
        wrong[place] ^= 1 << place % 8
        path.write_bytes(wrong)
        yield place
        path.write_bytes(data)


def snapshot_of(number: int) -> Snapshot:
    return Snapshot(
        round=number,
        digest="d" * 64,
        layout=LAYOUT,
        anchor=torch.arange(6.0) + number,
        momentum=torch.ones(6),
        tensors={"live": torch.arange(3.0), "inner.step": torch.tensor(7)},
        facts={"data": {"part": 2, "used": 9}},
    )


def test_a_snapshot_with_a_changed_byte_is_set_aside_for_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sound = tmp_path / "sound"
    older = write_snapshot(sound, snapshot_of(3)).rename(tmp_path / "older")
    newest = write_snapshot(sound, snapshot_of(4), number=1).name
    older.rename(sound / "00000000")
    names = names_in(sound / newest)
    assert len(names) == 5
    count = 0
    for name in names:
        for place in changed(sound / newest / name):
            copy = tmp_path / "copy"
            shutil.copytree(sound, copy)
            caplog.clear()
            found = read_snapshot(copy, layout=LAYOUT)
            assert found is not None and found.round == 3, f"byte {place} of {name}"
            assert f"{newest} is damaged" in caplog.text
            shutil.rmtree(copy)
            count += 1
    assert count > 5 * PLACES


def test_a_journal_with_a_changed_byte_counts_as_a_send(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "journal"
    Journal(path).note(JournaledSend(after=1, round=7, tokens=64, trained=128))
    assert [each.round for each in Journal(path).since(1)] == [7]
    newline = len(path.read_bytes()) - 1
    for place in changed(path):
        if place == newline:  # says nothing
            continue
        caplog.clear()
        (told,) = Journal(path).since(5)  # this journal has nothing after the fifth
        assert (told.after, told.round) == (5, -1), f"byte {place}"
        assert str(path) in caplog.text


@pytest.fixture
def maker(tmp_path: Path) -> ChainMaker:
    made = ChainMaker(Identity.load_or_create(tmp_path / "key"), tmp_path / "peer", MANIFEST)
    made.train(0, 1, 2, 3, 4)
    return made


LEFT = [
    (4, [0, 1, 2, 3]),  # it comes again from others, as what follows it
    (3, [0, 1, 2]),
    (1, [2, 3, 4]),  # it is in the anchor already
    (2, [3, 4]),
]


@pytest.mark.parametrize("ending", ["record", "certificate"])
@pytest.mark.parametrize(("hurt", "left"), sweep(LEFT, [LEFT[1]]))
def test_a_log_with_a_changed_byte_loses_no_more_than_it_must(
    maker: ChainMaker,
    caplog: pytest.LogCaptureFixture,
    hurt: int,
    left: list[int],
    ending: str,
) -> None:
    applied = 2
    log = maker.own / "log"
    (path,) = log.glob(f"{hurt:08d}*.{ending}")
    for place in changed(path):
        copy = maker.own / "copy"
        shutil.copytree(log, copy)
        caplog.clear()
        again = RoundLog(copy, manifest_digest=MANIFEST.root, codec=maker.codec)
        again.drop_damaged(applied=applied)
        assert again.rounds() == left, f"byte {place}"
        assert f"{hurt:08d}" in caplog.text and "damaged" in caplog.text
        shutil.rmtree(copy)
    maker.log.drop_damaged(applied=applied)
    assert maker.log.rounds() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("where", sweep(["middle", "beginning", "end"]))
def test_an_archive_with_a_changed_byte_takes_that_part_of_its_chain_from_others_again(
    maker: ChainMaker, tmp_path: Path, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    kept = Kept(tmp_path / "kept", maker)
    kept.look(maker)
    newest = kept.folder / kept.generations[-1]
    files = [path for path in sorted(newest.rglob("*")) if path.is_file()]
    assert {path.suffix for path in files} >= {".record", ".certificate", ".json", ".safetensors"}
    for path in files:
        data = path.read_bytes()
        place = places_of(data)[{"beginning": 0, "middle": 19, "end": -1}[where]]
        copy = tmp_path / "copy"
        shutil.copytree(kept.folder, copy)
        wrong = bytearray(data)
        wrong[place] ^= 0x10
        (copy / path.relative_to(kept.folder)).write_bytes(wrong)
        caplog.clear()
        again = Kept(copy, maker)
        claim = again.look()
        name = f"byte {place} of {path.name}"
        assert claim is None, name
        assert str(copy / newest.name) in caplog.text and "damaged" in caplog.text, name
        assert again.look(maker) == maker.claim(), name
        shutil.rmtree(copy)
        asyncio.run(again.archive.close())


def test_what_is_said_of_a_kept_state_is_refused_whichever_byte_is_changed(
    maker: ChainMaker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A key with another letter ended the bootstrap."""
    kept = Kept(tmp_path / "kept", maker)
    kept.look(maker)
    newest = kept.folder / kept.generations[-1]
    (said,) = newest.rglob(STATE_FACTS_FILE)
    for place in range(said.stat().st_size):
        copy = tmp_path / "copy"
        shutil.copytree(newest, copy / newest.name)
        wrong = bytearray(said.read_bytes())
        wrong[place] ^= 0x10
        (copy / newest.name / said.relative_to(newest)).write_bytes(wrong)
        caplog.clear()
        assert not Generation.kept(copy, CHECK, OlderRecords(copy, 1 << 30)), f"byte {place}"
        assert "damaged" in caplog.text and not (copy / newest.name).exists()
        shutil.rmtree(copy)


def test_a_manifest_with_a_changed_byte_counts_for_nobody(
    identities: list[Identity], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A peer takes the swarm's newest, as with none; the operator's next command ends with it."""
    run = run_id(identities[0].public_key, MANIFEST.name)
    signed = SignedManifest.sign(identities[0], in_state(MANIFEST, "paused"))
    kept = tmp_path / "run.signed"
    kept.write_bytes(signed.to_bytes())
    number = RevisionFolder(tmp_path, run).add(signed)
    (revision,) = tmp_path.rglob(f"{number:08d}.signed")
    refused = 0
    for place in changed(kept):
        caplog.clear()
        found = kept_manifest(kept, run)
        assert found in (None, signed), f"byte {place}"  # padding bits of deflate mean nothing
        assert (found is None) == (str(kept) in caplog.text)
        refused += found is None
    assert refused > PLACES + EDGE
    for place in changed(revision):
        try:
            assert RevisionFolder(tmp_path, run).newest() == signed, f"byte {place}"
        except InvalidInput as error:
            assert str(revision) in str(error)
            refused -= 1
    assert refused == 0
    caplog.clear()
    assert kept_manifest(kept, run) == RevisionFolder(tmp_path, run).newest() == signed
    assert kept_manifest(tmp_path / "none.signed", run) is None
    assert not caplog.text

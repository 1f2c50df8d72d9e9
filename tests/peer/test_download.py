"""Downloading an anchor as somebody who is no peer: from logs and snapshots, honest and not."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from dilocox.compression.layout import FlatLayout
from dilocox.dht.errors import EnvironmentFault
from dilocox.dht.identity import Identity
from dilocox.dht.manifest import Manifest
from dilocox.dht.records import ClaimRecord
from dilocox.peer import catchup, download
from dilocox.peer.ballots import Ballots
from dilocox.peer.certificate import Ballot
from dilocox.peer.download import StageAnchor, download_anchors
from dilocox.peer.groups import codecs_of
from dilocox.peer.join import Joined
from dilocox.peer.outer import OuterStep, anchor_sha256
from dilocox.peer.record import Contribution, Part, RoundRecord, digest_of
from dilocox.peer.roundlog import RoundLog
from dilocox.peer.snapshot import Snapshot, write_snapshot
from dilocox.peer.transport import Blob
from dilocox.pipeline.stage import build_stage, flatten_parameters, parameter_shapes

MANIFEST = Manifest.from_dict({"name": "test", "model": "tiny", "end_tokens": 1000})
RUN = "r" * 32
LAYOUT = FlatLayout.of(parameter_shapes(MANIFEST.model, 1, 0))
CODECS = codecs_of(MANIFEST)

Change = Callable[[RoundRecord], RoundRecord]


class Donor:
    """A peer with a log and perhaps a snapshot, alone in its stage. `change` makes it a liar."""

    def __init__(self, identity: Identity, folder: Path, change: Change = lambda record: record):
        self.peer = identity.peer_id
        self._identity = identity
        self._change = change
        self._snapshots = folder / "snapshots"
        self.log = RoundLog(folder / "log", manifest_digest=MANIFEST.digest, codecs=CODECS)
        module = build_stage(MANIFEST.model, 0, 1, MANIFEST.seed)
        self.anchor = flatten_parameters(module, LAYOUT).clone()
        self.momentum = torch.zeros_like(self.anchor)

    def train(self, round_number: int) -> None:
        """Commit one round."""
        head = self.log.head()
        noise = torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(round_number))
        record = RoundRecord(
            run=RUN,
            stage=0,
            round=round_number,
            previous=head.digest,
            anchor_before=anchor_sha256(self.anchor),
            layout=LAYOUT.digest,
            bits=4,
            members=(Contribution(peer=self.peer, tokens=10, exchange_s=0.0),),
            chain_tokens=head.chain_tokens + 10,
            parts=(Part(reducer=self.peer, start=0, stop=LAYOUT.numel, contributors=(self.peer,)),),
            next_bits=4,
            next_inner_steps=100,
            means=(CODECS[4].encode(1e-3 * noise).numpy().tobytes(),),
        )
        record = self._change(record)
        data = record.to_bytes()
        ballot = Ballot(
            run=RUN, stage=0, round=round_number, attempt=0, group=b"g", members=(self.peer,)
        )
        ballots = Ballots(identity=self._identity, ballot=ballot, log=self.log)
        ballots.cast(digest_of(data), ())
        self.log.append(data, ballots.certificate())
        outer = OuterStep(MANIFEST.outer.learning_rate, MANIFEST.outer.momentum)
        if self._change(record) is record:  # an honest peer can decode what it wrote
            average = record.average(CODECS[4])
            outer.apply(self.anchor, self.momentum, average, self.anchor, self.momentum)

    def snapshot(self) -> None:
        head = self.log.head()
        write_snapshot(
            self._snapshots,
            Snapshot(
                round=head.round,
                digest=head.digest,
                layout=LAYOUT.digest,
                anchor=self.anchor,
                momentum=self.momentum,
                tensors={},
                facts={},
            ),
        )

    def snapshot_of_the_start(self) -> None:
        start = Donor(self._identity, self._snapshots.parent / "start")
        start._snapshots = self._snapshots
        start.snapshot()

    def claim(self) -> ClaimRecord:
        head = self.log.head()
        return ClaimRecord(
            round=head.round,
            digest=head.digest,
            tokens=10,
            chain_tokens=head.chain_tokens,
            record_bytes=1,
        )

    def find(self, want: dict[str, Any]) -> catchup.Source | None:
        if want["what"] == "state":
            return catchup.open_state(self._snapshots, want["offset"], want.get("sha256"))
        return catchup.find_in_log(self.log, want["what"], want["digest"])


class Wire:
    """The donors' answers without a network."""

    def __init__(self, donors: dict[str, Donor]):
        self._donors = donors

    async def fetch(
        self,
        peer: str,
        want: dict[str, Any],
        *,
        limit_bytes: int,
        sink: Callable[[bytes], None] | None = None,
    ) -> Blob | None:
        if peer not in self._donors:
            raise ConnectionError(f"{peer} is gone")
        found = self._donors[peer].find(want)
        if found is None:
            return None
        with found as source:
            data = source.file.read()
        if sink is not None:
            stream = io.BytesIO(data)
            while chunk := stream.read(1 << 16):
                sink(chunk)
        return Blob(facts=source.facts, data=data)

    async def fetch_record(self, peer: str, digest: str) -> bytes | None:
        blob = await self.fetch(peer, {"what": "record", "digest": digest}, limit_bytes=1 << 31)
        return None if blob is None else blob.data


@pytest.fixture
def take(monkeypatch: pytest.MonkeyPatch) -> Callable[..., StageAnchor]:
    """Download from these donors; the peers in `gone` claim a long chain and do not answer."""

    def go(*donors: Donor, gone: tuple[str, ...] = (), timeout_s: float = 20.0) -> StageAnchor:
        claims = {donor.peer: donor.claim() for donor in donors}
        long_chain = replace(donors[0].claim(), round=999)
        claims |= dict.fromkeys(gone, long_chain)
        wire = Wire({donor.peer: donor for donor in donors})
        monkeypatch.setattr(download, "PeerTransport", lambda **_: wire)
        monkeypatch.setattr(download, "LOOK_PAUSE_S", 0.01)
        place = SimpleNamespace(
            run=RUN,
            manifest=MANIFEST,
            swarm=SimpleNamespace(read=lambda *_: claims),
            dht=SimpleNamespace(replicate_p2p=lambda: asyncio.sleep(0)),
        )
        (found,) = download_anchors(cast("Joined", place), timeout_s=timeout_s)
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
    with pytest.raises(EnvironmentFault, match=r"it is of run qqq.*check that the run trains"):
        take(liar, timeout_s=0.3)
    assert time.monotonic() - began < 5


def test_a_run_without_a_round_says_that_there_is_none_yet(
    identities: list[Identity], tmp_path: Path, take: Callable[..., StageAnchor]
) -> None:
    with pytest.raises(EnvironmentFault, match=r"none has committed a round.*wait for its first"):
        take(Donor(identities[0], tmp_path), timeout_s=0.1)

"""Peers to download anchors from, without a network: each has a log and perhaps a snapshot."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from dilocox.compression.group_codec import GroupCodec
from dilocox.compression.layout import FlatLayout
from dilocox.dht.identity import Identity
from dilocox.dht.join import Joined
from dilocox.dht.manifest import Manifest
from dilocox.dht.records import ClaimRecord, claim_key
from dilocox.dht.rpc import Blob
from dilocox.peer.chain import catchup, download
from dilocox.peer.chain.download import StageAnchor, download_anchors
from dilocox.peer.chain.snapshot_files import Snapshot, write_snapshot
from dilocox.peer.chain.store import RoundLog
from dilocox.peer.rounds.adaptation import following_window, stage_codec
from dilocox.peer.rounds.ballots import Ballots
from dilocox.peer.rounds.outer_step import OuterStep, anchor_sha256
from dilocox.peer.rounds.record import (
    Contribution,
    ReducedShare,
    RoundFacts,
    RoundRecord,
    digest_of,
)
from dilocox.peer.rounds.vote import Ballot
from dilocox.pipeline.stage import build_stage, flatten_parameters, parameter_shapes

MANIFEST = Manifest.from_dict(
    {"name": "test", "model": "tiny", "end_tokens": 1000, "codec": {"scheme": "dense"}}
)
GROUPS = GroupCodec(4)
RUN = "r" * 32
LAYOUT = FlatLayout.of(parameter_shapes(MANIFEST.model, 1, 0))
TWO_STAGES = replace(MANIFEST, stages=2)

Change = Callable[[RoundRecord], RoundRecord]


class Donor:
    """A peer with a log and perhaps a snapshot, alone in its stage. `change` makes it a liar."""

    def __init__(
        self,
        identity: Identity,
        folder: Path,
        change: Change = lambda record: record,
        *,
        stage: int = 0,
        manifest: Manifest = MANIFEST,
    ):
        self.peer = identity.peer_id
        self.stage = stage
        self._identity = identity
        self._change = change
        self._snapshots = folder / "snapshots"
        module = build_stage(manifest.model, stage, manifest.stages, manifest.seed)
        shapes = parameter_shapes(manifest.model, manifest.stages, stage)
        self._layout = FlatLayout.of(shapes)
        self._codec = stage_codec(manifest, self._layout)
        self.log = RoundLog(folder / "log", manifest_digest=manifest.digest, codec=self._codec)
        self.anchor = flatten_parameters(module, self._layout).clone()
        self.momentum = torch.zeros_like(self.anchor)

    def train(self, round_number: int) -> None:
        """Commit one round."""
        head = self.log.head()
        last = self.log.header(head.round) if head.round >= 0 else None
        facts = RoundFacts(ranks=(), needed=(), exchange_s=0.0, step_s=0.0)
        noise = torch.randn(
            self._layout.numel, generator=torch.Generator().manual_seed(round_number)
        )
        record = RoundRecord(
            run=RUN,
            stage=self.stage,
            round=round_number,
            previous=head.digest,
            anchor_before=anchor_sha256(self.anchor),
            layout=self._layout.digest,
            ranks=(),
            members=(Contribution(peer=self.peer, tokens=10, exchange_s=0.0, step_s=0.0),),
            chain_tokens=head.chain_tokens + 10,
            parts=(
                ReducedShare(
                    phase=0,
                    reducer=self.peer,
                    start=0,
                    stop=self._layout.numel,
                    contributors=(self.peer,),
                ),
            ),
            window=following_window(() if last is None else last.window, facts),
            next_ranks=(),
            next_inner_steps=100,
            means=(GROUPS.encode(1e-3 * noise).numpy().tobytes(),),
        )
        record = self._change(record)
        data = record.to_bytes()
        ballot = Ballot(
            run=RUN,
            stage=self.stage,
            round=round_number,
            attempt=0,
            group=b"g",
            members=(self.peer,),
        )
        ballots = Ballots(identity=self._identity, ballot=ballot, save_vote=self.log.save_vote)
        ballots.cast(digest_of(data), ())
        self.log.append(data, ballots.certificate())
        outer = OuterStep(MANIFEST.outer.learning_rate, MANIFEST.outer.momentum)
        if self._change(record) is record:  # an honest peer can decode what it wrote
            average = record.average(self._codec)
            outer.apply(self.anchor, self.momentum, average, self.anchor, self.momentum)

    def snapshot(self) -> None:
        head = self.log.head()
        write_snapshot(
            self._snapshots,
            Snapshot(
                round=head.round,
                digest=head.digest,
                layout=self._layout.digest,
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
        header = bool(want.get("header"))
        return catchup.find_in_log(self.log, want["what"], want["digest"], header=header)


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
        least_bytes_per_s: float = 0.0,
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

    async def fetch_record(self, peer: str, digest: str, *, older: bool = False) -> bytes | None:
        blob = await self.fetch(peer, {"what": "record", "digest": digest}, limit_bytes=1 << 31)
        return None if blob is None else blob.data


def take_all(
    monkeypatch: pytest.MonkeyPatch,
    *donors: Donor,
    manifest: Manifest,
    gone: tuple[str, ...] = (),
    timeout_s: float = 20.0,
    look: Callable[[], None] = lambda: None,
) -> list[StageAnchor]:
    """Download all stages of a run from these donors.

    The peers in `gone` claim a long chain of stage 0 and do not answer. `look` is called before
    each look at the claims.
    """
    long_chain = replace(donors[0].claim(), round=999)

    def read(key: str, _: object) -> dict[str, ClaimRecord]:
        look()
        stage = next(n for n in range(manifest.stages) if key == claim_key(RUN, n))
        claims = {donor.peer: donor.claim() for donor in donors if donor.stage == stage}
        return claims | dict.fromkeys(gone if stage == 0 else (), long_chain)

    wire = Wire({donor.peer: donor for donor in donors})
    monkeypatch.setattr(download, "Client", lambda **_: wire)
    monkeypatch.setattr(download, "LOOK_PAUSE_S", 0.01)
    place = SimpleNamespace(
        run=RUN,
        manifest=manifest,
        swarm=SimpleNamespace(read=read),
        dht=SimpleNamespace(replicate_p2p=lambda: asyncio.sleep(0)),
    )
    return download_anchors(cast("Joined", place), timeout_s=timeout_s)

"""State folders with chains in them as one peer would have written them, and not quite so."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from dilocox.compression.group_quantization import PayloadRefused
from dilocox.compression.layout import FlatLayout
from dilocox.compression.stage_codec import StageCodec
from dilocox.dht.identity import Identity
from dilocox.dht.manifest import Manifest
from dilocox.dht.records import ClaimRecord
from dilocox.peer.chain.snapshot_files import Snapshot, write_snapshot
from dilocox.peer.chain.store import RoundLog, keep_manifest
from dilocox.peer.chain.uploads import Source, find_in_log, open_state
from dilocox.peer.rounds.ballots import Ballot, certificate
from dilocox.peer.rounds.outer_step import anchor_sha256, outer_step
from dilocox.peer.rounds.rank_choice import RoundPlan
from dilocox.peer.rounds.record import (
    Contribution,
    ReducedShare,
    RoundRecord,
    digest_of,
    stage_codec,
)
from dilocox.peer.rounds.vote_count import Vote
from dilocox.pipeline.stage import build_stage, flatten_parameters, parameter_shapes
from tests.peer.told_records import remembering

RUN = "0123456789abcdef" * 2
MODEL: dict[str, Any] = {  # 42,000 parameters: what a test trains, checks and replays in an instant
    "model_type": "llama",
    "vocab_size": 384,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}

Change = Callable[[RoundRecord], RoundRecord]


def another_anchor(record: RoundRecord) -> RoundRecord:
    """A lie that only a replay finds."""
    return replace(record, anchor_before="f" * 64)


def manifest_of(scheme: str = "low_rank", **codec: Any) -> Manifest:
    """A run whose ranks and H move within a few rounds."""
    return Manifest.from_dict(
        {
            "name": "test",
            "model": MODEL,
            "end_tokens": 10_000,
            "codec": {"scheme": scheme, "rank": 6, "min_rank": 2, "max_rank": 16} | codec,
            "rounds": {"inner_steps": 20},
        }
    )


def reduced_alone(
    codec: StageCodec,
    ranks: tuple[int, ...],
    message: torch.Tensor,
    names: Sequence[str],
    seed: str,
) -> tuple[tuple[ReducedShare, ...], tuple[bytes, ...]]:
    """The parts and means of a record whose average is this message [n], as coded: the first of
    these members reduced all, and all are in it.
    """
    low_rank = codec.low_rank(ranks)
    basis = None if low_rank is None else low_rank.initial_basis(seed)
    encoder = codec.encoder(message, ranks, lambda: basis)
    parts, means, vectors = list[ReducedShare](), list[bytes](), list[torch.Tensor]()
    for index, phase in enumerate(codec.phases(ranks)):
        payload = phase.codec.encode(encoder.vector(index, vectors))
        vectors.append(phase.codec.decode(payload, phase.numel))
        means.append(payload.numpy().tobytes())
        parts.append(
            ReducedShare(
                phase=index,
                reducer=names[0],
                start=0,
                stop=phase.numel,
                contributors=tuple(names),
            )
        )
    return tuple(parts), tuple(means)


@cache
def initial_weights(
    model: str, stages: int, stage: int, seed: int
) -> tuple[FlatLayout, torch.Tensor]:
    """Of a stage of a model in JSON: its layout and its weights [n], for nobody to change."""
    config = json.loads(model)
    layout = FlatLayout.of(parameter_shapes(config, stages, stage))
    module = build_stage(config, stage, stages, seed)
    return layout, flatten_parameters(module, layout).detach()


class ChainMaker:
    """One peer, alone in its stage, with a log and snapshots on disk.

    Attributes:
        own: its folder of this stage and run. log: its records. digests: of all it ever made, the
            manifest's first. anchors: sha256 of the anchor that stands on each of these.
    """

    def __init__(
        self, identity: Identity, state: Path, manifest: Manifest, *, stage: int = 0, run: str = RUN
    ):
        self.peer = identity.peer_id
        self.manifest = manifest
        self.stage = stage
        self.run = run
        self.own = state / f"{run}-stage{stage}"
        self._identity = identity
        model = json.dumps(manifest.model)
        self.layout, initial = initial_weights(model, manifest.stages, stage, manifest.seed)
        self.codec = stage_codec(manifest, self.layout)
        self._plan = RoundPlan(manifest, self.codec)
        self.anchor = initial.clone()
        self.momentum = torch.zeros_like(self.anchor)
        self.log = RoundLog(self.own / "log", manifest_digest=manifest.root, codec=self.codec)
        self.last: RoundRecord | None = None
        self.digests = [manifest.digest]
        self.anchors = [anchor_sha256(self.anchor)]
        keep_manifest(self.own, manifest)

    def train(self, *rounds: int, change: Change = lambda record: record) -> None:
        """Commit these rounds; what `change` makes of a record is written, and applied if sound."""
        for number in rounds:
            made = remembering(self._unplanned(number), self.last)
            record = change(self._plan.finished(made))
            data = record.to_bytes()
            digest = digest_of(data)
            self.log.write(number, data, self.certificate(record, digest))
            with contextlib.suppress(PayloadRefused):  # a liar's
                average = record.average(self.codec)
                outer_step(self.manifest, record.rules).apply(
                    self.anchor, self.momentum, average, self.anchor, self.momentum
                )
            self.last = replace(record, means=())
            self.digests.append(digest)
            self.anchors.append(anchor_sha256(self.anchor))

    def revise(self, manifest: Manifest) -> None:
        """Go on under a newer revision."""
        self.manifest = manifest
        keep_manifest(self.own, manifest)

    def _unplanned(self, number: int) -> RoundRecord:
        last = self.last
        noise = torch.Generator().manual_seed(number)
        message = 1e-3 * torch.randn(self.layout.numel, generator=noise)
        ranks = self._plan.ranks_after(last)
        parts, means = reduced_alone(self.codec, ranks, message, (self.peer,), seed=f"{number}")
        member = Contribution(peer=self.peer, tokens=10, exchange_s=15.0, step_s=1.0)
        return RoundRecord(
            run=self.run,
            stage=self.stage,
            round=number,
            previous=self.digests[-1],
            anchor_before=self.anchors[-1],
            rules=self.manifest.rules,
            layout=self.layout.digest,
            ranks=ranks,
            members=(member,),
            chain_tokens=10 + (0 if last is None else last.chain_tokens),
            parts=parts,
            window=() if last is None else last.window,
            next_ranks=(),
            next_inner_steps=self._plan.inner_steps_after(last),
            means=means,
        )

    def certificate(self, record: RoundRecord, digest: str) -> bytes:
        """This peer's vote, which is the majority of its group."""
        ballot = Ballot(
            run=record.run,
            stage=record.stage,
            round=record.round,
            attempt=0,
            group=b"g",
            members=(self.peer,),
            voters=frozenset({self.peer}),
        )
        vote = Vote(voter=self.peer, digest=digest, missed=())
        signed = ballot.sign(vote, self._identity)
        return certificate(ballot, [signed], digest)

    def snapshot(self, folder: Path | None = None) -> Path:
        """Write where it is now; the folder of it."""
        return write_snapshot(
            folder or self.own / "snapshots",
            Snapshot(
                round=-1 if self.last is None else self.last.round,
                digest=self.digests[-1],
                layout=self.layout.digest,
                anchor=self.anchor,
                momentum=self.momentum,
                tensors={},
                facts={},
            ),
        )

    def claim(self) -> ClaimRecord:
        """What it tells of its chain."""
        head = self.log.head()
        return ClaimRecord(
            round=head.round,
            digest=head.digest,
            chain_tokens=head.chain_tokens,
            record_bytes=head.record_bytes,
        )

    def find(self, want: dict[str, Any]) -> Source | None:
        """What it gives to whoever asks."""
        if want["what"] == "state":
            return open_state(self.own / "snapshots", want)
        header = bool(want.get("header"))
        return find_in_log(self.log, want["what"], want["digest"], header=header)

    def find_all_but(self, missing: str, want: dict[str, Any]) -> Source | None:
        """Likewise, but of the first record another one ("record"), or no "certificate"."""
        if want["what"] != missing or want.get("header") or want["digest"] != self.digests[1]:
            return self.find(want)
        return self.find(want | {"digest": self.digests[2]}) if missing == "record" else None

    def record_file(self, number: int) -> Path:
        """Where the record of a round lies."""
        (path,) = (self.own / "log").glob(f"{number:08d}-*.record")
        return path


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())

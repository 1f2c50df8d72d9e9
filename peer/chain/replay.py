"""Replays a stage's chain: every record is checked, and the anchor that follows from them is made.

An anchor is a pure function of the chain, and so is the plan that each record names. So whoever has
the manifest and the records can tell whether a model is what it is said to be: begin at the initial
weights, or at a state that somebody kept, apply every record, and compare.

A flaw does not end a replay, but what it leaves unknown is not guessed: after it the records are
only checked, until a state tells the anchor again.
"""

# safetensors carries no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dilocox.compression.group_codec import PayloadRefused
from dilocox.dht.manifest import Manifest
from dilocox.peer.chain.record_check import RecordCheck
from dilocox.peer.chain.snapshot_files import sha256_of_file
from dilocox.peer.chain.store import Entry, KeptState
from dilocox.peer.rounds.adaptation import RoundPlan, outer_step
from dilocox.peer.rounds.outer_step import anchor_sha256
from dilocox.peer.rounds.record import RecordRefused, RoundRecord
from dilocox.pipeline.stage import build_stage, flatten_parameters, stage_layout


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """What a replay found.

    checked, replayed: rounds whose records were looked at, and those that were applied to an
        anchor. flaws: one line each. anchor_sha256: after the last record, empty if unknown.
        confirmed: rounds after which the anchor was compared with a state, and equal to it.
        gone: rounds whose records were there when they were listed: their owner has moved or
        removed them.
    """

    checked: tuple[int, ...]
    replayed: tuple[int, ...]
    flaws: tuple[str, ...]
    anchor_sha256: str
    confirmed: tuple[int, ...]
    gone: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Point:
    """Where the replay stands: on the manifest, or on a record."""

    digest: str
    record: RoundRecord | None  # without its means; None on the manifest
    chain_tokens: int


@dataclass
class _Vectors:
    anchor: Tensor  # [numel] fp32
    momentum: Tensor  # [numel] fp32


@dataclass
class _Found:
    checked: list[int] = field(default_factory=list[int])
    replayed: list[int] = field(default_factory=list[int])
    flaws: list[str] = field(default_factory=list[str])
    confirmed: list[int] = field(default_factory=list[int])
    gone: list[int] = field(default_factory=list[int])


def replay(
    manifest: Manifest,
    run: str,
    stage: int,
    records: Sequence[Entry],
    states: Iterable[KeptState] = (),
) -> Replayed:
    """Replay what there is of a stage's chain; `records` in chain order.

    Takes the memory of three vectors of the stage and what a record's decoding needs.
    """
    chain = _Replay(manifest, run, stage, states)
    for entry in records:
        chain.take(entry)
    found = chain.found
    return Replayed(
        checked=tuple(found.checked),
        replayed=tuple(found.replayed),
        flaws=tuple(found.flaws),
        anchor_sha256="" if chain.vectors is None else anchor_sha256(chain.vectors.anchor),
        confirmed=tuple(found.confirmed),
        gone=tuple(found.gone),
    )


def state_after(
    manifest: Manifest,
    run: str,
    stage: int,
    records: Sequence[Entry],
    states: Iterable[KeptState] = (),
) -> tuple[tuple[str, ...], tuple[Tensor, Tensor] | None]:
    """The flaws of these records, and the anchor and momentum after them; None if unknown.

    Without records they are the initial weights, and zeros.
    """
    chain = _Replay(manifest, run, stage, states)
    if not records:
        chain.begin()
    for entry in records:
        chain.take(entry)
    vectors = chain.vectors
    return tuple(chain.found.flaws), None if vectors is None else (vectors.anchor, vectors.momentum)


class _Replay:
    """found: so far. vectors: the anchor where the replay stands, None while it is unknown."""

    def __init__(self, manifest: Manifest, run: str, stage: int, states: Iterable[KeptState]):
        self.found = _Found()
        self.vectors: _Vectors | None = None
        self._manifest = manifest
        self._layout = stage_layout(manifest, stage)
        self._check = RecordCheck.of(run, stage, manifest, self._layout)
        self._plan = RoundPlan(manifest, self._check.codec)
        self._states = {state.digest: state for state in states}
        self._at: _Point | None = None

    def take(self, entry: Entry) -> None:
        """Check the next record, and apply it where the anchor is known."""
        self.found.checked.append(entry.round)
        at, self._at = self._at, None  # until this record has proved to be sound
        try:
            record = self._sound(entry)
        except RecordRefused as error:
            self._lost(f"round {entry.round}: {error}")
            return
        first = len(self.found.checked) == 1
        if first and record.previous == self._check.root:
            at = self.begin()
        elif at is not None and record.previous != at.digest:
            self._lost(
                f"round {entry.round}: follows the record {record.previous[:12]}, not "
                f"{at.digest[:12]} before it"
            )
            at = None
        if self.vectors is None:
            self._meet(record.previous)
        if at is not None:
            self._check_plan(record, at)
        self._apply(record)
        self._at = _Point(
            digest=entry.digest,
            record=replace(record, means=()),
            chain_tokens=record.chain_tokens,
        )
        self._meet(entry.digest)

    def _sound(self, entry: Entry) -> RoundRecord:
        """Raises RecordRefused."""
        data, certificate = entry.data(), entry.folder.certificate(entry.round)
        if data is None:
            self.found.gone.append(entry.round)
            raise RecordRefused("its record is gone; was it removed just now?")
        if certificate is None:
            raise RecordRefused("it has no certificate")
        record = self._check.record(data, certificate)
        if record.round != entry.round:
            raise RecordRefused(f"the record in its file is of round {record.round}")
        return record

    def begin(self) -> _Point:
        """Stand on the manifest, with the initial weights."""
        manifest, root = self._manifest, self._check.root
        module = build_stage(manifest.model, self._check.stage, manifest.stages, manifest.seed)
        anchor = flatten_parameters(module, self._layout).detach().clone()
        self.vectors = _Vectors(anchor, torch.zeros_like(anchor))
        self._meet(root)
        return _Point(digest=root, record=None, chain_tokens=0)

    def _check_plan(self, record: RoundRecord, at: _Point) -> None:
        """That the record is what had to follow, but for its anchor."""
        here = f"round {record.round}"
        if record.chain_tokens != at.chain_tokens + record.tokens:
            self.found.flaws.append(
                f"{here}: counts {record.chain_tokens} tokens of the chain, they are "
                f"{at.chain_tokens + record.tokens}"
            )
        if at.record is not None and record.rules < at.record.rules:
            self.found.flaws.append(f"{here}: is under older rules than the record before it")
        if record.ranks != self._plan.ranks_after(at.record):
            self.found.flaws.append(f"{here}: has other ranks than the record before it names")
        try:
            follows = self._plan.follows(record, at.record)
        except (ValueError, PayloadRefused):
            follows = False
        if not follows:
            self.found.flaws.append(
                f"{here}: its window, or the ranks or H that it names, do not follow from its "
                "means and the record before it"
            )

    def _apply(self, record: RoundRecord) -> None:
        vectors = self.vectors
        if vectors is None:
            return
        found = anchor_sha256(vectors.anchor)
        if record.anchor_before != found:
            self._lost(
                f"round {record.round}: applies to the anchor {record.anchor_before[:12]}, the "
                f"records before it make {found[:12]}"
            )
            return
        average = record.average(self._check.codec)
        outer_step(self._manifest, record.rules).apply(
            vectors.anchor, vectors.momentum, average, vectors.anchor, vectors.momentum
        )
        self.found.replayed.append(record.round)

    def _meet(self, digest: str) -> None:
        """Compare the anchor with the state that stands on this record, or learn it from there."""
        state = self._states.pop(digest, None)
        if state is None:
            return
        try:
            stated = _read(state, self._layout.numel)
        except FileNotFoundError:  # its owner, a running peer, has a newer one
            return
        except (OSError, ValueError, SafetensorError) as error:
            self.found.flaws.append(f"{state.file}: damaged ({error})")
            return
        if self.vectors is None:
            self.vectors = stated
            return
        for name in ("anchor", "momentum"):
            if not torch.equal(getattr(stated, name), getattr(self.vectors, name)):
                self.found.flaws.append(
                    f"{state.file}: its {name} is not the one that the records up to round "
                    f"{state.round} make"
                )
                return
        self.found.confirmed.append(state.round)

    def _lost(self, flaw: str) -> None:
        self.found.flaws.append(flaw)
        self.vectors = None


def _read(state: KeptState, numel: int) -> _Vectors:
    """Raises OSError, ValueError and SafetensorError."""
    if sha256_of_file(state.file) != state.sha256:
        raise ValueError("it does not have the sha256 that was written beside it")
    with safe_open(state.file, framework="pt") as file:
        vectors = _Vectors(file.get_tensor("anchor"), file.get_tensor("momentum"))
    for vector in (vectors.anchor, vectors.momentum):
        if vector.shape != (numel,) or vector.dtype != torch.float32:
            raise ValueError(f"it holds {tuple(vector.shape)} values, not ({numel},) of fp32")
    return vectors

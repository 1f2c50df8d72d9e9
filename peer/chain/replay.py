"""Replays a stage's chain: every record is checked, and the anchor that follows from them is made.

An anchor is a pure function of the chain, and so is the plan that each record names. So the
manifest and the records are enough to tell whether a model is what it is said to be: begin at the
initial weights, or at a state that somebody kept, apply every record, and compare.

A flaw does not end a replay, but what it leaves unknown is not guessed: after it the records are
only checked, until a state tells the anchor again.

`anchors_around` replays one record on a state's file, a piece at a time. An archive, which keeps
states of many stages, has no room for their vectors: it moves a state on by its records
(archive.py), and has it proved by two. The first record after a state names the sha256 of the
anchor before it, and its outer step must lead to the anchor that the second one names, which it
does from the right momentum only.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from dilocox.compression.group_quantization import PayloadRefused
from dilocox.dht.manifest import Manifest
from dilocox.peer.chain.record_check import MAX_STATE_HEADER_BYTES, RecordCheck, flaws_after
from dilocox.peer.chain.snapshot_files import (
    PIECE_VALUES,
    bytes_of,
    on_disk,
    save_tensors,
    state_sha256,
)
from dilocox.peer.chain.store import KeptState, LogEntry
from dilocox.peer.rounds.outer_step import OuterStep, anchor_sha256, move_anchor
from dilocox.peer.rounds.rank_choice import RoundPlan
from dilocox.peer.rounds.record import RecordRefused, RoundRecord
from dilocox.pipeline.stage import build_stage, flatten_parameters, stage_layout

REPLAY_ROOM = 1.1  # for what is small beside vectors


def replay_bytes(values: int, record_bytes: int, *, from_seed: bool) -> int:
    """Memory to move a state of so many values on by records of so many bytes: an average and twice
    the record; before that, where the state is the weights of a seed, two vectors. Measured at 77
    million values: 5.05 bytes a value with a dense codec of 4 bits, 8.4 to make the weights.
    """
    needed = 4 * values + 2 * record_bytes
    return round(REPLAY_ROOM * max(needed, 8 * values if from_seed else 0))


def start_file(check: RecordCheck, state: KeptState | None, path: Path) -> None:
    """Write the file of a state, to be moved on: a copy of this one, or the initial weights and a
    momentum of zeros, in the memory of two vectors. Raises EnvironmentFault.
    """
    with on_disk(path):
        if state is not None:
            shutil.copyfile(state.file, path)
        else:
            anchor = initial_anchor(check)
            momentum = torch.zeros(1).expand(anchor.numel())
            save_tensors(path, {"anchor": anchor, "momentum": momentum}, {})


def initial_anchor(check: RecordCheck, into: Tensor | None = None) -> Tensor:
    """The weights of the manifest's seed, [numel] fp32, in this vector if one is given, and in the
    memory of another one meanwhile."""
    manifest = check.manifest
    module = build_stage(manifest.model, check.stage, manifest.stages, manifest.seed)
    return flatten_parameters(module, check.layout, into).detach()


@torch.no_grad()
def anchors_around(
    path: Path, average: Tensor, outer: OuterStep, *, move: bool = False
) -> tuple[str, str]:
    """The sha256 of a state's anchor, and of the anchor after the outer step with this average.

    average: flat fp32, of the first record after the state. move: write the anchor and momentum
    after it into the file, which holds a mixture of both if that is cut off.

    Raises:
        RecordRefused: the file is damaged.
        EnvironmentFault: it cannot be written.
    """
    before, after = hashlib.sha256(), hashlib.sha256()
    try:
        with path.open("r+b" if move else "rb") as file:
            starts = _starts(file, average.numel())
            for low in range(0, average.numel(), PIECE_VALUES):
                gradient = average[low : low + PIECE_VALUES]
                places = [start + 4 * low for start in starts]
                anchor, momentum = (_piece(file, place, gradient.numel()) for place in places)
                before.update(bytes_of(anchor))
                outer.apply(anchor, momentum, gradient, anchor, momentum)
                after.update(bytes_of(anchor))
                for place, piece in zip(places if move else (), (anchor, momentum), strict=False):
                    with on_disk(path):
                        file.seek(place)
                        file.write(bytes_of(piece))
                        file.flush()
    except (ValueError, LookupError, TypeError, OSError) as error:
        raise RecordRefused(f"{path}: damaged ({error})") from error
    return before.hexdigest(), after.hexdigest()


_NAMES = ("anchor", "momentum")


def _starts(file: BinaryIO, numel: int) -> list[int]:
    """Where anchor and momentum begin in a safetensors file; ValueError for other ones."""
    length = int.from_bytes(file.read(8), "little")
    header = json.loads(file.read(min(length, MAX_STATE_HEADER_BYTES)))
    for name in _NAMES:
        shape, dtype = header[name]["shape"], header[name]["dtype"]
        if shape != [numel] or dtype != "F32":
            raise ValueError(f"its {name} holds {shape} values of {dtype}, not [{numel}] of F32")
    return [8 + length + int(header[name]["data_offsets"][0]) for name in _NAMES]


def _piece(file: BinaryIO, place: int, numel: int) -> Tensor:
    file.seek(place)
    return torch.frombuffer(bytearray(file.read(4 * numel)), dtype=torch.float32, count=numel)


@dataclass(kw_only=True)
class Replayed:
    """What a replay found.

    checked, replayed: rounds whose records were looked at, and those that were applied to an
        anchor. flaws: one line each. anchor_sha256: after the last record, empty if unknown.
        confirmed: rounds after which the anchor was compared with a state, and equal to it.
        gone: rounds whose records were there when they were listed: their owner has moved or
        removed them.
    """

    checked: tuple[int, ...] = ()
    replayed: tuple[int, ...] = ()
    flaws: tuple[str, ...] = ()
    anchor_sha256: str = ""
    confirmed: tuple[int, ...] = ()
    gone: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Vectors:
    anchor: Tensor  # [numel] fp32
    momentum: Tensor  # [numel] fp32


def replay(
    manifest: Manifest,
    run: str,
    stage: int,
    records: Sequence[LogEntry],
    states: Iterable[KeptState] = (),
) -> Replayed:
    """Replay what there is of a stage's chain; `records` in chain order.

    Takes the memory of three vectors of the stage and what a record's decoding needs.
    """
    chain = _Replay(manifest, run, stage, states)
    for entry in records:
        chain.take(entry)
    if chain.vectors is not None:
        chain.found.anchor_sha256 = anchor_sha256(chain.vectors.anchor)
    return chain.found


def state_after(
    manifest: Manifest,
    run: str,
    stage: int,
    records: Sequence[LogEntry],
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
    return chain.found.flaws, None if vectors is None else (vectors.anchor, vectors.momentum)


class _Replay:
    """found: so far. vectors: the anchor where the replay stands, None while it is unknown."""

    def __init__(self, manifest: Manifest, run: str, stage: int, states: Iterable[KeptState]):
        self.found = Replayed()
        self.vectors: _Vectors | None = None
        self._manifest = manifest
        self._layout = stage_layout(manifest, stage)
        self._check = RecordCheck(run, stage, manifest, self._layout)
        self._plan = RoundPlan(manifest, self._check.codec)
        self._states = {state.digest: state for state in states}
        # the digest of the record before, and it without its means: None on the manifest
        self._at: tuple[str, RoundRecord | None] | None = None

    def take(self, entry: LogEntry) -> None:
        """Check the next record, and apply it where the anchor is known."""
        self.found.checked += (entry.round,)
        at, self._at = self._at, None  # until this record has proved to be sound
        try:
            record = self._sound(entry)
        except RecordRefused as error:
            self._lost(f"round {entry.round}: {error}")
            return
        first = len(self.found.checked) == 1
        if first and record.previous == self._check.root:
            at = self.begin()
        elif at is not None and record.previous != at[0]:
            self._lost(
                f"round {entry.round}: follows the record {record.previous[:12]}, not "
                f"{at[0][:12]} before it"
            )
            at = None
        if self.vectors is None:
            self._meet(record.previous)
        if at is not None:
            self._check_plan(record, at[1])
        self._apply(record)
        self._at = entry.digest, replace(record, means=())
        self._meet(entry.digest)

    def _sound(self, entry: LogEntry) -> RoundRecord:
        """Raises RecordRefused."""
        data, certificate = entry.data(), entry.certificate()
        if data is None:
            self.found.gone += (entry.round,)
            raise RecordRefused("its record is gone; was it removed just now?")
        if certificate is None:
            raise RecordRefused("it has no certificate")
        record = self._check.record(data, certificate)
        if record.round != entry.round:
            raise RecordRefused(f"the record in its file is of round {record.round}")
        return record

    def begin(self) -> tuple[str, None]:
        """Stand on the manifest, with the initial weights: of a checkpoint those of a state."""
        if anchors := self._manifest.initial.anchors:
            self._meet(self._check.root)
            pinned, vectors = anchors[self._check.stage], self.vectors
            if vectors is not None and anchor_sha256(vectors.anchor) != pinned:
                self._lost("the state before the first round is not the one that the manifest pins")
            return self._check.root, None
        anchor = initial_anchor(self._check)
        self.vectors = _Vectors(anchor, torch.zeros_like(anchor))
        self._meet(self._check.root)
        return self._check.root, None

    def _check_plan(self, record: RoundRecord, before: RoundRecord | None) -> None:
        """That the record is what had to follow, but for its anchor."""
        here = f"round {record.round}"
        for flaw in flaws_after(record, before, self._check.codec.first_ranks):
            self._flaw(f"{here}: {flaw}")
        try:
            follows = self._plan.follows(record, before)
        except (ValueError, PayloadRefused):
            follows = False
        if not follows:
            self._flaw(
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
        codec = self._check.codec
        move_anchor(self._manifest, record, codec, vectors.anchor, vectors.momentum)
        self.found.replayed += (record.round,)

    def _meet(self, digest: str) -> None:
        """Compare the anchor with the state that stands on this record, or learn it from there."""
        state = self._states.pop(digest, None)
        if state is None:
            return
        known, numel = self.vectors, self._layout.numel
        differing = ""
        try:
            if known is None:
                self.vectors = _read(state, numel)
                return
            for name, part, piece in _pieces(state, numel):
                if not differing and not torch.equal(piece, getattr(known, name)[part]):
                    differing = name
        except FileNotFoundError:  # its owner, a running peer, has a newer one
            return
        except (OSError, ValueError, LookupError, TypeError) as error:
            self._flaw(f"{state.file}: damaged ({error})")
            return
        if differing:
            self._flaw(
                f"{state.file}: its {differing} is not the one that the records up to round "
                f"{state.round} make"
            )
            return
        self.found.confirmed += (state.round,)

    def _flaw(self, flaw: str) -> None:
        self.found.flaws += (flaw,)

    def _lost(self, flaw: str) -> None:
        self._flaw(flaw)
        self.vectors = None


def _read(state: KeptState, numel: int) -> _Vectors:
    """Raises as `_pieces`."""
    vectors = _Vectors(torch.empty(numel), torch.empty(numel))
    for name, part, piece in _pieces(state, numel):
        getattr(vectors, name)[part] = piece
    return vectors


def _pieces(state: KeptState, numel: int) -> Iterator[tuple[str, slice, Tensor]]:
    """Anchor and momentum a piece at a time: of a mapped file all would count as memory.

    Raises OSError, ValueError, LookupError and TypeError.
    """
    if state_sha256(state.file) != state.sha256:
        raise ValueError("it does not have the sha256 that was written beside it")
    with state.file.open("rb") as file:
        for name, start in zip(_NAMES, _starts(file, numel), strict=True):
            for low in range(0, numel, PIECE_VALUES):
                part = slice(low, min(numel, low + PIECE_VALUES))
                yield name, part, _piece(file, start + 4 * low, part.stop - low)

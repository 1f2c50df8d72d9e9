"""How a running manifest is revised: what may change, and what a change does to the records.

A revision is a whole manifest, signed like the first one, with a number of its own; the highest
counts. Rounds go on over it: the chain of records still begins at the first revision, every record
names the rules it was made under, and a manifest tells what its run needs to know of earlier rules.
So the newest revision is enough to replay all records. Any holder of the operator's key may revise
(`dilocox operate`).

`ManifestWatch` follows the manifest of a run: the operator may sign a newer one at any time. A
state alone (paused, ended, running again) takes effect in the running process, and so does the list
of admitted peers. New rules enter the outer step, the deadlines of an exchange or the records that
count, and are spread over several processes: for them a peer starts again from its snapshot,
between two inner steps with no send in flight. Records name the rules that they were made under, so
it does not matter which peer is first. A peer that cannot read the new rules must leave all the
same: under the old ones it would make a chain of its own.

`RevisionFolder` is the operator's: every manifest of a run that was signed, none ever removed.
`RUN-revisions/00000003.signed` in the operator's state folder. `dilocox operate` puts a new one
there; the bootstrap that runs beside it looks every second, publishes it, and writes its number
into `published`.
"""

from __future__ import annotations

import fcntl
import logging
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dilocox.dht.errors import EnvironmentFault, InvalidInput, UnreadableManifest
from dilocox.dht.field_rules import shown
from dilocox.dht.files import disk_fault, make_folder, write_atomically
from dilocox.dht.manifest import (
    MAX_HANDOVERS,
    REVISIONS_OF_A_KEY,
    Manifest,
    OperationSpec,
    SignedManifest,
)

if TYPE_CHECKING:
    from dilocox.dht.swarm import Swarm

logger = logging.getLogger(__name__)

LAPSED_DAYS = 7  # for which an admission that is over is remembered
RunState = Literal["running", "paused", "ended"]

FOR_PEOPLE = ("about", "licence", "samples.")  # no peer trains by them, so none starts again
REVISABLE = (
    "admission",
    "end_tokens",
    "inner.learning_rate",
    "inner.muon_learning_rate",
    "inner.weight_decay",
    "inner.clip_norm",
    "inner.warmup_tokens",
    "inner.schedule",
    "inner.decay_share",
    "inner.final_fraction",
    "outer.learning_rate",
    "outer.momentum",
    "deadlines.",
    *FOR_PEOPLE,
)
REASONS = {
    "name": "the run id is made of it",
    "protocol": "the peers that train now speak it",
    "seed": "the initial weights are made of it, and so is every anchor",
    "model": "the weights would not fit",
    "initial": "the weights of every stage began with it",
    "preset": "the weights would not fit",
    "stages": "every peer holds the weights of one of them",
    "data": "parts are leased and losses compared by it",
    "batch": "tokens of the records are counted by it",
    "pipeline": "replicas that stand agreed on it",
    "inner": "the optimizers' states would not fit",
    "outer": "peers keep their unsent progress by it",
    "codec": "the records of the chain are coded by it",
    "rounds": "the records of the chain are checked by it",
}


@dataclass(frozen=True)
class Change:
    """A field whose value differs."""

    field: str
    before: object
    after: object

    def __str__(self) -> str:
        return f"{self.field}: {shown(self.before)} -> {shown(self.after)}"


def changes(before: Manifest, after: Manifest) -> list[Change]:
    """The fields that differ, but for what the operator's commands write."""
    old, new = _flat(before.to_dict()), _flat(after.to_dict())
    names = sorted(old.keys() | new.keys())
    return [
        Change(name, old.get(name), new.get(name))
        for name in names
        if old.get(name) != new.get(name) and not name.startswith("operation.")
    ]


_READ_FROM = {
    "initial.anchors": "the checkpoint at `model.from`",
    "data.tokenizer_digest": "what the tokenizer makes of text",
    "data.end_of_text": "the end-of-text token of the tokenizer",
    "data.held_out": "the held-out part of the data",
}


def check_of_run(wanted: Manifest, run: str, known: Iterable[Manifest]) -> None:
    """Raise InvalidInput if a run.yaml differs from all of these revisions of a run that began."""
    differences = [changes(each, wanted) for each in known]
    if all(differences):
        first = differences[-1][0]
        read = _READ_FROM.get(first.field)
        if read is not None:  # by `dilocox bootstrap`, and not from run.yaml
            raise InvalidInput(
                f"{read} is not what it was when run {run} began ({first.field} is "
                f"{shown(first.after)}, the run has {shown(first.before)}): put that back, or "
                "begin another run under another name"
            )
        raise InvalidInput(
            f"run.yaml says {first.after!r} for {first.field}, run {run} has {first.before!r}; to "
            "change a run that has begun use `dilocox operate revise`, to begin another one give "
            "it another name"
        )


def revised(before: Manifest, wanted: Manifest) -> Manifest:
    """The next revision, with the values of a run.yaml that was edited.

    Raises:
        InvalidInput: nothing differs, or a field that cannot change in a running run.
    """
    _check_not_ended(before)
    found = changes(before, wanted)
    if not found:
        raise InvalidInput("nothing differs from the run's manifest: edit a value first")
    for change in found:
        if not any(
            change.field == name or (name.endswith(".") and change.field.startswith(name))
            for name in REVISABLE
        ):
            reason = REASONS.get(change.field.partition(".")[0], "all peers rely on it")
            may = ", ".join(name.rstrip(".") for name in REVISABLE)
            raise InvalidInput(
                f"{change.field} is {shown(change.after)}, the run has {shown(change.before)}; it "
                f"cannot change in a running run ({reason}): put it back, or start a run of "
                f"another name. What may change: {may}"
            )
    following = replace(wanted, operation=before.operation)
    if all(change.field.startswith(FOR_PEOPLE) for change in found):
        return _under_same_rules(following, root=before.root)
    return _under_new_rules(before, following)


def in_state(before: Manifest, state: RunState) -> Manifest:
    """The next revision, in this state; InvalidInput if the run has ended."""
    return _under_same_rules(before, state=state)


def admitting(before: Manifest, until: Mapping[str, int], today: int) -> Manifest:
    """The next revision, in which these peers are admitted until a day, of those since 1970.

    Peers whose time is over for longer than a week are forgotten; until then one that is away knows
    that its admission was not withdrawn.
    """
    oldest = today - LAPSED_DAYS
    kept = {peer: day for peer, day in before.operation.admitted if day >= oldest}
    return _under_same_rules(before, admitted=tuple(sorted((kept | dict(until)).items())))


def revoking(before: Manifest, peers: Collection[str]) -> Manifest:
    """The next revision, in which these peers are not admitted; InvalidInput where one is not."""
    known = dict(before.operation.admitted)
    if missing := [peer for peer in peers if peer not in known]:
        raise InvalidInput(f"{missing[0]} is not admitted: `dilocox operate admitted` lists who is")
    kept = tuple(row for row in before.operation.admitted if row[0] not in peers)
    return _under_same_rules(before, admitted=kept)


def back_to(before: Manifest, round_number: int, base: Sequence[str]) -> Manifest:
    """The next revision, in which the run goes on from the records up to a round.

    base: by stage, the digest of its last record of that round or an earlier one, or the root.
    """
    _check_not_ended(before)
    made = _under_new_rules(before, before)
    operation = made.operation
    rollbacks = (*operation.rollbacks, (operation.rules, round_number))
    return replace(made, operation=replace(operation, rollbacks=rollbacks, base=tuple(base)))


def under_next_key(before: Manifest) -> Manifest:
    """The next revision, the first of those that the operator's next key signs; all else stays."""
    handovers = before.operation.revision // REVISIONS_OF_A_KEY
    if handovers >= MAX_HANDOVERS:
        raise InvalidInput(f"the operator's key was replaced {MAX_HANDOVERS} times: no more")
    return _under_same_rules(before, revision=(handovers + 1) * REVISIONS_OF_A_KEY)


def _under_same_rules(before: Manifest, **changed: Any) -> Manifest:
    _check_not_ended(before)
    operation = before.operation
    told = {"revision": operation.revision + 1, "root": before.root} | changed
    return replace(before, operation=replace(operation, **told))


def _under_new_rules(before: Manifest, wanted: Manifest) -> Manifest:
    operation = before.operation
    held = (before.outer.learning_rate, before.outer.momentum)
    outer = operation.outer
    if held != (wanted.outer.learning_rate, wanted.outer.momentum):
        outer = (*outer, (operation.rules, *held))
    following: OperationSpec = replace(
        operation,
        revision=operation.revision + 1,
        rules=operation.revision + 1,
        root=before.root,
        outer=outer,
    )
    return replace(wanted, operation=following)


def _check_not_ended(manifest: Manifest) -> None:
    if manifest.operation.state == "ended":
        raise InvalidInput("the run has ended: its peers have left; start a run of another name")


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{name}.")  # pyright: ignore[reportUnknownArgumentType]
        else:
            found[prefix + name] = value
    return found


LOOK_LIMIT_S = 3.0
REVISION_S = 30.0  # between two looks for what nobody tells of
MAX_IN_VAIN = 10


class ManifestWatch:
    """The newest manifest that this process knows; one thread looks, others may read.

    manifest: is set whole. unreadable: what is wrong with a newer one that the operator signed and
    this program cannot read; None where there is none.
    """

    def __init__(self, swarm: Swarm, run: str, manifest: Manifest, file: Path | None = None):
        """file: where a newer one is kept for the next start."""
        self.manifest = manifest
        self.unreadable: UnreadableManifest | None = None
        self._swarm = swarm
        self._run = run
        self._file = file
        self._refused = ""
        self._looked_at: float | None = None
        self._in_vain = 0  # looks for what was told

    def follow(self, told: int, heartbeat_s: float, now: float) -> bool:
        """Look where somebody tells of a newer one, else now and then: it is large.

        Anybody may tell anything. The more often nobody had what was told, the later is looked
        again. told: the highest revision of all. now: of the monotonic clock. Returns as `look`.
        """
        newer = told > self.manifest.operation.revision
        pause_s = REVISION_S
        if newer:
            pause_s = min(pause_s, heartbeat_s / 2 * 2**self._in_vain)
        if self._looked_at is None:
            self._looked_at = now
        if now - self._looked_at < pause_s:
            return False
        self._looked_at = now
        found = self.look()
        self._in_vain = min(MAX_IN_VAIN, self._in_vain + 1) if newer and not found else 0
        return found

    def look(self) -> bool:
        """Ask the DHT; whether there is a newer one. EnvironmentFault if the disk is full."""
        try:
            signed = self._swarm.newest_manifest(LOOK_LIMIT_S)
            if signed is None or signed.revision_of(self._run) <= self.manifest.operation.revision:
                return False
            newer = self._read(signed)
        except InvalidInput as error:
            if str(error) != self._refused:
                self._refused = str(error)
                logger.error("the newest manifest is refused: %s", error)
            return False
        if self._file is not None:
            write_atomically(self._file, signed.to_bytes())
        if newer is None:
            return False
        before, self.manifest = self.manifest, newer
        if self._swarm.admission is not None:
            self._swarm.admission.take(newer)
        _tell(before, newer)
        return True

    def _read(self, signed: SignedManifest) -> Manifest | None:
        """None if it is the operator's, but not to be read; raises InvalidInput."""
        known = self.unreadable
        try:
            newer = signed.verify(self._run)
        except UnreadableManifest as error:
            if str(error) != str(known):
                logger.error("%s", error)
                self.unreadable = error
            return None
        self.unreadable = None
        return newer


def kept_manifest(file: Path, run: str) -> SignedManifest | None:
    """What a watch kept there; None if there is nothing, or nothing of the run's operator."""
    try:
        signed = SignedManifest.from_bytes(file.read_bytes())
        signed.revision_of(run)
    except FileNotFoundError:
        return None
    except (OSError, InvalidInput) as error:
        logger.warning("%s does not count: %s; the swarm's newest manifest does", file, error)
        return None
    return signed


def newer_of(found: SignedManifest, kept: SignedManifest | None, run: str) -> SignedManifest:
    """The one of the higher revision; both are of this run."""
    if kept is None or kept.revision_of(run) <= found.revision_of(run):
        return found
    return kept


def _tell(before: Manifest, newer: Manifest) -> None:
    old, new = before.operation, newer.operation
    told = f"revision {new.revision} of the manifest"
    if new.admitted != old.admitted:
        logger.info("%s: the operator admits %d peers", told, len(new.admitted))
    if new.state != old.state:
        words = {"paused": "pauses", "ended": "ends", "running": "resumes"}
        logger.warning("%s: the operator %s the run", told, words[new.state])
    if new.rollbacks != old.rollbacks:
        logger.warning("%s: the operator goes back to round %d", told, new.rollbacks[-1][1])
    elif new.rules != old.rules:
        logger.warning("%s: new values", told)


class RevisionFolder:
    """The revisions of one run."""

    def __init__(self, state: Path, run: str):
        self._folder = state / f"{run}-revisions"
        self._run = run
        self._read: tuple[int, SignedManifest] | None = None

    @property
    def numbers(self) -> list[int]:
        found = self._folder.glob("*.signed")
        return sorted(int(path.stem) for path in found if path.stem.isdecimal())

    def read(self, number: int) -> SignedManifest:
        """One of them; InvalidInput if it is damaged or not of this run."""
        path = self._path(number)
        try:
            signed = SignedManifest.from_bytes(path.read_bytes())
            signed.verify(self._run)
        except InvalidInput as error:
            raise InvalidInput(f"{path}: {error}") from error
        except OSError as error:
            raise EnvironmentFault(f"{path}: cannot be read ({error.strerror})") from error
        return signed

    def newest(self) -> SignedManifest | None:
        numbers = self.numbers
        if not numbers:
            return None
        if self._read is None or self._read[0] != numbers[-1]:
            self._read = numbers[-1], self.read(numbers[-1])
        return self._read[1]

    def check(self, manifest: Manifest) -> None:
        """Raise InvalidInput if a run.yaml is neither the oldest that is here nor the newest."""
        numbers = self.numbers
        if numbers:
            known = (self.read(number).verify(self._run) for number in (numbers[0], numbers[-1]))
            check_of_run(manifest, self._run, known)

    def add(self, signed: SignedManifest) -> int:
        """Keep the next revision; its number. EnvironmentFault if another one has that."""
        number = signed.revision_of(self._run)
        make_folder(self._folder)
        with self._locked():  # two commands at once
            if self._path(number).exists():
                raise EnvironmentFault(
                    f"{self._path(number)}: another command made this revision meanwhile; try again"
                )
            write_atomically(self._path(number), signed.to_bytes())
        return number

    # ---- what the bootstrap tells ----------------------------------------------------------------
    @property
    def published(self) -> int:
        """The revision that the bootstrap has published last, -1 before that."""
        try:
            return int((self._folder / "published").read_text())
        except (OSError, ValueError):
            return -1

    def note_published(self, number: int) -> None:
        if number != self.published:
            write_atomically(self._folder / "published", f"{number}\n".encode())

    @contextmanager
    def _locked(self) -> Generator[None]:
        path = self._folder / "lock"
        try:
            file = path.open("a")
        except OSError as error:
            raise disk_fault(path, error) from error
        with file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:08d}.signed"

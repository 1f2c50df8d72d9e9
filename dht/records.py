"""What peers say about themselves in the DHT: the whole vocabulary of the swarm, small and typed.

A record is a frozen dataclass, written as a msgpack map of its fields and at most 1 KB long; that
of a replica has 4 KB, which is room for the peers of 64 stages.
Decoding ignores fields it does not know (a newer version may send them), takes the default of a
field that an older version does not send, and refuses everything else that is not exactly of the
declared type: missing fields, wrong types, infinite numbers, endless text.

Every key and lifetime in the DHT stands here, too. All keys of a run start with its id, so one
parser tells which run and which kind of record a key is for. hivemind's matchmaking adds keys of
its own, which start with `averaging_prefix`.
"""

import hashlib
import math
import re
import types
import typing
from dataclasses import MISSING, dataclass, field, fields
from functools import lru_cache
from typing import Any, ClassVar, Literal, TypeVar, cast

from dilocox.dht.wire import Malformed, pack, unpack

Kind = Literal["manifest", "replica", "stage", "bell", "part", "round"]

# For so long copies of the bootstrap keep a run open to joiners while the operator's is away.
MANIFEST_LIFETIME_S = 7 * 24 * 3600.0
# Nodes that came near its key since, or lost it, soon have it again.
MANIFEST_REFRESH_S = 60.0
# Nobody may leave something in the memory of others for longer than this.
MAX_LIFETIME_S: dict[Kind, float] = {
    kind: MANIFEST_LIFETIME_S if kind == "manifest" else 3600.0 for kind in typing.get_args(Kind)
}
# Of a round or another index; what is larger is in no key.
MAX_INDEX = 9_999_999_999
MAX_DECLARATION_LIFETIME_S = 3600.0

_KEY = re.compile(
    r"(?P<run>[0-9a-f]{32})\.(?:(?P<single>manifest|replica)"
    r"|(?P<many>stage|bell|part|round)\.(?P<index>0|[1-9][0-9]{0,9}))"
)


@dataclass(frozen=True)
class ParsedKey:
    """The parts of a key; `index` is the stage, round or part, and 0 where there is none."""

    run: str
    kind: Kind
    index: int = 0


def manifest_key(run: str) -> str:
    """The signed manifest of the run (a plain value, no subkeys)."""
    return f"{run}.manifest"


def stage_key(run: str, stage: int) -> str:
    return f"{run}.stage.{stage}"


def replica_key(run: str) -> str:
    return f"{run}.replica"


def bell_key(run: str, round_number: int) -> str:
    return f"{run}.bell.{round_number}"


def part_key(run: str, part: int) -> str:
    """A `PartRecord` of every head that claims this part of the data."""
    return f"{run}.part.{part}"


def claim_key(run: str, stage: int) -> str:
    return f"{run}.round.{stage}"


def averaging_prefix(run: str, stage: int) -> str:
    """The prefix of hivemind's matchmaking for this stage; hivemind allows no dot in it."""
    return f"dilocox-{run}-stage{stage}"


def parse_key(key: str) -> ParsedKey:
    """The parts of one of this program's keys; raises ValueError for any other."""
    match = _KEY.fullmatch(key)
    if match is None:
        raise ValueError(f"{key[:80]!r} is not a key of dilocox")
    kind = cast(Kind, match["single"] or match["many"])
    return ParsedKey(match["run"], kind, int(match["index"] or 0))


def key_id(key: str) -> bytes:
    """What hivemind stores and sends in place of the key: a 20 byte hash."""
    return hashlib.sha1(pack(key), usedforsecurity=False).digest()


MAX_RECORD_BYTES = 1024
MAX_INTEGER = 2**53
MAX_TEXT = 256
MAX_TEXTS = 64

R = TypeVar("R", bound="Record")


@dataclass(frozen=True, kw_only=True)
class Record:
    """A record; each subclass is one kind and lives under one kind of key."""

    kind: ClassVar[Kind]
    max_bytes: ClassVar[int] = MAX_RECORD_BYTES

    def encode(self) -> bytes:
        """msgpack; raises `Malformed` when a field is not of its type or the whole is too long."""
        values = {spec.name: getattr(self, spec.name) for spec in fields(self)}
        for name, hint in _hints(type(self)).items():
            _checked(name, values[name], hint)
        data = pack(values)
        if len(data) > self.max_bytes:
            raise Malformed(
                f"{self.kind} record has {len(data)} bytes, it may have {self.max_bytes}"
            )
        return data

    @classmethod
    def decode(cls: type[R], data: bytes) -> R:
        value = unpack(data, cls.max_bytes)
        if not isinstance(value, dict):
            raise Malformed(f"{cls.kind} record is no map")
        given = cast(dict[str, object], value)
        values: dict[str, Any] = {}
        for name, hint in _hints(cls).items():
            if name in given:
                values[name] = _checked(name, given[name], hint)
            elif cls.__dataclass_fields__[name].default is MISSING:
                raise Malformed(f"{cls.kind} record has no {name}")
        return cls(**values)


def figure(text: str) -> Any:
    """A field for a share, from 0 to 1, that a training loop tells; None before there is one.

    Metrics, the progress line and the status page show every such field with its name; `text` says
    what it is.
    """
    return field(default=None, metadata={"figure": text})


def figures_of(record: type[Record]) -> dict[str, str]:
    """The shares that records of this kind tell, and what they are."""
    marked = {spec.name: spec.metadata.get("figure") for spec in fields(record)}
    return {name: text for name, text in marked.items() if text}


@dataclass(frozen=True, kw_only=True)
class StageRecord(Record):
    """A peer that hosts a stage.

    round: the round it is in.
    inner_steps: H as the last round record of its stage names it.
    digest: of the last round record it applied (hex).
    replica: peer id of the head of its replica, or empty.
    tokens: behind its unsent progress.
    client_mode: it can only dial out.
    voids: rounds that ended void since it started.
    version: of its dilocox.
    addresses: multiaddrs that reach it.
    blocked: why this peer cannot train now, in one line, or empty.
    compression_error: of its newest message in a round, |m - c| / |m|; None before there is one.
    name, team: that its volunteer gave it, or empty; texts of a stranger (names.py).
    """

    kind: ClassVar[Kind] = "stage"

    state: Literal["joining", "spare", "training", "left"]
    round: int
    inner_steps: int
    digest: str
    replica: str
    tokens: int
    tokens_per_s: float
    client_mode: bool
    voids: int
    version: str
    addresses: tuple[str, ...]
    blocked: str
    compression_error: float | None = None
    computing_share: float | None = figure("Of its time in replicas in which its stage computed.")
    name: str = ""
    team: str = ""


@dataclass(frozen=True, kw_only=True)
class ReplicaRecord(Record):
    """A replica, written by its head.

    members: peer ids by stage.
    epoch: grows with every change of the members.
    step_s: longest inner step of this round, in seconds.
    train_loss, val_loss: nats per token, None while unknown or not finite.
    val_round: the round whose anchor `val_loss` is of, -1 before the first one that was evaluated.
    waiting_share: of its last round, for averages; from 0 to 1.
    codec: of the activations.
    last_fault: one line, or empty.
    hear_s: seconds until this head has surely heard a bell that was written now.
    """

    kind: ClassVar[Kind] = "replica"
    max_bytes: ClassVar[int] = 4 * MAX_RECORD_BYTES

    members: tuple[str, ...]
    epoch: int
    round: int
    inner_step: int
    step_s: float
    tokens_per_s: float
    train_loss: float | None
    val_loss: float | None
    val_round: int
    waiting_share: float = 0.0
    codec: str
    last_fault: str
    hear_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class BellRecord(Record):
    """A head finished a round.

    finished_at: run time, in seconds.
    round_s: how long the round took it.
    tokens: it trained on in this round.
    send_after: run time after which it takes its send, once known.
    scheduled_at: run time of the exchange, once known to this head.
    """

    kind: ClassVar[Kind] = "bell"

    round: int
    finished_at: float
    round_s: float
    tokens: int
    send_after: float | None
    scheduled_at: float | None


@dataclass(frozen=True, kw_only=True)
class PartRecord(Record):
    """A head's lease on a part of the data and how far it has read."""

    kind: ClassVar[Kind] = "part"

    part: int
    position: int


@dataclass(frozen=True, kw_only=True)
class ClaimRecord(Record):
    """The last round record that a peer holds.

    round: -1 for the manifest, which stands before the first.
    tokens: behind that record.
    chain_tokens: capped tokens of the whole chain.
    record_bytes: its size.
    rules: that it was made under (`operation.rules` of the manifest).
    revision: of the manifest, the newest that this peer knows.
    idle: whether it neither trains nor has learnt anything that no record holds.
    written: by the operator's archive, what the model writes now after the run's prompt.
    """

    kind: ClassVar[Kind] = "round"

    round: int
    digest: str
    tokens: int
    chain_tokens: int
    record_bytes: int
    rules: int = 0
    revision: int = 0
    idle: bool = False
    written: str = ""


RECORD_TYPES: dict[Kind, type[Record]] = {
    record.kind: record
    for record in (StageRecord, ReplicaRecord, BellRecord, PartRecord, ClaimRecord)
}


@lru_cache(maxsize=64)
def _hints(record: type[Record]) -> dict[str, Any]:
    hints = typing.get_type_hints(record)
    return {spec.name: hints[spec.name] for spec in fields(record)}


def _checked(name: str, value: object, hint: Any) -> object:
    """`value` as the annotated type, or `Malformed`."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:
        return None if value is None else _checked(name, value, arguments[0])
    if origin is Literal:
        good = isinstance(value, str) and value in arguments
    elif origin is tuple:
        items = cast(list[object], value) if isinstance(value, list | tuple) else None
        if items is None or len(items) > MAX_TEXTS:
            raise Malformed(f"{name} is no list of at most {MAX_TEXTS} texts")
        return tuple(_checked(name, item, arguments[0]) for item in items)
    elif hint is float:
        value = float(value) if type(value) is int and abs(value) <= MAX_INTEGER else value
        good = isinstance(value, float) and math.isfinite(value)
    elif hint is int:
        good = type(value) is int and -1 <= value <= MAX_INTEGER
    elif hint is bool:
        good = isinstance(value, bool)
    else:
        good = isinstance(value, str) and len(value) <= MAX_TEXT
    if not good:
        raise Malformed(f"{name} is {str(value)[:60]!r}, which is not of type {hint}")
    return value

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
import re
import typing
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Annotated, ClassVar, Literal, TypeVar, cast

from pydantic import Field, TypeAdapter

from dilocox.dht.wire import MAX_INTEGER, Malformed, checked, pack, unpack

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
MAX_TEXT = 256
MAX_TEXTS = 64

Integer = Annotated[int, Field(strict=True, ge=-1, le=MAX_INTEGER)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Flag = Annotated[bool, Field(strict=True)]
Text = Annotated[str, Field(strict=True, max_length=MAX_TEXT)]
Texts = Annotated[tuple[Text, ...], Field(max_length=MAX_TEXTS)]

R = TypeVar("R", bound="Record")


@dataclass(frozen=True, kw_only=True)
class Record:
    """A record; each subclass is one kind and lives under one kind of key."""

    kind: ClassVar[Kind]
    max_bytes: ClassVar[int] = MAX_RECORD_BYTES

    def encode(self) -> bytes:
        """msgpack; raises `Malformed` when a field is not of its type or the whole is too long."""
        values = {spec.name: getattr(self, spec.name) for spec in fields(self)}
        self._read(values)
        data = pack(values)
        if len(data) > self.max_bytes:
            raise Malformed(
                f"{self.kind} record has {len(data)} bytes, it may have {self.max_bytes}"
            )
        return data

    @classmethod
    def decode(cls: type[R], data: bytes) -> R:
        """The record; raises `Malformed`."""
        return cls._read(unpack(data, cls.max_bytes))

    @classmethod
    def _read(cls: type[R], value: object) -> R:
        try:
            return checked(value, _adapter(cls))
        except Malformed as error:
            raise Malformed(f"{cls.kind} record: {error}") from None


@dataclass(frozen=True, kw_only=True)
class StageRecord(Record):
    """A peer that hosts a stage.

    round: the round it is in.
    inner_steps: H as the last round record of its stage names it.
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
    round: Integer
    inner_steps: Integer
    replica: Text
    tokens: Integer
    tokens_per_s: Number
    client_mode: Flag
    voids: Integer
    version: Text
    addresses: Texts
    blocked: Text
    compression_error: Number | None = None
    computing_share: Number | None = field(
        default=None,
        metadata={
            "figure": "Share of its time since it was first in a replica that its stage computed."
        },
    )
    spare_share: Number | None = field(
        default=None,
        metadata={"figure": "Share of its time since it began to train that it was in no replica."},
    )
    name: Text = ""
    team: Text = ""

    @property
    def present(self) -> bool:
        """Whether it has not said that it left."""
        return self.state != "left"

    @property
    def can_train(self) -> bool:
        """Whether it is here and has joined: it trains, or would in a replica."""
        return self.state not in ("left", "joining")


def stage_figures() -> dict[str, str]:
    """The shares, from 0 to 1, that training loops tell in a StageRecord, and what they are.

    Metrics, the progress line and the status page show every such field with its name.
    """
    marked = {spec.name: spec.metadata.get("figure") for spec in fields(StageRecord)}
    return {name: text for name, text in marked.items() if text}


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
    hear_s: seconds until this head has surely heard a bell that was written now, and can send.
    """

    kind: ClassVar[Kind] = "replica"
    max_bytes: ClassVar[int] = 4 * MAX_RECORD_BYTES

    members: Texts
    epoch: Integer
    round: Integer
    inner_step: Integer
    step_s: Number
    tokens_per_s: Number
    train_loss: Number | None
    val_loss: Number | None
    val_round: Integer
    waiting_share: Number = 0.0
    codec: Text
    last_fault: Text
    hear_s: Number = 0.0


@dataclass(frozen=True, kw_only=True)
class BellRecord(Record):
    """A head finished a round.

    finished_at: run time, in seconds.
    round_s: how long the round took it.
    send_after: run time after which it takes its send, once known.
    scheduled_at: run time of the exchange, once known to this head.
    """

    kind: ClassVar[Kind] = "bell"

    round: Integer
    finished_at: Number
    round_s: Number
    send_after: Number | None
    scheduled_at: Number | None


@dataclass(frozen=True, kw_only=True)
class PartRecord(Record):
    """A head's lease on a part of the data and how far it has read."""

    kind: ClassVar[Kind] = "part"

    part: Integer
    position: Integer


@dataclass(frozen=True, kw_only=True)
class ClaimRecord(Record):
    """The last round record that a peer holds.

    round: -1 for the manifest, which stands before the first.
    chain_tokens: capped tokens of the whole chain.
    record_bytes: its size.
    rules: that it was made under (`operation.rules` of the manifest).
    revision: of the manifest, the newest that this peer knows.
    idle: whether it neither trains nor has learnt anything that no record holds.
    stuck: whether its sends since that record came to nothing, three or more.
    written: by the operator's archive, what the model writes now after the run's prompt.
    run_round: by the same, of stage 0: the newest round of which any stage has a record.
    """

    kind: ClassVar[Kind] = "round"

    round: Integer
    digest: Text
    chain_tokens: Integer
    record_bytes: Integer
    rules: Integer = 0
    revision: Integer = 0
    idle: Flag = False
    stuck: Flag = False
    written: Text = ""
    run_round: Integer = -1


RECORD_TYPES: dict[Kind, type[Record]] = {
    record.kind: record
    for record in (StageRecord, ReplicaRecord, BellRecord, PartRecord, ClaimRecord)
}


@lru_cache(maxsize=64)
def _adapter(record: type[R]) -> TypeAdapter[R]:
    return TypeAdapter(record)

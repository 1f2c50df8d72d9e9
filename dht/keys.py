"""Every key and lifetime that this program uses in the DHT.

All keys of a run start with its id, so one parser tells which run and which kind of record a key is
for. hivemind's matchmaking adds keys of its own, which start with `averaging_prefix`.
"""

import hashlib
import re
from dataclasses import dataclass
from typing import Literal, cast

from dilocox.dht.wire import pack

Kind = Literal["manifest", "replica", "stage", "bell", "part", "round"]

# For so long copies of the bootstrap keep a run open to joiners while the operator's is away.
MANIFEST_LIFETIME_S = 7 * 24 * 3600.0
# Nodes that came near its key since, or lost it, soon have it again.
MANIFEST_REFRESH_S = 60.0
# Nobody may leave something in the memory of others for longer than this.
MAX_LIFETIME_S: dict[Kind, float] = {
    "manifest": MANIFEST_LIFETIME_S,
    "replica": 3600.0,
    "stage": 3600.0,
    "bell": 3600.0,
    "part": 3600.0,
    "round": 3600.0,
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
    """One `StageRecord` per peer that hosts this stage."""
    return f"{run}.stage.{stage}"


def replica_key(run: str) -> str:
    """One `ReplicaRecord` per head."""
    return f"{run}.replica"


def bell_key(run: str, round_number: int) -> str:
    """One `BellRecord` per head that finished this round."""
    return f"{run}.bell.{round_number}"


def part_key(run: str, part: int) -> str:
    """A `PartRecord` of every head that claims this part of the data."""
    return f"{run}.part.{part}"


def claim_key(run: str, stage: int) -> str:
    """One `ClaimRecord` per peer of this stage: the last round record it holds."""
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

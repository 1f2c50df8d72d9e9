"""What a peer is asked for its figures: read when somebody looks, and never waited for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dilocox.dht.reach import Reachability
from dilocox.peer.tally import Waiting


@dataclass(frozen=True, kw_only=True)
class PeerFacts:
    """What is not told as an event. Counts are since this process started.

    not_ready: why this peer does not take part, or empty.
    tokens, inner_steps: trained; skipped_steps: inner steps that were not taken.
    computing_s: of the stage; waiting_s: by what was waited for.
    sent_bytes, received_bytes: by what they were for.
    refused: messages of others, by who refused them and why.
    round_trips_s: to the neighbours whose links stand ("upper", "lower") and back.
    revision: of the manifest, the newest that this peer follows.
    spares: peers of this stage that are in no replica, as far as this peer knows.
    month_bytes: sent and received in this calendar month; month_limit_bytes: its limit, if any.
    """

    not_ready: str
    tokens: int
    inner_steps: int
    skipped_steps: int
    computing_s: float
    waiting_s: Mapping[Waiting, float]
    sent_bytes: Mapping[str, int]
    received_bytes: Mapping[str, int]
    refused: Mapping[str, int]
    round_trips_s: Mapping[str, float]
    revision: int
    spares: int
    reachability: Reachability
    month_bytes: int
    month_limit_bytes: float | None

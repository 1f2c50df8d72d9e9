"""When a peer takes part, and why it does not: hours of the day, months, reasons.

`Hours` are hours of this machine's local day, from the first to before the last (22-6 is from 22:00
to 06:00). Their next start is looked for hour by hour in real time, so that it is right on days of
23 and 25 hours, too. Months are those of UTC. process/resting.py says what rests when.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Literal

from dilocox.dht.errors import InvalidInput

HOUR_S = 3600.0
LONGEST_WAIT_HOURS = 49  # two days: on one of them the clocks may leave out the only hour

Reason = Literal["paused", "traffic", "hours", "battery", "busy"]
Local = Callable[[float], datetime]

_SPAN = re.compile(r"(\d{1,2})-(\d{1,2})")


@dataclass(frozen=True, kw_only=True)
class Rest:
    """Why a peer rests, in words too; `until`: seconds since the epoch, None until it is told."""

    reason: Reason
    words: str
    until: float | None


@dataclass(frozen=True, kw_only=True)
class Hours:
    """Hours of the local day in which a peer takes part; `shown` as the volunteer gave them."""

    allowed: frozenset[int]
    shown: str

    @classmethod
    def parse(cls, spans: Sequence[str]) -> Hours | None:
        """Of several spans each hour that is in one of them; None without any.

        Raises:
            InvalidInput: a span that is none.
        """
        allowed = set[int]()
        for span in spans:
            match = _SPAN.fullmatch(span.strip())
            first, last = (int(match[1]), int(match[2])) if match else (-1, -1)
            if not (0 <= first <= 23 and 0 <= last <= 24 and first != last):
                raise InvalidInput(
                    f"--hours {span}: give whole hours of the local day as FIRST-LAST, say 22-6 "
                    "for 22:00 to 06:00, or 0-24 for all of it"
                )
            length = (last - first) % 24 or 24
            allowed.update((first + hour) % 24 for hour in range(length))
        return cls(allowed=frozenset(allowed), shown=", ".join(spans)) if allowed else None

    def next_start(self, now: float, local: Local = datetime.fromtimestamp) -> float | None:
        """When the peer may go on, in seconds since the epoch; None if it may now."""
        at = now
        for _ in range(LONGEST_WAIT_HOURS):
            there = local(at)
            if there.hour in self.allowed:
                return at if at != now else None
            into_hour = 60 * there.minute + there.second + there.microsecond / 1e6
            at = round(at + HOUR_S - into_hour)  # the same whenever it is asked for
        return at


def next_month(now: float) -> float:
    """When the next calendar month begins in UTC, in seconds since the epoch."""
    at = datetime.fromtimestamp(now, timezone.utc)
    year, month = (at.year + 1, 1) if at.month == 12 else (at.year, at.month + 1)
    return datetime(year, month, 1, tzinfo=timezone.utc).timestamp()

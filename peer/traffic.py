"""What a peer has sent and received in each calendar month (UTC), in its state folder.

It is counted at libp2p's daemon (`RunDHT.carried_bytes`), the upkeep of the DHT included. The file
is written at most once a minute, so that a peer that is killed forgets no more than that.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, cast

from dilocox.dht.errors import EnvironmentFault
from dilocox.peer.allowance import month_of
from dilocox.peer.files import write_atomically

WRITE_PERIOD_S = 60.0
MONTHS_KEPT = 12


class MonthlyTraffic:
    """Bytes by month; of one process at a time."""

    def __init__(self, path: Path):
        """Read the file if there is one.

        Raises:
            EnvironmentFault: it is damaged.
        """
        self._path = path
        self._months = _read(path)
        self._total = 0
        self._written_at = float("-inf")
        self._unwritten = False

    def used_bytes(self, now: float) -> int:
        """Sent and received in the month of `now`, in seconds since the epoch."""
        return self._months.get(month_of(now), 0)

    def count(self, total: int, now: float) -> None:
        """Take in what this process has sent and received since it started, in bytes;
        EnvironmentFault if the file is due and cannot be written.
        """
        if total > self._total:
            month = month_of(now)
            self._months[month] = self._months.get(month, 0) + total - self._total
            self._total = total
            self._unwritten = True
        if time.monotonic() >= self._written_at + WRITE_PERIOD_S:
            self.keep()

    def keep(self) -> None:
        """Write the file if there is something new; EnvironmentFault if that cannot be."""
        self._written_at = time.monotonic()  # a full disk is not tried more often
        if not self._unwritten:
            return
        newest = sorted(self._months)[-MONTHS_KEPT:]
        kept = {month: self._months[month] for month in newest}
        write_atomically(self._path, (json.dumps(kept, indent=2) + "\n").encode())
        self._unwritten = False


def _read(path: Path) -> dict[str, int]:
    try:
        kept = cast("dict[str, Any]", json.loads(path.read_bytes()))
        return {month: int(total) for month, total in kept.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise EnvironmentFault(
            f"{path}: this month's traffic cannot be read ({error}); remove the file, then it is "
            "counted from now on"
        ) from error

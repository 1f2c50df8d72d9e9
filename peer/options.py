"""The options of `dilocox peer`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dilocox.dht.invite import Invite
from dilocox.peer.allowance import GB, Hours


@dataclass(frozen=True, kw_only=True)
class PeerOptions:
    """The options of `dilocox peer`; see their help texts."""

    invite: Invite
    state: Path
    stage: str
    host: str
    port: int
    announce: tuple[str, ...]
    device: str
    threads: int
    max_upload_mb_s: float
    memory_limit_gb: float
    data: str
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = None  # the default one if it is free
    hours: Hours | None = None
    monthly_traffic_gb: float = 0.0

    @property
    def memory_limit_bytes(self) -> float | None:
        """The memory limit in bytes, None without one."""
        return self.memory_limit_gb * GB or None

    @property
    def monthly_traffic_bytes(self) -> float | None:
        """The limit of a month's traffic in bytes, None without one."""
        return self.monthly_traffic_gb * GB or None

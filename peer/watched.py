"""A peer on this machine as seen through the files that it writes (report.py)."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dilocox.peer.subprocesses import Child


@dataclass
class WatchedPeer:
    """What one peer has said so far; `look` reads what is new.

    stage, number: the stage that it was told to host, and which of the stage's peers it is.
    """

    name: str
    state: Path
    child: Child
    stage: int = 0
    number: int = 0
    status: dict[str, Any] = field(default_factory=dict[str, Any])
    rounds: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    losses: dict[int, float] = field(default_factory=dict[int, float])
    voids: int = 0
    training_s: float = 0.0
    _read: dict[Path, int] = field(default_factory=dict[Path, int])  # bytes, by events file
    _began: float | None = None

    @property
    def head(self) -> str:
        """Peer id of the head of the replica that it is in, empty for none."""
        return str(self.status.get("head", ""))

    @property
    def waiting_share(self) -> float:
        """Share of its time that the training loop waited."""
        return float(self.status.get("waiting_share", 0.0))

    def look(self) -> None:
        """Read the newest status and the events since the last look."""
        for path in self.state.glob("*-stage*/status.json"):
            self.status = json.loads(path.read_text())
        for path in self.state.glob("*-stage*/events.jsonl"):
            with path.open() as file:
                file.seek(self._read.get(path, 0))
                while (line := file.readline()).endswith("\n"):
                    self._read[path] = file.tell()
                    self._take(json.loads(line))

    def _take(self, event: dict[str, Any]) -> None:
        match event["event"]:
            case "training":
                self._began = self._began or event["time"]
            case "round":
                self.rounds.append(event)
                self.training_s = event["time"] - (self._began or event["time"])
            case "validated":
                self.losses[event["round"]] = event["loss"]
            case "void":
                self.voids += 1
            case _:
                pass

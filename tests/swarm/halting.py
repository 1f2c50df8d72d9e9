"""`dilocox` that halts at a chosen point of an exchange, until it is told to go on.

    python halting.py SECONDS FOLDER peer INVITE ...

A fault is to hit a peer between the two phases, or with half a record on the disk, and these
moments are too short to be hit from outside. So the peer stops there of itself, once, when its
test has armed that point, and is then killed, frozen, or given a full disk. `Halt` is the test's
side; files in FOLDER are all that the two share. Inner steps take at least SECONDS, as in paced.py.
Nothing of the product knows of it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

POINTS = ("between phases", "decoding", "voting", "appending", "planning")
GO_LIMIT_S = 300.0
LOOK_S = 0.005


class Halt:
    """Where a peer is to halt, and whether it has."""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder

    def arm(self, point: str) -> None:
        """The next time that the peer comes to this point, it halts there; once."""
        if point not in POINTS:
            raise ValueError(f"no point {point!r}: one of {', '.join(POINTS)}")
        for name in ("halted", "go"):
            (self.folder / name).unlink(missing_ok=True)
        new = self.folder / "new"
        new.write_text(point)
        new.rename(self.folder / "armed")

    @property
    def halted(self) -> bool:
        """Whether it has come to the point that was armed last."""
        return (self.folder / "halted").exists()

    def release(self) -> None:
        """Let it go on."""
        (self.folder / "go").touch()


class _Halting:
    """The peer's side."""

    def __init__(self, folder: Path):
        self._folder = folder

    def at(self, point: str, *, wait: bool = True) -> bool:
        """Halt here if this point is armed; whether it was."""
        armed = self._folder / "armed"
        try:
            if armed.read_text() != point:
                return False
            armed.rename(self._folder / "halted")
        except FileNotFoundError:
            return False
        end = time.monotonic() + GO_LIMIT_S
        while wait and not (self._folder / "go").exists() and time.monotonic() < end:
            time.sleep(LOOK_S)
        return True

    def before(self, function: Callable[..., Any], point: str) -> Callable[..., Any]:
        """`function`, before which this point lies."""

        def halting(*arguments: Any, **options: Any) -> Any:
            self.at(point)
            return function(*arguments, **options)

        return halting


def _halt(halting: _Halting) -> None:
    """Put the points into the product's functions."""
    from dilocox.compression.stage_codec import StageEncoder
    from dilocox.peer.chain import store
    from dilocox.peer.chain.store import RoundLog
    from dilocox.peer.rounds import shares
    from dilocox.peer.rounds.adaptation import RoundPlan

    vector, write, ranks_after = (
        StageEncoder.vector,
        store.write_atomically,
        RoundPlan.ranks_after,
    )

    def vector_of(self: StageEncoder, phase: int, earlier: Any) -> Any:
        if phase == 1:
            halting.at("between phases")
        return vector(self, phase, earlier)

    def write_halting(path: Path, data: bytes, **options: Any) -> None:
        if path.suffix == ".record":
            half = path.with_name(f".{path.name}.{os.getpid()}.partial")
            half.write_bytes(data[: len(data) // 2])
            halting.at("appending")
        write(path, data, **options)

    def other_ranks(self: RoundPlan, last: Any) -> tuple[int, ...]:
        ranks = ranks_after(self, last)
        if halting.at("planning", wait=False):
            return tuple(rank - 1 if rank else 0 for rank in ranks)
        return ranks

    StageEncoder.vector = vector_of
    store.write_atomically = write_halting
    RoundPlan.ranks_after = other_ranks
    RoundLog.save_vote = halting.before(RoundLog.save_vote, "voting")
    modules: list[Any] = [shares, shares]
    for module in modules:
        module.decode = halting.before(module.decode, "decoding")


def main() -> None:
    """Take the first two arguments away, put the points in, and go on as `dilocox`."""
    # As peer/os_process.py does, but before hivemind is imported below.
    os.environ.setdefault("HIVEMIND_LOGLEVEL", "CRITICAL")
    from dilocox.peer import cli
    from tests.swarm.paced import pace

    step_s, folder = float(sys.argv[1]), Path(sys.argv[2])
    del sys.argv[1:3]
    pace(step_s)
    _halt(_Halting(folder))
    cli.main()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    main()

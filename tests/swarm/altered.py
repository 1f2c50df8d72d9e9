"""`dilocox` with one thing altered, of which nothing in the product knows.

    python altered.py '["paced", SECONDS]' peer INVITE ...

paced SECONDS               inner steps take at least so long: a slower machine, without the load
shown SECONDS FOLDER        forwards and backwards last longer, and are seen from outside (`Shown`)
halting SECONDS FOLDER      paced, and halts at a chosen point of an exchange (`Halt`)
lying SECONDS HOW            paced, and a member that lies (lies.py)
skewed SECONDS BY           paced, on a machine whose clock is so many seconds off (`skew`)
slow_disk BYTES_PER_S FILE  what it makes durable takes as long as on such a disk (`syncs`)
older                       reads the operator's first manifest, and no revision of it

`Shown`, `Halt` and `syncs` are the test's side. Files are all that the two sides share.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

PHASES = ("waiting", "forward", "backward", "between")
POINTS = ("between phases", "decoding", "voting", "appending", "planning")
GO_LIMIT_S = 300.0
LOOK_S = 0.005
NOTED_S = 0.1
LEFT = "crowd-"  # so begins what a liar leaves in the folder for temporary files
_TIME = struct.Struct("d")


# ---- the test's side -----------------------------------------------------------------------------
class Shown:
    """What a peer shows of itself in a folder: by every process it started there, and now.

    Attributes:
        steps: seconds since the epoch, of every inner step since the first start; see `look`.
    """

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.steps: list[float] = []
        self._read = 0
        self._log = folder / "steps"
        self._log.touch()
        self._byte = _mapped(folder / "phase")

    @property
    def phase(self) -> str:
        """One of PHASES, right now; "between": from an inner step's end to the next forward."""
        return PHASES[self._byte[0]]

    def look(self) -> None:
        """Read the inner steps taken since the last look."""
        with self._log.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        whole = len(data) - len(data) % _TIME.size
        self.steps += [time_ for (time_,) in _TIME.iter_unpack(data[:whole])]
        self._read += whole


class Halt:
    """Where a peer is to halt, and whether it has.

    A fault is to hit a peer between the two phases, or with half a record on the disk, and these
    moments are too short to be hit from outside. So the peer stops there of itself, once, when its
    test has armed that point, and is then killed, frozen, or given a full disk.
    """

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
    def halted_at(self) -> float | None:
        """When it came to the point that was armed last, in seconds since the epoch."""
        with suppress(FileNotFoundError):
            return (self.folder / "halted").stat().st_ctime  # it was renamed then
        return None

    def release(self) -> None:
        """Let it go on."""
        (self.folder / "go").touch()


def syncs(notes: Path) -> dict[str, float]:
    """Seconds that were spent in long calls of `fsync`, by the folder of the files."""
    seconds: dict[str, float] = defaultdict(float)
    if notes.exists():
        for line in notes.read_text().splitlines():
            note = json.loads(line)
            seconds[str(Path(note["path"]).parent)] += note["seconds"]
    return seconds


def _mapped(path: Path) -> mmap.mmap:
    """One byte that processes share."""
    if not path.exists():
        path.write_bytes(b"\0")
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 1)


# ---- the peer's side -----------------------------------------------------------------------------
def pace(step_s: float) -> None:
    """Let every inner step of a stage last at least so long, from its first microbatch on.

    What this peer's stage lacks of that time is slept at the end of its inner step, so peers of
    different speed can share two cores; the other stages of its replica wait for it as for a slow
    machine.
    """
    from dilocox.pipeline.stage_worker import StageWorker

    fast_feed, fast_go = StageWorker.feed, StageWorker.go
    began_at = 0.0

    def feed(self: StageWorker, *arguments: Any, **options: Any) -> None:
        nonlocal began_at
        if self.idle:
            began_at = time.monotonic()
        fast_feed(self, *arguments, **options)

    def go(self: StageWorker, factor: float, learning_rate: float) -> bool:
        taken = fast_go(self, factor, learning_rate)
        time.sleep(max(0.0, began_at + step_s - time.monotonic()))
        return taken

    StageWorker.feed, StageWorker.go = feed, go


def show(pace_s: float, folder: str) -> None:
    """Show the phase in a byte and note every inner step; each forward and backward sleeps."""
    from dilocox.pipeline.stage_worker import StagePasses, StageWorker

    byte = _mapped(Path(folder) / "phase")
    byte[0] = 0
    steps = os.open(Path(folder) / "steps", os.O_WRONLY | os.O_APPEND)

    def enter(phase: str) -> None:
        byte[0] = PHASES.index(phase)
        time.sleep(pace_s)

    def piece(compute: Callable[..., Any], *phases: str) -> Callable[..., Any]:
        """`compute`, in the first of these phases, and paced once in each."""

        def paced(*arguments: Any, **options: Any) -> Any:
            enter(phases[0])
            result = compute(*arguments, **options)
            for phase in phases[1:]:
                enter(phase)
            byte[0] = PHASES.index("waiting")
            return result

        return paced

    fast_go = StageWorker.go

    def go(self: StageWorker, factor: float, learning_rate: float) -> bool:
        taken = fast_go(self, factor, learning_rate)
        os.write(steps, _TIME.pack(time.time()))
        enter("between")
        return taken

    StagePasses.forward = piece(StagePasses.forward, "forward")
    StagePasses.backward = piece(StagePasses.backward, "backward")
    StagePasses.forward_backward = piece(StagePasses.forward_backward, "forward", "backward")
    StageWorker.go = go
    execv, altered = os.execv, sys.argv[:2]

    def execv_shown(path: str, arguments: list[str]) -> None:
        """A peer that starts itself again, as `python -m dilocox ...`, is still shown."""
        execv(path, [path, *altered, *arguments[3:]])

    os.execv = execv_shown  # pyright: ignore[reportAttributeAccessIssue]


def halt(step_s: float, folder: str) -> None:
    """Put the points at which it may halt into the product's functions."""
    from dilocox.compression.stage_codec import StageEncoder
    from dilocox.peer.chain import store
    from dilocox.peer.chain.store import RoundLog
    from dilocox.peer.rounds import shares
    from dilocox.peer.rounds.rank_choice import RoundPlan

    pace(step_s)
    shared = Path(folder)
    vector, decode, save_vote = StageEncoder.vector, shares.decode, RoundLog.save_vote
    write, ranks_after = store.write_atomically, RoundPlan.ranks_after

    def at(point: str, *, wait: bool = True) -> bool:
        """Halt here if this point is armed; whether it was."""
        armed = shared / "armed"
        try:
            if armed.read_text() != point:
                return False
            armed.rename(shared / "halted")
        except FileNotFoundError:
            return False
        end = time.monotonic() + GO_LIMIT_S
        while wait and not (shared / "go").exists() and time.monotonic() < end:
            time.sleep(LOOK_S)
        return True

    def before(function: Callable[..., Any], point: str) -> Callable[..., Any]:
        def halting(*arguments: Any, **options: Any) -> Any:
            at(point)
            return function(*arguments, **options)

        return halting

    def vector_of(self: StageEncoder, phase: int, earlier: Any) -> Any:
        if phase == 1:
            at("between phases")
        return vector(self, phase, earlier)

    def write_halting(path: Path, data: bytes, **options: Any) -> None:
        # of a round of others, which it only follows, it has no vote
        if path.suffix == ".record" and any(path.parent.glob(f"{path.name[:8]}-*.vote")):
            half = path.with_name(f".{path.name}.{os.getpid()}.partial")
            half.write_bytes(data[: len(data) // 2])
            at("appending")
        write(path, data, **options)

    def other_ranks(self: RoundPlan, last: Any) -> tuple[int, ...]:
        ranks = ranks_after(self, last)
        if at("planning", wait=False):
            return tuple(rank - 1 if rank else 0 for rank in ranks)
        return ranks

    StageEncoder.vector = vector_of
    store.write_atomically = write_halting
    RoundPlan.ranks_after = other_ranks
    RoundLog.save_vote = before(save_vote, "voting")
    shares.decode = before(decode, "decoding")


def slow_down(bytes_per_s: float, notes: str) -> None:
    """Let every `os.fsync` of this process, and of those that it forks, take its time.

    A file is on such a disk when its `fsync` returns, so that lasts at least as long as the disk
    needs for what the file has grown by since its last one; what is slower by itself stays so. A
    journal of small lines hardly feels it, a snapshot of a large stage does.
    """
    fast = os.fsync
    synced: dict[tuple[int, int], int] = {}  # bytes, by device and inode

    def fsync(descriptor: int) -> None:
        began = time.monotonic()
        fast(descriptor)
        facts = os.fstat(descriptor)
        file = (facts.st_dev, facts.st_ino)
        grown = facts.st_size - synced.get(file, 0)
        # a file that is smaller now is another one, whose number was free again
        least_s = (grown if grown >= 0 else facts.st_size) / bytes_per_s
        synced[file] = facts.st_size
        time.sleep(max(0.0, began + least_s - time.monotonic()))
        seconds = time.monotonic() - began
        if seconds >= NOTED_S:
            path = Path(f"/proc/self/fd/{descriptor}").readlink()
            with Path(notes).open("a") as log:
                log.write(json.dumps({"path": str(path), "seconds": seconds}) + "\n")

    os.fsync = fsync


def skew(step_s: float, by_s: float) -> None:
    """Let the machine's clock be so far ahead, or behind."""
    pace(step_s)
    right = time.time
    time.time = lambda: right() + by_s


def lie(step_s: float, how: str) -> None:
    """Lie to the others of a group as long as it runs; how: see lies.py."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from tests.swarm.lies import LIES

    pace(step_s)
    LIES[how]()


def age() -> None:
    """Find a field that is not known in every revision of the manifest but the first."""
    from dilocox.dht.errors import InvalidInput
    from dilocox.dht.manifest import Manifest

    read = Manifest.from_bytes

    def older(data: bytes) -> Manifest:
        if json.loads(data)["operation"]["revision"] > 0:
            raise InvalidInput("manifest: wings is not a field of the manifest")
        return read(data)

    Manifest.from_bytes = older


ALTERATIONS = {
    "paced": pace,
    "shown": show,
    "halting": halt,
    "lying": lie,
    "skewed": skew,
    "slow_disk": slow_down,
    "older": age,
}


def main() -> None:
    """Alter what the first argument says, take it away, and go on as `dilocox`."""
    # As peer/os_process.py does, but before hivemind is imported below.
    os.environ.setdefault("HIVEMIND_LOGLEVEL", "CRITICAL")
    from dilocox.peer import cli

    kind, *arguments = json.loads(sys.argv[1])
    ALTERATIONS[kind](*arguments)
    del sys.argv[1]
    cli.main()


if __name__ == "__main__":
    main()

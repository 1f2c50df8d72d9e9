"""A peer's state folder: identity, snapshots, log and status; one peer at a time."""

from __future__ import annotations

import fcntl
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from dilocox.dht.errors import EnvironmentFault
from dilocox.dht.files import disk_fault, write_atomically

MANIFEST_FILE = "manifest.json"  # in the folder of a stage, what it was made under
LOG_FOLDER = "log"  # there, and in an archive's generations: records, certificates, own votes
SNAPSHOT_FOLDER = "snapshots"  # there
EVENTS_FILE = "events.jsonl"  # there
STATUS_FILE = "status.json"  # there; in the state folder itself while the peer rests
ASIDE = "before-"  # how the folders begin of what was put aside

PEER_RUNS = (
    "another peer uses this state folder; stop it, or give this one a folder of its own with "
    "--state"
)

STATES = ("joining", "spare", "training", "leaving", "resting")
"""What a peer may say of itself in status.json."""


class StateFolder:
    """The paths in a state folder, for one stage of one run at a time."""

    def __init__(self, path: Path):
        self.path = path
        self.identity = path / "identity.key"
        self.operator = path / "operator.key"  # where it has taken the place of the former
        self.invite = path / "invite"  # what a bootstrap printed last
        self.page_token = path / "page.token"  # of the peer's own page
        self.traffic = path / "traffic.json"  # of this month, for --monthly-traffic
        self._paused = path / "paused"

    def run(self, run: str, stage: int) -> Path:
        """What belongs to a stage of a run: a folder that is moved away to join anew."""
        return self.path / f"{run}-stage{stage}"

    def stages(self, run: str) -> dict[int, Path]:
        """The folders of the stages of a run that were hosted here; no copies of them that somebody
        made.
        """
        found = {
            path.name.rpartition("-stage")[2]: path for path in self.path.glob(f"{run}-stage*")
        }
        return {int(stage): path for stage, path in found.items() if stage.isdecimal()}

    def of_stages(self, name: str, run: str = "*") -> list[Path]:
        """The files of this name that they have, of any run or one."""
        files = sorted(self.path.glob(f"{run}-stage*/{name}"))
        return [file for file in files if file.parent.name.rpartition("-stage")[2].isdecimal()]

    def took_part(self, run: str) -> bool:
        """Whether there is something of a run here."""
        return bool(self.stages(run))

    def manifest(self, run: str) -> Path:
        """The newest signed manifest of a run that was seen here."""
        return self.path / f"{run}.signed"

    def fallback_peers(self, run: str) -> Path:
        """The peers by which this one may come back into a run while no bootstrap is reachable."""
        return self.path / f"{run}.peers"

    @property
    def paused(self) -> bool:
        """Whether its peer is to rest until somebody resumes it."""
        return self._paused.exists()

    def pause(self, wanted: bool) -> None:
        """Let its peer rest, or no more; EnvironmentFault if that cannot be noted."""
        try:
            if wanted:
                self._paused.touch()
            else:
                self._paused.unlink(missing_ok=True)
        except OSError as error:
            raise disk_fault(self._paused, error) from error

    def note_stage(self, run: str, stage: int) -> None:
        """Remember which stage of a run this peer hosts, for its next start."""
        write_atomically(self._note(run), f"{stage}\n".encode())

    def noted_stage(self, run: str) -> int | None:
        """The stage of the last start, None if there was none."""
        try:
            return int(self._note(run).read_bytes())
        except (OSError, ValueError):
            return None

    def _note(self, run: str) -> Path:
        return self.path / f"{run}.stage"

    @property
    def in_use(self) -> bool:
        """Whether another process has `locked` it; nothing is written to find that out."""
        try:
            with (self.path / "lock").open() as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # nobody has made the file, or this user may not read it
            return False
        return False

    @contextmanager
    def locked(
        self, in_use: str = PEER_RUNS, remedy: str = "choose another folder with --state"
    ) -> Generator[None]:
        """Keep other processes out; the lock ends with this one, however it ends.

        remedy: where the disk is the fault.

        Raises:
            EnvironmentFault: `in_use`, where another one runs in this folder; or it cannot be
                written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            file = (self.path / "lock").open("w")
        except OSError as error:
            raise disk_fault(self.path, error, remedy) from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise EnvironmentFault(f"{self.path}: {in_use}") from error
            yield

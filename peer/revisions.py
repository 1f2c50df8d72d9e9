"""The operator's folder of revisions: every manifest of a run that was signed, none ever removed.

`RUN-revisions/00000003.signed` in the operator's state folder. `dilocox operate` puts a new one
there; the bootstrap that runs beside it looks every second, publishes it, and writes its number
into `published`.
"""

from __future__ import annotations

import fcntl
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from dilocox.dht.errors import EnvironmentFault, InvalidInput
from dilocox.dht.manifest import Manifest, SignedManifest
from dilocox.dht.manifest_revision import check_of_run
from dilocox.peer.files import disk_fault, make_folder, write_atomically


class RevisionFolder:
    """The revisions of one run."""

    def __init__(self, state: Path, run: str):
        self._folder = state / f"{run}-revisions"
        self._run = run
        self._read: tuple[int, SignedManifest] | None = None

    @property
    def numbers(self) -> list[int]:
        """Those that are here, oldest first."""
        found = self._folder.glob("*.signed")
        return sorted(int(path.stem) for path in found if path.stem.isdecimal())

    def read(self, number: int) -> SignedManifest:
        """One of them; InvalidInput if it is damaged or not of this run."""
        path = self._path(number)
        try:
            signed = SignedManifest.from_bytes(path.read_bytes())
            signed.verify(self._run)
        except InvalidInput as error:
            raise InvalidInput(f"{path}: {error}") from error
        except OSError as error:
            raise EnvironmentFault(f"{path}: cannot be read ({error.strerror})") from error
        return signed

    def newest(self) -> SignedManifest | None:
        """The one that counts; None before the first."""
        numbers = self.numbers
        if not numbers:
            return None
        if self._read is None or self._read[0] != numbers[-1]:
            self._read = numbers[-1], self.read(numbers[-1])
        return self._read[1]

    def check(self, manifest: Manifest) -> None:
        """Raise InvalidInput if a run.yaml is neither the oldest that is here nor the newest."""
        numbers = self.numbers
        if numbers:
            known = (self.read(number).verify(self._run) for number in (numbers[0], numbers[-1]))
            check_of_run(manifest, self._run, known)

    def add(self, signed: SignedManifest) -> int:
        """Keep the next revision; its number. EnvironmentFault if another one has that."""
        number = signed.revision_of(self._run)
        make_folder(self._folder)
        with self._locked():  # two commands at once
            if self._path(number).exists():
                raise EnvironmentFault(
                    f"{self._path(number)}: another command made this revision meanwhile; try again"
                )
            write_atomically(self._path(number), signed.to_bytes())
        return number

    # ---- what the bootstrap tells ----------------------------------------------------------------
    @property
    def published(self) -> int:
        """The revision that the bootstrap has published last, -1 before that."""
        try:
            return int((self._folder / "published").read_text())
        except (OSError, ValueError):
            return -1

    def note_published(self, number: int) -> None:
        """Say that this one is in the DHT."""
        if number != self.published:
            write_atomically(self._folder / "published", f"{number}\n".encode())

    @contextmanager
    def _locked(self) -> Generator[None]:
        path = self._folder / "lock"
        try:
            file = path.open("a")
        except OSError as error:
            raise disk_fault(path, error) from error
        with file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:08d}.signed"

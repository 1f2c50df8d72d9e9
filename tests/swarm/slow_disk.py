"""`dilocox` on a slow disk: what it makes durable takes as long as on a disk of a given rate.

    python slow_disk.py BYTES_PER_S FILE peer INVITE ...

A file is on such a disk when its `fsync` returns, so every `fsync` of a file lasts at least as long
as that disk needs for what the file has grown by since its last one; what is slower by itself stays
so. A journal of small lines hardly feels it, a snapshot of a large stage does. FILE notes each
`fsync` that took long, which `syncs` reads. Nothing of the product knows of it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from pathlib import Path

NOTED_S = 0.1


def syncs(notes: Path) -> dict[str, float]:
    """Seconds that were spent in long calls of `fsync`, by the folder of the files."""
    seconds: dict[str, float] = defaultdict(float)
    if notes.exists():
        for line in notes.read_text().splitlines():
            note = json.loads(line)
            seconds[str(Path(note["path"]).parent)] += note["seconds"]
    return seconds


def slow_down(bytes_per_s: float, notes: Path) -> None:
    """Let every `os.fsync` of this process, and of those that it forks, take its time."""
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
            with notes.open("a") as log:
                log.write(json.dumps({"path": str(path), "seconds": seconds}) + "\n")

    os.fsync = fsync


def main() -> None:
    """Take the first two arguments away, slow the disk, and go on as `dilocox`."""
    # As peer/os_process.py does, but before hivemind is imported below.
    os.environ.setdefault("HIVEMIND_LOGLEVEL", "CRITICAL")
    from dilocox.peer import cli

    bytes_per_s, notes = float(sys.argv[1]), Path(sys.argv[2])
    del sys.argv[1:3]
    slow_down(bytes_per_s, notes)
    cli.main()


if __name__ == "__main__":
    main()

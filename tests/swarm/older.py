"""`dilocox` as it was before the operator's newest revision: it reads the first manifest, no other.

    python older.py peer INVITE ...

Nothing of the product knows of it.
"""

from __future__ import annotations

import json
import os

# As peer/os_process.py does, but before hivemind is imported below.
os.environ.setdefault("HIVEMIND_LOGLEVEL", "CRITICAL")

from dilocox.dht.errors import InvalidInput
from dilocox.dht.manifest import Manifest
from dilocox.peer import cli


def main() -> None:
    """Find a field that is not known in every revision but the first, and go on as `dilocox`."""
    read = Manifest.from_bytes

    def older(data: bytes) -> Manifest:
        if json.loads(data)["operation"]["revision"] > 0:
            raise InvalidInput("manifest: wings is not a field of the manifest")
        return read(data)

    Manifest.from_bytes = older
    cli.main()


if __name__ == "__main__":
    main()

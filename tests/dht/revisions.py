"""A run's first manifest and newer ones, of which this version cannot read every one."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from dilocox.dht.identity import Identity
from dilocox.dht.manifest import Manifest, SignedManifest
from dilocox.dht.manifest_revisions import in_state

FIRST = Manifest.from_dict({"name": "demo", "model": "tiny", "end_tokens": 1_000_000})
PAUSED = in_state(FIRST, "paused")


def unreadable(operator: Identity, **values: Any) -> SignedManifest:
    """As an operator with a newer dilocox signs it."""
    signed = SignedManifest.sign(operator, PAUSED)
    content = json.dumps(PAUSED.to_dict() | values).encode()
    signature = operator.sign(b"dilocox manifest\0" + content)
    return replace(signed, manifest_bytes=content, signature=signature)

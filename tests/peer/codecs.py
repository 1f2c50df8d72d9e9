"""Stage codecs as a manifest would have them."""

from __future__ import annotations

from typing import Any

from dilocox.compression.layout import FlatLayout
from dilocox.compression.stage_codec import Compression, StageCodec


def codec_of(layout: FlatLayout, scheme: Any = "dense", **fields: Any) -> StageCodec:
    """A codec of this layout; 4 bits, and rank 4 of at most 16, unless said otherwise."""
    facts: dict[str, Any] = {
        "bits": 4,
        "max_factor": 1e4,
        "rank": 4,
        "min_rank": 2,
        "max_rank": 16,
    }
    return StageCodec(layout, Compression(scheme=scheme, **facts | fields))

"""The codecs that a test goes through, by bits a value, and what holds for all of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from dilocox.compression.group_quantization import GroupCodec

CODED = pytest.mark.parametrize("bits", [4, 8, 16])
SCALED = pytest.mark.parametrize("bits", [2, 4, 8, 16])
ALL = pytest.mark.parametrize("bits", [2, 4, 8, 16, 32])


def assert_flushing_changes_nothing(codec: GroupCodec, values: NDArray[np.float32]) -> None:
    """A processor that flushes subnormals makes the same bytes and values."""
    payload = codec.encode(torch.from_numpy(values))
    decoded = codec.decode(payload, len(values))
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        flushed = codec.encode(torch.from_numpy(values))
        flushed_decoded = codec.decode(payload, len(values))
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(flushed, payload)
    assert torch.equal(flushed_decoded, decoded)

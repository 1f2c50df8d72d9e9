"""The memory that a whole model takes, said before anything of it is downloaded."""

from __future__ import annotations

import pytest

from dilocox.dht.errors import EnvironmentFault, InvalidInput
from dilocox.dht.manifest import Manifest
from dilocox.peer.commands.model_memory import check_model_memory, writing_bytes


def test_memory_that_is_not_there_is_said_before_anything_is_downloaded() -> None:
    manifest = Manifest.from_dict({"name": "tales", "model": "small", "end_tokens": 10**6})
    plans = [
        writing_bytes(manifest, dtype, refreshes=refreshes)
        for dtype, refreshes in (("fp32", True), ("bf16", True), ("bf16", False))
    ]
    assert plans == sorted(plans, reverse=True) and len(set(plans)) == 3
    check_model_memory("to serve", 1000, "take less,", 1e9)
    with pytest.raises(InvalidInput, match=r"--memory-limit 1\.0: .* 1\.2 GB.* less, or raise"):
        check_model_memory("to serve", 1_200_000_000, "take less,", 1e9)
    with pytest.raises(EnvironmentFault, match=r"about 9000000 GB.* are free: take less, or"):
        check_model_memory("to serve", 9 * 10**15, "take less,")

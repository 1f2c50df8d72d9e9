"""Matchmaking as hivemind has it, with a key for each plan and a pause between looks."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

from dilocox.peer import matchmaking as module
from dilocox.peer.matchmaking import SEARCH_PAUSE_S, aim, pace

KEY = "ab" * 32


class Manager:
    def __init__(self) -> None:
        self.prefix = ""
        self.searches: list[float] = []

    async def get_averagers(self, key: str, only_active: bool) -> str:
        self.searches.append(time.monotonic())
        return f"{key}, {only_active}"


def made() -> Any:
    return SimpleNamespace(schema_hash=b"", group_key_manager=Manager())


def test_peers_with_another_plan_look_under_another_key_and_have_another_schema() -> None:
    matchmaking = made()
    aim(matchmaking, "run_stage0_averager", KEY)
    assert matchmaking.schema_hash == bytes.fromhex(KEY)
    prefix = matchmaking.group_key_manager.prefix
    assert prefix.startswith("run_stage0_averager-abab")
    assert "." not in prefix, "hivemind splits keys at dots"


def test_searches_are_apart_and_each_has_its_answer(monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "SEARCH_PAUSE_S", 0.05)
    matchmaking = made()
    pace(matchmaking)
    manager = matchmaking.group_key_manager

    async def search() -> list[str]:
        return [await manager.get_averagers(f"k{n}", only_active=True) for n in range(4)]

    began = time.monotonic()
    assert asyncio.run(search()) == [f"k{n}, True" for n in range(4)]
    assert manager.searches[0] - began < 0.04, "the first one waits for nothing"
    gaps = [b - a for a, b in zip(manager.searches, manager.searches[1:], strict=False)]
    assert min(gaps) > 0.045
    assert SEARCH_PAUSE_S <= 0.5, "a group would stand late"

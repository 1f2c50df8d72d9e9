"""The upload limit: how fast bytes may leave, and which go first."""

from __future__ import annotations

import asyncio
import time

from dilocox.peer.transport import UploadLimit

CHUNK, RATE = 1000, 50_000.0  # a chunk takes 20 ms


def test_the_rate_is_kept_over_all_streams() -> None:
    async def go() -> float:
        limit = UploadLimit(RATE)
        began = time.monotonic()
        await asyncio.gather(*(send(limit, 5, first=first) for first in (True, False, True)))
        return time.monotonic() - began

    assert asyncio.run(go()) >= 14 * CHUNK / RATE  # the last of 15 chunks may start then


def test_an_exchange_goes_before_downloads_that_began_earlier() -> None:
    async def go() -> list[str]:
        limit, ended = UploadLimit(RATE), list[str]()

        async def stream(name: str, chunks: int, *, first: bool) -> None:
            await send(limit, chunks, first=first)
            ended.append(name)

        downloads = [asyncio.create_task(stream("download", 8, first=False)) for _ in range(3)]
        await asyncio.sleep(2 * CHUNK / RATE)
        await stream("exchange", 10, first=True)
        await asyncio.gather(*downloads)
        return ended

    assert asyncio.run(go())[0] == "exchange"


def test_without_a_limit_nothing_waits() -> None:
    asyncio.run(asyncio.wait_for(send(UploadLimit(None), 10_000, first=False), 5.0))


async def send(limit: UploadLimit, chunks: int, *, first: bool) -> None:
    for _ in range(chunks):
        await limit.spend(CHUNK, first=first)

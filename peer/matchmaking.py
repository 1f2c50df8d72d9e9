"""What hivemind's matchmaking needs from us: a group key for each plan, and a pause between looks.

It takes one key and one schema for all of an averager's life, and the member that waits for the
others as their leader asks the DHT for them again and again without a pause: seen with four members
on loopback, 6.7 MB in the three seconds before an exchange of 0.3 MB.
"""

# hivemind carries no type stubs.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false

from __future__ import annotations

import asyncio
import time
from typing import Any

from hivemind.averaging.matchmaking import Matchmaking

SEARCH_PAUSE_S = 0.25


def aim(matchmaking: Matchmaking, prefix: str, key: str) -> None:
    """Look for the group of a plan: peers with another one are not found.

    key: the plan's, in hex.
    """
    matchmaking.schema_hash = bytes.fromhex(key)  # pyright: ignore[reportAttributeAccessIssue]
    matchmaking.group_key_manager.prefix = f"{prefix}-{key[:24]}"


def pace(matchmaking: Matchmaking) -> None:
    """Let searches for members begin at least SEARCH_PAUSE_S apart; to be called once."""
    manager: Any = matchmaking.group_key_manager
    search, began = manager.get_averagers, float("-inf")

    async def paced(*arguments: Any, **options: Any) -> Any:
        nonlocal began
        await asyncio.sleep(began + SEARCH_PAUSE_S - time.monotonic())
        began = time.monotonic()
        return await search(*arguments, **options)

    manager.get_averagers = paced

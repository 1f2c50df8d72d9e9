"""The calls of an exchange to the other members of its group.

Each may raise ConnectionError, and CallRefused for an answer that makes no sense.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, cast

from hivemind.proto import runtime_pb2

from dilocox.dht.rpc import CallRefused, Client, facts_of, request_of
from dilocox.dht.wire import pack
from dilocox.peer.rounds.group import Mean
from dilocox.peer.rounds.record import bitmap_of, chosen_in


class GroupCalls:
    """One member's calls within one averaging group."""

    def __init__(self, client: Client, group: bytes, members: tuple[str, ...]):
        self._client = client
        self._group = group
        self._members = members

    async def push_part(self, peer: str, column: int, payload: bytes) -> None:
        """Send this member's encoded part to the reducer of a column in its row."""
        await self._push(peer, {"kind": "part", "part": column}, payload)

    async def push_row(self, peer: str, mean: Mean) -> None:
        """Send this member's row's mean of a share to the one that averages it over the rows."""
        await self._push(peer, {"kind": "row"} | about(self._members, mean), mean.payload)

    async def push_mean(self, peer: str, mean: Mean) -> None:
        await self._push(peer, {"kind": "mean"} | about(self._members, mean), mean.payload)

    async def fetch_mean(self, peer: str, part: int, came: Callable[[], None]) -> Mean | None:
        """Ask a member for an averaged share; None if it has none.

        `came` is called for all that comes of it; nothing here ends where nothing does.
        """
        want = {"what": "mean", "group": self._group, "part": part}
        limit_bytes, chunks = self._client.record_bytes, list[bytes]()

        def sink(chunk: bytes) -> None:
            chunks.append(chunk)
            came()

        blob = await self._client.fetch(
            peer, want, limit_bytes=limit_bytes, sink=sink, stall_s=math.inf
        )
        if blob is None:
            return None
        return mean_from(self._members, part, blob.facts, b"".join(chunks))

    async def fetch_record(self, peer: str, digest: str) -> bytes | None:
        want = {"what": "record", "digest": digest}
        blob = await self._client.fetch(peer, want, limit_bytes=self._client.record_bytes)
        return None if blob is None else blob.data

    async def send_votes(self, peer: str, votes: Sequence[bytes]) -> None:
        tensors = [runtime_pb2.Tensor(buffer=vote) for vote in votes]
        metadata = pack({"group": self._group})
        request = runtime_pb2.ExpertRequest(metadata=metadata, tensors=tensors)
        await self._client.call(peer, "rpc_vote", request)

    async def send_words(self, peer: str, words: bytes) -> None:
        """Tell a member which means this one holds."""
        await self._client.call(
            peer, "rpc_vote", request_of({"group": self._group, "words": words})
        )

    async def ask_votes(self, peer: str, round_number: int, attempt: int) -> list[bytes]:
        """Ask a member for the votes of this group's attempt that it holds."""
        question = {"group": self._group, "round": round_number, "attempt": attempt}
        answer = facts_of(await self._client.call(peer, "rpc_ask", request_of(question)))
        votes = answer.get("votes")
        held = cast("list[object]", votes) if isinstance(votes, list) else []
        return [vote for vote in held if isinstance(vote, bytes)]

    async def heartbeats(self, peer: str) -> AsyncIterator[None]:
        async for _ in self._client.stream(peer, "rpc_watch", request_of({"group": self._group})):
            yield

    async def _push(self, peer: str, facts: dict[str, Any], payload: bytes) -> None:
        await self._client.push(peer, facts | {"group": self._group}, payload)


def about(members: Sequence[str], mean: Mean) -> dict[str, Any]:
    """The facts of a mean, as they travel beside its payload."""
    bits = bitmap_of(members, mean.contributors)
    return {"part": mean.part, "contributors": bits, "signature": mean.signature}


def mean_from(members: Sequence[str], part: int, facts: dict[str, Any], payload: bytes) -> Mean:
    """A mean from its facts and payload; CallRefused if it names none of a group's members."""
    bits, signature = facts.get("contributors"), facts.get("signature")
    if not isinstance(bits, bytes) or not isinstance(signature, bytes):
        raise CallRefused("a mean does not say whose it is")
    try:
        names = chosen_in(members, bits)
    except ValueError as error:
        raise CallRefused(f"a mean of members that are none: {error}") from error
    return Mean(part=part, contributors=names, payload=payload, signature=signature)

"""Dialling a stranger back: fresh TCP connections to the addresses it names, and whose greeting
comes.

That a libp2p listener answers is evidence enough that an address can be reached; who it is, is not
asked. Strangers may have us dial only where we see them come from, and public addresses.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# hivemind carries no types.

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Sequence

from hivemind.p2p import P2P

from dilocox.dht.errors import InvalidInput
from dilocox.dht.invite import TcpAddress, listen_address

GREETING = b"\x13/multistream/1.0.0\n"  # with which both ends of a libp2p connection begin
DIAL_LIMIT_S = 2.5  # a connection and its greeting; who drops packets answers nothing
MAX_DIALLED = 4


async def connections(p2p: P2P) -> dict[str, frozenset[str]]:
    """The IP addresses at the other ends of this p2pd's connections, by peer id."""
    found: dict[str, frozenset[str]] = {}
    for info in await p2p.list_peers():
        texts = [str(address) for address in info.addrs]
        direct = [text.split("/") for text in texts if "circuit" not in text]
        ips = {words[2] for words in direct if words[1] in ("ip4", "ip6") and words[3:4] == ["tcp"]}
        found[str(info.peer_id)] = found.get(str(info.peer_id), frozenset()) | ips
    return found


async def working(named: Sequence[str], seen: frozenset[str]) -> tuple[str, ...]:
    """Those of these multiaddrs that may be dialled and at which a libp2p listener answers.

    seen: IP addresses that the stranger comes from. There its ports are tried, too: behind a mapped
    port it may not know its own address.
    """
    places = possible(named, seen)
    checked = await asyncio.gather(*(_checked(place, seen) for place in places.values()))
    allowed = {text: ips for text, ips in zip(places, checked, strict=True) if ips}
    dialled = list(allowed)[:MAX_DIALLED]
    greets = await asyncio.gather(*(_greets(allowed[text], places[text].port) for text in dialled))
    return tuple(text for text, yes in zip(dialled, greets, strict=True) if yes)


def possible(named: Sequence[str], seen: frozenset[str]) -> dict[str, TcpAddress]:
    """The places to try, by multiaddr."""
    places = {text: place for text in named if (place := _place(text)) is not None}
    for ip in sorted(seen):
        for port in sorted({place.port for place in places.values()}):
            kind = "ip6" if ":" in ip else "ip4"
            places.setdefault(f"/{kind}/{ip}/tcp/{port}", TcpAddress(host=ip, port=port))
    return places


def _place(text: str) -> TcpAddress | None:
    try:
        return listen_address(text)
    except InvalidInput:
        return None


async def _checked(place: TcpAddress, seen: frozenset[str]) -> list[str]:
    """The IP addresses to dial for this; none if a stranger may not have us do so.

    A name is looked up but once: its owner could answer the second time with another address.
    """
    look_up = asyncio.get_running_loop().getaddrinfo
    try:
        found = await asyncio.wait_for(
            look_up(place.host, place.port, type=socket.SOCK_STREAM), DIAL_LIMIT_S
        )
    except (OSError, asyncio.TimeoutError, UnicodeError):
        return []
    ips = [str(each[4][0]) for each in found]
    allowed = all(ip in seen or ipaddress.ip_address(ip).is_global for ip in ips)
    return ips if allowed else []


async def _greets(ips: Sequence[str], port: int) -> bool:
    """Whether one of these answers; all together have the limit of one."""
    end = asyncio.get_running_loop().time() + DIAL_LIMIT_S
    for ip in ips:
        left_s = end - asyncio.get_running_loop().time()
        with contextlib.suppress(OSError, EOFError, asyncio.TimeoutError):
            if await asyncio.wait_for(_greeting(ip, port), left_s) == GREETING:
                return True
    return False


async def _greeting(ip: str, port: int) -> bytes:
    reader, writer = await asyncio.open_connection(ip, port)
    try:
        writer.write(GREETING)
        return await reader.readexactly(len(GREETING))
    finally:
        writer.transport.abort()

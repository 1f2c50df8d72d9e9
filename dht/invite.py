"""An invite: the one string a volunteer needs, `dilocox:<run id>@<address>,<address>`.

The run id is the hash of the operator's public key and the run's name. So a manifest found under it
proves itself: only the holder of that key can have signed it, and for that name only. The addresses
are libp2p multiaddrs of bootstrap nodes.
"""

import hashlib
import ipaddress
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from base58 import b58decode

from dilocox.dht.errors import InvalidInput

SCHEME = "dilocox:"
RUN_ID = re.compile(r"[0-9a-f]{32}")
EXAMPLE = "dilocox:<32 hex digits>@/ip4/203.0.113.7/tcp/31337/p2p/12D3Koo..."
MAX_BOOTSTRAPS = 16

# How the bytes of a libp2p peer id begin; an Ed25519 key of 32 follows.
PEER_ID_START = b"\x00\x24\x08\x01\x12\x20"

_HOST = r"/(?P<kind>ip4|ip6|dns|dns4|dns6)/(?P<host>[A-Za-z0-9.:_%-]{1,255})"
_FAMILIES = {"4": socket.AF_INET, "6": socket.AF_INET6}
_LISTEN = re.compile(_HOST + r"/tcp/(?P<port>[0-9]{1,5})")
PEER_ID = "12D3KooW[1-9A-HJ-NP-Za-km-z]{44}"
MAX_PEER_ID = 64  # characters that are read as one; it has 52
_BOOTSTRAP = re.compile(_LISTEN.pattern + f"/p2p/(?P<peer_id>{PEER_ID})")


@dataclass(frozen=True, kw_only=True)
class TcpAddress:
    """The parts of a multiaddr over TCP; `peer_id` is empty where the address names none.

    family: of the addresses that `host` stands for; AF_UNSPEC is both.
    """

    host: str
    port: int
    peer_id: str = ""
    family: socket.AddressFamily = socket.AF_UNSPEC


@dataclass(frozen=True)
class Invite:
    """Run id (32 hex digits) and addresses of at least one bootstrap node."""

    run_id: str
    bootstraps: tuple[str, ...]

    def __post_init__(self) -> None:
        if not RUN_ID.fullmatch(self.run_id):
            raise InvalidInput(
                f"invite: run id {self.run_id[:40]!r} is not 32 hex digits; "
                f"copy the whole invite, like {EXAMPLE}"
            )
        if not 1 <= len(self.bootstraps) <= MAX_BOOTSTRAPS:
            raise InvalidInput(
                f"invite: {len(self.bootstraps)} bootstrap addresses; "
                f"it must name 1 to {MAX_BOOTSTRAPS}"
            )
        for address in self.bootstraps:
            try:
                bootstrap_address(address)
            except InvalidInput as error:
                raise InvalidInput(f"invite: {error}; copy the whole invite") from error

    def __str__(self) -> str:
        return f"{SCHEME}{self.run_id}@{','.join(self.bootstraps)}"

    @property
    def peer_ids(self) -> tuple[str, ...]:
        """Of the bootstraps, in this order, each once."""
        return tuple(dict.fromkeys(bootstrap_address(each).peer_id for each in self.bootstraps))

    @classmethod
    def parse(cls, text: str) -> "Invite":
        """Read an invite; raises `InvalidInput` that names the part that is wrong."""
        text = text.strip()
        if not text.startswith(SCHEME):
            raise InvalidInput(
                f"invite {text[:40]!r} does not start with {SCHEME!r}; it looks like {EXAMPLE}"
            )
        run, separator, addresses = text[len(SCHEME) :].partition("@")
        if not separator:
            raise InvalidInput(
                f"invite {text[:60]!r} has no '@' and no addresses; it looks like {EXAMPLE}"
            )
        return cls(run, tuple(addresses.split(",")))


def run_id(operator_public_key: bytes, name: str) -> str:
    """The id of the run called `name` of the operator with this public key."""
    digest = hashlib.sha256(b"dilocox run\0")
    digest.update(operator_public_key)
    digest.update(name.encode())
    return digest.hexdigest()[:32]


def bootstrap_address(address: str) -> TcpAddress:
    """Check the address of a bootstrap node, which ends with its peer id; raises `InvalidInput`."""
    parsed = _parse(_BOOTSTRAP, address, "/ip4/203.0.113.7/tcp/31337/p2p/12D3Koo...")
    if not _is_peer_id(parsed.peer_id):
        raise InvalidInput(f"address {address[:120]!r} ends with a damaged peer id")
    return parsed


def peer_id(text: str) -> str:
    """Check the id of a peer; raises `InvalidInput`."""
    if not re.fullmatch(PEER_ID, text) or not _is_peer_id(text):
        raise InvalidInput(
            f"{text[:60]!r} is no peer's id: copy the whole id that `dilocox peer` tells, which "
            "begins with 12D3KooW"
        )
    return text


def listen_address(address: str) -> TcpAddress:
    """Check an address to listen on or to announce; raises `InvalidInput`."""
    return _parse(_LISTEN, address, "/ip4/203.0.113.7/tcp/31337")


def _is_peer_id(text: str) -> bool:
    """Whether base58 of this length holds an Ed25519 key; most mistyped ones do, too."""
    return b58decode(text).startswith(PEER_ID_START)


def _parse(pattern: re.Pattern[str], address: str, example: str) -> TcpAddress:
    match = pattern.fullmatch(address)
    if match is None or int(match["port"]) > 65535:
        raise InvalidInput(f"address {address[:120]!r} is not a TCP multiaddr like {example}")
    if match["kind"] in ("ip4", "ip6"):
        try:
            ip = ipaddress.ip_address(match["host"])
        except ValueError:
            ip = None
        # libp2p knows no zones (fe80::1%eth0), which name an interface of one machine
        if ip is None or f"ip{ip.version}" != match["kind"] or "%" in match["host"]:
            raise InvalidInput(
                f"address {address[:120]!r}: {match['host']!r} is no IPv{match['kind'][2]} "
                "address; write the machine's, or /dns4/NAME for a name"
            )
    return TcpAddress(
        host=match["host"],
        port=int(match["port"]),
        peer_id=match.groupdict().get("peer_id", ""),
        family=_FAMILIES.get(match["kind"][-1], socket.AF_UNSPEC),
    )


MAX_INVITE_ADDRESSES = 4


def invite_addresses(
    announce: Sequence[str], visible: Sequence[str], peer_id: str
) -> tuple[str, ...]:
    """The addresses for the invite: those announced, else those that reach furthest.

    Public addresses stand before those of a local network; loopback ones are named only when there
    is nothing else, as for a swarm on one machine.
    """
    if announce:
        return tuple(f"{address}/p2p/{peer_id}" for address in announce)
    reaches = {address: _reach(address) for address in visible}
    useful = [address for address in visible if reaches[address] > 0] or list(visible)
    useful.sort(key=lambda address: -reaches[address])
    return tuple(useful[:MAX_INVITE_ADDRESSES])


def _reach(address: str) -> int:
    try:
        ip = ipaddress.ip_address(bootstrap_address(address).host)
    except ValueError:
        return 2  # a name
    return 2 if ip.is_global else 0 if ip.is_loopback or ip.is_link_local else 1

"""What can be known about addresses: whether our port is free, whether a bootstrap listens, which
other peers were in the run when we last were, and whether others reach us.

The first ones are asked before p2pd starts, which cannot tell: two of them share one port without
a word (SO_REUSEPORT), and one that reaches no bootstrap says so in a single line and ends. Only
others can answer the last one, before the node joins: a node that only dials out must join as a
client, or the others wait for it in vain.
"""

import contextlib
import errno
import ipaddress
import json
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from dilocox.dht.errors import BootstrapsSilent, EnvironmentFault, InvalidInput
from dilocox.dht.files import write_atomically
from dilocox.dht.invite import TcpAddress, bootstrap_address, listen_address

logger = logging.getLogger(__name__)

DIAL_TIMEOUT_S = 3.0
MAX_TRIED = 4  # addresses of one name, one after the other
# A bootstrap that is started at the same moment, as by docker compose, is up within this time.
BOOTSTRAP_PATIENCE_S = 10.0
BETWEEN_TRIES_S = 5.0
MAX_ENTRIES = 16

ReachKind = Literal["public", "mapped", "dial_out", "unknown"]


@dataclass(frozen=True, kw_only=True)
class Reachability:
    """How others reach a peer.

    kind: public (at an address of its own), mapped (at its router's), dial_out (not at all),
    unknown (nobody could be asked). addresses: TCP multiaddrs that worked, without peer id. asked:
    how many peers dialled. seen: the IP addresses that others see it at. by_others: whether it was
    reached by more than those that it had dialled itself, which a router may let in alone.
    """

    kind: ReachKind = "unknown"
    addresses: tuple[str, ...] = ()
    asked: int = 0
    seen: tuple[str, ...] = ()
    by_others: bool = False


@dataclass(frozen=True, kw_only=True)
class FallbackPeers:
    """How a peer comes back into its run while no bootstrap can be reached, noted while it was in.

    addresses: of other peers, with their ids. client_mode: whether it only dialled out: the peers
    that it dials cannot tell. local_network: as `on_local_network` said, for a name may be gone,
    too.
    """

    addresses: tuple[str, ...] = ()
    client_mode: bool = False
    local_network: bool = False

    def __bool__(self) -> bool:
        return bool(self.addresses)

    def keep(self, file: Path) -> None:
        """Write it for `kept_fallback`."""
        with contextlib.suppress(EnvironmentFault):  # a full disk is told by what is needed there
            write_atomically(file, json.dumps(vars(self)).encode(), durable=False)


NO_FALLBACK = FallbackPeers()


def kept_fallback(file: Path) -> FallbackPeers:
    """What was kept there; none if that cannot be read."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, InvalidInput):
        kept = json.loads(file.read_bytes())
        addresses = tuple(str(each) for each in kept["addresses"][:MAX_ENTRIES])
        for address in addresses:
            bootstrap_address(address)
        flags = {name: kept[name] is True for name in ("client_mode", "local_network")}
        return FallbackPeers(addresses=addresses, **flags)
    return NO_FALLBACK


FindReach = Callable[[Any, Sequence[Any], Sequence[str]], Awaitable[Reachability]]
"""Has these peers (PeerID) dial this one at these multiaddrs, through its P2P."""


def check_ports(listen: Sequence[str]) -> None:
    """Raise `EnvironmentFault` when one of these addresses cannot be listened on."""
    for address in listen:
        parts = listen_address(address)
        try:
            family, kind, protocol, _, target = _resolve(parts)[0]
            with socket.socket(family, kind, protocol) as probe:
                # Connections of a former start may still linger; a listener is what must not be.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(target)
                probe.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise EnvironmentFault(
                    f"port {parts.port} of {parts.host} is in use by another program: "
                    "stop it or choose another one with --port"
                ) from error
            raise EnvironmentFault(
                f"cannot listen on {parts.host} port {parts.port} ({error.strerror}): choose an "
                "address of this machine, and with --port a port that this user may open"
            ) from error


def reachable_bootstraps(bootstraps: Sequence[str], patience_s: float) -> tuple[str, ...]:
    """Those addresses that accept a TCP connection.

    Asks again until one does; raises `BootstrapsSilent` that names them all after `patience_s`.
    """
    deadline = time.monotonic() + min(patience_s, BOOTSTRAP_PATIENCE_S)
    while True:
        faults = dial_faults(bootstraps)
        if reachable := _without_fault(faults):
            return reachable
        if time.monotonic() >= deadline:
            tried = ", ".join(f"{address} ({fault})" for address, fault in faults.items())
            raise BootstrapsSilent(
                f"no bootstrap can be reached: {tried}; check that this machine is online, "
                "that the bootstrap runs and that the invite is current"
            )
        time.sleep(0.5)


def wait_for_entry(
    bootstraps: Sequence[str], fallback: FallbackPeers, *, patience_s: float = BOOTSTRAP_PATIENCE_S
) -> FallbackPeers:
    """Return as soon as a bootstrap accepts a TCP connection, or a peer that was in the run: the
    way back by those peers, where no bootstrap does. Says in the log that it waits.
    """
    told = False
    while True:
        try:
            reachable_bootstraps(bootstraps, patience_s)
        except BootstrapsSilent as error:
            if reachable := _without_fault(dial_faults(fallback.addresses)):
                logger.warning("%s; joining by peers that were there before", error)
                return replace(fallback, addresses=reachable)
            if not told:
                logger.warning("%s; trying again until one answers", error)
            told = True
            time.sleep(BETWEEN_TRIES_S)
        else:
            return NO_FALLBACK


def dial_faults(addresses: Sequence[str]) -> dict[str, str | None]:
    """What `dial_fault` says of each; asked at the same time."""
    with ThreadPoolExecutor(max_workers=max(1, len(addresses))) as pool:
        return dict(zip(addresses, pool.map(dial_fault, addresses), strict=True))


def _without_fault(faults: Mapping[str, str | None]) -> tuple[str, ...]:
    return tuple(address for address, fault in faults.items() if fault is None)


def dial_fault(address: str) -> str | None:
    """None if somebody listens at the address of a bootstrap, else why it cannot be dialled."""
    faults = dict[str, None]()
    try:
        for family, kind, protocol, _, target in _resolve(bootstrap_address(address))[:MAX_TRIED]:
            try:
                with socket.socket(family, kind, protocol) as probe:
                    probe.settimeout(DIAL_TIMEOUT_S)
                    probe.connect(target)
            except OSError as error:
                faults[_words(error)] = None
            else:
                return None
    except (OSError, UnicodeError) as error:  # the second of a name that cannot be one
        return _words(error)
    return ", ".join(faults)


def _words(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)


def on_local_network(bootstraps: Sequence[str]) -> bool:
    """Whether all bootstraps are at addresses that the internet does not route, so that the run's
    other peers may be at such, too. A bootstrap whose name does not resolve now says nothing. Where
    any is at a public address volunteers come by the internet, and their home networks are none of
    the run's.
    """
    routed = set[bool]()
    for address in bootstraps:
        with contextlib.suppress(OSError, UnicodeError):
            for _, _, _, _, target in _resolve(bootstrap_address(address)):
                routed.add(ipaddress.ip_address(target[0]).is_global)
    return routed == {False}


def _resolve(parts: TcpAddress) -> list[tuple[Any, Any, int, str, Any]]:
    return socket.getaddrinfo(parts.host, parts.port, parts.family, socket.SOCK_STREAM)

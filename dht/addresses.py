"""What can be known about addresses: is our port free, does a bootstrap listen, who reaches us.

The first two are asked before p2pd starts, which cannot tell: two of them share one port without
a word (SO_REUSEPORT), and one that reaches no bootstrap says so in a single line and ends. The last
is for others to say, before the node joins: one that only dials out must join as a client, or the
others wait for it in vain.
"""

import contextlib
import errno
import ipaddress
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from dilocox.dht.errors import BootstrapsSilent, EnvironmentFault
from dilocox.dht.invite import TcpAddress, bootstrap_address, listen_address

logger = logging.getLogger(__name__)

DIAL_TIMEOUT_S = 3.0
# A bootstrap that is started at the same moment, as by docker compose, is up within this time.
BOOTSTRAP_PATIENCE_S = 10.0
BETWEEN_TRIES_S = 5.0

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


FindReach = Callable[[Any, Sequence[Any], Sequence[str]], Awaitable[Reachability]]
"""Has these peers (PeerID) dial this one at these multiaddrs, through its P2P."""


def check_ports(listen: Sequence[str]) -> None:
    """Raise `EnvironmentFault` when one of these addresses cannot be listened on."""
    for address in listen:
        parts = listen_address(address)
        try:
            family, kind, protocol, _, target = _resolve(parts)
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
        with ThreadPoolExecutor(max_workers=len(bootstraps)) as pool:
            faults = dict(zip(bootstraps, pool.map(dial_fault, bootstraps), strict=True))
        reachable = tuple(address for address, fault in faults.items() if fault is None)
        if reachable:
            return reachable
        if time.monotonic() >= deadline:
            tried = ", ".join(f"{address} ({fault})" for address, fault in faults.items())
            raise BootstrapsSilent(
                f"no bootstrap can be reached: {tried}; check that this machine is online, "
                "that the bootstrap runs and that the invite is current"
            )
        time.sleep(0.5)


def wait_for_bootstrap(bootstraps: Sequence[str]) -> None:
    """Return as soon as one of them accepts a TCP connection; says in the log that it waits."""
    told = False
    while True:
        try:
            reachable_bootstraps(bootstraps, BOOTSTRAP_PATIENCE_S)
        except BootstrapsSilent as error:
            if not told:
                logger.warning("%s; trying until one can be", error)
            told = True
            time.sleep(BETWEEN_TRIES_S)
        else:
            return


def dial_fault(address: str) -> str | None:
    """None if somebody listens at the address of a bootstrap, else why it cannot be dialled."""
    parts = bootstrap_address(address)
    try:
        family, kind, protocol, _, target = _resolve(parts)
        with socket.socket(family, kind, protocol) as probe:
            probe.settimeout(DIAL_TIMEOUT_S)
            probe.connect(target)
    except OSError as error:
        return str(error.strerror or error)
    return None


def on_local_network(bootstraps: Sequence[str]) -> bool:
    """Whether a bootstrap of these is at an address that the internet does not route, so that the
    run's other peers may be at such, too. One whose name nobody knows now says nothing.
    """
    for address in bootstraps:
        with contextlib.suppress(OSError, UnicodeError):
            _, _, _, _, target = _resolve(bootstrap_address(address))
            if not ipaddress.ip_address(target[0]).is_global:
                return True
    return False


def _resolve(parts: TcpAddress) -> tuple[Any, Any, int, str, Any]:
    return socket.getaddrinfo(parts.host, parts.port, type=socket.SOCK_STREAM)[0]

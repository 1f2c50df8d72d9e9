"""What can be known about addresses before p2pd starts: is our port free, does a bootstrap listen.

p2pd cannot tell us either: two of them share one port without a word (SO_REUSEPORT), and one that
reaches no bootstrap says so in a single line and ends.
"""

import errno
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from dilocox.dht.errors import EnvironmentFault
from dilocox.dht.invite import TcpAddress, bootstrap_address, listen_address

DIAL_TIMEOUT_S = 3.0
# A bootstrap that is started at the same moment, as by docker compose, is up within this time.
BOOTSTRAP_PATIENCE_S = 10.0


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

    Asks again until one does; raises `EnvironmentFault` that names them all after `patience_s`.
    """
    deadline = time.monotonic() + min(patience_s, BOOTSTRAP_PATIENCE_S)
    while True:
        with ThreadPoolExecutor(max_workers=len(bootstraps)) as pool:
            faults = dict(zip(bootstraps, pool.map(_dial, bootstraps), strict=True))
        reachable = tuple(address for address, fault in faults.items() if fault is None)
        if reachable:
            return reachable
        if time.monotonic() >= deadline:
            tried = ", ".join(f"{address} ({fault})" for address, fault in faults.items())
            raise EnvironmentFault(
                f"no bootstrap can be reached: {tried}; check that this machine is online, "
                "that the bootstrap runs and that the invite is current"
            )
        time.sleep(0.5)


def _dial(address: str) -> str | None:
    """None if somebody listens there, else why it failed."""
    parts = bootstrap_address(address)
    try:
        family, kind, protocol, _, target = _resolve(parts)
        with socket.socket(family, kind, protocol) as probe:
            probe.settimeout(DIAL_TIMEOUT_S)
            probe.connect(target)
    except OSError as error:
        return str(error.strerror or error)
    return None


def _resolve(parts: TcpAddress) -> tuple[Any, Any, int, str, Any]:
    return socket.getaddrinfo(parts.host, parts.port, type=socket.SOCK_STREAM)[0]

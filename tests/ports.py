"""Ports of this machine that nobody listens on."""

from __future__ import annotations

import socket


def free_ports(count: int) -> list[int]:
    """So many different ones, of the loopback."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(each.getsockname()[1]) for each in held]
    for each in held:
        each.close()
    return ports


def free_port() -> int:
    return free_ports(1)[0]

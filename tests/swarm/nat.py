"""Hosts on one machine of which some are at home behind a router: real address translation.

    with Homes("pph") as net:  # two public hosts, and one at home
        net.command(2, ["dilocox", "peer", ...])  # can only dial out

Each host is a network namespace. The public ones share one network; each home has a network of its
own and a router, a namespace too, which masquerades what leaves and lets in only answers, and what
comes to a mapped port. It needs Linux, root, iproute2 and iptables, and touches nothing outside the
namespaces that it made; `available` says what is missing. What a killed process leaves is removed
by whoever makes namespaces next.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from types import TracebackType

from tests.swarm import namespaces

_LIMIT_S = 20.0


class Homes:
    """A context manager. kinds: a letter for each host, p for a public one, h for one at home."""

    def __init__(self, kinds: str):
        names = namespaces.new_names(2 * len(kinds) + 1)
        self._hosts, self._net = names[: len(kinds)], names[-1]
        others = names[len(kinds) : -1]
        self._routers = {host: others[host] for host, kind in enumerate(kinds) if kind == "h"}

    def __enter__(self) -> Homes:
        if reason := available():
            raise RuntimeError(f"no address translation here: {reason}")
        try:
            namespaces.make(self._all)
            for name in self._all:
                _ip(name, "link set lo up")
            _ip(self._net, "link add br0 type bridge")
            _ip(self._net, "link set br0 up")
            for host, name in enumerate(self._hosts):
                self._plug(host, self._routers.get(host, name))
                if host in self._routers:
                    self._move_in(host)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill what runs on the hosts and remove them; twice does no harm."""
        namespaces.remove(self._all)

    # ---- use -------------------------------------------------------------------------------------
    def command(self, host: int, argv: Sequence[str]) -> list[str]:
        """The command line that runs `argv` on a host; its process id is that of `argv` itself."""
        return ["ip", "netns", "exec", self._hosts[host], *argv]

    def address(self, host: int) -> str:
        """The IPv4 address of a host in its own network."""
        return f"192.168.{host}.2" if host in self._routers else self.seen_at(host)

    def seen_at(self, host: int) -> str:
        """The public IPv4 address that others see: its router's for a host at home."""
        return f"10.99.0.{range(len(self._hosts))[host] + 1}"

    def map_port(self, host: int, port: int) -> None:
        """Have a home's router forward this TCP port to the host."""
        router = self._routers[host]
        to = f"{self.address(host)}:{port}"
        _table(router, f"-t nat -A PREROUTING -i wan -p tcp --dport {port} -j DNAT --to {to}")
        _table(router, f"-A FORWARD -i wan -p tcp --dport {port} -j ACCEPT")

    def cut(self, host: int) -> None:
        """Let every packet between a host and the world vanish, and nobody is told."""
        _ip(self._net, f"link set p{host} nomaster")

    def heal(self, host: int) -> None:
        """Undo `cut`."""
        _ip(self._net, f"link set p{host} master br0")

    # ---- setting up ------------------------------------------------------------------------------
    @property
    def _all(self) -> list[str]:
        return [*self._hosts, *self._routers.values(), self._net]

    def _plug(self, host: int, name: str) -> None:
        """Join a namespace to the public network, as its device `wan`."""
        _ip(self._net, f"link add p{host} type veth peer name wan netns {name}")
        _ip(self._net, f"link set p{host} master br0 up")
        _ip(name, f"address add {self.seen_at(host)}/24 dev wan")
        _ip(name, "link set wan up")

    def _move_in(self, host: int) -> None:
        """Give a home its network, behind a router that translates addresses."""
        name, router = self._hosts[host], self._routers[host]
        gateway = f"{self.address(host).rpartition('.')[0]}.1"
        _ip(router, f"link add lan type veth peer name eth0 netns {name}")
        _ip(router, f"address add {gateway}/24 dev lan")
        _ip(router, "link set lan up")
        _ip(name, f"address add {self.address(host)}/24 dev eth0")
        _ip(name, "link set eth0 up")
        _ip(name, f"route add default via {gateway}")
        _run(["ip", "netns", "exec", router, "sysctl", "-qw", "net.ipv4.ip_forward=1"])
        _table(router, "-P FORWARD DROP")
        _table(router, "-A FORWARD -i lan -j ACCEPT")
        _table(router, "-A FORWARD -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT")
        _table(router, "-t nat -A POSTROUTING -o wan -j MASQUERADE")


@cache
def available() -> str:
    """Why there can be no address translation on this machine; empty if there can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    for command in ("ip", "iptables", "sysctl"):
        if shutil.which(command) is None:
            return f"the command {command} is missing"
    (name,) = namespaces.new_names(1)
    try:  # a container's root may lack the right to, or the kernel the tables
        namespaces.make([name])
        _ip(name, "link add wan type veth peer name other")
        _table(name, "-t nat -A POSTROUTING -o wan -j MASQUERADE")
        _table(name, "-A FORWARD -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT")
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        return str(error)
    finally:
        with contextlib.suppress(RuntimeError, OSError, subprocess.SubprocessError):
            namespaces.remove([name])
    return ""


def _ip(name: str, line: str) -> None:
    namespaces.ip("-n", name, *line.split())


def _table(router: str, rule: str) -> None:
    _run(["ip", "netns", "exec", router, "iptables", "-w", *rule.split()])


def _run(argv: Sequence[str]) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv[4:])}: {done.stderr.strip()}")

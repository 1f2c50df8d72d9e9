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

from functools import cache

from tests.swarm import namespaces
from tests.swarm.namespaces import Hosts


class Homes(Hosts):
    """A context manager. kinds: a letter for each host, p for a public one, h for one at home."""

    def __init__(self, kinds: str):
        count = len(kinds)
        names = namespaces.new_names(2 * count + 1)
        routers = names[count:-1]
        self._net = names[-1]
        self._routers = {host: routers[host] for host, kind in enumerate(kinds) if kind == "h"}
        self._hosts = names[:count]
        super().__init__([*self._hosts, *self._routers.values(), self._net], available)

    def _set_up(self) -> None:
        for name in self._names:
            _ip(name, "link set lo up")
        _ip(self._net, "link add br0 type bridge")
        _ip(self._net, "link set br0 up")
        for host, name in enumerate(self._hosts):
            self._plug(host, self._routers.get(host, name))
            if host in self._routers:
                self._move_in(host)

    # ---- use -------------------------------------------------------------------------------------
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
        _run(router, "sysctl -qw net.ipv4.ip_forward=1")
        _table(router, "-P FORWARD DROP")
        _table(router, "-A FORWARD -i lan -j ACCEPT")
        _table(router, "-A FORWARD -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT")
        _table(router, "-t nat -A POSTROUTING -o wan -j MASQUERADE")


@cache
def available() -> str:
    """Why there can be no address translation on this machine; empty if there can."""

    def probe(name: str) -> None:
        _ip(name, "link add wan type veth peer name other")
        _table(name, "-t nat -A POSTROUTING -o wan -j MASQUERADE")
        _table(name, "-A FORWARD -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT")

    needed = {"ip": "iproute2", "iptables": "iptables", "sysctl": "procps"}
    return namespaces.missing(needed, [], probe)


def _ip(name: str, line: str) -> None:
    namespaces.ip("-n", name, *line.split())


def _table(router: str, rule: str) -> None:
    _run(router, f"iptables -w {rule}")


def _run(name: str, line: str) -> None:
    namespaces.ip("netns", "exec", name, *line.split())

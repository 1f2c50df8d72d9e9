"""p2pd, the libp2p daemon, owned by a thread of the DHT child. Apart from node.py, which says what
the node does; this keeps one program alive.

hivemind would start p2pd inside its DHT node. Here it starts before the node, so that run time can
be measured against the bootstraps first (hivemind refuses a peer whose clock is three seconds off)
and others asked whether they reach us; and it is watched: when p2pd ends, so does the child, and
when the child ends, the kernel ends p2pd. The thread has an event loop of its own, in which the
clock is measured again and again; that also keeps the connections to the bootstraps alive, which
libp2p does not dial again by itself.
"""

import asyncio
import asyncio.subprocess
import contextlib
import ipaddress
import logging
import resource
import signal
import time
from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass, replace
from typing import Any

from hivemind.p2p import P2P, P2PDaemonError, PeerID
from hivemind.proto import dht_pb2
from hivemind.utils.multiaddr import Multiaddr

from dilocox.dht.addresses import FindReach, Reachability
from dilocox.dht.clock import OffsetSample, RunClock, agreed_offset
from dilocox.dht.errors import BootstrapsSilent, EnvironmentFault
from dilocox.dht.identity import Identity
from dilocox.dht.invite import bootstrap_address, listen_address
from dilocox.dht.parent_death import dying_with_parent
from dilocox.dht.rpc import SILENCE_S, LoopThread, Silence

logger = logging.getLogger(__name__)

PING_HANDLER = "RunProtocol.rpc_ping"
PING_TIMEOUT_S = 3.0
PINGS_PER_BOOTSTRAP = 3
# libp2p drops idle paths after a while; routers forget a mapping after 30 s at the earliest.
CLOCK_PERIOD_S = 20.0
CLOCK_AGAIN_S = 5.0  # after a bootstrap gave no answer
MAPPING_LIMIT_S, LOOK_S = 12.0, 0.5  # libp2p looks for routers for five seconds, then asks them
START_MARGIN_S = 2.0  # `startup_s` is kept by what is done in it
STOP_GRACE_S = 1.0
# By p2pd's default 512 are too many, so that it closes half, and first those that others dialled: a
# bootstrap of a large swarm would lose them every two minutes, the only way to a peer behind a NAT
MOST_CONNECTIONS = 8192
MOST_OF_A_PEER = 2048  # anybody may open one, and each takes memory
LOOPBACK = ("127.", "::1", "localhost")


@dataclass(frozen=True, kw_only=True)
class DaemonOptions:
    """What p2pd is started with.

    bootstraps: addresses of all bootstraps; without any this node is the first of its swarm.
    reachable: those of them, or peers in their place, that p2pd dials at its start, since it waits
        for each.
    listen, announce: TCP multiaddrs to listen on and to tell others.
    client_mode: this node only dials out.
    find_reach: asks others whether this node only dials out; None where that is known.
    leads_time: it takes the bootstraps' time once, when it starts: two that follow each other for
        good would drift away together.
    keeps_all: whether it is a bootstrap (keepers.py). local_network: see `on_local_network`.
    """

    identity: Identity
    bootstraps: tuple[str, ...]
    reachable: tuple[str, ...]
    listen: tuple[str, ...]
    announce: tuple[str, ...]
    client_mode: bool
    startup_s: float
    find_reach: FindReach | None = None
    leads_time: bool = False
    keeps_all: bool = False
    local_network: bool = False

    @property
    def asks_router(self) -> bool:
        """Whether p2pd asks the router for a port (UPnP)."""
        return any(not listen_address(each).host.startswith(LOOPBACK) for each in self.listen)


class DaemonOwner:
    """Starts p2pd, watches it and measures run time through it."""

    def __init__(self, options: DaemonOptions, clock: RunClock, on_death: Callable[[], None]):
        self._options = options
        self._clock = clock
        self._on_death = on_death
        self._deadline = 0.0
        self._p2p: P2P | None = None
        self._thread: LoopThread | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.reach = Reachability()
        self._silence = Silence()
        self._asking: dict[str, asyncio.Task[list[OffsetSample]]] = {}  # bootstraps

    def start(self) -> None:
        """Start p2pd and measure the clock; raises `EnvironmentFault`."""
        self._deadline = time.monotonic() + self._options.startup_s
        # hivemind's event loops refuse to watch children from a thread.
        policy = asyncio.DefaultEventLoopPolicy()
        asyncio.set_event_loop_policy(policy)  # pyright: ignore[reportDeprecated]
        self._thread = LoopThread("p2pd", begin=self._start, end=self._stop)
        self._thread.start(self._options.startup_s + START_MARGIN_S)

    def stop(self) -> None:
        if self._thread is not None:
            self._thread.close(2 * STOP_GRACE_S)

    @property
    def client_mode(self) -> bool:
        return self._options.client_mode

    @property
    def p2p(self) -> P2P:
        """The started p2pd: its process, and where handles of other processes reach it."""
        if self._p2p is None:
            raise RuntimeError("p2pd has not been started")
        return self._p2p

    async def _start(self) -> None:
        await self._launch()
        options = self._options
        if options.reachable:
            await self._first_measurement()
            if options.find_reach is not None and options.listen:
                await self._find_reach(options.find_reach)
        if options.bootstraps:
            self._tasks.append(asyncio.create_task(self._keep_time()))

    async def _launch(self) -> None:
        try:
            try:
                self._p2p = await self._new_p2pd()
            except P2PDaemonError as error:
                if "bootstrap" not in str(error):
                    raise
                # p2pd gives up at its first failure; where a machine is busy the second succeeds
                logger.debug("p2pd did not reach a bootstrap, trying again: %s", error)
                self._p2p = await self._new_p2pd()
        except (P2PDaemonError, OSError) as error:
            raise self._explained(str(error)) from error
        self._tasks = [asyncio.create_task(self._watch())]

    async def _new_p2pd(self) -> P2P:
        options = self._options
        with _starting_as_we_want(MOST_CONNECTIONS if options.keeps_all else MOST_OF_A_PEER):
            return await P2P.create(
                initial_peers=options.reachable or None,
                announce_maddrs=options.announce or None,
                host_maddrs=options.listen or None,
                no_listen=not options.listen,
                identity_path=str(options.identity.path),
                dht_mode="client" if options.client_mode else "server",
                # its relay service is on by default: strangers' streams, 4 GiB each, over this line
                use_relay=False,
                nat_port_map=options.asks_router,
                startup_timeout=max(1.0, self._deadline - time.monotonic()),
                check_if_identity_free=False,
            )

    async def _find_reach(self, find_reach: FindReach) -> None:
        """Ask others how they reach this node; where p2pd does not know it, start it once more."""
        options, p2p = self._options, self.p2p
        peers = {bootstrap_address(each).peer_id for each in options.reachable}
        asked = [PeerID.from_base58(peer) for peer in sorted(peers)]
        own = await _own_addresses(p2p)
        reach = await find_reach(p2p, asked, own)
        left_s = self._deadline - time.monotonic()
        told = options.local_network or options.announce
        mapped = list[str]()
        if reach.kind == "dial_out" and options.asks_router and not told:
            mapped = await mapped_addresses(p2p, own, min(MAPPING_LIMIT_S, left_s / 3))
        if mapped:
            own = [*mapped, *own]
            found = await find_reach(p2p, asked, own)
            reach = reach if found.kind == "unknown" else found
        self.reach = reach
        if reach.kind == "dial_out":
            # nobody is to be sent to an address at which nothing comes in
            self._options = replace(options, client_mode=True, listen=(), announce=())
        elif reach.addresses and not set(reach.addresses) & set(own):
            ports = {listen_address(address).port for address in own}
            if len(ports) != 1:
                return
            listen = tuple(
                f"{address.rpartition('/')[0]}/{min(ports)}" for address in options.listen
            )
            # others behind the same router may not get in from outside
            announce = (*reach.addresses, *filter(_is_at_home, own))
            self._options = replace(options, listen=listen, announce=announce)
        else:
            return
        self._cancel_tasks()
        await p2p.shutdown()
        await self._launch()
        await self._first_measurement()  # and so is connected again

    def _explained(self, reason: str) -> EnvironmentFault:
        options = self._options
        if "bootstrap" in reason:
            return BootstrapsSilent(
                f"{', '.join(options.reachable)} accept connections but do not answer as that "
                "peer: check that the bootstrap runs, and that the invite is current"
            )
        if "listen" in reason:
            return EnvironmentFault(
                f"p2pd cannot listen on {', '.join(options.listen)} ({reason}): "
                "choose another port with --port"
            )
        unheard = f", and do {', '.join(options.reachable)} answer" if options.reachable else ""
        return EnvironmentFault(
            f"p2pd did not start ({reason}): is this machine overloaded{unheard}?"
        )

    async def _watch(self) -> None:
        await self.p2p._child.wait()
        self._on_death()

    def _cancel_tasks(self) -> None:
        for task in (*self._tasks, *self._asking.values()):
            task.cancel()
        self._asking.clear()

    async def _stop(self) -> None:
        self._cancel_tasks()
        p2p = self._p2p
        if p2p is None:
            return
        try:
            await asyncio.wait_for(p2p.shutdown(), STOP_GRACE_S)
        except asyncio.TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                p2p._child.kill()

    async def _first_measurement(self) -> None:
        while not await self.measure(self._options.reachable):
            if time.monotonic() > self._deadline:
                raise BootstrapsSilent(
                    f"no answer from {', '.join(self._options.reachable)}: "
                    "check that they run the same version of dilocox"
                )
            await asyncio.sleep(0.2)

    async def _keep_time(self) -> None:
        answered = True
        while True:
            await asyncio.sleep(CLOCK_AGAIN_S if self._silence else CLOCK_PERIOD_S)
            before, answered = answered, await self.measure(self._options.bootstraps, again=True)
            if before and not answered:  # said once: it may stay away for days
                logger.warning(
                    "no bootstrap answers: nobody new can join, but those who train go on"
                )
            elif answered and not before:
                logger.info("a bootstrap answers again")

    async def measure(self, bootstraps: tuple[str, ...], *, again: bool = False) -> bool:
        """Ask these bootstraps for the time; whether one of them told it. again: they told it
        before, so an answer that comes too late for that will do.
        """
        peers: dict[str, list[Multiaddr]] = {}
        for address in bootstraps:
            dialled = Multiaddr(address.rpartition("/p2p/")[0])
            peers.setdefault(bootstrap_address(address).peer_id, []).append(dialled)
        limit_s = SILENCE_S if again else PING_TIMEOUT_S  # an upload keeps answers waiting
        for peer, addresses in peers.items():
            if peer not in self._asking:
                samples = self.samples_of(PeerID.from_base58(peer), addresses, limit_s)
                self._asking[peer] = asyncio.create_task(samples)
        asked = {peer: self._asking[peer] for peer in peers}
        # one that hangs must not keep the others unasked until a router forgets their connections
        done, _ = await asyncio.wait(asked.values(), timeout=CLOCK_PERIOD_S)
        if not done:
            done, _ = await asyncio.wait(asked.values(), return_when=asyncio.FIRST_COMPLETED)
        answers = [self._asking.pop(peer).result() for peer, task in asked.items() if task in done]
        offset = agreed_offset(answers, self._clock.offset)
        if offset is None:
            return again and any(answers)
        if not again:
            self._clock.measured(offset)
        elif not self._options.leads_time:
            self._clock.measured_again(offset)
        return True

    async def samples_of(
        self, peer: PeerID, addresses: list[Multiaddr], limit_s: float
    ) -> list[OffsetSample]:
        """What a bootstrap answers to a few questions for the time, each within `limit_s`; empty
        where it is silent.
        """
        samples: list[OffsetSample] = []
        try:
            self._silence.asked(str(peer))
            await asyncio.wait_for(self.p2p._client.connect(peer, addresses), PING_TIMEOUT_S)
            for _ in range(PINGS_PER_BOOTSTRAP):
                self._silence.asked(str(peer))
                asked_at = self._clock.own_time()
                answer = await asyncio.wait_for(
                    self.p2p.call_protobuf_handler(
                        peer, PING_HANDLER, dht_pb2.PingRequest(), dht_pb2.PingResponse
                    ),
                    limit_s,
                )
                answered_at = self._clock.own_time()
                samples.append(OffsetSample.from_ping(asked_at, answer.dht_time, answered_at))
                self._silence.ended(str(peer))
                if answered_at - asked_at > PING_TIMEOUT_S:  # the next ones would tell no more
                    break
        except Exception as error:  # noqa: BLE001 - an unreachable peer fails in many ways
            logger.debug("bootstrap %s does not answer: %r", peer, error)
            if self._silence.too_long(str(peer)):
                await self._hang_up(peer)
        return samples

    async def _hang_up(self, peer: PeerID) -> None:
        """Give up a connection, which may hang for long after what cut it is over."""
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self.p2p._client.disconnect(peer), PING_TIMEOUT_S)


@contextlib.contextmanager
def _starting_as_we_want(most_connections: int) -> Generator[None, None, None]:
    """Start p2pd so that it keeps so many connections, or as many as it has files for, and the
    kernel kills it when this thread is gone, however that came about.

    hivemind offers no way to pass flags or a hook on; so its call is caught, in this child only.
    """
    original: Any = asyncio.subprocess.create_subprocess_exec
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    high = most_connections
    if files != resource.RLIM_INFINITY:  # a stream of a connection is one, too
        high = min(high, files // 2)
    limits = f"-connLo={high // 2}", f"-connHi={high}"

    async def start(*command: str, **options: Any) -> Any:
        killed_with_us = dying_with_parent(signal.SIGKILL)
        return await original(*command, *limits, preexec_fn=killed_with_us, **options)

    asyncio.subprocess.create_subprocess_exec = start
    try:
        yield
    finally:
        asyncio.subprocess.create_subprocess_exec = original


async def mapped_addresses(p2p: P2P, known: Collection[str], limit_s: float) -> list[str]:
    """The public addresses that p2pd has and that are not known: those that the router maps to it,
    which it says seconds after it was asked. Returns without any after `limit_s`.
    """
    end = time.monotonic() + limit_s
    while True:
        own = [each for each in await _own_addresses(p2p) if each not in known]
        found = [each for each in own if (ip := _ip_of(each)) is not None and ip.is_global]
        if found or time.monotonic() >= end:
            return found
        await asyncio.sleep(LOOK_S)


async def _own_addresses(p2p: P2P) -> list[str]:
    found = [str(address) for address in await p2p.get_visible_maddrs(latest=True)]
    return [address.rpartition("/p2p/")[0] for address in found]


def _is_at_home(address: str) -> bool:
    ip = _ip_of(address)
    return ip is not None and not (ip.is_global or ip.is_loopback or ip.is_link_local)


def _ip_of(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """None for a name."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(listen_address(address).host)
    return None

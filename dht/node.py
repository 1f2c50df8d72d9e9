"""A DHT node in a child process that cannot outlive its peer.

hivemind.DHT is subclassed where it falls short of what a run needs: its child and p2pd live on when
the main process is killed, a terminal's Ctrl-C reaches p2pd, sockets stay behind, messages of more
than 16 KB kill it, and it waits for answers without a deadline.

What the main process asks its child stands first: coroutines that run there, beside the node.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import logging
import multiprocessing
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hivemind import DHT
from hivemind.dht.node import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import P2P, PeerID
from hivemind.utils import MPFuture

from dilocox.dht import node_process, protocol, streams
from dilocox.dht.addresses import (
    NO_FALLBACK,
    FallbackPeers,
    FindReach,
    Reachability,
    check_ports,
    on_local_network,
    reachable_bootstraps,
)
from dilocox.dht.clock import RunClock
from dilocox.dht.errors import BootstrapsSilent, DilocoxError, EnvironmentFault
from dilocox.dht.identity import Identity, peer_id_bytes_of
from dilocox.dht.invite import bootstrap_address, listen_address
from dilocox.dht.keepers import Keepers
from dilocox.dht.node_process import (
    BlockingPipe,
    SharedPipe,
    freeze_for_fork,
    kill_daemon,
    leave_the_terminal,
    watch_parent,
)
from dilocox.dht.p2p_daemon import DaemonOptions, DaemonOwner
from dilocox.dht.protocol import Entry
from dilocox.dht.validator import RunRecordValidator
from dilocox.dht.wire import MAX_VALUE_BYTES, pack

logger = logging.getLogger(__name__)

PAUSE_S = 0.2  # between two pings


@dataclass(frozen=True)
class StoredValue:
    """A value as it goes into the DHT: under a key, or under one of the key's subkeys."""

    key: str
    value: bytes
    expires_at: float  # run time, in seconds
    subkey: bytes | None = None


async def reach(dht: RunDHT, _node: DHTNode) -> Reachability:
    return dht.reached


async def visible_addresses(_dht: DHT, node: DHTNode) -> tuple[str, ...]:
    try:
        return tuple(str(address) for address in await node.get_visible_maddrs(latest=True))
    except ValueError:  # a node that listens nowhere
        return ()


async def known_nodes(_dht: DHT, node: DHTNode) -> int:
    return len(node.protocol.routing_table.uid_to_peer_id)


async def news(
    dht: RunDHT,
    _node: DHTNode,
    known: Mapping[str, Collection[bytes]],
    thorough: bool,
    timeout_s: float,
) -> dict[str, list[Entry]]:
    """The values under each key that are not among the known marks (keepers.py)."""
    keys = {DHTID.generate(key): key for key in known}
    asked = {key_id: known[key] for key_id, key in keys.items()}
    found = await dht.keepers.news(asked, thorough=thorough, timeout_s=timeout_s)
    return {keys[key_id]: entries for key_id, entries in found.items()}


async def store_values(
    dht: RunDHT, _node: DHTNode, values: tuple[StoredValue, ...], timeout_s: float
) -> bool:
    """Give these values to the keepers of their keys; whether all were taken in time."""
    entries = {
        DHTID.generate(each.key): Entry(each.subkey, pack(each.value), each.expires_at)
        for each in values
    }
    try:
        return await asyncio.wait_for(dht.keepers.store(entries), timeout_s)
    except asyncio.TimeoutError:
        return False


async def declare(dht: RunDHT, node: DHTNode, key: str, subkey: bytes, expires_at: float) -> bool:
    """Say, signed by this node, that its peer looks for the group of a key."""
    protocol: Any = node.protocol
    key_id, looking = DHTID.generate(key), pack(True)
    record = DHTRecord(key_id.to_bytes(), pack(subkey), looking, expires_at)
    entry = Entry(subkey, protocol.record_validator.sign_value(record), expires_at)
    try:
        return await asyncio.wait_for(dht.keepers.store({key_id: entry}), QUESTION_LIMIT_S)
    except asyncio.TimeoutError:
        return False


async def declared(dht: RunDHT, _node: DHTNode, key: str) -> dict[bytes, float]:
    """The peers that said so under a key, in bytes of peer ids, and when that expires."""
    found = await dht.keepers.everything(DHTID.generate(key), timeout_s=QUESTION_LIMIT_S)
    return {each.subkey: each.expires_at for each in found if each.subkey}


async def who_answers(
    _dht: DHT, node: DHTNode, peers: tuple[str, ...], timeout_s: float, *, one: bool = False
) -> frozenset[str]:
    """Those of these peers that answer a ping in time; `one`: the first that does."""

    async def ping(peer: str) -> str | None:
        node_id = await node.protocol.call_ping(PeerID.from_base58(peer))
        return None if node_id is None else peer

    answered = set[str]()
    with contextlib.suppress(asyncio.TimeoutError):
        for call in asyncio.as_completed(map(ping, peers), timeout=timeout_s):
            if (peer := await call) is not None:
                answered.add(peer)
                if one:
                    break
    return frozenset(answered)


async def meet(dht: DHT, node: DHTNode, peers: tuple[str, ...], timeout_s: float) -> bool:
    """Whether the node knows another one; while it does not, these are pinged again and again.

    hivemind pings each of them once as it starts, and a machine that is busy answers too late.
    """
    known = node.protocol.routing_table.uid_to_peer_id
    loop = asyncio.get_running_loop()
    end = loop.time() + timeout_s
    while not known and loop.time() < end:
        answered = await who_answers(dht, node, peers, end - loop.time(), one=True)
        await asyncio.sleep(PAUSE_S)  # a task of its own enters the peer that answers
        if answered and known:
            with contextlib.suppress(asyncio.TimeoutError):
                neighbours = node.find_nearest_nodes([node.node_id])
                await asyncio.wait_for(neighbours, max(PAUSE_S, end - loop.time()))
    return bool(known)


LOCK_S = 1.0  # that an answer takes at most to be written
CLOSE_GRACE_S = 4.0
ANSWER_LIMIT_S = 2.0  # a frozen node keeps every search that meets it waiting for so long
QUESTION_LIMIT_S = 10.0
ASKING_SHARE = 0.9  # of a read's time is the search; the rest brings back what it has found
START_MARGIN_S = 5.0
POLL_S = 0.2
CLEANUP_PATIENCE_S = 3.0
LOST_REQUEST_S = 10.0  # longer than it takes to see that the main process is gone, and to tidy up


class NoAnswer(EnvironmentFault):
    """The DHT process did not answer in time or is gone."""


def open_dht(
    *,
    identity: Identity,
    bootstraps: Sequence[str],
    listen: Sequence[str],
    announce: Sequence[str],
    client_mode: bool,
    validator: RunRecordValidator,
    clock: RunClock,
    startup_s: float = 60.0,
    alone: bool = False,
    leads_time: bool = False,
    keeps_all: bool = False,
    find_reach: FindReach | None = None,
    fallback: FallbackPeers = NO_FALLBACK,
) -> RunDHT:
    """Start a node and wait until it has joined; without bootstraps it is the first of its swarm.

    `alone`: start although no bootstrap can be reached; they are tried again all the time.
    `leads_time`: the others follow this node's clock, not it theirs.
    `keeps_all`: it is a bootstrap, and keeps what is under any key.
    `find_reach`: asks others whether they reach this node; where they do not it only dials out.
    `fallback`: peers to join by, and to ask the time, instead of the bootstraps.
    Call it before CUDA is touched. Raises `InvalidInput` for an address that is none,
    `EnvironmentFault` when a port is in use, `BootstrapsSilent` when none answers; then nothing is
    left behind.
    """
    deadline = time.monotonic() + startup_s
    for address in announce:
        listen_address(address)
    for address in bootstraps:
        bootstrap_address(address)
    check_ports(listen)
    reachable = fallback.addresses
    try:
        if bootstraps and not fallback:
            reachable = reachable_bootstraps(bootstraps, 0.0 if alone else startup_s)
    except BootstrapsSilent as error:
        if not alone:
            raise
        logger.warning("%s; continuing without it", error)
    clock.install()
    protocol.install()
    streams.install()
    options = DaemonOptions(
        identity=identity,
        bootstraps=tuple(bootstraps),
        reachable=reachable,
        listen=tuple(listen),
        announce=tuple(announce),
        client_mode=client_mode,
        find_reach=find_reach,
        leads_time=leads_time,
        keeps_all=keeps_all,
        startup_s=max(1.0, deadline - time.monotonic()),
        local_network=fallback.local_network or on_local_network(bootstraps),
    )
    folder = node_process.acquire()
    try:
        dht = RunDHT(options, validator, clock, folder)
    except BaseException:
        node_process.release()
        raise
    try:
        dht.start_and_wait(startup_s)
        if reachable and not dht.meets(reachable, max(1.0, deadline - time.monotonic())):
            silent = f"no answer from {', '.join(reachable)}"
            if not alone:
                raise BootstrapsSilent(
                    f"{silent} within {startup_s:.0f} s, though they can be connected to: is "
                    "this machine or theirs overloaded?"
                )
            logger.warning("%s; continuing without it", silent)
    except BaseException:
        dht.close()
        raise
    return dht


class RunDHT(DHT):
    """hivemind's DHT with an owner, deadlines and a clean end. Made by `open_dht`.

    local_network: whether its swarm is one of a local network, see `on_local_network`. refused:
    what its node refuses of others, by reason.
    """

    def __init__(
        self,
        options: DaemonOptions,
        validator: RunRecordValidator,
        clock: RunClock,
        socket_folder: Path,
    ):
        self._options = options
        self._clock = clock
        self._socket_folder = socket_folder
        self._main_pid = os.getpid()
        self._ended = False
        self.reached = Reachability()  # as the child knows it
        self.local_network = options.local_network
        self.refused = validator.refused
        forking = multiprocessing.get_context("fork")
        self._sending = forking.RLock()
        self._daemon_pid = forking.RawValue("i", 0)
        super().__init__(
            list(options.reachable) or None,
            start=False,
            record_validators=[validator],
            client_mode=options.client_mode,
            wait_timeout=ANSWER_LIMIT_S,
            # A peer that comes back is the same node; else its old one answers stores a second time
            # with "I have that already", which looks like a refusal.
            node_id=DHTID.generate(source=peer_id_bytes_of(options.identity.public_key)),
            # A clock that is off has been corrected; one odd bootstrap must not keep a peer out.
            strict=False,
            # It would end at the first ping that comes too late; `meets` pings again.
            ensure_bootstrap_success=False,
            # Cached answers of others are taken at their word for their expiry, and reads that
            # want the latest ask the network anyway.
            cache_locally=False,
            cache_nearest=0,
            cache_on_store=False,
        )
        self._outer_pipe: Any = SharedPipe(self._outer_pipe, self._sending)

    @functools.cached_property
    def keepers(self) -> Keepers:
        """In the child: which nodes keep which keys."""
        return Keepers(self._node, self.bootstraps, keeps_all=self._options.keeps_all)

    @property
    def p2pd_pid(self) -> int:
        return self._daemon_pid.value

    def carried_bytes(self) -> int:
        """What p2pd has sent, and handed on of what it received, since it started.

        The kernel counts what it wrote, to other peers and to its own. Headers of packets are not
        in it: they add a tenth to bulk, two fifths where nothing but small messages flows.
        """
        try:
            lines = Path(f"/proc/{self.p2pd_pid}/io").read_text().splitlines()
        except OSError:  # it has ended
            return 0
        return next((int(line[7:]) for line in lines if line.startswith("wchar: ")), 0)

    def start_and_wait(self, timeout_s: float) -> None:
        """Fork the child and wait for it to join; raises `EnvironmentFault`."""
        freeze_for_fork()
        # The child must not meet a Ctrl-C before it has set its own handlers.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            self.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        # Without this, an interpreter that ends by an error would wait for the child for ever.
        atexit.register(self.close)
        try:
            # The child knows better what is missing, so it may give up first.
            self._result(self._ready, timeout_s + START_MARGIN_S)
        except NoAnswer as error:
            raise EnvironmentFault(
                f"the DHT node did not start ({error}): is this machine overloaded?"
            ) from error
        except DilocoxError:
            raise
        except Exception as error:
            raise EnvironmentFault(f"the DHT node did not start ({error})") from error

    def meets(self, bootstraps: Sequence[str], timeout_s: float) -> bool:
        """Whether one of the bootstraps lets this node in; they are asked until one does."""
        peers = tuple({bootstrap_address(address).peer_id for address in bootstraps})
        return self._ask(meet, timeout_s + START_MARGIN_S, peers=peers, timeout_s=timeout_s)

    @property
    def running(self) -> bool:
        """Whether child and p2pd live; when they have died, only a new node helps."""
        return not self._ended and self.is_alive()

    async def replicate_p2p(self) -> P2P:
        """As hivemind's, one handle to p2pd for each process; raises `NoAnswer`, where hivemind's
        waits for a node for ever that has just died."""
        if self._p2p_replica is None or self._origin_pid != os.getpid():
            try:
                address = daemon_address(self, QUESTION_LIMIT_S)
            except FutureTimeout as error:
                raise NoAnswer("the DHT process did not say where p2pd listens") from error
            self._origin_pid, self._p2p_replica = os.getpid(), await P2P.replicate(address)
        return self._p2p_replica

    def find_news(
        self, known: Mapping[str, Collection[bytes]], *, thorough: bool, timeout_s: float
    ) -> dict[str, list[Entry]]:
        """The values under each key that are not among its known marks; keys that nobody answered
        for in time are left out. `thorough`: all are asked that keep a key, not one of them.
        Raises `NoAnswer`.
        """
        return self._ask(
            news,
            timeout_s,
            known={key: tuple(marks) for key, marks in known.items()},
            thorough=thorough,
            timeout_s=ASKING_SHARE * timeout_s,
        )

    def declare(self, key: str, subkey: bytes, expires_at: float) -> Any:
        """A future for `declare`, of any process and event loop."""
        asked = functools.partial(declare, key=key, subkey=subkey, expires_at=expires_at)
        return self.run_coroutine(asked, return_future=True)

    def declared(self, key: str) -> Any:
        """Likewise for `declared`."""
        return self.run_coroutine(functools.partial(declared, key=key), return_future=True)

    def put_many(self, values: Sequence[StoredValue], *, timeout_s: float) -> bool:
        """Store values, with one call to each node that keeps some of them; whether the DHT
        accepted all of them. Raises `NoAnswer`.
        """
        for each in values:
            if len(each.value) > MAX_VALUE_BYTES:
                raise ValueError(f"{len(each.value)} bytes; the DHT takes {MAX_VALUE_BYTES}")
        limit_s = ASKING_SHARE * timeout_s
        return self._ask(store_values, timeout_s, values=tuple(values), timeout_s=limit_s)

    def _ask(self, question: Callable[..., Any], limit_s: float, **arguments: Any) -> Any:
        """The answer of one of the coroutines above in time; raises `NoAnswer`."""
        deadline = time.monotonic() + limit_s
        if not self.running or not self._sending.acquire(timeout=max(0.0, limit_s)):
            raise NoAnswer("the DHT process is gone or stuck")
        try:
            if not self._takes_requests(max(0.0, deadline - time.monotonic())):
                raise NoAnswer("the DHT process is gone or stuck")
            asked = functools.partial(question, **arguments)
            future = self.run_coroutine(asked, return_future=True)
        finally:
            self._sending.release()
        try:
            return self._result(future, deadline - time.monotonic())
        except NoAnswer:
            raise
        except Exception as error:  # the node choked on something that a stranger sent it
            raise NoAnswer(f"the DHT process failed ({error!r})") from error

    def _takes_requests(self, timeout_s: float) -> bool:
        """Whether the request pipe has room; writing into a full one would block for ever."""
        poll = select.poll()
        try:
            poll.register(self._outer_pipe.fileno(), select.POLLOUT)
        except (OSError, ValueError):  # closed
            return False
        return bool(poll.poll(timeout_s * 1000))

    def visible_addresses(self) -> tuple[str, ...]:
        """Multiaddrs, with peer id, that this node is reached at as far as it knows."""
        return self._ask(visible_addresses, QUESTION_LIMIT_S)

    def reach(self) -> Reachability:
        return self._ask(reach, QUESTION_LIMIT_S)

    @property
    def bootstraps(self) -> frozenset[str]:
        """Peer ids of the bootstraps that this node was given."""
        return frozenset(bootstrap_address(each).peer_id for each in self._options.bootstraps)

    def bootstrap_answers(self, timeout_s: float) -> bool:
        """Whether one of the bootstraps answers a ping; true for a node without bootstraps."""
        if not self.bootstraps:
            return True
        with contextlib.suppress(NoAnswer):
            return bool(self.answering_bootstraps(timeout_s, one=True))
        return False

    def answering_bootstraps(self, timeout_s: float, *, one: bool = False) -> frozenset[str]:
        """Peer ids of the bootstraps that answer a ping; one: of the first. Raises `NoAnswer`."""
        peers = tuple(self.bootstraps)
        return self._ask(who_answers, timeout_s + 1.0, peers=peers, timeout_s=timeout_s, one=one)

    def known_nodes(self, timeout_s: float = QUESTION_LIMIT_S) -> int:
        """How many other nodes this one knows."""
        return self._ask(known_nodes, timeout_s)

    def close(self) -> None:
        """End the child and p2pd within five seconds and remove the sockets; twice does no harm."""
        if self._ended or os.getpid() != self._main_pid:
            return
        self._ended = True
        atexit.unregister(self.close)
        if self.is_alive() and self._takes_requests(0):
            with contextlib.suppress(OSError):
                self._outer_pipe.send(("_shutdown", [], {}))
            self.join(CLOSE_GRACE_S)
        if self.is_alive():
            self.kill()
            self.join(1.0)
        # A child that was killed in the middle of an answer still has the lock under which all that
        # are forked from here write theirs: those of later ones would never come.
        lock = vars(MPFuture)["_update_lock"]
        if lock.acquire(timeout=LOCK_S):
            lock.release()
        else:
            MPFuture.reset_backend()
        kill_daemon(self.p2pd_pid)
        node_process.release()

    shutdown = close  # what hivemind calls it

    def run(self) -> None:
        """The child: p2pd first, then hivemind's node on top of it, until told to stop."""
        leave_the_terminal()
        watch = threading.Thread(
            target=watch_parent, args=(self._main_pid, self._end), name="parent watch", daemon=True
        )
        watch.start()
        protocol.RunProtocol.refused = self.refused
        owner = DaemonOwner(self._options, self._clock, on_death=self._end)
        try:
            owner.start()
            self._daemon_pid.value = owner.p2p._child.pid
            self.reached = owner.reach
            self.kwargs["client_mode"] = owner.client_mode
            self._daemon_listen_maddr = owner.p2p.daemon_listen_maddr
            self._inner_pipe: Any = BlockingPipe(self._inner_pipe)
            super().run()
        except DilocoxError as error:
            with contextlib.suppress(InvalidStateError):  # nobody waits any more
                self._ready.set_exception(error)
        except (EOFError, OSError):  # half a request: the main process was killed, or it soon is
            watch.join(LOST_REQUEST_S)  # which ends this process and tidies up
            raise
        finally:
            owner.stop()

    def _end(self) -> None:
        """The main process or p2pd is gone: go, too, and leave nothing if nobody else can tidy up.

        The main process sees that we end, and removes what is left itself. If it is gone, p2pd goes
        here, which calls this a second time from the thread that watches it.
        """
        if os.getppid() != self._main_pid:
            kill_daemon(self._daemon_pid.value)
            for folder in (self._socket_folder, node_process.shared_memory_folder()):
                node_process.remove(folder, CLEANUP_PATIENCE_S)
        os._exit(1)

    async def _run_coroutine(self, coro: Any, future: Any) -> None:
        """As hivemind's, but quiet where nobody waits for the answer any more."""
        try:
            answer, error = await coro(self, self._node), None
        except Exception as raised:  # noqa: BLE001 - it is the caller's
            answer, error = None, raised
        with contextlib.suppress(InvalidStateError):
            future.set_result(answer) if error is None else future.set_exception(error)

    def _result(self, future: MPFuture[Any], timeout_s: float) -> Any:
        deadline = time.monotonic() + timeout_s
        alive = True
        while not future.done():
            left = deadline - time.monotonic()
            if left <= 0 or not alive:
                future.cancel()
                raise NoAnswer(
                    f"the DHT process did not answer within {timeout_s:.0f} s"
                    if alive
                    else "the DHT process has ended"
                )
            # What the child said last may arrive just after its end: look once more.
            alive = self.is_alive()
            with contextlib.suppress(FutureTimeout):
                future.exception(min(left, POLL_S))
        return future.result()


def daemon_address(dht: DHT, timeout_s: float) -> Any:
    """Where the node's p2pd listens for its clients; raises TimeoutError.

    hivemind's `replicate_p2p` hands out one handle to all of a process, tied to one event loop.
    """
    ask = DHT._get_p2p_daemon_listen_maddr  # pyright: ignore[reportPrivateUsage]
    asked: Any = dht.run_coroutine(ask, return_future=True)
    return asked.result(timeout_s)

"""The network thread of a peer: what it says to the other members of its replica, and hears.

What: one thread with an event loop and a handle of its own to this node's p2pd. It answers and asks
short requests (ping, reserve, assign, release: a fresh stream, one frame there and one back) and
keeps the links to the two neighbours (link.py). What comes over links goes into `inbox`.
Why a thread: torch computes in the main thread for seconds at a time, and the neighbours must hear
meanwhile that this peer lives.

A link is asked for on both sides, with one side dialling. The dialler's first frame is a `hello`;
it is tried again until the other side knows the link too and says yes. libp2p has proved by then
which peer is at the other end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dilocox.dht.errors import EnvironmentFault
from dilocox.dht.node import RunDHT, daemon_address
from dilocox.dht.rpc import MARGIN_S, LoopThread
from dilocox.pipeline.frames import Frame, encode_prefix_and_header
from dilocox.pipeline.link import (
    FLUSH_S,
    Answer,
    Backlog,
    Broken,
    Inbox,
    Link,
    LinkFacts,
    LinkKey,
    LinkLimits,
    Stream,
    Traffic,
    Wake,
)
from dilocox.pipeline.relayed_requests import RelayedRequests
from dilocox.pipeline.requests import RequestServer, StrangerLimits, Unreachable

logger = logging.getLogger(__name__)

START_LIMIT_S = 20.0
DIAL_PAUSE_S = 0.1


class Network:
    """Requests and links of one peer; made after all forks, and closed before its DHT node.

    answer: called with (peer id, request) for each request, in the network thread: it must be
    quick, and returns a frame of kind "yes" or "no". admits: called in the same way with a `hello`;
    returns the link of this peer that it is for, or None to refuse.
    limits: of links. relayed, relays, knows, strangers: see requests.py; used in the network
    thread.
    thread: in which it runs.
    """

    def __init__(
        self,
        dht: RunDHT,
        *,
        run: str,
        limits: LinkLimits,
        relayed: RelayedRequests,
        answer: Callable[[str, Frame], Frame],
        admits: Callable[[str, Frame], LinkKey | None],
        relays: Callable[[str], Sequence[str]],
        knows: Callable[[str], bool] = lambda peer: False,
        strangers: StrangerLimits | None = None,
    ):
        self.inbox = Inbox()
        self._dht = dht
        self._limits = limits
        self._admits = admits
        self._traffic = Traffic()
        self._server = RequestServer(
            f"dilocox.{run}.replica",
            self._traffic,
            relayed=relayed,
            answer=answer,
            welcome=self._welcome,
            relays=relays,
            knows=knows,
            limits=strangers or StrangerLimits(),
        )
        self._links: dict[LinkKey, Link] = {}
        self._backlogs: dict[LinkKey, Backlog] = {}  # also of ended links, until they are dropped
        self._lock = threading.Lock()  # of the tables; a link itself belongs to the loop
        self._lives: set[asyncio.Task[None]] = set()
        self._daemon_address: Any = None
        self.thread = LoopThread(
            "network", begin=lambda: self._server.open(self._daemon_address), end=self._end
        )

    # ---- from any thread: life -------------------------------------------------------------------
    def start(self, timeout_s: float = START_LIMIT_S) -> Network:
        """Begin to answer; raises `EnvironmentFault` if p2pd or the DHT process does not."""
        deadline = time.monotonic() + timeout_s
        try:
            self._daemon_address = daemon_address(self._dht, timeout_s)
        except Exception as error:
            self.close()
            raise EnvironmentFault(
                f"p2pd did not say within {timeout_s:.0f} s where it listens ({error!r}): is this "
                "machine overloaded?"
            ) from error
        self.thread.start(max(0.0, deadline - time.monotonic()))
        return self

    def close(self) -> None:
        """Drop all links and end the thread within three seconds; twice does no harm."""
        self.drop_links()
        self.thread.close()

    def __enter__(self) -> Network:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def sent_bytes(self) -> int:
        return self._traffic.sent_bytes

    @property
    def received_bytes(self) -> int:
        return self._traffic.received_bytes

    @property
    def refused(self) -> Counter[str]:
        """How many frames and streams were refused, by kind."""
        return self._traffic.refused.copy()

    def round_trips_s(self) -> dict[str, float]:
        """Seconds to each neighbour and back, by side; of links that stand and were measured."""
        with self._lock:
            links = list(self._links.values())
        measured = {link.key.side: link.facts().round_trip_s for link in links}
        return {side: seconds for side, seconds in measured.items() if seconds > 0}

    @property
    def running(self) -> bool:
        return self.thread.running

    def wake(self) -> None:
        """End a `get` of the inbox with a `Wake`."""
        self.inbox.put(Wake())

    # ---- from any thread: requests ---------------------------------------------------------------
    def request_all(
        self, frames: Mapping[str, Frame], timeout_s: float
    ) -> dict[str, Answer | None]:
        """Ask peers at the same time, each its own question; None for one that does not answer."""
        asking = self._server.ask_all(dict(frames), timeout_s)
        with contextlib.suppress(ConnectionError):  # the thread is busy or has ended
            return self.thread.ask(asking, timeout_s + MARGIN_S)
        return dict.fromkeys(frames)

    # ---- from any thread: links ------------------------------------------------------------------
    def open_link(
        self, key: LinkKey, peer: str, hello: Frame | None, opening_s: float = 0.0
    ) -> None:
        """Dial a neighbour with this until it admits the link, or (None) let it dial: `Opened`, or
        in the end `Broken` (missing). opening_s: what that may take, where it is more than the
        limits say.
        """
        opening_s = max(opening_s, self._limits.opening_s)
        link = Link(
            key,
            peer,
            loop=self.thread.loop,
            limits=replace(self._limits, opening_s=opening_s),
            inbox=self.inbox,
            traffic=self._traffic,
            expected=hello is None,
        )
        with self._lock:
            self._drop(key)
            self._links[key], self._backlogs[key] = link, link.backlog
        self.thread.post(lambda: self._give_life(link, hello))

    def send(self, key: LinkKey, frame: Frame) -> None:
        """Queue a frame, also before the link stands; nothing happens if it is gone.

        More than `max_queued` frames break the link (stuck). Raises ValueError for a frame that no
        receiver would take.
        """
        link = self._links.get(key)
        if link is not None:
            link.post(frame)

    def break_link(self, key: LinkKey, reason: str) -> None:
        """End a link over which came what cannot be: counted in `refused`, told as `Broken`."""
        link = self._links.get(key)
        if link is not None:
            self.thread.post(lambda: link.refuse(reason))

    def drop_links(self) -> None:
        """End links; the inbox gives nothing of them from now on, and no `Broken`, also of those
        that have ended.

        Frames without a tensor that were sent before may still leave for a second.
        """
        with self._lock:
            for key in list(self._backlogs):
                self._drop(key)

    def link_facts(self, key: LinkKey) -> LinkFacts:
        """What was measured of a link; nothing if it is gone."""
        link = self._links.get(key)
        return LinkFacts() if link is None else link.facts()

    def _drop(self, key: LinkKey) -> None:
        if key in self._backlogs:
            self._backlogs.pop(key).dropped = True
        if key in self._links:
            self.thread.post(self._links.pop(key).finish)

    # ---- in the network thread: links ------------------------------------------------------------
    def _give_life(self, link: Link, hello: Frame | None) -> None:
        task = self.thread.loop.create_task(self._live(link, hello))
        self._lives.add(task)
        task.add_done_callback(self._lives.discard)

    async def _live(self, link: Link, hello: Frame | None) -> None:
        opening = _adopted(link) if hello is None else self._dial(link, hello)
        try:
            kind = await link.live(opening)
        except Exception:  # the computing thread waits for word of this link
            logger.exception("the link to %s failed", link.peer)
            kind = "closed"
        with self._lock:
            if self._links.get(link.key) is link:
                del self._links[link.key]
        if kind is not None:
            broken = Broken(link.key, kind, link.unheard_s)
            self.inbox.put(broken, link.backlog)

    async def _dial(self, link: Link, hello: Frame) -> Stream:
        while True:
            try:
                stream = await self._server.dial(link.peer, hello)
                if stream is not None:
                    return stream
            except Unreachable as error:
                logger.debug("no link yet: %s", error)
            await asyncio.sleep(DIAL_PAUSE_S)

    async def _welcome(self, peer: str, hello: Frame, stream: Stream) -> bool:
        """Answer a neighbour that dials; whether its stream became a link."""
        link = self._link_for(peer, hello)
        kind = "no" if link is None else "yes"
        answer = Frame(kind=kind, replica=hello.replica, epoch=hello.epoch)
        await stream.write(encode_prefix_and_header(answer))
        if link is None or not link.is_awaited:
            return False
        link.adopted.set_result(stream)
        return True

    def _link_for(self, peer: str, hello: Frame) -> Link | None:
        key = self._admits(peer, hello)
        link = None if key is None else self._links.get(key)
        if link is None or not link.is_awaited or link.peer != peer:
            return None
        fits = (hello.replica, hello.epoch) == (link.key.replica, link.key.epoch)
        return link if fits else None

    # ---- in the network thread: life -------------------------------------------------------------
    async def _end(self) -> None:
        """Links first, while p2pd still carries their last words."""
        if self._lives:
            await asyncio.wait(self._lives, timeout=FLUSH_S + 0.1)
        await self._server.close()


async def _adopted(link: Link) -> Stream:
    return await link.adopted

"""A peer rests while its volunteer does not want it to take part: paused, outside its hours
(hours.py), with this month's traffic used up, or, with --idle-only, while others use the machine
(`Allowance.rest`).

A peer that trains leaves as at SIGTERM, then its process starts anew and waits here, before it has
imported or opened anything: no DHT, no replica, no GPU. It still shows its page, answers /metrics
and /healthz, and says in status.json why it rests and when it goes on. Pausing is a file in the
state folder, so it outlives a restart.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, cast, get_args

import typer

from dilocox import __version__
from dilocox.dht.errors import EnvironmentFault, InvalidInput
from dilocox.dht.files import write_atomically
from dilocox.dht.manifest import PROTOCOL_VERSION
from dilocox.peer.hours import Local, Reason, Rest, next_month
from dilocox.peer.http_pages import (
    RUN_LABEL,
    MetricSpec,
    MetricTable,
    Pages,
    one_of,
    served,
    usual_pages,
)
from dilocox.peer.options import GB, PauseOptions, PeerOptions, ResumeOptions
from dilocox.peer.os_process import StopSignal
from dilocox.peer.process.idle import IdleWatch, Machine
from dilocox.peer.process.local_page import LocalPage
from dilocox.peer.state_folder import STATES, STATUS_FILE, StateFolder

logger = logging.getLogger(__name__)

PREFIX = "dilocox_"  # of a peer's metrics
REASONS: tuple[Reason, ...] = get_args(Reason)
CAN_WAIT: tuple[Reason, ...] = ("hours", "traffic")  # until an inner step has ended
WRITE_PERIOD_S = 60.0
MONTHS_KEPT = 12
LOOK_S = 1.0
CLOSE_LIMIT_S = 5.0


def month_of(now: float) -> str:
    """The calendar month in UTC, as in 2026-11."""
    return datetime.fromtimestamp(now, timezone.utc).strftime("%Y-%m")


class Allowance:
    """What a volunteer allows a peer, and how much of it is used; of one process at a time.

    Traffic is what the peer has sent and received in each calendar month (UTC), counted at libp2p's
    daemon (`RunDHT.carried_bytes`), the upkeep of the DHT included. Its file in the state folder is
    written at most once a minute, so that a peer that is killed forgets no more than that.
    """

    def __init__(
        self,
        options: PeerOptions,
        clock: Callable[[], float] = time.time,
        local: Local = datetime.fromtimestamp,
        *,
        working: bool = True,
        machine: Machine | None = None,
    ):
        """clock: seconds since the epoch. local: the local time of such seconds. working: whether
        the peer trains now. machine: what others use, where that matters. Raises EnvironmentFault
        where the file of the traffic is damaged.
        """
        self._options = options
        self._clock = clock
        self._local = local
        self._idle: IdleWatch | None = None
        if options.idle_only:
            share = options.idle_share / 100
            self._idle = IdleWatch(machine or Machine(), share=share, working=working)
        self._file = StateFolder(options.state).traffic
        self._months = _read_months(self._file)
        self._total = 0
        self._written_at = float("-inf")
        self._unwritten = False

    def rest(self) -> Rest | None:
        """Why this peer should rest now, the reason that lasts longest first; None if it should
        not."""
        now, hours, limit = self._clock(), self._options.hours, self.limit_bytes
        if StateFolder(self._options.state).paused:
            return Rest(reason="paused", words="paused, until `dilocox resume`", until=None)
        if limit is not None and self.used_bytes >= limit:
            used = f"{self.used_bytes / GB:.3g} GB of this month's {limit / GB:g} GB are used"
            return Rest(reason="traffic", words=used, until=next_month(now))
        if hours is not None and (start := hours.next_start(now, self._local)) is not None:
            return Rest(reason="hours", words=f"outside the hours {hours.shown}", until=start)
        return self._idle and self._idle.rest

    def look(self) -> None:
        """See what else happens on this machine, where that matters; may take seconds."""
        if self._idle is not None:
            self._idle.look()

    def page(self) -> LocalPage:
        """The page of the peer that is allowed this."""
        return LocalPage(self._options, self.rest, lambda: self.used_bytes)

    @property
    def limit_bytes(self) -> float | None:
        """What may be sent and received in a month; None without a limit."""
        return self._options.monthly_traffic_bytes

    @property
    def used_bytes(self) -> int:
        """Sent and received in this month."""
        return self._months.get(month_of(self._clock()), 0)

    def count(self, total: int, *, last: bool = False) -> None:
        """Take in the bytes that this process has sent and received since it started; warns where
        that cannot be written. `last`: nothing follows.
        """
        now = self._clock()
        if total > self._total:
            month = month_of(now)
            self._months[month] = self._months.get(month, 0) + total - self._total
            self._total = total
            self._unwritten = True
        due = last or not 0 <= now - self._written_at < WRITE_PERIOD_S
        if not (due and self._unwritten):
            return
        self._written_at = now  # a full disk is not tried more often
        newest = sorted(self._months)[-MONTHS_KEPT:]
        kept = {month: self._months[month] for month in newest}
        try:
            write_atomically(self._file, (json.dumps(kept, indent=2) + "\n").encode())
            self._unwritten = False
        except EnvironmentFault as error:
            logger.warning("this month's traffic is not kept: %s", error)


def _read_months(path: Path) -> dict[str, int]:
    try:
        kept = cast("dict[str, Any]", json.loads(path.read_bytes()))
        return {month: int(total) for month, total in kept.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise EnvironmentFault(
            f"{path}: this month's traffic cannot be read ({error}); remove the file, then it is "
            "counted from now on"
        ) from error


@contextmanager
def rest_watch(
    allowance: Allowance, traffic: Callable[[], int], stop: StopSignal, *, look_s: float = LOOK_S
) -> Generator[None]:
    """A context in which a peer takes part, and is asked to leave when it should rest.

    traffic: bytes sent and received since the start. look_s: between two looks.
    """
    closing = threading.Event()

    def watch() -> None:
        while not closing.wait(look_s):
            try:
                allowance.count(traffic())
                allowance.look()
                rest = allowance.rest()
            except Exception:  # else the volunteer's limits would hold no more
                logger.exception("whether to rest is not known: looking again")
                continue
            if rest is None:
                continue
            patient = rest.reason in CAN_WAIT
            if not stop.event.is_set() or (stop.patient and not patient):
                logger.info("leaving to rest: %s", rest.words)
                stop.leave(patient=patient)

    thread = threading.Thread(target=watch, name="rest", daemon=True)
    thread.start()
    try:
        yield
    finally:
        closing.set()
        thread.join(CLOSE_LIMIT_S)
        allowance.count(traffic(), last=True)


def wait_until_allowed(options: PeerOptions, *, look_s: float = LOOK_S) -> bool:
    """Rest as long as the volunteer wants this peer to; False if a signal came meanwhile."""
    allowance = Allowance(options, working=False)
    if allowance.rest() is None:
        return True
    resting = Resting(options, allowance)
    with StateFolder(options.state).locked(), StopSignal() as stop:
        page = allowance.page()
        at = options.metrics_host, options.metrics_port
        with served(*at, resting.pages(), answer=page.answer, query=page.query):
            while resting.look():
                stop.event.wait(look_s)
        return True
    logger.info("left: stopped on request, while it rested")
    return False


class Resting:
    """What is shown of a peer that rests. run, rest, allowance: what its metrics read."""

    def __init__(self, options: PeerOptions, allowance: Allowance):
        self.run = options.invite.run_id
        self.allowance = allowance
        self.rest: Rest | None = None
        self._options = options
        self._stage, self._status = _last_place(options)

    def look(self) -> bool:
        """Whether it still rests; says so where that changed."""
        self.allowance.look()
        rest = self.allowance.rest()
        if rest == self.rest:
            return rest is not None
        self.rest = rest
        if rest is None:
            logger.info("going on")
        elif rest.reason == "paused":
            state = self._options.state
            logger.info("resting: %s; `dilocox resume --state %s` ends it", rest.reason, state)
        elif rest.until is None:
            logger.info("resting: %s; going on after a quiet minute", rest.words)
        else:
            until = datetime.fromtimestamp(rest.until).strftime("%Y-%m-%d %H:%M")
            logger.info("resting: %s; going on at %s", rest.words, until)
        self._write_status(rest)
        return rest is not None

    def pages(self) -> Pages:
        metrics = MetricTable(
            specs=METRICS, source=lambda: self, prefix=PREFIX, labels={"stage": self._stage}
        )
        return usual_pages(metrics, {}, lambda: f"resting: {self.rest.words if self.rest else ''}")

    def _write_status(self, rest: Rest | None) -> None:
        if rest is None and self._status.parent == self._options.state:
            self._status.unlink(missing_ok=True)  # from now on it is in the folder of a stage
            return
        try:
            known = cast("dict[str, Any]", json.loads(self._status.read_bytes()))
        except (OSError, ValueError):
            known = {}
        for name in ("resting", "resumes_at"):
            known.pop(name, None)
        known |= {"state": "joining", "head": "", "members": [], "tokens_per_s": 0.0}
        if rest is not None:
            known |= {"state": "resting", "resting": rest.words, "resumes_at": rest.until}
        write_atomically(self._status, json.dumps(known).encode(), durable=False)


ALWAYS: tuple[MetricSpec[Any], ...] = (
    MetricSpec(
        "build_info",
        "Version, protocol and run of this peer.",
        lambda p: {(__version__, PROTOCOL_VERSION, p.run[:RUN_LABEL]): 1},
        ("version", "protocol", "run"),
    ),
    MetricSpec(
        "month_traffic_bytes",
        "Bytes sent and received in this calendar month (UTC).",
        lambda p: p.allowance.used_bytes,
    ),
    MetricSpec(
        "month_traffic_limit_bytes",
        "Bytes that may be sent and received in a calendar month.",
        lambda p: p.allowance.limit_bytes,
    ),
)
"""Of a peer that trains, too: of whatever has its run and its allowance."""

# In the names and labels of metrics.py, whose imports would take the memory of a peer.
_Spec = MetricSpec[Resting]
METRICS = (
    *ALWAYS,
    _Spec("ready", "Whether this peer takes part in the run.", lambda _: 0),
    _Spec(
        "peer_state",
        "What this peer does, one of its states.",
        lambda _: one_of("resting", STATES),
        ("state",),
    ),
    _Spec(
        "resting",
        "Why this peer rests.",
        lambda p: one_of(p.rest.reason if p.rest else "", REASONS),
        ("reason",),
    ),
    _Spec(
        "resting_until_timestamp_seconds",
        "Time at which this peer goes on.",
        lambda p: p.rest and p.rest.until,
    ),
)


def _last_place(options: PeerOptions) -> tuple[str, Path]:
    """The stage that this peer hosts or hosted, empty if none is known, and its status.json."""
    folder, run = StateFolder(options.state), options.invite.run_id
    found = folder.stages(run)
    if options.stage.isdecimal():
        stage: int | None = int(options.stage)
    elif (stage := folder.noted_stage(run)) is None and len(found) == 1:
        (stage,) = found
    if stage is None:
        return "", options.state / STATUS_FILE
    own = folder.run(run, stage)
    return str(stage), (own if own.is_dir() else options.state) / STATUS_FILE


# ---- the commands --------------------------------------------------------------------------------
def pause(options: PauseOptions) -> int:
    """Let the peer of a folder rest until `resume`; the exit code. Raises InvalidInput where it is
    no peer's, EnvironmentFault where it cannot be written.
    """
    folder, ends = _checked(options.state), f"`dilocox resume --state {options.state}`"
    if folder.paused:
        typer.echo(f"paused already; {ends} ends it")
        return 0
    folder.pause(True)
    typer.echo(
        "paused: the peer leaves the swarm within minutes and stays away, also after a restart, "
        f"until {ends}"
    )
    return 0


def resume(options: ResumeOptions) -> int:
    """Let the peer of a folder take part again; the exit code. Raises as `pause` does."""
    folder = _checked(options.state)
    if not folder.paused:
        typer.echo("it is not paused")
        return 0
    folder.pause(False)
    typer.echo("resumed: a peer that waits goes on within seconds, unless another limit forbids it")
    return 0


def _checked(state: Path) -> StateFolder:
    folder = StateFolder(state)
    if folder.invite.exists():
        raise InvalidInput(f"--state {state}: this is a bootstrap's folder; name the one of a peer")
    if not folder.identity.exists():
        raise InvalidInput(
            f"--state {state}: no peer was started with this folder; name the one that "
            "`dilocox peer` was given as --state"
        )
    return folder

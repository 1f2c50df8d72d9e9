"""Keeps every stage's newest state and records beside the bootstrap, so that none of it is lost
when all peers of a stage leave. Apart from the command, which runs other things too.

It follows what peers claim (archive.py: what happens to one stage, without a thread or a network of
its own; together the two are over 650 lines), gives what it has to any caller by the call that
peers answer too, and claims it, so that joiners find it. It is no peer of any stage: it says
nothing else of itself, and neither averages nor votes.

The DHT is read and written in the bootstrap's thread, as its manifest is (`Archive`). All traffic
with peers is in a thread of its own, with an event loop and a handle to p2pd (`Keeper`). One job
per stage at a time; what fails is logged and tried again with the next claims that are heard, or
later where the disk is at fault.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, AsyncIterator  # noqa: UP035 - hivemind knows this one only

import torch
from hivemind.p2p import P2P, P2PContext
from hivemind.proto import runtime_pb2
from hivemind.utils import timed_storage

from dilocox.dht.errors import EnvironmentFault
from dilocox.dht.manifest import Manifest
from dilocox.dht.node import RunDHT, daemon_address
from dilocox.dht.reachability import PROBE_REFUSALS, Probe
from dilocox.dht.records import ClaimRecord, averaging_prefix, claim_key
from dilocox.dht.rpc import Client, Counts, LoopThread, StageServicer, byte_kind
from dilocox.dht.streams import open_streams
from dilocox.dht.swarm import Swarm
from dilocox.peer.chain.archive import StageArchive
from dilocox.peer.chain.history_keeper import HistoryKeeper
from dilocox.peer.chain.record_check import RecordCheck
from dilocox.peer.chain.store import keep_manifest
from dilocox.peer.chain.uploads import Source, Uploads
from dilocox.pipeline.stage import stage_layout

logger = logging.getLogger(__name__)

START_LIMIT_S = 10.0
STAGES_AT_ONCE = 2  # that are followed; each may hold a record and its decoded mean
UPLOADS_AT_ONCE = 32  # of a stage: all of its peers may have nobody else
FAULT_PAUSE_S = 60.0  # after a full disk or a fault of ours

Claims = Mapping[int, Mapping[str, ClaimRecord]]
"""By stage and peer."""


class ArchiveService(StageServicer):
    """Answers for one stage what an averager answers, as far as it is kept: states and records.

    served: bytes by kind (state, record, the history among them); refused: requests by reason.
    """

    def __init__(
        self,
        find: Callable[[dict[str, Any]], Awaitable[Source | None]],
        served: Counter[str],
        refused: Counter[str],
        knows: Callable[[str], bool] = lambda peer: False,
    ):
        """knows: see `Uploads`."""
        self._find = find
        self._served = served
        self._refused = refused
        self._uploads = Uploads(UPLOADS_AT_ONCE, knows=knows)

    async def rpc_get(
        self, request: runtime_pb2.ExpertRequest, context: P2PContext
    ) -> AsyncIterator[runtime_pb2.ExpertResponse]:
        def pace(want: dict[str, Any], found: Source) -> Callable[[int], Awaitable[None]]:
            async def before_chunk(count: int) -> None:
                self._served[byte_kind(want["what"])] += count

            return before_chunk

        peer = str(context.remote_id)
        answer = self._uploads.answer(request, peer, self._find, refuse=self._refuse, pace=pace)
        async with contextlib.aclosing(answer) as frames:
            async for frame in frames:
                yield frame

    def _refuse(self, reason: str) -> None:
        self._refused[reason] += 1


class Keeper:
    """The thread, the stages that are kept, and their service.

    `claims`: what is to be told of the stages; set whole. `served`, `refused`: see ArchiveService.
    `probe_refused`: what was asked of `Probe`, by reason.
    """

    def __init__(
        self,
        run: str,
        me: str,
        witness: str,
        manifest: Manifest,
        folder: Path,
        history: HistoryKeeper | None = None,
        copies: frozenset[str] = frozenset(),
    ):
        self.claims: Mapping[int, ClaimRecord] = {}
        self.served: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.probe_refused = Counts(PROBE_REFUSALS)
        self._run = run
        self._me = me
        self._witness = witness
        self._copies = copies
        self._manifest = manifest
        self._folder = folder
        self._history = history
        self._paging = asyncio.Semaphore(1)
        self._stages: dict[int, StageArchive] = {}
        self._jobs: dict[int, asyncio.Task[None]] = {}
        self._serving: set[int] = set()  # stages whose service p2pd knows
        self._adopting: asyncio.Task[None] | None = None
        self._between = False  # two revisions: nothing may begin
        self._not_before: dict[int, float] = {}
        self._slots = asyncio.Semaphore(STAGES_AT_ONCE)
        self._replaying = asyncio.Lock()
        self._pool = ThreadPoolExecutor(2, "archive", torch.set_num_threads, (1,))
        # what is asked for does not wait for a state to be moved on, which takes minutes
        self._finds = ThreadPoolExecutor(2, "archive-finds")
        self._working: set[concurrent.futures.Future[Any]] = set()  # in the pool, or about to be
        self._address: Any = None
        self._thread = LoopThread(
            "archive",
            p2p=lambda: P2P.replicate(self._address),
            begin=self._begin,
            end=self._end,
        )

    # ---- in the bootstrap's thread ---------------------------------------------------------------
    @property
    def running(self) -> bool:
        return self._thread.running

    def start(self, address: Any) -> None:
        """Start with the p2pd that listens at this address; raises EnvironmentFault."""
        self._address = address
        self._thread.start(START_LIMIT_S)

    @property
    def rounds(self) -> Mapping[int, int]:
        """The newest round that is kept, by stage; -1 before the first one."""
        return {stage: archive.round for stage, archive in self._stages.copy().items()}

    def hear(self, claims: Claims, *, trains: bool) -> None:
        """What is claimed of each stage that gave an answer. trains: whether the run is neither
        paused nor ended.
        """
        self._thread.post(self._heard, claims, trains)

    def revise(self, manifest: Manifest) -> None:
        """Go on under new rules of the manifest: every stage is taken up anew from the disk."""
        self._thread.post(self._revise, manifest)

    def close(self) -> None:
        self._thread.close()
        for pool in (self._pool, self._finds):
            pool.shutdown(wait=False, cancel_futures=True)

    # ---- in the archive's thread -----------------------------------------------------------------
    async def _begin(self) -> None:
        p2p = self._thread.p2p
        open_streams.refuse = lambda reason: self.refused.update([reason])

        def knows(peer: str) -> bool:
            return any(each.knows(peer) for each in self._stages.values())

        open_streams.knows = knows
        probe = Probe(
            p2p,
            now=timed_storage.get_dht_time,
            refuse=self.probe_refused.add,
            knows=knows,
            bootstraps=None,
        )
        await probe.add_p2p_handlers(p2p)
        self._take_up()

    async def _end(self) -> None:
        if self._adopting is not None:
            self._adopting.cancel()
        await self._put_down()

    def _take_up(self) -> None:
        """Begin with what is on the disk, before anybody claims anything."""
        for stage in range(self._manifest.stages):
            if self._of_stage(stage).exists():
                self._heard({stage: {}}, True)

    async def _put_down(self) -> None:
        for job in self._jobs.values():
            job.cancel()
        await asyncio.gather(*self._jobs.values(), return_exceptions=True)
        for stage, archive in self._stages.items():
            try:
                await archive.close()
            except Exception:  # the others, and new rules, do not wait for it
                logger.exception("archive of stage %d: did not close properly", stage)

    def _revise(self, manifest: Manifest) -> None:
        self._adopting = self._thread.loop.create_task(self._adopt(manifest, self._adopting))

    async def _adopt(self, manifest: Manifest, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])  # however it ended: these rules are newer
        self._between = True
        try:
            await self._put_down()
            self._stages.clear()  # so that nobody is given anything of them any more
            # a thread does not end with the task that waited for it, and folders are about to move
            await asyncio.gather(
                *map(asyncio.wrap_future, self._working.copy()), return_exceptions=True
            )
        finally:
            self._between = False
        self._manifest = manifest
        self._jobs.clear()
        self._not_before.clear()
        self.claims = {}
        self._take_up()

    def _heard(self, claims: Claims, trains: bool) -> None:
        if self._between:
            return
        for stage, of_stage in claims.items():
            if (job := self._jobs.get(stage)) is not None and not job.done():
                continue
            known = stage in self._stages or self._of_stage(stage).exists()
            wanted = known or any(claim.round >= 0 for claim in of_stage.values())
            if wanted and time.monotonic() >= self._not_before.get(stage, 0.0):
                tending = self._tend(stage, of_stage, trains)
                self._jobs[stage] = self._thread.loop.create_task(tending)

    async def _tend(self, stage: int, claims: Mapping[str, ClaimRecord], trains: bool) -> None:
        try:
            async with self._slots:
                archive = self._stages.get(stage) or await self._opened(stage)
                try:
                    await archive.tend(claims, trains=trains)
                finally:
                    self._show(stage, archive.claim)
                if self._history is not None:
                    await self._compute(self._history.credit, stage, archive.rounds_since)
                    if stage == 0:
                        take = partial(self._history.take, claimed=bool(claims.keys() - {self._me}))
                        await self._compute(take, archive.rounds_since)
        except EnvironmentFault as error:
            logger.error("archive of stage %d: %s", stage, error)
            self._not_before[stage] = time.monotonic() + FAULT_PAUSE_S
        except Exception:  # the other stages are to be kept all the same
            logger.exception("archive of stage %d: failed", stage)
            self._not_before[stage] = time.monotonic() + FAULT_PAUSE_S

    def _show(self, stage: int, claim: ClaimRecord | None) -> None:
        others = {number: each for number, each in self.claims.items() if number != stage}
        self.claims = others if claim is None else others | {stage: claim}

    async def _opened(self, stage: int) -> StageArchive:
        keep_manifest(self._folder, self._manifest)  # here, or the pool's threads would race for it
        manifest = self._manifest
        namespace = averaging_prefix(self._run, stage)

        def made() -> StageArchive:
            layout = stage_layout(manifest, stage)
            check = RecordCheck(self._run, stage, manifest, layout)
            if self._history is not None:
                self._history.parameters[stage] = sum(each.numel for each in layout.slices)
            return StageArchive(
                self._of_stage(stage),
                me=self._me,
                witness=self._witness,
                check=check,
                record_lifetime_s=manifest.deadlines.record_lifetime_s,
                keep_bytes=manifest.rounds.log_bytes,
                client=Client(
                    p2p=self._thread.p2p,
                    namespace=namespace,
                    record_bytes=check.record_bytes,
                ),
                compute=self._compute,
                copies=self._copies,
                replaying=self._replaying,
            )

        def knows(peer: str) -> bool:  # the archive of now: a revision makes another one
            return stage in self._stages and self._stages[stage].knows(peer)

        archive = await self._compute(made)
        if stage not in self._serving:
            service = ArchiveService(
                lambda want: self._find(stage, want),
                self.served,
                self.refused,
                knows,
            )
            await asyncio.wait_for(
                service.add_p2p_handlers(self._thread.p2p, namespace=namespace), START_LIMIT_S
            )
            self._serving.add(stage)
        self._stages[stage] = archive
        return archive

    async def _find(self, stage: int, want: dict[str, Any]) -> Source | None:
        if want["what"] == "history":
            if stage != 0 or self._history is None:
                return None
            async with self._paging:  # of two threads one is left for the chains
                return await self._compute(self._history.page, int(want["after"]), pool=self._finds)
        archive = self._stages.get(stage)
        if archive is None:
            return None
        return await self._compute(archive.find, want, pool=self._finds)

    def _of_stage(self, stage: int) -> Path:
        return self._folder / f"stage{stage}"

    async def _compute(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        pool: concurrent.futures.Executor | None = None,
    ) -> Any:
        work = (pool or self._pool).submit(function, *arguments)
        self._working.add(work)
        work.add_done_callback(self._working.discard)
        return await asyncio.wrap_future(work)


LOOK_S = 2.0  # how often the claims are read; no longer than a heartbeat
DHT_LIMIT_S = 3.0  # of each question and each answer to it
TELLING_S = 1.0  # claims that are due are told for so long in one go
START_PAUSE_S = 60.0


class Archive:
    """The archive of a run; all calls in the bootstrap's thread.

    me: this node's peer id. witness: the operator's bootstrap's. folder: what is kept, of this run
    and manifest alone. history: what is told of the rounds beside their records, kept and given.
    """

    def __init__(
        self,
        *,
        dht: RunDHT,
        swarm: Swarm,
        run: str,
        me: str,
        witness: str,
        manifest: Manifest,
        folder: Path,
        history: HistoryKeeper | None = None,
    ):
        self._dht = dht
        self._swarm = swarm
        self._run = run
        self._manifest = manifest
        self._history = history
        copies = frozenset(dht.bootstraps)
        self._new_keeper = partial(
            Keeper, run, me, witness, folder=folder, history=history, copies=copies
        )
        self._keeper: Keeper | None = None
        self._start_at = self._look_at = self._looked_at = float("-inf")
        self._told: dict[int, tuple[ClaimRecord, float]] = {}  # by stage, and when

    @property
    def keeper(self) -> Keeper | None:
        return self._keeper if self._keeper is not None and self._keeper.running else None

    def tick(self) -> None:
        """Do what is due; takes a few seconds at most, and never raises."""
        try:
            self._tick(time.monotonic())
        except EnvironmentFault as error:
            logger.warning("the archive: %s", error)
        except Exception:  # the bootstrap is to live on
            logger.exception("the archive failed")

    def revise(self, manifest: Manifest) -> None:
        """Go on under a newer revision of the manifest."""
        before, self._manifest = self._manifest, manifest
        if self._history is not None:
            self._history.revise(manifest)
        if manifest.rules != before.rules and self._keeper is not None:
            self._keeper.revise(manifest)

    def close(self) -> None:
        """End the thread; twice does no harm."""
        if self._keeper is not None:
            self._keeper.close()
            self._keeper = None

    def _tick(self, now: float) -> None:
        if self._keeper is None or not self._keeper.running:
            if now < self._start_at:
                return
            self._start_at = now + START_PAUSE_S
            self.close()
            try:
                address = daemon_address(self._dht, START_LIMIT_S)
            except Exception as error:
                raise EnvironmentFault(f"p2pd cannot be reached ({error!r})") from error
            keeper = self._new_keeper(self._manifest)
            keeper.start(address)
            self._keeper = keeper
        heartbeat_s = self._manifest.deadlines.heartbeat_s
        if now >= self._look_at:
            self._looked_at, self._look_at = now, now + min(LOOK_S, heartbeat_s)
            self._keeper.hear(self._claims(), trains=self._trains(self._keeper.claims))
        self._tell(self._keeper.claims, heartbeat_s)
        if self._history is not None and now == self._looked_at:
            self._history.look(self._swarm, self._keeper.claims)

    def _trains(self, kept: Mapping[int, ClaimRecord]) -> bool:
        """Whether the run is neither paused nor ended."""
        tokens = kept[0].chain_tokens if 0 in kept else 0
        manifest = self._manifest
        return manifest.operation.state == "running" and not manifest.ended_at(tokens)

    def _claims(self) -> Claims:
        keys = {claim_key(self._run, stage): stage for stage in range(self._manifest.stages)}
        found = self._swarm.read_many(dict.fromkeys(keys, ClaimRecord), DHT_LIMIT_S)
        return {stage: claims for key, stage in keys.items() if (claims := found[key]) is not None}

    def _tell(self, claims: Mapping[int, ClaimRecord], heartbeat_s: float) -> None:
        """Publish what is new or not heard for a heartbeat."""
        end = time.monotonic() + TELLING_S
        for stage, kept in claims.items():
            claim = replace(kept, revision=self._manifest.operation.revision)
            if stage == 0:
                claim = replace(claim, run_round=max(each.round for each in claims.values()))
            if stage == 0 and self._history is not None:
                claim = replace(claim, written=self._history.written(self._manifest.samples.prompt))
            now = time.monotonic()
            last, at = self._told.get(stage, (None, 0.0))
            if last == claim and now < at + heartbeat_s:
                continue
            if now > end:
                return
            lifetime_s = self._manifest.deadlines.record_lifetime_s
            key = claim_key(self._run, stage)
            if self._swarm.publish(key, claim, lifetime_s, DHT_LIMIT_S):
                self._told[stage] = (claim, now)

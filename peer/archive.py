"""Keeps every stage's newest state and records beside the bootstrap, so that none of it is lost
when all peers of a stage leave.

It follows what peers claim (archive_stage.py), gives what it has to whoever asks by the call that
peers answer too, and claims it, so that joiners find it. It is no peer of any stage: it says
nothing else of itself, and neither averages nor votes. The DHT is read and written in the
bootstrap's thread, as its manifest is; all traffic with peers is in a thread of its own. Whatever
goes wrong here is logged and tried again later.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dilocox.dht.errors import EnvironmentFault
from dilocox.dht.keys import claim_key
from dilocox.dht.manifest import Manifest
from dilocox.dht.node import RunDHT
from dilocox.dht.records import ClaimRecord
from dilocox.dht.swarm import Swarm
from dilocox.peer.archive_keeper import START_LIMIT_S, Claims, Keeper
from dilocox.pipeline.door import daemon_address

logger = logging.getLogger(__name__)

LOOK_S = 2.0  # how often the claims are read; no longer than a heartbeat
DHT_LIMIT_S = 3.0  # of each question and each answer to it
TELLING_S = 1.0  # claims that are due are told for so long in one go
START_PAUSE_S = 60.0


class Archive:
    """The archive of a run; all calls in the bootstrap's thread.

    me: this node's peer id. folder: what is kept, of this run and manifest alone.
    """

    def __init__(
        self, *, dht: RunDHT, swarm: Swarm, run: str, me: str, manifest: Manifest, folder: Path
    ):
        self._dht = dht
        self._swarm = swarm
        self._run = run
        self._me = me
        self._manifest = manifest
        self._folder = folder
        self._keeper: Keeper | None = None
        self._start_at = self._look_at = float("-inf")
        self._told: dict[int, tuple[ClaimRecord, float]] = {}  # by stage, and when

    @property
    def keeper(self) -> Keeper | None:
        """Its thread, while that lives."""
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
            keeper = Keeper(self._run, self._me, self._manifest, self._folder)
            keeper.start(self._daemon())
            self._keeper = keeper
        heartbeat_s = self._manifest.deadlines.heartbeat_s
        if now >= self._look_at:
            self._look_at = now + min(LOOK_S, heartbeat_s)
            self._keeper.hear(self._claims())
        self._tell(self._keeper.claims, heartbeat_s)

    def _daemon(self) -> Any:
        try:
            return daemon_address(self._dht, START_LIMIT_S)
        except Exception as error:
            raise EnvironmentFault(f"p2pd is not to be had ({error!r})") from error

    def _claims(self) -> Claims:
        keys = {claim_key(self._run, stage): stage for stage in range(self._manifest.stages)}
        found = self._swarm.read_many(dict.fromkeys(keys, ClaimRecord), DHT_LIMIT_S)
        return {stage: claims for key, stage in keys.items() if (claims := found[key]) is not None}

    def _tell(self, claims: Mapping[int, ClaimRecord], heartbeat_s: float) -> None:
        """Publish what is new or not heard for a heartbeat."""
        end = time.monotonic() + TELLING_S
        for stage, kept in claims.items():
            claim = replace(kept, revision=self._manifest.operation.revision)
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

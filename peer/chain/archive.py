"""What the bootstrap keeps of one stage, so that the stage outlives all of its peers.

A *generation* grows by the records that peers commit. When many have come, the next one is begun
from a peer's newer state, and takes over once two records have proved that state; until then the
older one is kept, grows and is served. A chain that cannot be followed any more (the peers' logs do
not reach back so far, or it lost against one with more tokens) is replaced at once. Nothing is
computed but checks.

On disk a generation has all that a joiner needs, in a folder, complete once its name is a number:
    state/00000000/  the state as in a peer's snapshot folder (snapshot_files.py); not there where
                     the records begin at the initial weights
    log/             the record that the state stands on and those after it, with certificates

`OlderRecords` are those from before the current generation, for the history. Nobody needs them to
go on: they are given only to those who ask for `older` ones, to list a run from its first round, or
to replay it. Oldest first they make room for newer ones.
"""

from __future__ import annotations

import asyncio
import logging
import random
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dilocox.dht.errors import InvalidInput
from dilocox.dht.files import make_folder, sync
from dilocox.dht.records import ClaimRecord
from dilocox.dht.rpc import REFUSED, Client, PeerBusy
from dilocox.dht.swarm_view import SwarmView, that_count
from dilocox.peer.chain.claims import ClaimBook, holders, wins
from dilocox.peer.chain.record_check import RecordCheck
from dilocox.peer.chain.rollback import STATE_NAME, archive_goes_back
from dilocox.peer.chain.snapshot_files import STATE_FILE, made_whole, sha256_of_file, write_facts
from dilocox.peer.chain.store import INITIAL_NAME, OLDER_NAME, RoundLog, Store, Tip, kept_state
from dilocox.peer.chain.sync import (
    ChainClient,
    Compute,
    NoState,
    Reached,
    StateOffer,
    anchors_around,
)
from dilocox.peer.chain.uploads import Source, find_in_log, open_state
from dilocox.peer.rounds.adaptation import outer_step
from dilocox.peer.rounds.record import RecordRefused, RoundRecord, digest_of, parse_header

logger = logging.getLogger(__name__)


class Generation:
    """One generation; only its log grows.

    state_round: of the record that the state stands on, -1 without a state. donor: who gave the
    state, empty after a restart. proven: whether two records have shown the state to be right.
    """

    def __init__(self, folder: Path, check: RecordCheck, *, donor: str = ""):
        self.folder = folder
        self.number = int(folder.name)
        self.donor = donor
        self.states = folder / "state"
        self.state = kept_state(self.states)
        self.log = RoundLog(folder / "log", manifest_digest=check.root, codec=check.codec)
        self.state_round = -1 if self.state is None else self.state.round
        self.proven = self.state_round < 0
        self.grown()

    @classmethod
    def begun(
        cls,
        folder: Path,
        number: int,
        check: RecordCheck,
        state: tuple[StateOffer, Path] | None = None,
    ) -> Generation:
        """A new one from a checked state, whose file is moved into it, or from the initial weights.

        Raises EnvironmentFault if the disk is full.
        """
        final = folder / f"{number:08d}"
        with made_whole(final) as partial:
            if state is not None:
                offer, file = state
                kept = partial / "state" / STATE_NAME
                make_folder(kept)
                file.replace(kept / STATE_FILE)
                sync(kept / STATE_FILE)
                write_facts(kept, offer.record.round, offer.digest, offer.sha256)
                make_folder(partial / "log")
                log = Store(partial / "log")
                log.write(offer.record.round, offer.record_bytes, offer.certificate)
        return cls(final, check, donor="" if state is None else state[0].peer)

    @classmethod
    def kept(cls, folder: Path, check: RecordCheck) -> list[Generation]:
        """Those in a folder that are whole, oldest first; the others, and halves, are removed."""
        make_folder(folder)
        found: list[Generation] = []
        for path in sorted(folder.iterdir()):
            if path.name.endswith(".partial"):
                shutil.rmtree(path, ignore_errors=True)
            elif path.name.isdecimal():
                try:
                    found.append(cls._whole(path, check))
                except (ValueError, InvalidInput, OSError) as error:
                    logger.warning("%s: damaged (%s), left out", path, error)
                    shutil.rmtree(path, ignore_errors=True)
        return found

    @classmethod
    def _whole(cls, folder: Path, check: RecordCheck) -> Generation:
        """Raises InvalidInput, OSError and ValueError (RecordRefused among them)."""
        made = cls(folder, check)
        state, rounds, previous = made.state, made.log.rounds(), check.root
        if state is not None:
            if sha256_of_file(state.file) != state.sha256:
                raise RecordRefused("its state is not what it was")
            if made.log.find(state.digest) != state.round or state.round != rounds[0]:
                raise RecordRefused("its records do not begin at its state")
        for number in rounds:
            data = made.log.read_bytes(number)
            if data is None or made.log.certificate(number) is None:
                raise RecordRefused(f"round {number} is not whole")
            if number != made.state_round and parse_header(data).previous != previous:
                raise RecordRefused(f"round {number} does not follow the one before it")
            previous = digest_of(data)
        return made

    @property
    def records_after(self) -> int:
        return len(self._following())

    def grown(self) -> None:
        self.head: Tip = self.log.head()
        self.last: RoundRecord | None = self.log.header(self.head.round)

    def proved(self, check: RecordCheck) -> bool | None:
        """Whether the state is the one its records apply to; None while they are fewer than two.

        Takes the time of decoding a record and reading the state once.
        """
        following = self._following()[:2]
        if self.state is None or len(following) < 2:
            return None
        first, second = self.log.read(following[0]), self.log.header(following[1])
        if first is None or second is None:
            raise RecordRefused(f"{self.folder}: a record vanished")
        average = first.average(check.codec)
        outer = outer_step(check.manifest, first.rules)
        found = anchors_around(self.state.file, average, outer)
        return found == (first.anchor_before, second.anchor_before)

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _following(self) -> list[int]:
        return [number for number in self.log.rounds() if number > self.state_round]


class OlderRecords:
    """Records that end where a generation begins; empty where its chain is not theirs."""

    def __init__(self, folder: Path, keep_bytes: int):
        """folder: of the stage. keep_bytes: of records, the newest four aside."""
        self.records = Store(folder / OLDER_NAME)
        self._keep_bytes = keep_bytes

    def keep(self, log: Store) -> None:
        """Take over all records of a generation that is given up for its state alone."""
        self._take(log, log.rounds())

    def lead_to(self, generation: Generation, before: Generation | None = None) -> None:
        """Be the records before this generation's first one.

        before: the generation that it replaces; what is here ends where that begins. It may be
            removed afterwards, and not sooner: a crash in between costs nothing.
        """
        first = next(iter(generation.log.entries()), None)
        header = None if first is None or generation.state_round < 0 else first.header()
        if first is None or header is None:  # it begins at the initial weights
            self.records.drop_from(0)
            return
        log = None if before is None else before.log
        for source in (log, self.records):
            newest = None if source is None else source.newest()
            if source is None or newest is None:
                continue
            if source.find(first.digest) is not None or newest.digest == header.previous:
                if before is not None and source is log:
                    if before.state_round < 0:
                        self.records.drop_from(0)  # that one has all of its chain
                    self._take(source, [n for n in source.rounds() if n < first.round])
                self.records.drop_from(first.round)
                return
        self.records.drop_from(0)

    def _take(self, log: Store, rounds: list[int]) -> None:
        self.records.share(log, rounds)
        self.records.prune(sys.maxsize, self._keep_bytes)


RECORDS_AFTER_STATE = 8
TRIED_AT_ONCE = 3  # claims: one that is a lie must not hide the others
STATE_LIMIT_S = 6 * 3600.0  # of a whole model
PAUSE_S = 5.0


class StageArchive:
    """Keeps one stage. All calls belong to one event loop; slow work runs in `compute`.

    claim: what is to be told of it: its last record, or None while it has none or somebody is known
    to be ahead, so that nobody takes a chain that is behind, or has lost, for a current one.
    """

    def __init__(
        self,
        folder: Path,
        *,
        me: str,
        check: RecordCheck,
        record_lifetime_s: float,
        keep_bytes: int,
        client: Client,
        compute: Compute,
        records_after_state: int = RECORDS_AFTER_STATE,
        pause_s: float = PAUSE_S,
        now: Callable[[], float] = time.monotonic,
    ):
        """Takes up what is on the disk; slow. Raises EnvironmentFault.

        keep_bytes: of records from before the current generation. records_after_state: when more
        have come, a newer state is looked for. pause_s: after a state that could not be had.
        """
        self.claim: ClaimRecord | None = None
        self._folder = folder
        self._me = me
        self._check = check
        self._record_lifetime_s = record_lifetime_s
        self._client = client
        self._compute = compute
        self._records_after_state = records_after_state
        self._pause_s = pause_s
        self._now = now
        make_folder(folder)
        archive_goes_back(folder, check.manifest)
        kept = Generation.kept(folder, check) or [Generation.begun(folder, 0, check)]
        self._current, self._coming = kept[0], kept[1] if len(kept) > 1 else None
        for more in kept[2:]:
            more.remove()
        self._older = OlderRecords(folder, keep_bytes)
        if self._current.state_round >= 0:
            self._older.lead_to(self._current)
        self._building: asyncio.Task[Generation] | None = None
        self._replaces = False  # what is being built: the chain, and not only the state
        self._not_before = 0.0
        self._book = ClaimBook(record_lifetime_s=record_lifetime_s, now=now)

    @property
    def round(self) -> int:
        """The newest round that is kept; -1 before the first one."""
        return self._current.head.round

    def find(self, want: Mapping[str, Any]) -> Source | None:
        """What a peer asks for, as uploads.py answers it; KeyError and so on for nonsense."""
        match want["what"]:
            case "record" | "certificate":
                logs: list[Store] = [self._current.log]
                logs += [] if self._coming is None else [self._coming.log]
                logs += [self._older.records] if want.get("older") else []
                asked = want["what"], str(want["digest"])
                header = bool(want.get("header"))
                found = (find_in_log(log, *asked, header=header) for log in logs)
                return next(filter(None, found), None)
            case "state":
                offset, sha256 = int(want.get("offset", 0)), want.get("sha256")
                initial = self._folder / INITIAL_NAME
                first = (initial,) if want.get("initial") else (self._current.states, initial)
                found = (open_state(folder, offset, sha256) for folder in first)
                return next(filter(None, found), None)
            case _:
                return None

    async def tend(self, claims: Mapping[str, ClaimRecord]) -> None:
        """Follow the best of these claims as far as possible; `claim` is right again after it.

        Raises EnvironmentFault, also in its name for a download that ran beside the last calls.
        """
        view = SwarmView(me=self._me, claims=that_count(claims, self._check.manifest))
        try:
            await self._take_built()
            await self._follow(view)
            await self._prove()
            if self._current.records_after > self._records_after_state and self._coming is None:
                head = self._current.head.digest
                self._build(view, head, replaces=False)
        finally:
            behind = self._book.best(view, self._current.head) is not None
            self.claim = None if behind else self._own_claim()

    async def close(self) -> None:
        building, self._building = self._building, None
        if building is not None:
            building.cancel()
            await asyncio.wait([building])

    # ---- records ---------------------------------------------------------------------------------
    async def _follow(self, view: SwarmView) -> None:
        for claim in self._book.ahead(view, self._current.head)[:TRIED_AT_ONCE]:
            peer, before = random.choice(holders(view, claim.digest)), self._current.head.round
            try:
                reach = await self._catch_up(self._current, peer, claim.digest)
            except REFUSED as error:
                self._doubt(claim, peer, error, came=self._current.head.round > before)
                continue
            self._book.came(claim.digest)
            forked = reach.fork_round is not None
            if reach.too_far or (forked and wins(reach, self._current.log, self._current.head)):
                self._cannot_follow(view, claim, reach)
            elif forked:
                self._book.ignore(claim.digest)  # it lost against ours
                continue
            elif self._coming is not None:
                await self._follow_with(self._coming, peer, claim.digest)
            return

    async def _catch_up(self, generation: Generation, peer: str, digest: str) -> Reached:
        try:
            return await self._chain(peer).catch_up(generation.log, digest)
        finally:
            generation.grown()

    def _chain(self, peer: str) -> ChainClient:
        return ChainClient(self._client, self._check, [peer], compute=self._compute)

    async def _follow_with(self, coming: Generation, peer: str, digest: str) -> None:
        """Let the next generation grow too; one that cannot is given up."""
        try:
            reach = await self._catch_up(coming, peer, digest)
        except REFUSED as error:
            logger.info("%s: the next generation waits: %s", self, _said(error))
            return
        if reach.too_far or reach.fork_round is not None:
            self._drop_coming()

    def _cannot_follow(self, view: SwarmView, claim: ClaimRecord, reach: Reached) -> None:
        if self._coming and self._coming.head.chain_tokens > self._current.head.chain_tokens:
            self._adopt(self._coming)
            return
        self._drop_coming()
        if not reach.too_far and not self._replaces:
            logger.error("alarm: %s: two certified chains; changing to the one with more", self)
        self._build(view, claim.digest, replaces=True)

    def _doubt(self, claim: ClaimRecord, peer: str, error: Exception, *, came: bool) -> None:
        if came:
            self._book.came(claim.digest)
            return
        if not self._book.failing(claim.digest):
            logger.info("%s: round %d from %s: %s", self, claim.round, peer[-6:], _said(error))
        if self._book.failed(claim.digest, busy=isinstance(error, PeerBusy)):
            logger.info(
                "%s: no peer serves the record of round %d; ignoring its claim", self, claim.round
            )

    # ---- states ----------------------------------------------------------------------------------
    def _build(self, view: SwarmView, digest: str, *, replaces: bool) -> None:
        """Begin the next generation from a peer that claims this record, beside all else."""
        if self._building is not None or self._now() < self._not_before:
            return
        donors = self._book.donors(holders(view, digest))
        if donors:
            self._replaces = replaces
            building = self._built_in_time(random.choice(donors), digest, replaces)
            self._building = asyncio.create_task(building)

    async def _built_in_time(self, peer: str, digest: str, replaces: bool) -> Generation:
        return await asyncio.wait_for(self._built(peer, digest, replaces), STATE_LIMIT_S)

    async def _built(self, peer: str, digest: str, replaces: bool) -> Generation:
        current, check = self._current, self._check
        number = current.number + 1

        def helps(digest: str) -> bool:
            known = current.log.find(digest)
            return replaces or (known is not None and known > current.state_round)

        chain = self._chain(peer)
        try:
            offer = await chain.offer(peer, helps)
        except NoState:
            if not replaces:
                raise
            generation = await self._compute(Generation.begun, self._folder, number, check)
        else:
            logger.info("%s: taking the state of round %d", self, offer.record.round)
            kept = await chain.download(offer, self._folder / "incoming")
            begun = (self._folder, number, check, (offer, kept.file))
            generation = await self._compute(Generation.begun, *begun)
        try:
            if generation.log.find(digest) is None:
                reach = await self._catch_up(generation, peer, digest)
                ahead = generation.head.chain_tokens > current.head.chain_tokens
                if not (generation.log.find(digest) is not None or (reach.too_far and ahead)):
                    raise ConnectionError(f"the log of {peer} does not lead to {digest[:12]}")
        except BaseException:
            generation.remove()
            raise
        return generation

    async def _take_built(self) -> None:
        """What was built beside becomes the next generation, or the only one."""
        building = self._building
        if building is None or not building.done():
            return
        self._building = None
        self._not_before = self._now() + self._pause_s
        try:
            generation = building.result()
        except REFUSED as error:
            logger.info("%s: no newer state: %s", self, _said(error))
            return
        if self._replaces:
            self._adopt(generation)
        else:
            self._coming = generation

    async def _prove(self) -> None:
        for each in (self._coming, self._current):
            if each is None or each.proven:
                continue
            try:
                proved = await self._compute(each.proved, self._check)
            except RecordRefused as error:
                logger.error("%s: %s", self, error)
                proved = False
            if proved:
                each.proven = True
                if each is self._coming:
                    self._adopt(each)
            elif proved is False:
                logger.error("alarm: %s: the state of %s is wrong", self, each.donor or "the disk")
                if each.donor and self._book.lied(each.donor):
                    # nobody's traffic is to be spent on one wrong state after the other
                    self._not_before = self._now() + self._record_lifetime_s / 2
                if each is self._coming:
                    self._drop_coming()
                else:
                    self._start_over()

    def _adopt(self, generation: Generation) -> None:
        old, self._current, self._coming = self._current, generation, None
        self._older.lead_to(generation, old)
        old.remove()
        logger.info(
            "%s: kept from the state of round %d on, %d records",
            self,
            generation.state_round,
            generation.records_after,
        )

    def _drop_coming(self) -> None:
        if self._coming is not None:
            self._coming.remove()
            self._coming = None

    def _start_over(self) -> None:
        old = self._current
        self._older.keep(old.log)  # its records are sound
        self._drop_coming()
        if self._building is not None:
            self._building.cancel()
            self._building = None
        self._current = Generation.begun(self._folder, old.number + 2, self._check)
        old.remove()

    # ---- telling ---------------------------------------------------------------------------------
    def _own_claim(self) -> ClaimRecord | None:
        head, last = self._current.head, self._current.last
        if last is None:
            return None
        return ClaimRecord(
            round=head.round,
            digest=head.digest,
            tokens=last.tokens,
            chain_tokens=head.chain_tokens,
            record_bytes=head.record_bytes,
            rules=last.rules,
        )

    def __str__(self) -> str:
        return f"archive of stage {self._check.stage}"


def _said(error: Exception) -> str:
    text = str(error) or type(error).__name__
    return text if len(text) <= 160 else f"{text[:160]}..."  # p2pd lists all addresses

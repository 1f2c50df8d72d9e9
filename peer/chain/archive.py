"""What the bootstrap keeps of one stage, so that the stage outlives all of its peers. Apart from
archive_keeper.py, which has the thread, the network and the service of all stages.

A *generation* is a state, or the initial weights, and the records that peers commit after it. When
these have become more bytes than a state, the next generation is made beside it: its state follows
from this one by its records, but for the last two, which prove it (replay.py). No state is taken
from a peer for that. Only a chain that cannot be followed any more (the peers' logs do not reach
back so far, or it lost against one with more tokens) is replaced by the state of a peer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from dilocox.dht.errors import reason_of
from dilocox.dht.files import make_folder
from dilocox.dht.names import cut, shown_peer
from dilocox.dht.records import ClaimRecord
from dilocox.dht.rpc import REFUSED, CallRefused, Client
from dilocox.dht.swarm_view import SwarmView, that_count
from dilocox.peer.chain.chain_client import (
    STATE_LIMIT_S,
    ChainClient,
    Compute,
    Limits,
    NoState,
    Reached,
)
from dilocox.peer.chain.fork_choice import ClaimBook, Trust, holders
from dilocox.peer.chain.generation import Generation, OlderRecords
from dilocox.peer.chain.record_check import RecordCheck
from dilocox.peer.chain.replay import replay_bytes, start_file
from dilocox.peer.chain.rollback import archive_goes_back
from dilocox.peer.chain.store import (
    INITIAL_NAME,
    TOKENIZER_NAME,
    KeptState,
    Store,
    kept_state,
)
from dilocox.peer.chain.summary import ChainRound
from dilocox.peer.chain.uploads import Source, find_in_log, open_state
from dilocox.peer.memory_and_disk import available_bytes, size
from dilocox.peer.rounds.record import RecordRefused

logger = logging.getLogger(__name__)

RECORDS_AFTER_STATE = (8, 64)  # a joiner applies each of them
TRIED_AT_ONCE = 3  # claims: one that is a lie must not hide the others
PAUSE_S = 5.0
ROOM_PAUSE_S = 600.0  # between two looks whether there is memory for a state
LIMITS, BEFORE_ANY_RECORD = Limits(), Limits(all_headers_s=60.0)


class StageArchive:
    """Keeps one stage. All calls belong to one event loop; slow work runs in `compute`.

    claim: what is to be told of it: its last record, or None while it has none. An archive that is
    not the witness tells of none either while somebody is known to be ahead, so that nobody takes a
    chain that is behind, or has lost, for a current one.
    """

    def __init__(
        self,
        folder: Path,
        *,
        me: str,
        witness: str,
        check: RecordCheck,
        record_lifetime_s: float,
        keep_bytes: int,
        client: Client,
        compute: Compute,
        copies: frozenset[str] = frozenset(),
        replaying: asyncio.Lock | None = None,
        records_after_state: tuple[int, int] = RECORDS_AFTER_STATE,
        pause_s: float = PAUSE_S,
        now: Callable[[], float] = time.monotonic,
    ):
        """Takes up what is on the disk; slow. Raises EnvironmentFault.

        witness: as for Trust. copies: other bootstraps, of the operator's own one alone.
        keep_bytes: of records from before the current generation. replaying: held while a state is
        moved on or proved, which takes long and an average of the stage in memory.
        records_after_state: a newer state is made when more than the first number have come and are
        more bytes than a state, or more than the second. pause_s: after a state that could not be
        had.
        """
        self.claim: ClaimRecord | None = None
        self._folder = folder
        self._me = me
        self._check = check
        self._client = client
        self._compute = compute
        self._replaying = replaying or asyncio.Lock()
        self._records_after_state = records_after_state
        self._pause_s = pause_s
        self._now = now
        make_folder(folder)
        archive_goes_back(folder, check.manifest)
        self._older = OlderRecords(folder, keep_bytes)
        kept = Generation.kept(folder, check, self._older)
        kept = kept or [Generation.begun(folder, 0, check)]
        self._current = max(kept, key=lambda each: (each.head.chain_tokens, each.number))
        for each in kept:
            if each is not self._current:  # a crash came while it was given up, or begun
                self._older.lead_to(self._current, each)
                if each.number < self._current.number:
                    each.give_way(self._current)
                else:
                    each.remove()
        if self._current.head.round >= 0:  # after what the others have between the two
            self._older.lead_to(self._current)
        self._building: asyncio.Task[Generation | None] | None = None
        self._replaces = False  # what is being built: the chain, and not only the state
        self._not_before = 0.0
        self._replay_at = float("-inf")  # not before, for want of memory
        self._short = False  # of memory, when last looked
        self._trust = Trust(
            me=me,
            witness=witness,
            stand_ins=copies if me == witness else frozenset(),
            record_lifetime_s=record_lifetime_s,
            now=now,
        )
        self._book = ClaimBook(self._trust)
        self._say_what_is_lost()

    @property
    def round(self) -> int:
        """The newest round that is kept; -1 before the first one."""
        return self._current.head.round

    def find(self, want: Mapping[str, Any]) -> Source | None:
        """What a peer asks for, as uploads.py answers it; KeyError and so on for nonsense."""
        match want["what"]:
            case "record" | "certificate":
                logs: list[Store] = [self._current.log]
                logs += [self._older.records] if want.get("older") else []
                asked = want["what"], str(want["digest"])
                header = bool(want.get("header"))
                found = (find_in_log(log, *asked, header=header) for log in logs)
                return next(filter(None, found), None)
            case "state":
                initial = self._folder / INITIAL_NAME
                first = (initial,) if want.get("initial") else (self._current.states, initial)
                return next(filter(None, (open_state(folder, want) for folder in first)), None)
            case "tokenizer":
                kept = self._folder / TOKENIZER_NAME
                return Source.of(kept.read_bytes()) if kept.exists() else None
            case _:
                return None

    def rounds_since(self, known: Collection[str], most: int) -> list[ChainRound]:
        """The records of the chain from after those that are known, by the beginnings of their
        digests; oldest first, the newest ones where they are too many. Reads all their headers.
        """
        entries = [*self._current.log.entries()[::-1], *self._older.records.entries()[::-1]]
        found: dict[int, ChainRound] = {}
        for entry in entries:
            if len(found) == most or any(each and entry.digest.startswith(each) for each in known):
                break
            with contextlib.suppress(RecordRefused):  # a damaged one
                header = entry.header()
                if header is None:  # it has just moved
                    continue
                found[entry.round] = ChainRound.of(header, entry.digest, entry.record_bytes)
        return [found[number] for number in sorted(found)]

    async def tend(self, claims: Mapping[str, ClaimRecord], *, trains: bool = True) -> None:
        """Follow the best of these claims as far as possible; `claim` is right again after it.
        trains: as for `Trust.counting`.

        Raises EnvironmentFault, also in its name for a download that ran beside the last calls.
        """
        view = SwarmView(me=self._me, claims=that_count(claims, self._check.manifest))
        try:
            await self._take_built()
            log, head = self._current.log, self._current.head
            lost = self._older.records
            view = self._trust.counting(
                view, log, head, trains=trains, lost=lost, served=self._book.believed
            )
            await self._follow(view)
            await self._prove()
            self._renew()
        finally:
            behind = self._book.best(view, self._current.head, self._other_chain()) is not None
            told = self._trust.is_witness or not behind
            self.claim = self._own_claim() if told else None

    def knows(self, peer: str) -> bool:
        """Whether its values are in the chain's last records, or it is a bootstrap."""
        return self._trust.knows(peer)

    async def close(self) -> None:
        building, self._building = self._building, None
        if building is not None:
            building.cancel()
            await asyncio.wait([building])

    # ---- records ---------------------------------------------------------------------------------
    async def _follow(self, view: SwarmView) -> None:
        ahead = self._book.ahead(view, self._current.head, self._other_chain())
        if self._trust.is_witness and self._current.head.round < 0:
            random.shuffle(ahead)  # none is known yet: the peer that claims most may have nothing
        for claim in ahead[:TRIED_AT_ONCE]:
            peer = self._book.chosen(holders(view, claim.digest))
            before = self._current.head.round
            try:
                second = self._trust.second(holders(view, claim.digest), peer)
                reached = await self._catch_up(self._current, [peer], claim.digest, second)
            except REFUSED as error:
                self._doubt(claim, peer, error, came=self._current.head.round > before)
                continue
            self._book.came(claim.digest)
            self._book.gave(peer)
            forked = reached.fork_round is not None
            may_replace = before < 0 or self._trust.may_replace(claim.digest)
            if reached.too_far and not may_replace:
                logger.error(
                    "alarm: %s: no records lead to round %d of %s, and those who made the chain "
                    "kept here do not claim it, so it is not taken; if the run went on while this "
                    "bootstrap was away, and they have left, stop it and its copies, move %s "
                    "elsewhere on all of them, and start them again: they begin with what peers "
                    "have then",
                    self,
                    claim.round,
                    shown_peer(peer),
                    self._folder,
                )
                self._book.ignore(claim.digest)
                continue
            log, head = self._current.log, self._current.head
            if reached.too_far or (forked and self._trust.wins(claim.digest, reached, log, head)):
                self._cannot_follow(view, claim, reached)
            elif forked:
                self._book.ignore(claim.digest)  # it lost against ours
                continue
            return

    def _other_chain(self) -> ClaimRecord | None:
        return self._trust.other_chain(self._current.log, self._current.head)

    async def _catch_up(
        self,
        generation: Generation,
        peers: Sequence[str],
        digest: str,
        second: Sequence[str] = (),
    ) -> Reached:
        try:
            # where no chain is known anybody's headers are walked
            limits = LIMITS if generation.head.round >= 0 else BEFORE_ANY_RECORD
            chain = self._chain(peers, limits)
            return await chain.catch_up(generation.log, digest, second=second)
        finally:
            generation.grown()

    def _chain(self, peers: Sequence[str], limits: Limits = LIMITS) -> ChainClient:
        return ChainClient(self._client, self._check, peers, compute=self._compute, limits=limits)

    def _cannot_follow(self, view: SwarmView, claim: ClaimRecord, reached: Reached) -> None:
        if not self._replaces:
            if not reached.too_far:
                logger.error("alarm: %s: %s", self, self._book.switching(claim.digest, reached))
            self._drop_building()  # of the chain that is given up
        donors = self._book.donors(holders(view, claim.digest))
        if donors and self._building is None and self._now() >= self._not_before:
            random.shuffle(donors)
            donors.sort(key=lambda peer: not self._trust.knows(peer))
            self._building = asyncio.create_task(self._taken_in_time(donors, claim.digest))
            self._replaces = True

    def _doubt(self, claim: ClaimRecord, peer: str, error: Exception, *, came: bool) -> None:
        if not came:
            self._book.asked_in_vain(peer, error)
            if not self._book.failing(claim.digest):
                logger.info(
                    "%s: round %d from %s: %s", self, claim.round, shown_peer(peer), _said(error)
                )
        if self._book.failed(claim.digest, error, came=came):
            logger.info(
                "%s: no peer serves the record of round %d; ignoring its claim", self, claim.round
            )

    # ---- states ----------------------------------------------------------------------------------
    def _renew(self) -> None:
        """Begin to make the next generation where the records have become many."""
        current, (least, most) = self._current, self._records_after_state
        count = current.records_after
        many = count > most or (count > least and current.bytes_after > self._check.state_bytes)
        ready = self._building is None and self._now() >= max(self._not_before, self._replay_at)
        # of a checkpoint, whose weights a copy of the bootstrap does not have
        from_seed = not self._check.manifest.initial.anchors
        known = from_seed or self._base(current) is not None
        if many and ready and current.proven and known:
            self._building, self._replaces = asyncio.create_task(self._renewed(current)), False

    def _base(self, current: Generation) -> KeptState | None:
        """The state that a generation begins with, None for the weights of the manifest's seed."""
        return current.state or kept_state(self._folder / INITIAL_NAME)

    async def _renewed(self, current: Generation) -> Generation | None:
        """The generation after this one, made of its records alone; None for want of memory."""
        check, file = self._check, self._folder / "incoming" / "moved"
        applied = current.following()[:-2]

        def begun() -> Generation:
            data, proof = current.log.read_bytes(applied[-1]), current.log.certificate(applied[-1])
            if data is None or proof is None:
                raise RecordRefused(f"{current.folder}: a record vanished")
            number, state = current.number + 1, (file, data, proof)
            return Generation.begun(self._folder, number, check, state, before=current)

        async with self._replaying:  # the memory of the other stages' replays is free again
            if not self._has_room(current, from_seed=self._base(current) is None):
                return None
            logger.info("%s: replaying rounds %d to %d", self, applied[0], applied[-1])
            make_folder(file.parent)
            try:
                await self._compute(start_file, check, self._base(current), file)
                for number in applied:
                    await self._compute(current.move, file, number, check)
                generation = await self._compute(begun)
            finally:
                file.unlink(missing_ok=True)
            generation.proven = bool(await self._compute(generation.proved, check))
        if not generation.proven:
            generation.remove()
            raise RecordRefused(f"{current.folder}: its records do not lead to their anchors")
        return generation

    def _has_room(self, generation: Generation, *, from_seed: bool = False) -> bool:
        """Whether its records can be applied in the memory that there is: what is too much ends the
        whole bootstrap, and again after each start.
        """
        if self._now() < self._replay_at:
            return False
        largest = max((each.record_bytes for each in generation.log.entries()), default=0)
        needed = replay_bytes(self._check.layout.numel, largest, from_seed=from_seed)
        free, was_short = available_bytes(), self._short
        self._short = free < needed
        if not self._short:
            return True
        self._replay_at = self._now() + ROOM_PAUSE_S
        if not was_short:
            logger.error(
                "alarm: %s: to apply its records takes %s of memory, and %s are free: no newer "
                "state is made, nor the one that is kept proved, until there is more; records are "
                "kept all the same, but take ever more of the disk, and joiners fetch all of them; "
                "give this machine more memory (it looks again every %.0f minutes)",
                self,
                size(needed),
                size(free),
                ROOM_PAUSE_S / 60,
            )
        return False

    async def _taken_in_time(self, donors: Sequence[str], digest: str) -> Generation:
        return await asyncio.wait_for(self._taken(donors, digest), STATE_LIMIT_S)

    async def _taken(self, donors: Sequence[str], digest: str) -> Generation:
        """A generation from the state of the first of these peers; the others may help."""
        current, check, chain = self._current, self._check, self._chain(donors)
        state: tuple[Path, bytes, bytes] | None = None
        with contextlib.suppress(NoState):
            try:
                offer = await chain.offer(donors[0])
                logger.info("%s: taking the state of round %d", self, offer.round)
                kept = await chain.download(offer, self._folder / "incoming")
            except (RecordRefused, CallRefused):
                self._lied(donors[0])
                raise
            state = kept.file, offer.record_bytes, offer.certificate
        number, donor = current.number + 2, donors[0] if state else ""  # a replay may end yet
        generation = await self._compute(
            lambda: Generation.begun(self._folder, number, check, state, donor=donor)
        )
        try:
            if generation.log.find(digest) is None:
                reached = await self._catch_up(generation, donors, digest)
                ahead = generation.head.chain_tokens > current.head.chain_tokens
                if not (generation.log.find(digest) is not None or (reached.too_far and ahead)):
                    raise ConnectionError(f"the log of {donors[0]} does not lead to {digest[:12]}")
        except BaseException:
            generation.remove()
            raise
        return generation

    async def _take_built(self) -> None:
        """What was made beside takes over."""
        building, current = self._building, self._current
        if building is None or not building.done():
            return
        self._building = None
        self._not_before = max(self._not_before, self._now() + self._pause_s)
        try:
            generation = building.result()
        except REFUSED as error:
            if self._replaces:
                logger.info("%s: no newer state: %s", self, _said(error))
            else:
                logger.error("alarm: %s: what is kept is damaged: %s", self, error)
                self._start_over()
            return
        if generation is None:
            return
        if not self._replaces:
            since = [n for n in current.log.rounds() if n > generation.head.round]
            await self._compute(generation.log.share, current.log, since)
            generation.grown()
        await self._adopt(generation)

    async def _prove(self) -> None:
        current = self._current
        if current.proven or self._replaying.locked():  # an average of a stage at a time
            return
        if current.records_after < 2 or not self._has_room(current):
            return
        try:
            async with self._replaying:
                proved = await self._compute(current.proved, self._check)
        except RecordRefused as error:
            logger.error("%s: %s", self, error)
            proved = False
        current.proven = bool(proved)
        if proved is False:
            logger.error("alarm: %s: the state of %s is wrong", self, current.donor or "the disk")
            if current.donor:
                self._lied(current.donor)
            self._start_over()

    def _lied(self, donor: str) -> None:
        """Its state was wrong: no traffic for one such state after the other."""
        self._not_before = max(self._not_before, self._now() + self._book.lied(donor))

    async def _adopt(self, generation: Generation) -> None:
        old, self._current = self._current, generation
        await self._compute(self._older.lead_to, generation, old)
        await self._compute(old.give_way, generation)
        logger.info(
            "%s: kept from the state of round %d on, %d records",
            self,
            generation.state_round,
            generation.records_after,
        )

    def _drop_building(self) -> None:
        if self._building is not None:
            self._building.cancel()
            self._building = None

    def _start_over(self) -> None:
        old = self._current
        self._older.keep(old.log)  # its records are sound
        self._drop_building()
        self._current = Generation.begun(self._folder, old.number + 3, self._check)
        old.remove()
        self._say_what_is_lost()

    def _say_what_is_lost(self) -> None:
        lost = self._current.head.round < 0 and self._older.records.rounds()
        if not (lost and self._trust.is_witness):
            return
        logger.error(
            "alarm: %s: what was kept cannot be used; it takes the chain again from the peers that "
            "made it, and from nobody else; if they have left for good, stop this bootstrap and "
            "its copies, move %s elsewhere on all of them, and start them again: they begin with "
            "what peers have then",
            self,
            self._folder,
        )

    # ---- telling ---------------------------------------------------------------------------------
    def _own_claim(self) -> ClaimRecord | None:
        head, last = self._current.head, self._current.last
        if last is None:
            return None
        return ClaimRecord(
            round=head.round,
            digest=head.digest,
            chain_tokens=last.chain_tokens,
            record_bytes=head.record_bytes,
            rules=last.rules,
        )

    def __str__(self) -> str:
        return f"archive of stage {self._check.stage}"


def _said(error: Exception) -> str:
    return cut(reason_of(error), 160)  # p2pd lists all addresses

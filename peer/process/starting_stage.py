"""Which stage a peer hosts when it starts: the one asked for, or the one that lacks peers."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager

from dilocox import __version__
from dilocox.dht.errors import InvalidInput
from dilocox.dht.join import Joined
from dilocox.dht.records import StageRecord, stage_key
from dilocox.dht.swarm import CALL_TIMEOUT_S
from dilocox.peer.options import PeerOptions
from dilocox.peer.state_folder import StateFolder
from dilocox.pipeline.candidates import Records
from dilocox.pipeline.stage_choice import choose_stage

logger = logging.getLogger(__name__)

JITTER_S = 2.0  # peers that start together do not look at the same moment
LOOK_LIMIT_S = 10.0
LOOKS = 3
SECOND_THOUGHTS = 2
SECOND_LOOK_S = 1.0
JOINING_S = 20.0  # about what it takes until it is said again, or by its own records
SAID_AGAIN = 3  # times in the life of such a record
GONE_S = 4.0  # twice, at most, of a person who waits for the end


def chosen_stage(options: PeerOptions, joined: Joined, folder: StateFolder) -> int:
    """The stage that `--stage` names, or with `auto` the one with the fewest peers.

    A peer that was here before goes back to its stage, whose weights are on its disk: after new
    rules all peers return at once, when every stage looks empty. Where its stage has too many,
    `Mover` sends it on later. Raises InvalidInput.
    """
    stages = joined.manifest.stages
    named = named_stage(options.stage, stages)
    if named is not None:
        return named
    if (before := stage_of_before(folder, joined.run, stages)) is not None:
        announce_joining(joined, options, before)  # or spares would move to where nobody seems left
        return before
    time.sleep(random.uniform(0, JITTER_S))
    me = joined.identity.peer_id
    stage = choose_stage(look_at_stages(joined), me=me, num_stages=stages)
    for _ in range(SECOND_THOUGHTS):
        announce_joining(joined, options, stage)
        time.sleep(SECOND_LOOK_S)
        # of those that join at once the smaller id goes first: it has chosen without the others
        seen = _without_later_joiners(look_at_stages(joined), me)
        better = choose_stage(seen, me=me, num_stages=stages)
        if better == stage:
            break
        announce_joining(joined, options, stage, gone=True)
        stage = better
    folder.note_stage(joined.run, stage)
    logger.info("chose stage %d of %d", stage, stages)
    return stage


def named_stage(option: str, stages: int) -> int | None:
    """The stage that `--stage` leaves no choice about, else None. Raises InvalidInput."""
    if option == "auto":
        return 0 if stages == 1 else None
    if not option.isdecimal() or int(option) >= stages:
        has = "stage 0 only" if stages == 1 else f"the stages 0 to {stages - 1}"
        raise InvalidInput(f"--stage {option}: the run has {has}; choose one, or auto")
    return int(option)


def stage_of_before(folder: StateFolder, run: str, stages: int) -> int | None:
    """The stage that this peer chose or moved to last, if the run has it."""
    noted = folder.noted_stage(run)
    return noted if noted in range(stages) else None


def announce_joining(
    joined: Joined, options: PeerOptions, stage: int, *, gone: bool = False
) -> None:
    """Say that this peer is about to host a stage, long before it can; or that it is not."""
    record = StageRecord(
        state="left" if gone else "joining",
        round=0,
        inner_steps=0,
        replica="",
        tokens=0,
        tokens_per_s=0.0,
        client_mode=joined.reach.kind == "dial_out",
        voids=0,
        version=__version__,
        name=options.name,
        team=options.team,
        addresses=(),
        blocked="",
    )
    limit_s = GONE_S if gone else CALL_TIMEOUT_S
    joined.swarm.publish(stage_key(joined.run, stage), record, _lifetime_s(joined), limit_s)


def _lifetime_s(joined: Joined) -> float:
    return max(joined.manifest.deadlines.record_lifetime_s, JOINING_S)


@contextmanager
def said_to_join(joined: Joined, options: PeerOptions, stage: int) -> Generator[None]:
    """Others know meanwhile that this peer is about to host a stage: what a start reads, checks or
    downloads may take hours, and spares would move to where nobody seems to be. If it fails they
    hear that at once. Begins a thread: nothing is to be forked in here.
    """
    ready = threading.Event()

    def say() -> None:
        while not ready.is_set():
            announce_joining(joined, options, stage)
            ready.wait(_lifetime_s(joined) / SAID_AGAIN)

    thread = threading.Thread(target=say, name="joining", daemon=True)
    thread.start()
    try:
        yield
    except BaseException:
        ready.set()
        thread.join(GONE_S)  # or what it says would come last
        announce_joining(joined, options, stage, gone=True)
        raise
    ready.set()
    thread.join(LOOK_LIMIT_S)


def _without_later_joiners(records: Records, me: str) -> dict[int, dict[str, StageRecord]]:
    return {
        stage: {
            peer: record for peer, record in here.items() if record.state != "joining" or peer <= me
        }
        for stage, here in records.items()
    }


def look_at_stages(joined: Joined) -> dict[int, dict[str, StageRecord]]:
    """The hosts of each stage; a stage whose records could not be had is left out."""
    keys = {stage_key(joined.run, stage): stage for stage in range(joined.manifest.stages)}
    records: dict[int, dict[str, StageRecord]] = {}
    for _ in range(LOOKS):
        found = joined.swarm.read_many(dict.fromkeys(keys, StageRecord), LOOK_LIMIT_S)
        records |= {keys[key]: here for key, here in found.items() if here is not None}
        if len(records) == len(keys):
            break
    return records

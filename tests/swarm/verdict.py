"""What a fault campaign showed: what must not have happened, and the figures."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator
from pathlib import Path

from dilocox.pipeline.member import PATIENCE, PING_LIMIT_S
from tests.swarm.campaign import Outcome
from tests.swarm.harness import ProcessSwarm

ROOT = Path(__file__).resolve().parents[2]
STOP_S = 10.0  # with a spare ready, training stands still for silence_s and so much longer
SPLICE_S = 3.0  # the median
LOSS_SHARE = 0.03
LAST_LOSSES = 3  # single ones differ by chance


def flaws(swarm: ProcessSwarm, outcomes: list[Outcome]) -> list[str]:
    """Everything in this campaign that must not be, one line each."""
    return [
        *_long_stops(swarm, outcomes),
        *_slow_splices(outcomes),
        *false_detections(swarm, outcomes),
        *_needless_starts(swarm, outcomes),
        *_unequal_chains(swarm),
        *_tracebacks(swarm),
    ]


def summary(swarm: ProcessSwarm, outcomes: list[Outcome]) -> str:
    """The figures, for people."""
    beside_spare = sum(each.spare for each in outcomes)
    missed = sum(each.landed != each.fault.phase for each in outcomes)
    median_s, longest_s = median_splice_s(outcomes), longest_stop_s(outcomes)
    rounds = {stage: len(swarm.chain(stage)) for stage in range(swarm.manifest.stages)}
    return (
        f"{len(outcomes)} faults, {beside_spare} beside a spare: median splice "
        f"{median_s or math.nan:.2f} s, longest stop {longest_s or math.nan:.1f} s; "
        f"{len(list(false_detections(swarm, outcomes)))} false detections; {missed} missed their "
        f"phase; rounds by stage {rounds}"
    )


def _long_stops(swarm: ProcessSwarm, outcomes: list[Outcome]) -> Iterator[str]:
    for each in outcomes:
        limit_s = swarm.manifest.deadlines.silence_s + STOP_S
        if each.fault.role == "head" and each.reason == "silent":
            limit_s += PATIENCE * PING_LIMIT_S  # it may be the line that is full
        if each.spare and (each.stop_s is None or each.stop_s > limit_s):
            yield f"fault {each.number}: training stood still {each.stop_s} s beside a spare"


def _slow_splices(outcomes: list[Outcome]) -> Iterator[str]:
    median_s = median_splice_s(outcomes)
    if median_s is not None and median_s >= SPLICE_S:
        yield f"the median splice took {median_s:.1f} s"


def median_splice_s(outcomes: list[Outcome]) -> float | None:
    """Of the faults with a spare ready."""
    splices = [each.splice_s for each in outcomes if each.spare and each.splice_s is not None]
    return statistics.median(splices) if splices else None


def longest_stop_s(outcomes: list[Outcome]) -> float | None:
    """Of the faults with a spare ready."""
    stops = [each.stop_s for each in outcomes if each.spare and each.stop_s is not None]
    return max(stops) if stops else None


def false_detections(swarm: ProcessSwarm, outcomes: list[Outcome]) -> Iterator[str]:
    """Faults that heads told of peers which nobody had hurt.

    A head that was hurt itself (cut off or frozen) finds its members gone, and is right.
    """
    for head in swarm.of_stage(0):
        for event in head.of_kind("fault"):
            hurt = {
                each.peer_id
                for each in outcomes
                if each.hit_at <= event["time"] <= each.hit_at + each.back_s
            }
            if not hurt & {event["peer"], head.peer_id}:
                yield f"{head.name} told a false fault: {event}"


def _needless_starts(swarm: ProcessSwarm, outcomes: list[Outcome]) -> Iterator[str]:
    for peer in swarm.peers:
        ended = [
            each
            for each in outcomes
            if each.victim == peer.name and each.fault.kind in ("kill", "p2pd", "leave")
        ]
        starts = len(peer.of_kind("training"))
        if starts != 1 + len(ended):
            yield f"{peer.name} started {starts} times and was ended {len(ended)} times"


def _unequal_chains(swarm: ProcessSwarm) -> Iterator[str]:
    try:
        swarm.assert_equal_chains()
    except AssertionError as error:
        yield str(error)


def _tracebacks(swarm: ProcessSwarm) -> Iterator[str]:
    """Of our code: hivemind has its own when a p2pd dies or an answer comes too late."""
    for log in sorted(swarm.folder.glob("*.log")):
        text = log.read_text(errors="replace")
        if (frame := text.find(f'File "{ROOT}/')) >= 0:
            yield f"{log.name} holds a traceback: {text[frame : frame + 600]}"


# ---- loss ----------------------------------------------------------------------------------------
def losses(swarm: ProcessSwarm) -> list[tuple[int, float]]:
    """(tokens behind the anchor, its validation loss) of every anchor that was evaluated."""
    heads = swarm.of_stage(0)
    tokens = {line["round"]: line["chain_tokens"] for peer in heads for line in peer.rounds}
    tokens[-1] = 0
    seen = {number: loss for peer in heads for number, loss in peer.losses.items()}
    return sorted((tokens[number], loss) for number, loss in seen.items() if number in tokens)


def loss_beside(
    curve: list[tuple[int, float]], reference: list[tuple[int, float]]
) -> tuple[float, float]:
    """The means of the last losses of a curve, and of the reference at the same tokens.

    ValueError where the reference does not reach so far.
    """
    last = curve[-LAST_LOSSES:]
    beside = [_at(reference, tokens) for tokens, _ in last]
    return statistics.fmean(loss for _, loss in last), statistics.fmean(beside)


def _at(curve: list[tuple[int, float]], tokens: int) -> float:
    """Interpolated between two evaluated anchors."""
    for (before, loss_before), (after, loss_after) in itertools.pairwise(curve):
        if before <= tokens <= after:
            share = (tokens - before) / max(1, after - before)
            return loss_before + share * (loss_after - loss_before)
    raise ValueError(f"the run without faults has no loss at {tokens:,} tokens")

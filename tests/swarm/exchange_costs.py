"""What averaging costs a swarm on shaped links: its seconds and bytes, beside the arithmetic.

The payload follows from the records: who sent which part to whom, and which mean. What went into
the averaging streams is what the averaging process wrote until the round was merged (the kernel
counts that), less what it wrote elsewhere; what the links carried is counted in IP packets with all
their headers.
"""

from __future__ import annotations

import statistics
import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from dilocox.compression.stage_codec import StageCodec
from dilocox.peer.rounds.record import RoundRecord
from tests.swarm.harness import ProcessSwarm, memory_folder
from tests.swarm.links import Links
from tests.swarm.small_run import MODEL, fixed_steps, run_manifest

SCHEMES = {
    "dense": {"scheme": "dense", "bits": 4},
    "low rank": {"scheme": "low_rank", "bits": 4, "rank": 32},
}
# 3.4 million parameters: several hundred kilobytes even in low rank.
WIDE_MODEL = MODEL | {
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
DEADLINES = {"exchange_s": 30.0, "vote_s": 8.0, "silence_s": 6.0}
START_LIMIT_S = 240.0
MARGIN_S = 0.5  # around an exchange: the clocks of events and of samples


@dataclass(frozen=True, kw_only=True)
class Payload:
    """What one member's averaging streams carry in one round, by phase, in bytes."""

    parts_up: tuple[int, ...]
    parts_down: tuple[int, ...]
    means_up: tuple[int, ...]
    means_down: tuple[int, ...]

    @property
    def up(self) -> int:
        """All that it sends."""
        return sum(self.parts_up) + sum(self.means_up)

    @classmethod
    def of(cls, record: RoundRecord, codec: StageCodec, peer: str) -> Payload:
        """From a record with its means."""
        phases = codec.phases(record.ranks)
        others = len(record.members) - 1
        sums = [[0] * len(phases) for _ in range(4)]
        for part, mean in zip(record.parts, record.means, strict=True):
            size = part.stop - part.start
            sent = phases[part.phase].codec.encoded_bytes(size) if size else 0
            if part.reducer == peer:
                sums[1][part.phase] += sent * others
                sums[2][part.phase] += len(mean) * others
            else:
                sums[0][part.phase] += sent
                sums[3][part.phase] += len(mean)
        up, down, means_up, means_down = (tuple(each) for each in sums)
        return cls(parts_up=up, parts_down=down, means_up=means_up, means_down=means_down)


def least_s(payloads: Sequence[Payload], bytes_per_s: float) -> float:
    """The least time of an exchange: a mean leaves when its parts have come, phase after phase."""
    total = 0.0
    for phase in range(len(payloads[0].parts_up)):
        for up, down in (("parts_up", "parts_down"), ("means_up", "means_down")):
            most = max(max(getattr(p, up)[phase], getattr(p, down)[phase]) for p in payloads)
            total += most / bytes_per_s
    return total


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Of one peer and round: medians over a swarm's peers and whole rounds, but for `waiting`,
    which is a mean, and `longest_s`."""

    rounds: int
    rank: float  # mean over matrices and rounds, 0 where there are none
    payload_bytes: int  # what its averaging streams have to carry
    stream_bytes: int  # what it wrote into them
    burst_bytes: int  # what its link sent while the round was averaged, of whatever kind
    link_bytes: int  # what its link sent from this exchange to the next
    fp16_bytes: int  # what a ring all-reduce of fp16 values would have sent
    exchange_s: float
    longest_s: float
    least_s: float
    waiting: float

    @property
    def overhead(self) -> float:
        """Bytes of the streams for each byte of payload."""
        return self.stream_bytes / self.payload_bytes


class Meter:
    """Reads again and again what the links and the averaging processes have sent."""

    def __init__(self, swarm: ProcessSwarm, links: Links):
        self._links = links
        self._hosts = [swarm.host(peer) for peer in swarm.peers]
        self._averagers = [peer.averager() for peer in swarm.peers]
        self._times: list[float] = []
        self._sent: list[list[int]] = []  # by sample, by peer
        self._written: list[list[int]] = []

    def sample(self) -> None:
        """Note what has passed by now."""
        self._sent.append([self._links.counters(host).sent_bytes for host in self._hosts])
        self._written.append([averager.written_bytes for averager in self._averagers])
        self._times.append(time.time())

    def sent(self, peer: int, start: float, stop: float) -> int:
        """Bytes that a peer's link sent between two times."""
        return self._between(self._sent, peer, start, stop)

    def written(self, peer: int, start: float, stop: float) -> int:
        """Bytes that its averaging process wrote: to sockets, files and its parent."""
        return self._between(self._written, peer, start, stop)

    def _between(self, counts: list[list[int]], peer: int, start: float, stop: float) -> int:
        first, last = (max(bisect_right(self._times, at) - 1, 0) for at in (start, stop))
        return counts[last][peer] - counts[first][peer]


def measure(
    codec: dict[str, Any],
    *,
    mbit: float = 10.0,
    delay_ms: float = 20.0,
    peers: int = 4,
    rounds: int = 2,
    inner_steps: int = 80,
    step_s: float = 0.5,
) -> Costs:
    """Run one swarm on links of this rate and measure so many rounds of all its peers."""
    manifest = run_manifest(
        model=WIDE_MODEL,
        codec=codec,
        batch={"sequence_length": 32, "microbatch_size": 1},
        rounds=fixed_steps(inner_steps),
        deadlines=DEADLINES,
    )
    with (
        memory_folder() as folder,
        Links(peers + 1, mbit=mbit, delay_ms=delay_ms) as links,
        ProcessSwarm(folder, manifest, links=links) as swarm,
    ):
        for _ in range(peers):
            swarm.add_peer(step_s=step_s)
        meter, numbers = _watch(swarm, links, rounds, inner_steps * step_s)
        swarm.assert_equal_chains()
        return _costs(swarm, meter, numbers, mbit * 1e6 / 8)


def _watch(
    swarm: ProcessSwarm, links: Links, count: int, round_s: float
) -> tuple[Meter, list[int]]:
    """Meter so many rounds that hold all peers, and one more, where the last one ends."""
    everybody = swarm.peers
    first = swarm.wait_until_all_train(START_LIMIT_S)
    meter = Meter(swarm, links)

    def whole() -> list[int]:
        meter.sample()
        told = [number for number in sorted(swarm.chain()) if number > first]
        lines = {number: [peer.record(number) for peer in everybody] for number in told}
        return [n for n in told if all(line and line["tokens"] for line in lines[n])]

    limit_s = START_LIMIT_S + (count + 3) * 2 * round_s
    swarm.wait(lambda: len(whole()) > count, limit_s, f"{count + 1} rounds of all peers")
    return meter, whole()[: count + 1]


def _costs(swarm: ProcessSwarm, meter: Meter, numbers: list[int], bytes_per_s: float) -> Costs:
    log, codec = swarm.round_log(swarm.peers[0]), swarm.stage_codec(0)
    spans = {number: _span(swarm, number) for number in numbers}
    payloads, streams, bursts, sent = list[int](), list[int](), list[int](), list[int]()
    least, ranks, lines = list[float](), list[int](), list[dict[str, Any]]()
    for number, following in pairwise(numbers):
        record = log.read(number)
        assert record is not None
        members = [Payload.of(record, codec, peer.peer_id) for peer in swarm.peers]
        least.append(least_s(members, bytes_per_s))
        ranks += [rank for rank in record.ranks if rank]
        (start, stop), (end, _) = spans[number], spans[following]
        beside = _written_beside(swarm, number)
        for index, peer in enumerate(swarm.peers):
            payloads.append(members[index].up)
            # what it serves to the bootstrap comes later
            streams.append(meter.written(index, start, stop) - beside)
            bursts.append(meter.sent(index, start, stop))
            sent.append(meter.sent(index, start, end))
            lines += [peer.record(number) or {}]
    seconds = [line["exchange_s"] for line in lines if line["exchange_s"] is not None]
    return Costs(
        rounds=len(numbers) - 1,
        rank=statistics.fmean(ranks or [0]),
        payload_bytes=round(statistics.median(payloads)),
        stream_bytes=round(statistics.median(streams)),
        burst_bytes=round(statistics.median(bursts)),
        link_bytes=round(statistics.median(sent)),
        fp16_bytes=round(statistics.median(line["fp16_bytes"] for line in lines)),
        exchange_s=statistics.median(seconds),
        longest_s=max(seconds),
        least_s=statistics.median(least),
        waiting=statistics.fmean(line["waiting_share"] for line in lines),
    )


def _written_beside(swarm: ProcessSwarm, number: int) -> int:
    """What an averaging process writes of a round to no peer.

    The record and its certificate, once to the log and once to the main process, and its vote.
    """
    (folder,) = swarm.peers[0].state.glob("*-stage0/log")
    twice = sum(path.stat().st_size for path in folder.glob(f"{number:08d}*.[rc]e*"))
    return 2 * twice + sum(path.stat().st_size for path in folder.glob(f"{number:08d}-*.vote"))


def _span(swarm: ProcessSwarm, number: int) -> tuple[float, float]:
    """From before the first peer's exchange of a round to after the last one's."""
    lines = [line for peer in swarm.peers if (line := peer.record(number)) is not None]
    starts = [line["time"] - (line["exchange_s"] or 0.0) for line in lines]
    return min(starts) - 2 * MARGIN_S, max(line["time"] for line in lines) + MARGIN_S

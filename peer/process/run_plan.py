"""What a run will do on given machines and links, before anybody starts it: an operator chooses
stages, H and codec before there is anything to measure. Apart from the command, which asks and
prints: this is formulas alone (docs/plan.md).

`RunPlan` sums over what the product itself says: the stages' needs (prepare.py), the arrangement of
a group (rounds/grid.py), the codecs' bytes, the window of a pipeline. docs/plan.md has every
formula, its source and what it leaves out; benchmarks/plan.py prints it beside measured swarms.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from dilocox.compression.exact import MAX_RANK
from dilocox.compression.layout import FlatLayout
from dilocox.compression.stage_codec import Phase
from dilocox.dht.errors import InvalidInput
from dilocox.dht.manifest import Manifest
from dilocox.dht.manifest_sections import CodecSpec, InitialSpec, OperationSpec
from dilocox.peer.memory_and_disk import MemoryNeeds, memory_status, size
from dilocox.peer.process.prepare import fewest_stages, memory_of_stages, stage_kinds
from dilocox.peer.rounds.grid import Grid
from dilocox.peer.rounds.rank_choice import least_inner_steps
from dilocox.peer.rounds.record import stage_codec
from dilocox.peer.rounds.robust import JUDGED, LEAST_GATED
from dilocox.peer.rounds.round_end import LONGEST_LOOK_S, LOOK_S, LOOKS, NOTICE_S
from dilocox.pipeline.frames import CODECS, encoded_bytes
from dilocox.pipeline.partition import EMBEDDING_DISCOUNT, hidden_size, plan_stages
from dilocox.pipeline.stage import stage_layout
from dilocox.pipeline.stage_worker import window_size
from dilocox.pipeline.tuning import line_payloads, next_codec

WIRE = 1.05  # bytes of a link for each byte of payload: headers of IP, TCP, Noise and frames
LAST_WAYS = 3  # of an exchange: words of the means, votes, and the answers to these
STALL_S = 1.1e-8  # without training for each value and round: a send and a merge
CODEC_ROOM = 3  # in `LowRank.core_seconds`, which deadlines follow, over what is measured
# Of a core, as benchmarks/plan_costs.py prints them: for each value encoded, reduced and decoded,
# and more with the gate; for each byte that is sent and one that comes; for each such call.
CODE_S, GATE_S, MOVE_S, CALL_S = 8e-9, 13e-9, 4e-9, 3e-3
HEARTBEAT_BYTES = 35_000.0  # what a peer sends in a heartbeat's time while nothing happens
MONTH_S, DAY_S = 30 * 86400.0, 86400.0
DENSE_BITS: tuple[Literal[4, 2], ...] = (4, 2)  # a value, of dense codecs that one chooses from


@dataclass(frozen=True, kw_only=True)
class Machines:
    """What a run's peers have, all alike, or the slowest of them.

    peers: of all stages. up_bytes_s, down_bytes_s: of each one's link. rtt_s: between two of them.
    flops: that a peer reaches in training, each second. stage_tokens_s: in the place of it, tokens
    a second of a stage, as measured, by stage or one for all. memory_bytes, gpu_memory_bytes: of
    the machine and of its GPU; None is not told. threads: cores of which the codec takes one while
    training needs it; 0: it has its own, as beside a GPU. core: how much of a core an exchange
    finds to compute on; less than all of it where peers share a machine.
    """

    peers: int
    up_bytes_s: float
    down_bytes_s: float
    rtt_s: float
    flops: float | None = None
    stage_tokens_s: tuple[float, ...] = ()
    memory_bytes: float | None = None
    gpu_memory_bytes: float | None = None
    threads: int = 0
    core: float = 1.0

    def __post_init__(self) -> None:
        if (self.flops is None) == (not self.stage_tokens_s):
            raise InvalidInput("give either --tflops or --tokens-per-s")

    @property
    def slower_bytes_s(self) -> float:
        """Of the two directions."""
        return min(self.up_bytes_s, self.down_bytes_s)


@dataclass(frozen=True, kw_only=True)
class StageFacts:
    """One stage: its layers (first and last), its values, what it takes, whether that fits, and a
    microbatch's seconds.
    """

    stage: int
    layers: tuple[int, int]
    values: int
    memory_bytes: int
    gpu_memory_bytes: int
    fits: bool
    pass_s: float


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """An inner step of a replica: computing_s of its mean stage, total_s of the wall; between
    stages the codec, the microbatches in flight, and bytes that the busiest stage sends.

    line: the share of the time in which these pass its link. limit: what a step waits for most.
    """

    computing_s: float
    total_s: float
    codec: str = "-"
    window: int = 1
    sent_bytes: int = 0
    line: float = 0.0
    limit: str = "computing"

    @property
    def beside_exchange(self) -> tuple[float, float]:
        """While an exchange moves bytes: the share of the line that these leave it, and the speed
        of inner steps. Two streams that want more than a line has get half of it each."""
        return 1 - min(self.line, 0.5), min(1.0, 0.5 / self.line) if self.line else 1.0


@dataclass(frozen=True, kw_only=True)
class ExchangeFacts:
    """An exchange of the stage whose one takes longest: bytes each way of the member that moves
    most, seconds on the wire, on the way (half round trips), of codes, sums and calls, and of a low
    rank's own products, which a peer does not count as its exchange (`exchange_s` of an event)."""

    rows: int
    up_bytes: int
    down_bytes: int
    wire_s: float = 0.0
    ways_s: float = 0.0
    code_s: float = 0.0
    products_s: float = 0.0

    @property
    def codec_s(self) -> float:
        return self.code_s + self.products_s

    @property
    def seconds(self) -> float:
        return self.wire_s + self.ways_s + self.codec_s


@dataclass(frozen=True, kw_only=True)
class Method:
    """One way to train the same model there: what all tables compare."""

    name: str
    step_bytes: float
    round_s: float
    tokens_per_s: float
    computing: float


class RunPlan:
    """What a run does on some machines, each thing reckoned once, when it is asked for."""

    def __init__(self, manifest: Manifest, machines: Machines, *, memory: bool = True):
        """memory: False leaves out what the stages take, which is seconds of work.

        Raises InvalidInput where there is no whole replica.
        """
        told = len(machines.stage_tokens_s)
        if told > 1 and told != manifest.stages:
            raise InvalidInput(
                f"--tokens-per-s: {told} values for {manifest.stages} stages: give one for each, "
                "or that of the slowest"
            )
        if machines.peers < manifest.stages:
            raise InvalidInput(
                f"--peers {machines.peers}: a replica of this run takes {manifest.stages}, one for "
                "each stage"
            )
        self.manifest, self.machines, self._memory = manifest, machines, memory
        self.replicas, self.spares = divmod(machines.peers, manifest.stages)
        self._kinds = stage_kinds(manifest)

    @property
    def days(self) -> float:
        """Until the run's end."""
        return self.manifest.end_tokens / self.ours.tokens_per_s / DAY_S

    # ---- memory ----------------------------------------------------------------------------------
    def _of_machine(self, needs: MemoryNeeds) -> int:
        return needs.on_cpu if self.machines.gpu_memory_bytes is None else needs.beside_gpu

    def _fits(self, needs: MemoryNeeds) -> bool:
        machines, taken = self.machines, self._of_machine(needs)
        rooms = ((taken, machines.memory_bytes), (needs.on_gpu, machines.gpu_memory_bytes))
        return all(room is None or memory_status(need, room) == "ok" for need, room in rooms)

    @property
    def fits(self) -> bool:
        return all(each.fits for each in self.stages)

    @cached_property
    def fewest_stages(self) -> int | None:
        """That fit the memory; None where none do, or none is told."""
        machines = self.machines
        if not self._memory or machines.memory_bytes is machines.gpu_memory_bytes is None:
            return None
        # a run that has begun says by stage what it began with, and went back to
        run = replace(self.manifest, initial=InitialSpec(), operation=OperationSpec())
        return fewest_stages(
            lambda stages: replace(run, stages=stages),
            machines.peers,
            lambda needed: all(map(self._fits, needed)),
        )

    @cached_property
    def stages(self) -> list[StageFacts]:
        plans = plan_stages(self.manifest.model, self.manifest.stages)
        values = [each.num_parameters for each in plans]
        alone = [MemoryNeeds(values=each) for each in values]
        needed = memory_of_stages(self.manifest) if self._memory else alone
        return [
            StageFacts(
                stage=stage,
                layers=(plans[stage].start, plans[stage].stop - 1),
                values=values[stage],
                memory_bytes=self._of_machine(needs),
                gpu_memory_bytes=needs.on_gpu,
                fits=self._fits(needs),
                pass_s=self._pass_s(stage),
            )
            for stage, needs in enumerate(needed)
        ]

    # ---- computing -------------------------------------------------------------------------------
    def _pass_s(self, stage: int) -> float:
        """A forward and a backward of one microbatch; the step of the optimizer shared out."""
        batch, told = self.manifest.batch, self.machines.stage_tokens_s
        tokens = batch.sequence_length * batch.microbatch_size
        if told:
            return tokens / told[stage if len(told) > 1 else 0]
        assert self.machines.flops is not None
        return tokens * flops_per_token(self.manifest, stage) / self.machines.flops

    @cached_property
    def step(self) -> StepFacts:
        """The head feeds microbatches as the window lets it; the last one travels down and up."""
        batch, stages, machines = self.manifest.batch, self.manifest.stages, self.machines
        passes = [each.pass_s for each in self.stages]
        slowest, count = max(passes), batch.microbatches
        computing = count * sum(passes) / stages
        if stages == 1:
            return StepFacts(computing_s=computing, total_s=computing)
        shape = batch.microbatch_size, batch.sequence_length, hidden_size(self.manifest.model)
        payloads = line_payloads(stages)
        codec = self.manifest.pipeline.codec
        if codec == "auto":
            room = machines.slower_bytes_s / WIRE * slowest
            codec = next_codec(CODECS[-1], room, shape, payloads=payloads)
        sent = payloads * encoded_bytes(codec, shape)
        line_s = WIRE * sent / machines.slower_bytes_s
        # both ways of all links: for each a transfer and half a round trip
        travel_s = (stages - 1) * (2 * line_s / payloads + machines.rtt_s)
        window = self.manifest.pipeline.window or window_size(
            stages=stages,
            microbatches=count,
            round_trip_s=travel_s,
            compute_s=slowest,
            limit=count,
        )
        turns = {
            "computing": slowest,
            "the links between stages": line_s,
            "the round trip of a microbatch": (sum(passes) + travel_s) / window,
        }
        limit = max(turns, key=lambda name: turns[name])
        return StepFacts(
            computing_s=computing,
            total_s=sum(passes) + travel_s + (count - 1) * turns[limit],
            codec=codec,
            window=window,
            sent_bytes=count * sent,
            line=line_s / turns[limit],
            limit=limit,
        )

    @cached_property
    def _layouts(self) -> Mapping[int, FlatLayout]:
        return {stage: stage_layout(self.manifest, stage) for stage in self._kinds}

    # ---- exchanging ------------------------------------------------------------------------------
    @cached_property
    def exchange(self) -> ExchangeFacts:
        """Of the stage whose exchange takes longest."""
        found = [self._exchange(stage, self.manifest) for stage in self._kinds]
        return max(found, key=lambda each: each.seconds)

    def _exchange(self, stage: int, manifest: Manifest, rank: int | None = None) -> ExchangeFacts:
        machines = self.machines
        codec = stage_codec(manifest, self._layouts[stage])
        ranks = [min(rank, limit) for limit in codec.limits] if rank else codec.first_ranks
        phases = codec.phases(ranks)
        names = [str(number) for number in range(self.replicas)]
        grid = Grid.of(b"plan", names, names, manifest.rounds.group_size)
        turns = traffic(grid, phases)
        factors = codec.low_rank(ranks)
        products_s = 0.0 if factors is None else sum(factors.core_seconds()) / CODEC_ROOM
        if len(names) == 1:
            return ExchangeFacts(rows=1, up_bytes=0, down_bytes=0)
        left, _ = self.step.beside_exchange
        upload, download = machines.up_bytes_s, machines.down_bytes_s
        left *= max(0.1, 1 - self._resting_bytes_s / machines.slower_bytes_s)
        moved = sum(up for up, _ in turns)
        gated = manifest.rounds.robust in JUDGED and min(map(len, grid.rows)) >= LEAST_GATED
        computed = (CODE_S + GATE_S * gated) * sum(phase.numel for phase in phases)
        computed += MOVE_S * moved + CALL_S * (len(turns) + 2) * (max(map(len, grid.rows)) - 1)
        return ExchangeFacts(
            rows=len(grid.rows),
            up_bytes=moved,
            down_bytes=sum(down for _, down in turns),
            wire_s=WIRE / left * sum(max(up / upload, down / download) for up, down in turns),
            ways_s=(len(turns) + LAST_WAYS) * machines.rtt_s / 2,
            code_s=computed / machines.core,
            products_s=products_s / machines.core,
        )

    # ---- a round ---------------------------------------------------------------------------------
    @property
    def _stall_s(self) -> float:
        """Of a round, without training: what it costs once, and what an exchange takes away."""
        machines, exchange = self.machines, self.exchange
        competing = exchange.codec_s / machines.threads if machines.threads else 0.0
        _, speed = self.step.beside_exchange
        once = STALL_S * max(each.values for each in self.stages)
        return once + competing + exchange.wire_s * (1 - speed)

    @cached_property
    def _round(self) -> tuple[float, float]:
        """Its seconds, and inner steps."""
        step_s, steps = self.step.total_s, self.manifest.rounds.inner_steps
        # from the send to the merge; until then no head ends another round
        flight_s = NOTICE_S + step_s + self.exchange.seconds
        heard_s = min(max(steps * step_s / LOOKS, LOOK_S), LONGEST_LOOK_S)
        if self.replicas == 1:
            return steps * step_s + self._stall_s, float(steps)
        if self.manifest.outer.merge == "none":  # it waits for its own record
            return steps * step_s + heard_s + flight_s, steps + heard_s / step_s
        training_s = max(steps * step_s, flight_s) + heard_s
        return training_s + self._stall_s, training_s / step_s

    @cached_property
    def ours(self) -> Method:
        round_s, steps = self._round
        return self._method("this run", self.exchange.up_bytes, steps, round_s)

    def _method(self, name: str, round_bytes: float, steps: float, round_s: float) -> Method:
        tokens = self.replicas * self.manifest.batch.tokens_per_step * steps
        return Method(
            name=name,
            step_bytes=round_bytes / steps + self.step.sent_bytes,
            round_s=round_s,
            tokens_per_s=tokens / round_s,
            computing=steps * self.step.computing_s / round_s,
        )

    @property
    def inner_steps(self) -> float:
        """Of a round: H, and those until all have heard that it is over."""
        return self._round[1]

    # ---- what others do --------------------------------------------------------------------------
    @cached_property
    def methods(self) -> tuple[Method, ...]:
        """This run beside what others would do there, AllReduce last."""
        steps, step_s, machines = self.manifest.rounds.inner_steps, self.step.total_s, self.machines
        # a ring all-reduce of 16 bits a value of the largest stage, none of it overlapped
        others = self.replicas - 1
        sent = 2 * 2 * max(each.values for each in self.stages) * others / self.replicas
        ring_s = WIRE * sent / machines.slower_bytes_s + 2 * others * machines.rtt_s / 2
        return (
            self.ours,
            self._dilocox,
            self._method("OpenDiLoCo", sent, steps, steps * step_s + ring_s),  # pseudo-gradients
            self._method("AllReduce", sent, 1, step_s + ring_s),  # gradients
        )

    @property
    def _dilocox(self) -> Method:
        """DiLoCoX as published: one round late, low rank and 4 bits."""
        spec = self.manifest.codec
        codec = replace(spec, scheme="low_rank", bits=4, min_rank=min(spec.min_rank, spec.rank))
        outer = replace(self.manifest.outer, merge="reset", apply="round_end")
        other = RunPlan(
            replace(self.manifest, codec=codec, outer=outer), self.machines, memory=False
        )
        return replace(other.ours, name="DiLoCoX")

    # ---- what follows ----------------------------------------------------------------------------
    @property
    def month_gb(self) -> float:
        """That a peer of the busiest stage sends."""
        sent = self.exchange.up_bytes + self._round[1] * self.step.sent_bytes
        return MONTH_S * (WIRE * sent / self._round[0] + self._resting_bytes_s) / 1e9

    @property
    def _resting_bytes_s(self) -> float:
        """Announcements and looks at the DHT."""
        return HEARTBEAT_BYTES / self.manifest.deadlines.heartbeat_s

    @property
    def hidden_steps(self) -> int:
        """The least H that the records would go to."""
        least = least_inner_steps(self.exchange.seconds, self._stall_s, self.step.total_s)
        return max(1, math.ceil(least))

    @cached_property
    def hidden_rank(self) -> int:
        """The largest of a low rank codec at which an exchange ends within half of H steps; 0 where
        none does."""
        spec = CodecSpec(scheme="low_rank", bits=4, min_rank=1, max_rank=MAX_RANK)
        # seconds grow with the rank
        return bisect_left(
            range(1, MAX_RANK + 1), True, key=lambda rank: not self._hides(spec, rank)
        )

    @cached_property
    def hidden_bits(self) -> int:
        """The most of a dense codec at which one does; 0 where none does."""
        found = (b for b in DENSE_BITS if self._hides(CodecSpec(scheme="dense", bits=b)))
        return next(found, 0)

    def _hides(self, codec: CodecSpec, rank: int | None = None) -> bool:
        room_s = self.manifest.rounds.inner_steps * self.step.total_s / 2
        manifest = replace(self.manifest, codec=codec)
        return all(self._exchange(s, manifest, rank).seconds <= room_s for s in self._kinds)

    @property
    def limit(self) -> str:
        """What holds the run up, in words."""
        exchange, step = self.exchange, self.step
        short = [each for each in self.stages if not each.fits]
        if short:
            return (
                f"memory: stage {short[0].stage} takes {size(short[0].memory_bytes)}"
                f" and {size(short[0].gpu_memory_bytes)} of a GPU"
            )
        round_s = self.manifest.rounds.inner_steps * step.total_s
        waits = self.manifest.outer.merge == "none"
        if exchange.seconds > round_s or (waits and exchange.seconds > round_s / 20):
            up = WIRE * exchange.up_bytes / self.machines.up_bytes_s
            down = WIRE * exchange.down_bytes / self.machines.down_bytes_s
            parts = {"the uplink": up, "the downlink": down * 0.999}
            parts |= {"round trips": exchange.ways_s, "the codec": exchange.codec_s}
            return f"the exchange: {max(parts, key=lambda name: parts[name])}"
        if step.limit == "computing" and step.computing_s < 0.9 * step.total_s:
            return "the pipeline's filling and draining: more microbatches help"
        return step.limit


# ---- formulas that stand alone -------------------------------------------------------------------
def flops_per_token(manifest: Manifest, stage: int) -> float:
    """Of training: 6 a weight that multiplies, and 6 * length * width a layer for causal attention
    (arXiv 2001.08361, 2204.02311); a third more of both where layers are computed twice.
    """
    here = plan_stages(manifest.model, manifest.stages)[stage]
    # a table of embeddings, which is looked up, counts in part in the cost by which stages are cut
    table = (here.num_parameters - here.cost) * EMBEDDING_DISCOUNT / (EMBEDDING_DISCOUNT - 1)
    length, width = manifest.batch.sequence_length, hidden_size(manifest.model)
    layers = here.stop - here.start
    flops = 6 * (here.num_parameters - table) + 6 * layers * length * width
    return flops * (4 / 3 if manifest.pipeline.recompute else 1)


def traffic(grid: Grid, phases: Sequence[Phase]) -> list[tuple[int, int]]:
    """What a group moves, by turns that wait for each other: of each phase parts to the reducers
    of the row, between rows their means, and means to all. Of each turn the most bytes that a
    member sends, and that one receives.
    """
    found: list[tuple[int, int]] = []
    for number, phase in enumerate(phases):
        shares = [share for share in grid.shares(phases) if share.phase == number]
        parts, rows, means = (_Turn() for _ in range(3))
        for first in range(0, len(shares), len(grid.rows)):
            column = shares[first : first + len(grid.rows)]
            span = column[-1].stop - column[0].start
            reducers = [share.reducer for share in column]
            for row, reducer in zip(grid.rows, reducers, strict=True):
                if span:
                    whole = phase.codec.encoded_bytes(span)
                    for peer in row:
                        parts.send(peer, [reducer], whole)
                for share in column:
                    if not share.numel:
                        continue
                    mean = phase.codec.encoded_bytes(share.numel)
                    if share.reducer == reducer:
                        means.send(reducer, {*row, *reducers}, mean)
                    else:
                        beside = phase.row_codec.encoded_bytes(share.numel)
                        rows.send(reducer, [share.reducer], beside)
                        means.send(reducer, set(row) - {share.reducer}, mean)
        found += [turn.most for turn in (parts, rows, means) if turn.up]
    return found


class _Turn:
    def __init__(self) -> None:
        self.up, self.down = Counter[str](), Counter[str]()

    def send(self, peer: str, others: Sequence[str] | set[str], count: int) -> None:
        for other in others:
            if other != peer:
                self.up[peer] += count
                self.down[other] += count

    @property
    def most(self) -> tuple[int, int]:
        return max(self.up.values()), max(self.down.values())

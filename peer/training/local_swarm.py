"""A swarm in one process, for studies of the method: merge, outer step and codecs are those of
peers, and there is no network. docs/library.md shows it; the benchmarks of the loss are made of it.

A record reaches all workers `arrival` inner steps after its send. What an exchange would move is
encoded, averaged and decoded as a group does it, and counted. The caller decides which workers
train, and on what.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from dilocox.compression.layout import FlatLayout, split
from dilocox.compression.stage_codec import StageCodec
from dilocox.dht.manifest import CodecSpec, OuterSpec, RoundSpec
from dilocox.peer.rounds.outer_step import OuterStep
from dilocox.peer.rounds.rank_choice import facts_of, following_window, next_ranks
from dilocox.peer.rounds.record import RoundFacts, compression
from dilocox.peer.rounds.shares import Reduction, combine, decode, encode
from dilocox.peer.training.merge import Merge, MergeConfig, RecordFacts, Remainder
from dilocox.pipeline.stage import flatten_parameters


class LocalSwarm:
    """Workers side by side; after each inner step `trained` does what is due: send, average, outer
    step, merge.

    Attributes:
        seed: of the bases.
        layout: of the flat vectors; `layout.view(anchor)` has the anchor by the model's names.
        codec: of the stage that the model is.
        ranks: of the coming exchange, one a tensor; empty unless the scheme is low_rank.
        bytes_sent: by all workers so far, payloads only.
    """

    def __init__(
        self,
        replicas: Sequence[nn.Module],
        *,
        rounds: RoundSpec,
        arrival: int,
        outer: OuterSpec | None = None,
        codec: CodecSpec | None = None,
        seed: int = 0,
        weights: Sequence[Tensor] | None = None,
    ):
        """replicas: equal fp32 modules, one a worker; their parameters become views of the live
        weights. rounds, outer, codec: as a manifest has them; members do not judge reducers here.
        arrival: 0 to H inner steps; with `merge: none` it is 0, with `apply: round_end` H. seed: of
        the bases. weights: the live ones, flat fp32 [n], where they are not the replicas'.
        """
        outer, codec = outer or OuterSpec(), codec or CodecSpec()
        late = rounds.inner_steps if outer.apply == "round_end" else arrival
        self._arrival = 0 if outer.merge == "none" else late
        if not 0 <= self._arrival <= rounds.inner_steps:
            raise ValueError(f"arrival {arrival}: choose from 0 to the {rounds.inner_steps} of H")
        self._rounds, self._spec, self.seed, self._steps = rounds, codec, seed, 0
        self.layout = FlatLayout.of((n, tuple(p.shape)) for n, p in replicas[0].named_parameters())
        self._outer = OuterStep(outer.learning_rate, outer.momentum)
        self.codec = StageCodec(self.layout, compression(codec))
        self.ranks, self.bytes_sent = self.codec.first_ranks, 0
        self._basis = self.codec.first_basis(f"{seed}/-1")
        self._window: tuple[RoundFacts, ...] = ()
        live = weights or [flatten_parameters(each, self.layout) for each in replicas]
        anchor, momentum = live[0].to("cpu", copy=True), torch.zeros(self.layout.numel)
        rule = MergeConfig.of(outer, codec, rounds)
        self._merges = [
            Merge(rule, each, anchor, momentum, round_number=-1, digest="-1") for each in live
        ]
        self._in_flight: tuple[Tensor, list[Tensor]] | None = None  # average, what is left of each

    @property
    def anchor(self) -> Tensor:
        """The anchor, fp32 [n], of all workers."""
        return self._merges[0].anchor

    def trained(self, tokens: int) -> None:
        """Every worker made an inner step on so many tokens."""
        for merge in self._merges:
            merge.trained(tokens)
        self._steps += 1
        number, rest = divmod(self._steps, self._rounds.inner_steps)
        if self._arrival and rest == self._arrival % self._rounds.inner_steps:
            self.arrive()
        if rest == 0:
            messages = [merge.send(number - 1).message for merge in self._merges]
            self._in_flight = self.average(number - 1, messages), messages
            if not self._arrival:
                self.arrive()

    def arrive(self) -> None:
        """The record in flight, if there is one, reaches all workers now."""
        if self._in_flight is None:
            return
        average, left = self._in_flight
        self._in_flight = None
        first = self._merges[0]
        anchor, momentum = torch.empty_like(first.anchor), torch.empty_like(first.momentum)
        self._outer.apply(first.anchor, first.momentum, average, anchor, momentum)
        number, before = first.round + 1, str(first.round)
        record = RecordFacts(round=number, digest=str(number), previous=before, contributor=True)
        for merge, values in zip(self._merges, left, strict=True):
            merge.commit(record, anchor, momentum, Remainder(values))

    def average(self, number: int, messages: Sequence[Tensor]) -> Tensor:
        """The average fp32 [n] of a round's messages [n], in each of which what is left stays."""
        codec, spec, ranks = self.codec, self._spec, self.ranks
        vectors, counted = self.exchange(messages, {str(n): 1 for n in range(len(messages))})
        means = codec.means(ranks, vectors)
        for message, parts in zip(messages, counted, strict=True):
            means.take_out(message, parts)
        average = means.average()
        if spec.adaptive:
            facts = facts_of(ranks=ranks, needed=means.needed(spec.energy), times=())
            self._window = window = following_window(self._window, facts)
            self.ranks = next_ranks(ranks, window, limits=codec.limits, min_rank=spec.min_rank)
        self._basis = means.next_basis(codec.low_rank(self.ranks), f"{self.seed}/{number}")
        return average

    def exchange(
        self, messages: Sequence[Tensor], weight: Mapping[str, int]
    ) -> tuple[list[Tensor], list[list[slice]]]:
        """Each member, by what it counts, reduces one part of each phase: the decoded mean of each
        phase, and by member the parts of the last one in which its values are.
        """
        encoders = [self.codec.encoder(each, self.ranks, lambda: self._basis) for each in messages]
        vectors, counted = list[Tensor](), list[list[slice]]()
        for number, phase in enumerate(self.codec.phases(self.ranks)):
            sent = [encoder.vector(number, vectors) for encoder in encoders]
            mean, counted = torch.empty(phase.numel), [list[slice]() for _ in messages]
            parts = split(phase.numel, len(messages), phase.codec.group_size)
            for reducer, part in enumerate(parts):
                if part.stop > part.start:
                    values = {name: each[part] for name, each in zip(weight, sent, strict=True)}
                    mean[part], heard = self.reduce(number, reducer, values, weight)
                    for member in heard:
                        counted[int(member)].append(part)
            vectors.append(mean)
        return vectors, counted

    def reduce(
        self, phase: int, reducer: int, values: Mapping[str, Tensor], weight: Mapping[str, int]
    ) -> tuple[Tensor, Sequence[str]]:
        """The decoded mean [n] of the reducer's part, and whose values [n] are in it."""
        codec, numel = self.codec.phases(self.ranks)[phase].codec, len(values["0"])
        reduction = Reduction(codec, weight, numel, self._rounds.robust)
        payloads = {name: encode(codec, part) for name, part in values.items()}
        for name, payload in payloads.items():
            reduction.add(name, payload)
        row = reduction.finish()
        mean = combine(0, [row] if row else [], codec=codec, weight=weight)
        if mean is None:
            raise RuntimeError("a part without members")
        # the reducer is a member: neither its part nor its mean travels to itself
        self.bytes_sent += (len(values) - 1) * (len(payloads["0"]) + len(mean.payload))
        return decode(codec, mean.payload, numel), mean.contributors


local_swarm = LocalSwarm  # as a call in a script

"""What a round's record says of the next ones: their ranks, and H.

A pure function of the record before and of what the members gathered and averaged, so all members
write the same, and whoever replays the log finds it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dilocox.compression.layout import FlatLayout
from dilocox.compression.stage_codec import Compression, StageCodec
from dilocox.dht.manifest import Manifest
from dilocox.peer.adaptation import facts_of, following_window, next_inner_steps, next_ranks
from dilocox.peer.outer import OuterStep
from dilocox.peer.record import RoundRecord


def stage_codec(manifest: Manifest, layout: FlatLayout) -> StageCodec:
    """How the records of a stage of this layout are coded."""
    spec = manifest.codec
    compression = Compression(
        scheme=spec.scheme,
        bits=spec.bits,
        max_factor=spec.max_factor,
        rank=spec.rank,
        min_rank=spec.min_rank,
        max_rank=spec.max_rank,
        top_k=spec.top_k,
    )
    return StageCodec(layout, compression)


def outer_step(manifest: Manifest, rules: int) -> OuterStep:
    """The outer step of a record that was made under these rules."""
    return OuterStep(*manifest.outer_under(rules))


class RoundPlan:
    """The plan of one stage of a run."""

    def __init__(self, manifest: Manifest, codec: StageCodec):
        self._manifest = manifest
        self._codec = codec

    def ranks_after(self, last: RoundRecord | None) -> tuple[int, ...]:
        """The ranks of the exchange after a record; None is the manifest, before the first."""
        return self._codec.first_ranks if last is None else last.next_ranks

    def inner_steps_after(self, last: RoundRecord | None) -> int:
        """The newest H that a record, or the manifest, names."""
        return self._manifest.rounds.inner_steps if last is None else last.next_inner_steps

    def finished(self, record: RoundRecord) -> RoundRecord:
        """A record that is whole but for its plan.

        Its `window` and `next_inner_steps` are still those of the record before it.
        """
        spec, rounds = self._manifest.codec, self._manifest.rounds
        facts = facts_of(
            ranks=record.ranks,
            needed=record.decoded(self._codec).needed(spec.energy),
            times=[(each.exchange_s, each.step_s, each.stall_s) for each in record.members],
        )
        window = following_window(record.window, facts)
        ranks: Sequence[int] = record.ranks
        if spec.adaptive:
            limits = self._codec.limits
            ranks = next_ranks(ranks, window, limits=limits, min_rank=spec.min_rank)
        low, high = rounds.min_inner_steps, rounds.max_inner_steps
        steps = next_inner_steps(record.next_inner_steps, window, low=low, high=high)
        return replace(record, window=window, next_ranks=tuple(ranks), next_inner_steps=steps)

    def follows(self, record: RoundRecord, last: RoundRecord | None) -> bool:
        """Whether this is the plan that must stand in a record after `last` (with its means)."""
        unplanned = replace(
            record,
            window=() if last is None else last.window,
            next_inner_steps=self.inner_steps_after(last),
        )
        return self.finished(unplanned) == record

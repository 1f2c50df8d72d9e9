"""What happens in a replica, in small facts: sums on their way up, orders on their way down."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, cast

from pydantic import Field

from dilocox.pipeline.frames import Amount, Codec, Facts, FrameRefused, or_nan
from dilocox.pipeline.link import BrokenKind
from dilocox.pipeline.reservation import MAX_WINDOW, ClipFactor, LearningRate

Stage = Annotated[int, Field(ge=0)]
Nats = Annotated[float, or_nan()]


class StageReport(Facts):
    """What a stage tells its head at the end of every inner step.

    anchor_round: of the last record in its anchor.
    compute_s: of a forward and a backward of one microbatch.
    upper_bytes_per_s, lower_bytes_per_s: how fast large payloads came from each neighbour; 0 where
        nothing was measured.
    lower_round_trip_s: of a few bytes to the neighbour below and back; 0 where not measured.
    window: microbatches in flight that it has memory for.
    undecided: its last send is in no record yet, and not void.
    leaving: it wants to be relieved.
    """

    anchor_round: int
    compute_s: Amount
    upper_bytes_per_s: Amount = 0.0
    lower_bytes_per_s: Amount = 0.0
    lower_round_trip_s: Amount = 0.0
    window: Annotated[int, Field(ge=1, le=MAX_WINDOW)] = MAX_WINDOW
    undecided: bool = False
    leaving: bool = False


class Totals(Facts):
    """Sums over a stage and all below it; `reports` are theirs, from the topmost down.

    Not a number where something was not finite. In a frame's facts the reports stand as one list
    for each of their fields.
    """

    squared_norm: Annotated[float, or_nan(0.0)]
    loss: Nats
    reports: tuple[StageReport, ...] = ()

    def plus(self, squared_norm: float, report: StageReport) -> Totals:
        """With the next stage above."""
        total = self.squared_norm + squared_norm
        return Totals(squared_norm=total, loss=self.loss, reports=(report, *self.reports))

    def to_facts(self) -> dict[str, object]:
        names = StageReport.model_fields
        columns = {name: tuple(getattr(each, name) for each in self.reports) for name in names}
        return {"squared_norm": self.squared_norm, "loss": self.loss, **columns}

    @classmethod
    def from_facts(cls, facts: Mapping[str, object], num_stages: int = 0) -> Totals:
        names, columns = tuple(StageReport.model_fields), list[tuple[object, ...]]()
        for name in names:
            column = facts.get(name)
            column = cast("tuple[object, ...]", column) if isinstance(column, tuple) else ()
            if len(column) != num_stages:
                raise FrameRefused("header", f"{name} is no list of {num_stages}")
            columns.append(column)
        rows = (dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True))
        reports = tuple(StageReport.from_facts(row) for row in rows)
        return super().from_facts({**facts, "reports": reports})


class Go(Facts):
    """The head's word that an inner step is complete: all stages clip and step now.

    factor: what gradients are multiplied by; not a number: the step is skipped. codecs: by link,
    from the next inner step on. loss: the mean of this one's.
    """

    factor: ClipFactor
    learning_rate: LearningRate
    loss: Nats
    codecs: tuple[Codec, ...]

    def contradiction(self, num_stages: int) -> str:
        links = num_stages - 1
        return "" if len(self.codecs) == links else f"{len(self.codecs)} codecs of {links} links"


@dataclass(frozen=True, kw_only=True)
class Stepped:
    """The stage took (or, with `skipped`, had to skip) an inner step."""

    step: int
    loss: float
    skipped: bool


@dataclass(frozen=True)
class Ready:
    """The chain below stands."""


class Fault(Facts):
    """A member that `seen_by` lost, `after_s` seconds after its last sign of life."""

    stage: Stage
    seen_by: Stage
    reason: BrokenKind | Literal["left"]
    after_s: Annotated[float, Field(ge=0.0, le=1e9, allow_inf_nan=False)] = 0.0

    def contradiction(self, num_stages: int) -> str:
        last = max(self.stage, self.seen_by)
        return "" if last < num_stages else f"there is no stage {last}"


@dataclass(frozen=True)
class Dissolved:
    """The head lets its replica go."""


class Evaluated(Facts):
    """The summed cross-entropy of a batch of held-out windows; None: a stage had another anchor."""

    batch: int
    loss: Nats | None


MemberEvent = Stepped | Ready | Fault | Dissolved | Evaluated

"""What happens in a replica, in small facts: sums on their way up, orders on their way down.

Facts that travel say how they are written into a frame and read back; reading raises FrameRefused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from dilocox.pipeline.frames import (
    CODECS,
    Frame,
    FrameRefused,
    flags,
    integer,
    number,
    numbers,
    text,
    texts,
)
from dilocox.pipeline.reservation import MAX_LEARNING_RATE, MAX_WINDOW

FAULT_REASONS = ("closed", "silent", "missing", "stuck", "refused", "left")


@dataclass(frozen=True, kw_only=True)
class StageReport:
    """What a stage tells its head at the end of every inner step.

    anchor_round: of the last record in its anchor.
    compute_s: of a forward and a backward of one microbatch.
    upper_bytes_per_s, lower_bytes_per_s: how fast large payloads came from each neighbour; 0 where
        nothing was measured.
    lower_round_trip_s: of a few bytes to the neighbour below and back; 0 likewise.
    window: microbatches in flight that it has memory for.
    leaving: it wants to be relieved.
    """

    anchor_round: int
    compute_s: float
    upper_bytes_per_s: float = 0.0
    lower_bytes_per_s: float = 0.0
    lower_round_trip_s: float = 0.0
    window: int = MAX_WINDOW
    leaving: bool = False


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Sums over a stage and all below it; `reports` are theirs, from the topmost down.

    Not a number where something was not finite.
    """

    squared_norm: float
    loss: float
    reports: tuple[StageReport, ...] = ()

    def plus(self, squared_norm: float, report: StageReport) -> Totals:
        """With the next stage above."""
        total = self.squared_norm + squared_norm
        return replace(self, squared_norm=total, reports=(report, *self.reports))

    def to_facts(self) -> dict[str, object]:
        """For a `sum` frame."""
        return {
            "squared_norm": self.squared_norm,
            "loss": self.loss,
            "anchor_round": [each.anchor_round for each in self.reports],
            "compute_s": [each.compute_s for each in self.reports],
            "upper_bytes_per_s": [each.upper_bytes_per_s for each in self.reports],
            "lower_bytes_per_s": [each.lower_bytes_per_s for each in self.reports],
            "lower_round_trip_s": [each.lower_round_trip_s for each in self.reports],
            "window": [each.window for each in self.reports],
            "leaving": [each.leaving for each in self.reports],
        }

    @classmethod
    def from_facts(cls, facts: Mapping[str, object], stages: int) -> Totals:
        """Of the `stages` stages below."""
        columns = zip(
            numbers(facts, "anchor_round", stages),
            numbers(facts, "compute_s", stages, 0.0),
            numbers(facts, "upper_bytes_per_s", stages, 0.0),
            numbers(facts, "lower_bytes_per_s", stages, 0.0),
            numbers(facts, "lower_round_trip_s", stages, 0.0),
            numbers(facts, "window", stages, 1, MAX_WINDOW),
            flags(facts, "leaving", stages),
            strict=True,
        )
        reports = tuple(
            StageReport(
                anchor_round=int(anchor_round),
                compute_s=compute_s,
                upper_bytes_per_s=upper,
                lower_bytes_per_s=lower,
                lower_round_trip_s=round_trip_s,
                window=int(window),
                leaving=leaving,
            )
            for anchor_round, compute_s, upper, lower, round_trip_s, window, leaving in columns
        )
        return cls(
            squared_norm=number(facts, "squared_norm", 0.0, nan=True),
            loss=number(facts, "loss", nan=True),
            reports=reports,
        )


@dataclass(frozen=True, kw_only=True)
class Go:
    """The head's word that an inner step is complete: all stages clip and step now.

    codecs: by link, from the next inner step on. loss: the mean of this one's.
    """

    factor: float
    learning_rate: float
    loss: float
    codecs: tuple[str, ...]

    def to_facts(self) -> dict[str, object]:
        """For a `go` frame."""
        return {
            "factor": self.factor,
            "learning_rate": self.learning_rate,
            "loss": self.loss,
            "codecs": list(self.codecs),
        }

    @classmethod
    def from_facts(cls, facts: Mapping[str, object], stages: int) -> Go:
        """Of a replica of so many stages."""
        codecs = texts(facts, "codecs", stages - 1)
        if any(codec not in CODECS for codec in codecs):
            raise FrameRefused("header", f"codecs {codecs}")
        return cls(
            factor=number(facts, "factor", 0.0, 1.0, nan=True),
            learning_rate=number(facts, "learning_rate", 0.0, MAX_LEARNING_RATE),
            loss=number(facts, "loss", nan=True),
            codecs=codecs,
        )


@dataclass(frozen=True, kw_only=True)
class Stepped:
    """The stage took (or, with `skipped`, had to skip) an inner step."""

    step: int
    loss: float
    skipped: bool


@dataclass(frozen=True)
class Ready:
    """The chain below stands."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A member that `seen_by` lost, `after_s` seconds after its last sign of life."""

    stage: int
    seen_by: int
    reason: str
    after_s: float = 0.0

    def to_facts(self) -> dict[str, object]:
        """For a `fault` frame."""
        return {
            "stage": self.stage,
            "seen_by": self.seen_by,
            "reason": self.reason,
            "after_s": self.after_s,
        }

    @classmethod
    def from_facts(cls, facts: Mapping[str, object], stages: int) -> Fault:
        """Of a replica of so many stages."""
        reason = text(facts, "reason")
        if reason not in FAULT_REASONS:
            raise FrameRefused("header", f"a fault by {reason[:40]!r}")
        return cls(
            stage=integer(facts, "stage", 0, stages - 1),
            seen_by=integer(facts, "seen_by", 0, stages - 1),
            reason=reason,
            after_s=number(facts, "after_s", 0.0, 1e9),
        )


@dataclass(frozen=True)
class Dissolved:
    """The head lets its replica go."""


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """The summed cross-entropy of a batch of held-out windows; None: a stage had another anchor."""

    batch: int
    loss: float | None

    @classmethod
    def of(cls, frame: Frame) -> Evaluated:
        """Of an `evaluated` frame."""
        told = frame.facts.get("loss")
        loss = None if told is None else number(frame.facts, "loss", nan=True)
        return cls(batch=frame.microbatch, loss=loss)


Happening = Stepped | Ready | Fault | Dissolved | Evaluated

"""The merge: a peer's live weights follow the anchor, and no inner step is lost or counted twice.

A send goes out while training continues, and its record comes back late, without this peer, or
never. What a peer learnt and no record holds yet is its unsent progress (start - p) plus the sends
in flight. A record may arrive between any two inner steps: it moves the anchor A, and that
progress, weighted by w, goes on top. With E the residual, m a message and c this peer's own decoded
contribution to a record:

    inner step         p = inner step from p;  start stays
    send               delta = start - p;  m = delta + E;  E = 0;  start = p;  m is exchanged
    record, I in it    E = decay * (m - c), and m - c where a part of mine was left out
    record, I not      E = m - delta;  start += delta       (the send is undone)
    every record then  u = start - p;  p = A - w * (u + deltas in flight);  start = p + u
    void               E = m - delta;  start += delta       (the send is undone; A and p stay)

What is unsent for `max_age` records is dropped, and so is E after as many without a send of this
peer. Before that, with decay 1 and any schedule: sum of all inner steps = own c in committed
records + E + m in flight + (start - p). `rebase` has w = 0.75, `reset` w = 0; `none` waits for its
own record, so its u is 0 and w plays no part. One code path serves the three; when a record is
applied is the caller's business.

Where a record names a send that was undone after all (nobody knew of the record for long, or
another chain has it), what is unsent or in flight holds that send once more: nothing of it is kept,
and the peer goes on from the anchor. It loses what it learnt in about a round, and a later send
that is under way may bring the progress of the first one in twice; to tell the two apart would take
two vectors for each undone send.

Sources: DiLoCo (arXiv 2311.08105) for `none`, DiLoCoX (arXiv 2506.21263) for `reset`.

`Merge` holds the state of one peer and stage: what a snapshot holds, exactly. Its memory, in
vectors of the stage's size: live weights, anchor, outer momentum and that of residual and message
(all the caller's), start, and while a send is in flight its delta. Nothing else is allocated, not
for a moment either, but chunks and parts that were left out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from dilocox.dht.manifest import CodecSpec, OuterSpec, RoundSpec
from dilocox.peer.training.unsent_progress import Progress, norm

SENDS_REMEMBERED = 64  # of those that are not held any more: two integers each


class Residual:
    """What the codec left unsent of a stage's updates, and while a send is in flight its message:
    both in one vector, for of the two there is only one at a time.

    Error feedback (EF-SGD, arXiv 1901.09847): coding loses up to half a step per value and round;
    kept and sent later, the loss stays bounded instead of piling up. The residual is measured
    against this peer's *own* decoded contribution, never against the group's mean, which holds
    other peers' data.
    """

    def __init__(self, vector: Tensor):
        """vector [n]: adopted, and changed in place; its values do not matter."""
        self._vector = vector
        self.empty = True
        self.age = 0  # records applied since one with a send of this peer settled it

    @property
    def values(self) -> Tensor:
        """[n]; where the residual is empty, new zeros."""
        return torch.zeros_like(self._vector) if self.empty else self._vector

    @values.setter
    def values(self, values: Tensor) -> None:
        self._vector.copy_(values)
        self.empty = False

    @property
    def norm(self) -> float:
        """The Euclidean norm."""
        return 0.0 if self.empty else norm(self._vector)

    def clear(self) -> None:
        """Nothing is unsent any more."""
        self.empty, self.age = True, 0

    def take(self, delta: Tensor) -> Tensor:
        """A send: the message, delta + residual [n], which takes the residual's place."""
        message = self._vector.copy_(delta) if self.empty else self._vector.add_(delta)
        self.empty = True
        return message

    def take_again(self, message: Tensor) -> Tensor:
        """A send of before a restart: its message [n], now in the residual's place."""
        return self._vector.copy_(message)

    def give_back(self, delta: Tensor) -> None:
        """The send is undone: what it had taken from here, message - delta, is unsent again."""
        self._vector.sub_(delta)
        self.empty = False

    def settle(self, remainder: Remainder, decay: float) -> None:
        """A record with the send was committed: keep `decay` of what it left of the message."""
        values, numel, end = remainder.values, self._vector.numel(), 0
        last = slice(numel, numel)
        # between what was left out: a copy of that may be a vector more
        for part in (*sorted(remainder.left_out, key=lambda part: part.start), last):
            decays = slice(end, max(end, part.start))
            torch.mul(values[decays], decay, out=self._vector[decays])
            stays = slice(decays.stop, max(decays.stop, part.stop))
            self._vector[stays].copy_(values[stays])
            end = stays.stop
        self.empty, self.age = False, 0


@dataclass(frozen=True, eq=False)
class Remainder:
    """What a record left of this peer's message, m - c [n]: the error of the codec, and all of it
    where it did not count. `left_out`: the slices where that is so, at least in part; there all
    that is unsent stays, without decay. The values belong to the merge then.
    """

    values: Tensor
    left_out: Iterable[slice] = ()


@dataclass(frozen=True, kw_only=True)
class MergeConfig:
    """The merge rule of a run in numbers."""

    weight: float = 0.75
    """w, the share of progress without a record that the live weights keep; 0 is `reset`."""
    decay: float = 0.95
    """How much of the codec's error the residual keeps."""
    max_age: int = 8
    """Records after which unsent progress is dropped, and so is the residual, if no send of this
    peer was in one of them."""

    def __post_init__(self) -> None:
        if not (0 <= self.weight <= 1 and 0 <= self.decay <= 1):
            raise ValueError(f"merge weight {self.weight}, decay {self.decay}: choose from 0 to 1")
        if self.max_age < 1:
            raise ValueError(f"max_age {self.max_age}: at least 1")

    @classmethod
    def of(cls, outer: OuterSpec, codec: CodecSpec, rounds: RoundSpec) -> MergeConfig:
        """That of a run, from its manifest's sections."""
        weight = 0.0 if outer.merge == "reset" else outer.rebase_weight
        return cls(weight=weight, decay=codec.residual_decay, max_age=rounds.max_age)


@dataclass(eq=False)
class Send:
    """One send: the progress, the message (progress and residual), the tokens behind them.

    dropped: this peer has gone back to the anchor since, and only its tokens count.
    """

    delta: Tensor
    message: Tensor
    tokens: int
    dropped: bool = False


@dataclass(frozen=True)
class GivenUp:
    """A send that is not held any more, and that a record may name all the same.

    clean: nothing of it is in what this peer still has of its own.
    """

    tokens: int
    clean: bool


class OutOfOrder(ValueError):
    """A record that does not follow the last one applied: fetch those between, or resync."""


class Outcome(Enum):
    """What a record, or another chain's state, meant for this peer's own progress."""

    REPEATED = "repeated"  # it was applied before; nothing changed
    FOLLOWED = "followed"  # this peer had sent nothing for it
    COUNTED = "counted"  # this peer's send is in it
    UNDONE = "undone"  # this peer had sent but is not in it; that progress is unsent again
    RESET = "reset"  # it names this peer for a send that is unknown, or in what is unsent


@dataclass(frozen=True, kw_only=True)
class RecordFacts:
    """What the merge must know of a round record."""

    round: int
    digest: str
    previous: str
    contributor: bool
    """Whether the mean of at least one part holds this peer's values."""


class Merge:
    """One peer's state of one stage, and the rules. `progress.live` belongs to the caller and
    changes in place. Methods run between two inner steps, in the thread that trains.

    Anchors and momenta are adopted, not copied, and may be the same vectors with other values: from
    the moment when they begin to change until `commit` or `resync` no method may be called that
    stands on the anchor.

    Every token that was trained on is behind the unsent progress (`tokens`), behind a send in
    flight, in a record as far as this peer knows (`counted_tokens`), or lost.
    """

    def __init__(
        self,
        config: MergeConfig,
        live: Tensor,
        anchor: Tensor,
        momentum: Tensor,
        *,
        round_number: int,
        digest: str,
        message: Tensor | None = None,
    ):
        """As a joiner or spare: live weights set to the anchor of this record.

        Before the first record `round_number` is -1 and `digest` the manifest's. All vectors are
        flat, of one length and dtype; live weights may be on another device. message: where the
        residual and messages are to lie, whatever it holds.
        """
        self.config = config
        self.progress = Progress(live, torch.empty_like(anchor))
        self.residual = Residual(torch.empty_like(anchor) if message is None else message)
        self.in_flight: dict[int, Send] = {}
        self.tokens: int = 0  # behind the unsent progress
        self.age: int = 0  # records applied since nothing was unsent, or it was sent
        self.trained_tokens: int = 0
        self.counted_tokens: int = 0
        self._unsent = False
        self._counted: dict[int, int] = {}  # tokens of own sends in the chain's last records
        self._given_up: dict[int, GivenUp] = {}
        self._adopt(round_number, digest, anchor, momentum)
        self.reset_to_anchor()

    @property
    def lost_tokens(self) -> int:
        """Tokens that no record will hold, as far as is known: one that names a send which was
        given up takes its tokens back. A record that holds a send twice counts with a minus.
        """
        in_flight = sum(send.tokens for send in self.in_flight.values())
        return self.trained_tokens - self.counted_tokens - self.tokens - in_flight

    def reset_to_anchor(self) -> None:
        """Stand on the anchor with nothing of one's own; what that was counts as lost, unless a
        record of one of its sends comes after all. What is in flight stays so until it is decided.
        """
        self.progress.stand_on(self.anchor)
        self.residual.clear()
        for send in self.in_flight.values():
            send.dropped = True
        self._nothing_doubled()
        self._nothing_unsent()

    def start_over(self, sent: Mapping[int, int], trained_tokens: int) -> None:
        """Stand on the anchor after a restart: this state was followed by sends that it does not
        know, whose records may or may not come.

        sent: their tokens, by round. trained_tokens: as of the last of them.
        """
        self.trained_tokens = max(self.trained_tokens, trained_tokens)
        given_up = {number: send.tokens for number, send in self.in_flight.items()}
        self.in_flight.clear()
        self.reset_to_anchor()
        self._give_up(given_up | dict(sent), clean=True)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors (not copied, the live weights on their own device) and JSON facts; `from_state`
        restores them exactly."""
        tensors = {
            "anchor": self.anchor,
            "momentum": self.momentum,
            "live": self.progress.live,
            "start": self.progress.start,
        }
        if not self.residual.empty:
            tensors["residual"] = self.residual.values
        # "fly": as snapshots of earlier versions have it
        for number, send in self.in_flight.items():
            if not send.dropped:
                tensors[f"fly.{number}.delta"] = send.delta
                tensors[f"fly.{number}.message"] = send.message
        facts: dict[str, Any] = {
            "round": self.round,
            "digest": self.digest,
            "tokens": self.tokens,
            "age": self.age,
            "residual_age": self.residual.age,
            "trained": self.trained_tokens,
            "counted_tokens": self.counted_tokens,
            "unsent": self._unsent,
            "fly": [[number, send.tokens, send.dropped] for number, send in self.in_flight.items()],
            "counted": [[number, tokens] for number, tokens in self._counted.items()],
            "given_up": [[n, send.tokens, send.clean] for n, send in self._given_up.items()],
        }
        return tensors, facts

    @classmethod
    def from_state(
        cls,
        config: MergeConfig,
        live: Tensor,
        tensors: Mapping[str, Tensor],
        facts: Mapping[str, Any],
        message: Tensor | None = None,
    ) -> Merge:
        """The state as it was. `live` and `message` are overwritten, anchor and momentum are
        adopted, and the rest is copied.

        Raises:
            KeyError: a tensor or a fact is missing.
            ValueError: vectors that do not fit the live weights.
        """
        anchor, momentum = tensors["anchor"], tensors["momentum"]
        number, digest = facts["round"], facts["digest"]
        self = cls(
            config, live, anchor, momentum, round_number=number, digest=digest, message=message
        )
        residual = [tensors["residual"]] if "residual" in tensors else []
        self.progress.check(tensors["live"], tensors["start"], *residual)
        live.copy_(tensors["live"])
        self.progress.start.copy_(tensors["start"])
        for values in residual:
            self.residual.values = values
        for number, tokens, dropped in facts["fly"]:
            if dropped:
                self._give_up({number: tokens}, clean=True)
                continue
            delta, sent = (tensors[f"fly.{number}.{name}"] for name in ("delta", "message"))
            self.progress.check(delta, sent)
            self.in_flight[number] = Send(delta.clone(), self.residual.take_again(sent), tokens)
        self._counted = {number: tokens for number, tokens in facts["counted"]}  # noqa: C416
        self._unsent = facts["unsent"]
        self.age, self.residual.age = facts["age"], facts["residual_age"]
        self.tokens = facts["tokens"]
        self.trained_tokens = facts["trained"]
        self.counted_tokens = facts["counted_tokens"]
        self._given_up |= {n: GivenUp(tokens, clean) for n, tokens, clean in facts["given_up"]}
        return self

    def _adopt(self, round_number: int, digest: str, anchor: Tensor, momentum: Tensor) -> None:
        self.progress.check(anchor, momentum)
        self.anchor = anchor
        self.momentum = momentum
        self.round = round_number
        self.digest = digest

    def _doubled(self) -> set[int]:
        """The rounds of undone sends: what is unsent or in flight holds them once more."""
        return {number for number, send in tuple(self._given_up.items()) if not send.clean}

    def _nothing_doubled(self) -> None:
        tokens = {number: send.tokens for number, send in self._given_up.items()}
        self._give_up(tokens, clean=True)

    def _give_up(self, sends: Mapping[int, int], *, clean: bool) -> None:
        self._given_up |= {number: GivenUp(tokens, clean) for number, tokens in sends.items()}
        for old in sorted(self._given_up)[:-SENDS_REMEMBERED]:
            del self._given_up[old]

    def _nothing_unsent(self) -> None:
        self.tokens = self.age = 0
        self._unsent = False

    # ---- this peer trains and sends -------------------------------------------------------------
    def trained(self, tokens: int) -> None:
        """Count an inner step that was made on the live weights."""
        if tokens < 1:
            raise ValueError(f"an inner step on {tokens} tokens")
        self.tokens += tokens
        self.trained_tokens += tokens
        self._unsent = True

    @property
    def can_send(self) -> bool:
        """Whether there are tokens to send and no send is in flight."""
        return not self.in_flight and self.tokens > 0

    def send(self, round_number: int) -> Send:
        """Take all unsent progress as the send of a round; it is in flight until it is decided.

        Raises:
            ValueError: nothing to send, one still in flight, or a round that the chain has passed.
        """
        if not self.can_send or round_number <= self.round:
            raise ValueError(
                f"no send for round {round_number}: {self.tokens} tokens unsent, in flight "
                f"{list(self.in_flight)}, last record {self.round}; ask can_send first"
            )
        delta = self.progress.take()
        send = Send(delta, self.residual.take(delta), self.tokens)
        self.in_flight[round_number] = send
        self._nothing_unsent()
        return send

    @property
    def unsettled(self) -> tuple[int, ...]:
        """The rounds of sends whose record may still come; any thread may ask."""
        oldest = self.round - self.config.max_age
        return *tuple(self.in_flight), *(n for n in self._doubled() if n > oldest)

    def tokens_of(self, round_number: int) -> int | None:
        """Of the send of a round, also of one that was given up; None where nothing is known."""
        send = self.in_flight.get(round_number) or self._given_up.get(round_number)
        return None if send is None else send.tokens

    # ---- what became of it ----------------------------------------------------------------------
    def commit(
        self,
        record: RecordFacts,
        anchor: Tensor,
        momentum: Tensor,
        own: Remainder | None = None,
    ) -> Outcome:
        """Apply the next record of the chain; `anchor` and `momentum` are those after it.

        A record of a round that was passed changes nothing. What was counted before the merge went
        back behind its record counts once. An open send of an earlier round is closed as void.
        `own` is needed where the record names this peer and its send is in flight.

        Raises:
            OutOfOrder: the record does not follow the last one applied.
            ValueError: vectors that do not fit, or `own` is missing. Nothing has changed then.
        """
        if record.round <= self.round:
            return Outcome.REPEATED
        if record.previous != self.digest:
            raise OutOfOrder(
                f"record {record.round} follows {record.previous[:12]}, but the last one applied "
                f"is {self.digest[:12]} of round {self.round}"
            )
        if record.contributor and own is None and record.round in self.in_flight:
            raise ValueError(f"record {record.round} names this peer: pass what it left unsent")
        self.progress.check(anchor, momentum, *([own.values] if own else []))
        for number in [number for number in self.in_flight if number < record.round]:
            self.void(number)
        outcome = Outcome.FOLLOWED
        number = record.round
        newer = number in self.in_flight or number in self._given_up
        if record.contributor and (newer or number not in self._counted):
            outcome = self._count(number, own)
        elif number in self.in_flight:
            self.void(number)
            outcome = Outcome.UNDONE
        self._adopt(record.round, record.digest, anchor, momentum)
        self._settle(records=1, outcome=outcome)
        return outcome

    def void(self, round_number: int, *, certain: bool = False) -> None:
        """Undo the send in flight: its last attempt is void, or presumed so.

        `certain`: no record can ever name it, because half of its group signed aborts or no byte
        of it left this peer.
        """
        send = self.in_flight.pop(round_number)
        if send.dropped:
            self._give_up({round_number: send.tokens}, clean=True)
            return
        self.residual.give_back(send.delta)
        self.progress.start += send.delta
        self.tokens += send.tokens
        self._unsent = True
        if not certain:
            self._give_up({round_number: send.tokens}, clean=False)

    def drop(self) -> None:
        """Give up the unsent progress; its tokens are lost. The live weights stay."""
        self.progress.start.copy_(self.progress.live)
        self._nothing_unsent()
        if not self.in_flight:
            self._nothing_doubled()

    def discard_unsent(self) -> None:
        """Stand on the anchor with the send in flight on top: what this peer has of its own besides
        is not finite. Its tokens are lost.
        """
        self.residual.clear()
        self.drop()
        self.progress.stand_on(self.anchor)
        self.progress.rebase(self.anchor, self._in_flight(), self.config.weight)

    def resync(
        self,
        round_number: int,
        digest: str,
        anchor: Tensor,
        momentum: Tensor,
        *,
        since: int,
        named: Collection[int],
        untold: Collection[int] = (),
        records: int,
    ) -> Outcome:
        """Go over to another state: this peer's chain lost a fork, or it was away for too long.

        `since` is the round of the last common record (after an absence: of this peer's last one)
        and `records` how many the new state is ahead of it. `named` are the rounds of those that
        name this peer: all of their messages counts, for what they left unsent cannot be had.
        `untold` are rounds of which nobody said whether a record names this peer: what may be
        counted is not kept, and its tokens are lost. Another send in flight is undone. Sends that
        only the lost chain counted are not held any more: their tokens are lost. Unsent progress
        stays.
        """
        self.progress.check(anchor, momentum)
        for number in [n for n in self._counted if n > since and n not in named]:
            self.counted_tokens -= self._counted.pop(number)
        outcome, doubled = Outcome.FOLLOWED, not self._doubled().isdisjoint(untold)
        for number in untold:
            send = self.in_flight.pop(number, None)
            if send is not None:
                self._give_up({number: send.tokens}, clean=True)
        for number in [number for number in self.in_flight if number not in named]:
            # no record up to the new state's can name it: all of those are told
            self.void(number, certain=since < number <= round_number)
            outcome = Outcome.UNDONE
        new = set(named) - self._counted.keys()
        # those in flight first: they may hold what another one held
        for number in sorted(new, key=lambda n: n not in self.in_flight):
            counted = self._count(number, None)
            if outcome is not Outcome.RESET:
                outcome = counted
        outcome = Outcome.RESET if doubled else outcome
        self._adopt(round_number, digest, anchor, momentum)
        self._settle(records=records, outcome=outcome)
        return outcome

    # ---- steps of the above ---------------------------------------------------------------------
    def _count(self, number: int, own: Remainder | None) -> Outcome:
        """A record names this peer for its send of this round."""
        send, given_up = self.in_flight.pop(number, None), self._given_up.pop(number, None)
        if send is not None:
            if own is not None and not send.dropped:
                self.residual.settle(own, self.config.decay)
            self._nothing_doubled()  # it took all that was unsent
            tokens, outcome = send.tokens, Outcome.COUNTED
        elif given_up is not None:
            tokens = given_up.tokens
            outcome = Outcome.COUNTED if given_up.clean else Outcome.RESET
        else:
            return Outcome.RESET
        self.counted_tokens += tokens
        self._counted[number] = tokens
        for old in sorted(self._counted)[:-SENDS_REMEMBERED]:
            del self._counted[old]
        return outcome

    def _settle(self, *, records: int, outcome: Outcome) -> None:
        """Put what is still this peer's own on top of the new anchor."""
        if outcome is Outcome.RESET:  # what was unsent may be in that send: it was counted
            self.reset_to_anchor()
            return
        self.age += records if self._unsent else 0
        if self.age >= self.config.max_age:
            self.drop()
        self.residual.age += records if outcome is not Outcome.COUNTED else 0
        if not self.in_flight and self.residual.age >= self.config.max_age:
            self.residual.clear()  # it is older than what is dropped of the progress
        self.progress.rebase(self.anchor, self._in_flight(), self.config.weight)

    def _in_flight(self) -> list[Tensor]:
        return [send.delta for send in self.in_flight.values() if not send.dropped]

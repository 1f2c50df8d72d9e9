"""Members of an averaging group in one event loop, on links that a test can cut."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from dilocox.compression.layout import FlatLayout
from dilocox.compression.stage_codec import StageCodec
from dilocox.dht.identity import Identity
from dilocox.dht.manifest import Manifest
from dilocox.dht.manifest_sections import DeadlineSpec, RobustRule
from dilocox.dht.rpc import CallRefused
from dilocox.peer.chain.store import RoundLog
from dilocox.peer.rounds.ballots import Ballot, Ballots, excluded_by
from dilocox.peer.rounds.exchange import Attempt
from dilocox.peer.rounds.grid import Grid
from dilocox.peer.rounds.group import AttemptResult, AttemptSetup, Mean
from dilocox.peer.rounds.group_calls import GroupCalls
from dilocox.peer.rounds.rank_choice import RoundPlan
from dilocox.peer.rounds.record import (
    Contribution,
    RoundFacts,
    RoundRecord,
    digest_of,
    parse_record,
    stage_codec,
)
from dilocox.peer.rounds.shares import decode, encode
from dilocox.peer.rounds.signed_means import MeanSeal
from dilocox.peer.rounds.vote_count import Verdict

LAYOUT = FlatLayout.of([("weight", (40, 30)), ("bias", (30,))])
MANIFEST_DIGEST = "0" * 64
EXCHANGE_S, VOTE_S, SILENCE_S = 2.0, 1.0, 0.5  # a busy machine stands still for a second
PATIENT_S = 10.0  # where nobody fails nothing waits for its deadline
DROP_S = 0.1  # between two pieces of what is fetched
THIN_S, PIECES = 2.0, 10  # that a mean takes to a member with a thin link, in so many of them
LIMIT_S = 30.0  # of a test's group

Passes = Callable[[str, str, str], bool]
"""(sender, receiver, kind) -> whether a message gets through. Parts, rows and means carry their
phase: part0, row0, mean0, part1, row1, mean1; the others are fetch (of a mean), record, words,
vote, ask, beat.
"""


@contextmanager
def refused_as_lost() -> Generator[None]:
    """A refusal as the sender's transport reports it."""
    try:
        yield
    except ValueError as error:
        raise ConnectionError(f"refused: {error}") from error


class Link:
    """One member's transport: direct calls into the others' attempts."""

    def __init__(self, me: str, group: Group):
        self.me = me
        self._group = group

    async def push_part(self, peer: str, column: int, payload: bytes) -> None:
        kind = f"part{self._group.setups[self.me].phase_of(column)}"
        attempt = await self._to(peer, kind)
        with refused_as_lost():
            await attempt.on_part(self.me, column, payload)

    async def push_row(self, peer: str, mean: Mean) -> None:
        kind = f"row{self._group.shares[mean.part].phase}"
        attempt = await self._to(peer, kind)
        with refused_as_lost():
            await attempt.on_row(self.me, mean)

    async def push_mean(self, peer: str, mean: Mean) -> None:
        kind = f"mean{self._group.shares[mean.part].phase}"
        attempt = await self._to(peer, kind)
        with refused_as_lost():
            with self._group.queued(self.me, peer):
                for piece in range(PIECES if peer in self._group.thin else 0):
                    attempt.bytes_came(self.me, mean.part, "mean", piece + 1, PIECES)
                    await asyncio.sleep(self._group.thin_s / PIECES)
            await attempt.on_mean(self.me, self._group.falsified(self.me, peer, mean))

    async def fetch_mean(self, peer: str, part: int, came: Callable[[], None]) -> Mean | None:
        attempt = await self._to(peer, "fetch")
        await self._comes_from(peer, came)
        mean = await attempt.checked_mean(part)
        return mean and self._group.falsified(peer, self.me, mean)

    async def fetch_record(self, peer: str, digest: str) -> bytes | None:
        attempt = await self._to(peer, "record")
        await self._comes_from(peer)
        return attempt.record if attempt.digest == digest else None

    async def send_votes(self, peer: str, votes: Sequence[bytes]) -> None:
        (await self._to(peer, "vote")).on_votes(votes)

    async def send_words(self, peer: str, words: bytes) -> None:
        if self.me in self._group.lying:
            words = words[::-1]
        (await self._to(peer, "words")).on_words(self.me, words)

    async def ask_votes(self, peer: str, round_number: int, attempt: int) -> list[bytes]:
        asked = await self._to(peer, "ask")
        if peer in self._group.lying:
            raise CallRefused("metadata is not a map")
        return asked.ballots.all_bytes()

    async def heartbeats(self, peer: str) -> AsyncIterator[None]:
        while True:
            await self._to(peer, "beat")
            while self._group.queue[peer, self.me]:
                await asyncio.sleep(0.02)
            yield
            await asyncio.sleep(0.02)

    async def _comes_from(self, peer: str, came: Callable[[], None] = lambda: None) -> None:
        """While something comes all the time."""
        takes_s = LIMIT_S if peer in self._group.dripping else self._group.fetching_s
        ends_at = time.monotonic() + takes_s
        while (left_s := ends_at - time.monotonic()) > 0:
            came()
            await asyncio.sleep(min(left_s, DROP_S))

    async def _to(self, peer: str, kind: str) -> Attempt:
        if {self.me, peer} & self._group.frozen:
            await asyncio.Event().wait()  # until the caller loses patience
        if not self._group.passes(self.me, peer, kind):
            raise ConnectionError(f"{kind} from {self.me} to {peer} is lost")
        return self._group.attempts[peer]


def template(**changes: object) -> RoundRecord:
    """A record to be made, of round 3 unless changed."""
    facts = {
        "run": "run",
        "stage": 0,
        "round": 3,
        "previous": MANIFEST_DIGEST,
        "anchor_before": "a" * 64,
        "layout": LAYOUT.digest,
        "ranks": (),
        "members": (),
        "chain_tokens": 0,
        "parts": (),
        "window": (RoundFacts(ranks=(), needed=(), exchange_s=0.0, step_s=0.0),),
        "next_ranks": (),
        "next_inner_steps": 100,
        "means": (),
    }
    return RoundRecord(**(facts | changes))  # type: ignore[arg-type]


class Pool(ThreadPoolExecutor):
    """The one thread in which members compute."""

    def __init__(self, decoding_s: float):
        super().__init__(1, initializer=torch.set_num_threads, initargs=(1,))
        self._decoding_s = decoding_s

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if fn is decode and self._decoding_s:
            super().submit(time.sleep, self._decoding_s)
        return super().submit(fn, *args, **kwargs)


class Group:
    """N members with keys, logs and messages of their own.

    With low_rank a message is a matrix of rank 1 beside a vector, so that the factors can hold the
    mean of up to four; else it is noise.
    """

    def __init__(
        self,
        identities: list[Identity],
        folder: Path,
        *,
        passes: Passes,
        scheme: str = "dense",
        robust: RobustRule = "none",
        bits: int = 4,
        clients: frozenset[int] = frozenset(),
        exchange_s: float | None = None,
        silence_s: float | None = None,
        group_size: int = 32,
        decoding_s: float = 0.0,
        fetching_s: float = 0.0,
        codec_s: float = 0.0,
        computing_s: float = 0.0,
    ):
        """`clients`: those that can only dial out, so that they average nothing.

        decoding_s, fetching_s: so long it takes each member to check a mean, one after the other,
        and to fetch one, or the record. codec_s: so long they agreed to compute at
        the start of a phase. computing_s: so long each does, in turn, at that of the first one.

        Whoever is put into `frozen` neither answers nor is refused any more; who is `dripping`
        gives what is fetched by a byte now and then;
        who is `thin` gets means slowly, each in `thin_s`, and heartbeats only where no mean of the
        same sender is on its way to it: the `queue` holds how many are, by sender and receiver;
        who is `lying` answers what votes it holds with bytes that are none, and tells others words
        of no means. `falsify` is what a sender makes of a mean on its way to a receiver, signed by
        its reducer.
        """
        usual_s = (PATIENT_S, PATIENT_S) if passes is everything else (EXCHANGE_S, SILENCE_S)
        exchange_s, silence_s = exchange_s or usual_s[0], silence_s or usual_s[1]
        self.passes = passes
        self.fetching_s = fetching_s
        self.frozen: set[str] = set()
        self.dripping: set[str] = set()
        self.thin: set[str] = set()
        self.thin_s = THIN_S
        self.queue: Counter[tuple[str, str]] = Counter()
        self.lying: set[str] = set()
        self.falsify: Callable[[str, str, Mean], Mean] = lambda sender, receiver, mean: mean
        self.identities = sorted(identities, key=lambda identity: identity.peer_id)
        self.peers = [identity.peer_id for identity in self.identities]
        codec = {"scheme": scheme, "bits": bits, "rank": 4, "min_rank": 2, "max_rank": 16}
        manifest = Manifest.from_dict(
            {"name": "test", "model": "tiny", "end_tokens": 1000, "codec": codec}
        )
        self.codec: StageCodec = stage_codec(manifest, LAYOUT)
        ranks = self.codec.first_ranks
        self.messages = [message_of(index, scheme) for index in range(len(self.peers))]
        self.tokens = [100 * (index + 1) for index in range(len(self.peers))]
        self.attempts: dict[str, Attempt] = {}
        self.setups: dict[str, AttemptSetup] = {}
        self.pool = Pool(decoding_s)
        self.members = tuple(
            Contribution(peer=peer, tokens=tokens)
            for peer, tokens in zip(self.peers, self.tokens, strict=True)
        )
        phases = self.codec.phases(ranks)
        dial_out = frozenset(self.peers[at] for at in clients)
        self.grid = Grid.of(b"group", self.peers, set(self.peers) - dial_out, group_size)
        self.shares = self.grid.shares(phases)
        self.ballot = ballot = Ballot(
            run="run",
            stage=0,
            round=3,
            attempt=0,
            group=b"group",
            members=tuple(self.peers),
            voters=frozenset(self.peers),
        )

        def first_basis() -> Tensor | None:
            time.sleep(computing_s)
            return self.codec.first_basis("seed")

        for identity, message in zip(self.identities, self.messages, strict=True):
            me = identity.peer_id
            setup = self.setups[me] = AttemptSetup(
                me=me,
                members=self.members,
                credited=dict.fromkeys(self.peers, 0),
                clients=dial_out,
                grid=self.grid,
                template=template(ranks=ranks, window=()),
                shares=self.shares,
                phases=phases,
                excluded=(),
                lacking=frozenset(),
                plan=RoundPlan(manifest, self.codec),
                robust=robust,
                deadlines=DeadlineSpec(exchange_s=exchange_s, vote_s=VOTE_S, silence_s=silence_s),
                codec_s=codec_s,
            )
            log = RoundLog(folder / me, manifest_digest=MANIFEST_DIGEST, codec=self.codec)
            self.attempts[me] = Attempt(
                setup,
                encoder=self.codec.encoder(message, ranks, first_basis),
                transport=cast("GroupCalls", Link(me, self)),
                ballots=Ballots(identity=identity, ballot=ballot, save_vote=log.save_vote),
                pool=self.pool,
            )

    @contextmanager
    def queued(self, sender: str, receiver: str) -> Generator[None]:
        """While something is on its way, which a heartbeat of that sender waits for."""
        self.queue[sender, receiver] += 1
        try:
            yield
        finally:
            self.queue[sender, receiver] -= 1

    def falsified(self, sender: str, receiver: str, mean: Mean) -> Mean:
        """What a receiver gets of a mean: what its reducer makes of it, signed by that."""
        reducer, other = self.shares[mean.part].reducer, self.falsify(sender, receiver, mean)
        return mean if other == mean else self.signed(reducer, other)

    def make_two_faced(self, liar: str) -> None:
        """Every other member gets another mean of what it averages, and nobody a word or a vote."""
        honest, codec_of = [peer for peer in self.peers if peer != liar], self.setups[liar].phases
        heard = self.passes

        def falsify(sender: str, receiver: str, mean: Mean) -> Mean:
            share = self.shares[mean.part]
            if sender != liar or share.reducer != liar or honest.index(receiver) % 2:
                return mean
            codec = codec_of[share.phase].codec
            values = 0.9 * decode(codec, mean.payload, share.numel)  # as sound as the other one
            return replace(mean, payload=encode(codec, values))

        def passes(sender: str, receiver: str, kind: str) -> bool:
            tells = sender == liar and kind in ("words", "vote")
            answers = receiver == liar and kind == "ask"
            return not tells and not answers and heard(sender, receiver, kind)

        self.falsify, self.passes = falsify, passes

    def signed(self, reducer: str, mean: Mean) -> Mean:
        return MeanSeal(self.identities[self.peers.index(reducer)], self.ballot).sign(mean)

    def part(self, phase: int, reducer: str) -> int:
        """The number of a member's share in a phase."""
        wanted = phase, reducer
        return next(
            part for part, share in enumerate(self.shares) if (share.phase, share.reducer) == wanted
        )

    async def run(self, dead: frozenset[int] = frozenset()) -> list[AttemptResult | None]:
        """Let all members but the dead ones run to their end."""

        async def one(index: int) -> AttemptResult | None:
            return None if index in dead else await self.attempts[self.peers[index]].run()

        running: Any = asyncio.gather(*(one(index) for index in range(len(self.peers))))
        return await asyncio.wait_for(running, LIMIT_S)

    def weighted_mean(self) -> Tensor:
        """What the group should have averaged."""
        total = sum(self.tokens)
        return torch.stack(
            [message * (t / total) for message, t in zip(self.messages, self.tokens, strict=True)]
        ).sum(0)


def message_of(index: int, scheme: str) -> Tensor:
    """The message of a group's member."""
    generator = torch.Generator().manual_seed(index)
    if scheme != "low_rank":
        return torch.randn(LAYOUT.numel, generator=generator)
    flat = torch.zeros(LAYOUT.numel)
    tensors = LAYOUT.view(flat)
    column, row = (torch.randn(n, generator=generator) for n in tensors["weight"].shape)
    tensors["weight"].copy_(torch.outer(column, row))
    tensors["bias"].copy_(torch.randn(30, generator=generator))
    return flat


def spoil(group: Group, reducer: str, sender: str, part: int) -> None:
    """What a sender gives a reducer for one part arrives as nonsense."""
    attempt = group.attempts[reducer]
    honest = attempt.on_part

    async def receive(peer: str, number: int, payload: bytes) -> None:
        if peer == sender and number == part:
            payload = b"\xff" * len(payload)
        await honest(peer, number, payload)

    attempt.on_part = receive  # type: ignore[method-assign]


def everything(sender: str, receiver: str, kind: str) -> bool:
    return True


def verdicts(results: list[AttemptResult | None]) -> set[Verdict]:
    return {result.verdict for result in results if result is not None}


def digests(results: list[AttemptResult | None]) -> set[str]:
    return {digest_of(result.record) for result in results if result and result.record}


def record_of(group: Group, results: list[AttemptResult | None]) -> RoundRecord:
    """The one record that all who ran have."""
    ended = [result for result in results if result is not None]
    assert verdicts(results) == {Verdict.COMMITTED}
    assert len(digests(results)) == 1 and all(result.record for result in ended)
    return parse_record(ended[0].record or b"", group.codec)


def assert_two_faced_is_named(group: Group, liar: str) -> None:
    """All others void the attempt at once, and would leave this one out of a repeated one."""
    started = time.monotonic()
    results = asyncio.run(group.run())
    ended = [result for peer, result in zip(group.peers, results, strict=True) if peer != liar]
    assert verdicts(ended) == {Verdict.VOID}
    assert blamed(ended) == [liar]
    assert time.monotonic() - started < PATIENT_S / 2, "the time of the exchange was waited out"


def blamed(results: list[AttemptResult | None]) -> list[str]:
    """Whom a repeated attempt would leave out."""
    ended = [result for result in results if result]
    aborts, members = [result.abort for result in ended], ended[0].members
    return excluded_by(aborts, members, members, run="run", stage=0, round_number=3)


def seconds(results: list[AttemptResult | None]) -> float:
    return max(result.seconds + result.codec_s for result in results if result)

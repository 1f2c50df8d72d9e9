"""What one look at the DHT shows of the swarm, and what follows from it for one stage."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median_low

from dilocox.dht.manifest import Manifest
from dilocox.dht.names import cut, shown_peer
from dilocox.dht.records import MAX_TEXT, BellRecord, ClaimRecord, ReplicaRecord, StageRecord

Heads = frozenset[str] | None
"""The heads that count, of all that say that they lead a replica; None where all do."""


def nobody_holds(peers: int) -> str:
    """What to tell a person when none of a stage's peers in view holds a round of it."""
    if peers:
        return "the run has no committed round yet, so there is nothing learnt"
    return (
        "nobody who holds its weights is in view; check that the run trains (its status page says)"
    )


def own_order(*what: object) -> bytes:
    """To sort by: draws an order of each one's own, which changes little as others come and go."""
    return hashlib.sha256(" ".join(str(each) for each in what).encode()).digest()


def that_count(claims: Mapping[str, ClaimRecord], manifest: Manifest) -> dict[str, ClaimRecord]:
    """Without those of records that the operator went back behind."""
    return {
        peer: claim
        for peer, claim in claims.items()
        if not manifest.rolled_back(claim.round, claim.rules)
    }


def believed_first(claims: Mapping[str, ClaimRecord], witness: str = "") -> dict[str, ClaimRecord]:
    """What is claimed of a stage, for an onlooker, which has no chain to judge it by: first what
    the operator's archive, the witness, vouches for; then what most claim, though their ids cost
    nothing; among equals the longer chain, since right after a commit only some have it.
    """
    vouched = claims.get(witness)
    # with their tokens: a peer that only copies a digest could say that the run has ended
    counts = Counter((claim.digest, claim.chain_tokens) for claim in claims.values())

    def order(item: tuple[str, ClaimRecord]) -> tuple[object, ...]:
        peer, claim = item
        told = claim.digest, claim.chain_tokens
        believed = vouched is not None and told == (vouched.digest, vouched.chain_tokens)
        # of those the others first: a bootstrap's line is everybody's
        rest = -counts[told], -claim.chain_tokens, -claim.round, peer
        return (claim.round < 0, not believed, peer == witness, *rest)

    return dict(sorted(claims.items(), key=order))


def as_most_say(
    claims: Mapping[str, ClaimRecord],
    witness: str,
    number: Callable[[ClaimRecord], int],
    nothing: int,
) -> int:
    """A number of the claims, for an onlooker: the operator's archive's, the witness's; else what
    most claim at least, so that strangers must be more than all others. nothing: where none claims.
    """
    if (told := claims.get(witness)) is not None:
        return number(told)
    return median_low(map(number, claims.values())) if claims else nothing


def newest_round(stages: Sequence[Mapping[str, ClaimRecord]], witness: str) -> tuple[int, int]:
    """The newest round that every stage has, -1 before the first, and the run's tokens, for an
    onlooker. stages: what is claimed of each, from the first one on; who has no record yet says
    nothing of the newest.
    """
    held = [{peer: each for peer, each in some.items() if each.round >= 0} for some in stages]
    rounds = [as_most_say(claims, witness, lambda claim: claim.round, -1) for claims in held]
    return min(rounds), SwarmView(me="", run_claims=stages[0]).run_tokens(witness)


@dataclass(frozen=True, kw_only=True)
class SwarmView:
    """Signed records by peer, as of the last look; empty where nothing is known.

    stage: of the peers of one's own stage. stages: of all stages that gave an answer.
    run_claims: of the peers of stage 0, whose chain counts the run's tokens, and of the bootstraps'
        archive, which may be behind them.
    """

    me: str
    stage: Mapping[str, StageRecord] = field(default_factory=dict[str, StageRecord])
    replicas: Mapping[str, ReplicaRecord] = field(default_factory=dict[str, ReplicaRecord])
    bells: Mapping[int, Mapping[str, BellRecord]] = field(
        default_factory=dict[int, Mapping[str, BellRecord]]
    )
    claims: Mapping[str, ClaimRecord] = field(default_factory=dict[str, ClaimRecord])
    stages: Mapping[int, Mapping[str, StageRecord]] = field(
        default_factory=dict[int, Mapping[str, StageRecord]]
    )
    run_claims: Mapping[str, ClaimRecord] = field(default_factory=dict[str, ClaimRecord])

    def of_heads(self, heads: Heads, archives: Collection[str]) -> SwarmView:
        """Without the replicas of other heads, and what others say of the run's tokens; but for
        the archives of bootstraps."""
        if heads is None:
            return self
        replicas = {peer: each for peer, each in self.replicas.items() if peer in heads}
        counting = heads | set(archives)
        claims = {peer: each for peer, each in self.run_claims.items() if peer in counting}
        return replace(self, replicas=replicas, run_claims=claims)

    def run_tokens(self, witness: str) -> int:
        """How many tokens the run has trained on: as the operator's archive, the witness, says;
        where it says nothing, what most peers of stage 0 hold records of at least.

        One chain ends the run for all stages, or a stage that lost a round would train on alone.
        Where stage 0 has no peer any more, what others keep of its chain counts.
        """
        claims, hosts = self.run_claims, self.stages.get(0, {})
        if witness not in claims:
            claims = {peer: each for peer, each in claims.items() if peer in hosts} or claims
        return as_most_say(claims, witness, lambda claim: claim.chain_tokens, 0)

    def run_round(self, witness: str) -> int:
        """The newest round of which any stage has a record, as the operator's archive says; -1
        where it says nothing."""
        told = self.run_claims.get(witness)
        return -1 if told is None else told.run_round

    def written(self, witness: str) -> str:
        """What the model writes now, in one line, as the operator's archive says; empty where it
        says nothing."""
        told = self.run_claims.get(witness)
        return cut(told.written, MAX_TEXT) if told is not None else ""

    def says_ended(self, manifest: Manifest, witness: str, *, by_peers: bool = True) -> bool:
        """Whether the run has ended, by the operator or because records of all of it are held;
        `by_peers`: also where they alone say that."""
        believed = by_peers or witness in self.run_claims
        return manifest.ended_at(self.run_tokens(witness) if believed else 0)

    def shown(self, peer: str) -> str:
        """A peer as people see it, with the name that its record states."""
        here = (self.stage, *self.stages.values())
        return shown_peer(peer, next((at[peer].name for at in here if peer in at), ""))

    @property
    def leading(self) -> dict[str, ReplicaRecord]:
        """The replicas whose head does not say that it has left: nobody waits for its bell."""
        hosts = self.stages.get(0, {})
        gone = {peer for peer, host in hosts.items() if not host.present}
        return {head: each for head, each in self.replicas.items() if head not in gone}

    def held_by(self, peers: Iterable[str], round_number: int) -> bool:
        held = (self.claims[peer].round for peer in peers if peer in self.claims)
        return max(held, default=-1) >= round_number

    def counted(self) -> tuple[str, ...]:
        """The peers of the stage that must be reckoned with: they train, or hold unsent tokens."""
        others = {
            peer
            for peer, record in self.stage.items()
            if record.state == "training" or record.tokens > 0
        }
        return tuple(sorted(others | {self.me}))

    def within_reach(self, peers: Iterable[str]) -> list[str]:
        """Those of these peers of the stage that this one can call; all where it could call none.

        Of two that can only dial out neither can call the other.
        """
        everybody, own = list(peers), self.stage.get(self.me)
        if own is None or not own.client_mode:
            return everybody
        shut = {peer for peer, record in self.stage.items() if record.client_mode}
        return [peer for peer in everybody if peer not in shut] or everybody

    def best_claim(
        self, chain_tokens: int, digest: str, ignored: Collection[str] = ()
    ) -> ClaimRecord | None:
        """The claim of a chain with more tokens than ours, or with as many and another digest.

        Along a chain the tokens only grow, and they also decide between two chains, so this
        finds what is ahead of us and what may win a fork, and nothing that is behind us. The most
        tokens first; among equals the smaller digest. `ignored`: digests that are not to be had.
        """
        candidates = [
            claim
            for peer, claim in self.claims.items()
            if peer != self.me and claim.round >= 0
            if claim.chain_tokens >= chain_tokens and claim.digest != digest
            if claim.digest not in ignored
        ]
        return min(candidates, key=lambda each: (-each.chain_tokens, each.digest), default=None)

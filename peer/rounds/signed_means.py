"""Means signed by the member that made them, so that it cannot give different ones to different
members, and nobody on the way can change them.

A reducer could give half of a group one mean and the other half another one: their records would
differ, and no vote could ever decide. So before it votes each member tells those near it the
*words* of the means that it holds, a short hash of each. A member that hears another word fetches
that mean: with two signatures of one reducer under different means it votes against the record and
names the reducer, as everybody else will; a word without a signature behind it is nobody's fault
but its sender's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

from dilocox.dht.identity import Identity, public_key_of, verify
from dilocox.dht.wire import pack
from dilocox.peer.rounds.ballots import Ballot
from dilocox.peer.rounds.group import Mean, ShareRefused

MEAN_DOMAIN = "dilocox mean 1"  # so that a signature over a mean can be taken for nothing else
WORD_BYTES = 8


@dataclass(frozen=True)
class MeanSeal:
    """Signs the means that this member makes in an attempt, and checks those of others."""

    identity: Identity
    ballot: Ballot

    def sign(self, mean: Mean) -> Mean:
        return replace(mean, signature=self.identity.sign(self._signed_bytes(mean)))

    def check(self, mean: Mean, reducer: str) -> None:
        """Raise ShareRefused unless this reducer made this mean for this attempt."""
        data = self._signed_bytes(mean)
        if not verify(public_key_of(reducer), data, mean.signature):
            raise ShareRefused(f"{reducer} did not sign this mean of part {mean.part}")

    def _signed_bytes(self, mean: Mean) -> bytes:
        ballot = self.ballot
        attempt = [*ballot.facts, ballot.members_sha256]
        return pack([MEAN_DOMAIN, *attempt, mean.part, _digest(mean)])


def _digest(mean: Mean) -> bytes:
    names = pack(list(mean.contributors))
    return hashlib.sha256(hashlib.sha256(names).digest() + mean.payload).digest()


def words_of(means: Mapping[int, Mean], shares: int) -> bytes:
    """The words of the means of an attempt with so many shares, one after the other; zeros where
    there is none.
    """
    none = bytes(WORD_BYTES)
    return b"".join(
        _digest(means[part])[:WORD_BYTES] if part in means else none for part in range(shares)
    )


def held_by(words: bytes) -> set[int]:
    """The parts whose means the sender of these words holds."""
    return set(unlike_words(words, bytes(len(words))))


def unlike_words(words: bytes, others: bytes) -> list[int]:
    """The parts whose words differ."""
    starts = range(0, len(words), WORD_BYTES)
    return [
        part
        for part, start in enumerate(starts)
        if words[start : start + WORD_BYTES] != others[start : start + WORD_BYTES]
    ]

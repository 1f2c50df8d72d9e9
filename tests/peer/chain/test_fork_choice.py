"""Which claims are believed, whom one asks, who lied, and which of two chains wins: one table for
peers and archives, whose own tests show that they keep to it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dilocox.dht.records import ClaimRecord
from dilocox.dht.rpc import PeerBusy
from dilocox.dht.swarm_view import SwarmView
from dilocox.peer.chain.chain_client import Reached
from dilocox.peer.chain.fork_choice import (
    AGAIN_LIFETIMES,
    BUSY_LIFETIMES,
    MAX_NOTED,
    STUCK_LIFETIMES,
    ClaimBook,
    Trust,
    holders,
    wins,
)
from dilocox.peer.chain.store import RoundLog, Tip
from tests.clocks import TestClock

LIFETIME_S = 60.0
HEAD = Tip(round=4, digest="aa", chain_tokens=500, record_bytes=10)
SILENT, BUSY = ConnectionError(), PeerBusy()


def claim(digest: str, tokens: int = 600, number: int = 5) -> ClaimRecord:
    return ClaimRecord(round=number, digest=digest, chain_tokens=tokens, record_bytes=10, rules=0)


def view(**claims: ClaimRecord) -> SwarmView:
    return SwarmView(me="me", claims=claims)


@pytest.fixture
def clock() -> TestClock:
    return TestClock()


@pytest.fixture
def book(clock: TestClock) -> ClaimBook:
    return ClaimBook(trust_of(clock))


# ---- what is ahead -------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("claims", "expected"),
    [
        ({}, []),
        ({"a": claim("aa", 500, 4)}, []),  # our own record
        ({"a": claim("bb", 499)}, []),  # behind us, or a fork that has lost
        ({"a": claim("bb", 500, 4)}, ["bb"]),  # a fork with as many tokens: it may win
        ({"a": claim("bb"), "b": claim("bb")}, ["bb"]),
        ({"a": claim("bb"), "b": claim("cc", 700), "d": claim("dd", 700)}, ["cc", "dd", "bb"]),
        ({"me": claim("bb")}, []),
        ({"a": claim("bb", 600, -1)}, []),
    ],
)
def test_what_is_ahead_is_asked_for_the_most_tokens_first(
    book: ClaimBook, claims: dict[str, ClaimRecord], expected: list[str]
) -> None:
    seen = view(**claims)
    assert [each.digest for each in book.ahead(seen, HEAD)] == expected
    best = book.best(seen, HEAD)
    assert (best and best.digest) == (expected[0] if expected else None)


def test_all_who_claim_a_record_can_be_asked_for_it() -> None:
    seen = view(a=claim("bb"), b=claim("cc"), d=claim("bb"), me=claim("bb"))
    assert holders(seen, "bb") == ["a", "d"]


# ---- doubt ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(("error", "lifetimes"), [(SILENT, 1), (BUSY, BUSY_LIFETIMES)])
def test_a_claim_that_nobody_proves_is_believed_so_long_and_no_longer(
    book: ClaimBook, clock: TestClock, error: Exception, lifetimes: int
) -> None:
    seen = view(a=claim("bb"), b=claim("cc", 550))
    assert not book.failing("bb")
    assert not book.failed("bb", error)
    assert book.failing("bb")
    clock.now += lifetimes * LIFETIME_S
    assert not book.failed("bb", error)
    assert [each.digest for each in book.ahead(seen, HEAD)] == ["bb", "cc"]
    clock.now += 1.0
    assert book.failed("bb", error)
    assert not book.believed(claim("bb"))
    assert [each.digest for each in book.ahead(seen, HEAD)] == ["cc"]


def test_a_record_that_takes_long_to_come_is_no_lie(book: ClaimBook, clock: TestClock) -> None:
    """Half a gigabyte over a thin line; two tries in vain are always further apart."""
    for _ in range(2):
        assert not book.failed("bb", asyncio.TimeoutError())
        clock.now += 20 * LIFETIME_S
    assert book.failed("bb", asyncio.TimeoutError()), "but it is one that never comes"


def test_time_in_which_its_holders_were_only_busy_does_not_count_as_silence(
    book: ClaimBook, clock: TestClock
) -> None:
    book.failed("bb", BUSY)
    clock.now += 2 * LIFETIME_S
    assert not book.failed("bb", SILENT)


def test_records_that_came_end_the_doubt_of_their_claim_and_of_no_other(
    book: ClaimBook, clock: TestClock
) -> None:
    for digest in ("bb", "cc", "dd"):
        book.failed(digest, SILENT)
    book.came("bb")
    clock.now += LIFETIME_S + 1.0
    assert not book.failed("bb", SILENT), "it begins anew"
    assert not book.failed("dd", SILENT, came=True), "some did, then the line broke"
    assert not book.failing("dd")
    assert book.failed("cc", SILENT), "a lie would be believed for as long as others are honest"


def test_what_lost_against_ours_is_not_looked_at_again(book: ClaimBook) -> None:
    book.ignore("bb")
    assert book.best(view(a=claim("bb")), HEAD) is None


# ---- liars ---------------------------------------------------------------------------------------
def test_who_gave_a_wrong_state_is_asked_again_only_where_nobody_else_has_one(
    book: ClaimBook,
) -> None:
    assert book.donors(("a", "b")) == ["a", "b"]
    assert not book.lied("a")
    assert book.donors(("a", "b")) == ["b"]
    assert book.donors(("a",)) == ["a"]
    assert book.lied("a") == LIFETIME_S / 2, "twice: then it speaks against the claim"


def test_what_is_noted_is_bounded(book: ClaimBook) -> None:
    for number in range(MAX_NOTED + 1):
        book.failed(f"{number:x}", SILENT)
        book.ignore(f"{number:x}")
        book.lied(f"{number:x}")
    assert book.believed(claim("0")) and not book.believed(claim(f"{MAX_NOTED:x}"))
    assert book.donors(("0", f"{MAX_NOTED:x}")) == ["0"]


# ---- forks ---------------------------------------------------------------------------------------
class Log:
    """Rounds, and what the header of each names as the one before it."""

    def __init__(self, *previous: str):
        self._previous = previous

    def rounds(self) -> Sequence[int]:
        return range(len(self._previous))

    def header(self, number: int) -> Any:
        return SimpleNamespace(previous=self._previous[number])


@pytest.mark.parametrize(
    ("tokens", "first", "theirs_wins"),
    [
        (501, "ff", True),  # more tokens
        (499, "00", False),
        (500, "00", True),  # as many: the smaller digest after the fork
        (500, "ff", False),
    ],
)
@pytest.mark.parametrize("length", [1, 2])
def test_of_two_chains_the_one_with_more_tokens_wins(
    tokens: int, first: str, theirs_wins: bool, length: int
) -> None:
    """Ours goes on with the record "aa" after round 0, and with another one after that."""
    log = Log("root", "common", *["aa"] * (length - 1))
    ours = Tip(round=length, digest="aa" if length == 1 else "99", chain_tokens=500, record_bytes=1)
    reached = Reached(fork_round=0, fork_digest=first, chain_tokens=tokens, too_far=False)
    assert wins(reached, cast("RoundLog", log), ours) is theirs_wins


# ---- whose claims count --------------------------------------------------------------------------
WITNESS = "boot"
LOG = {0: ("r0", "ab"), 1: ("r1", "abc"), 2: ("r2", "abc"), 3: ("r3", "abc"), 4: ("aa", "abc")}
"""Our chain by round: the digest of its record, and whose values are in it; who is in capital
letters had no vote."""


class Credited:
    """As much of a RoundLog as trust asks for."""

    def __init__(self, records: dict[int, tuple[str, str]]):
        self.records = records

    def rounds(self) -> list[int]:
        return sorted(self.records)

    def header(self, number: int) -> Any:
        names = self.records[number][1]
        before = [digest for n, (digest, _) in self.records.items() if n < number]
        return SimpleNamespace(
            contributions=[SimpleNamespace(peer=peer) for peer in names.lower()],
            voters=set(names) - set(names.upper()),
            previous=before[-1] if before else "root",
        )

    def find(self, digest: str) -> int | None:
        return next((n for n, (found, _) in self.records.items() if found == digest), None)


def trust_of(clock: TestClock, me: str = "me", witness: str = WITNESS) -> Trust:
    return Trust(me=me, witness=witness, record_lifetime_s=LIFETIME_S, now=clock.monotonic)


def counting(
    trust: Trust,
    claims: dict[str, ClaimRecord],
    log: Credited | None = None,
    *,
    trains: bool = True,
) -> str:
    """The digests that count, sorted."""
    seen = SwarmView(me="me", claims=claims)
    found = trust.counting(seen, cast("RoundLog", log or Credited(LOG)), HEAD, trains=trains)
    return " ".join(sorted({each.digest for each in found.claims.values()}))


@pytest.mark.parametrize(
    ("claims", "expected"),
    [
        ({"x": claim("bad")}, ""),  # a stranger: nobody who is in our chain
        ({f"x{n}": claim("bad") for n in range(12)}, ""),  # nor are twelve
        ({WITNESS: claim("bb")}, "bb"),
        ({WITNESS: claim("bb"), "x": claim("bad", 10**9)}, "bb"),
        ({"a": claim("bb")}, ""),  # 5 of 14
        ({"a": claim("bb"), "b": claim("bb")}, "bb"),  # 10 of 14
        ({"a": claim("bb"), "b": claim("bad")}, ""),
        ({"b": claim("aa", 500, 4)}, "aa"),  # who has our newest record may give its state
        ({"a": claim("bb"), "b": claim("bb"), WITNESS: claim("aa", 500, 4)}, "aa bb"),
    ],
)
def test_a_claim_counts_if_the_witness_makes_it_or_most_of_those_who_made_our_chain(
    clock: TestClock, claims: dict[str, ClaimRecord], expected: str
) -> None:
    assert counting(trust_of(clock), claims) == expected


def test_who_has_no_chain_believes_the_witness_alone(clock: TestClock) -> None:
    trust, nothing = trust_of(clock), Credited({})
    assert counting(trust, {"a": claim("bb"), "b": claim("bb")}, nothing) == ""
    assert counting(trust, {"a": claim("bb"), WITNESS: claim("cc")}, nothing) == "cc"
    assert counting(trust_of(clock, witness=""), {"a": claim("bb")}, nothing) == "bb"


def test_while_the_witness_is_silent_a_joiner_believes_the_bootstraps_of_its_invite(
    clock: TestClock,
) -> None:
    def joiner() -> Trust:
        return Trust(
            me="me",
            witness=WITNESS,
            stand_ins=frozenset({"copy", WITNESS}),
            record_lifetime_s=LIFETIME_S,
            now=clock.monotonic,
        )

    told = {"copy": claim("bb"), "x": claim("bad")}
    assert counting(joiner(), told, Credited({})) == "bb"
    assert joiner().teller(["x", "copy"]) == "copy"
    assert joiner().second(["x", "copy", WITNESS], "x") == [WITNESS]
    assert joiner().second(["x", "y", WITNESS], WITNESS) == joiner().second(["x", "y"], "x") == []
    assert counting(joiner(), told | {WITNESS: claim("cc")}, Credited({})) == "cc"
    assert counting(joiner(), told) == "", "who has a chain does not"


def test_who_is_idle_keeps_nobody_from_going_on(clock: TestClock) -> None:
    """A spare waited for the witness, and this for the spare: the archive kept nothing more."""
    rests = replace(claim("aa", 500, 4), idle=True)  # a and b: 5 records each; c: 4
    told = {"a": rests, "b": rests, "c": claim("bb")}
    for me in (WITNESS, "me"):
        trust = trust_of(clock, me=me)
        assert counting(trust, told) == "aa"
        clock.now += LIFETIME_S + 1
        assert counting(trust, told) == "aa bb"
        assert counting(trust, told | {"x": claim("bad")}) == "aa bb", "a stranger stays one"
        back = told | {"a": replace(rests, idle=False)}
        assert counting(trust, back) == "aa", "who trains again counts again"
        clock.now += LIFETIME_S + 1
        counting(trust, told)
        clock.now += LIFETIME_S + 1
        # with nobody at work whom it knows, a witness takes what comes
        everybody = told | {"c": rests, "x": claim("bad")}
        counting(trust, everybody)
        clock.now += LIFETIME_S + 1
        found = counting(trust, everybody)
        assert found == ("aa bad" if me == WITNESS else "aa")


def test_while_a_run_rests_nobody_else_goes_on_with_its_chain(clock: TestClock) -> None:
    """Its members were idle or gone, and anybody could put a record of its own after theirs."""
    trust = trust_of(clock, me=WITNESS)
    rests = replace(claim("aa", 500, 4), idle=True)
    stranger = {"x": claim("bad")}
    for told in (dict.fromkeys("abc", rests), dict[str, ClaimRecord]()):
        for _ in range(3):
            clock.now += LIFETIME_S + 1
            assert "bad" not in counting(trust, told | stranger, trains=False)
        assert "bb" in counting(trust, {"b": claim("bb"), **stranger}, trains=False), (
            "one that made the chain may have a record from before"
        )
    assert "bad" in counting(trust, stranger), "it trains again, with whoever comes"
    trust = trust_of(clock, me=WITNESS)
    told = {"a": rests, "b": rests, "c": claim("bb"), **stranger}  # c makes the run's last record
    assert counting(trust, told, trains=False) == "aa"
    clock.now += LIFETIME_S + 1
    assert counting(trust, told, trains=False) == "aa bb", "spares keep it from nothing at the end"
    assert counting(trust_of(clock, me=WITNESS), stranger, Credited({}), trains=False) == "bad", (
        "one that has lost its disk begins with what is there"
    )


def test_most_of_those_who_made_the_last_record_go_on_without_who_made_most_of_the_others(
    clock: TestClock,
) -> None:
    """c and d waited for a quorum, and neither they nor the archive followed a and b."""
    records = {n: (f"r{n}", "cd") for n in range(9)} | {9: ("aa", "abc")}
    stays = {"c": claim("aa", 500, 9), "d": claim("aa", 500, 9)}
    for me in (WITNESS, "me"):
        trust = trust_of(clock, me=me)
        goes_on = {"a": claim("bb", number=10), "b": claim("bb", number=10)}
        assert counting(trust, stays | goes_on, Credited(records)) == "aa bb"
        alone = {"a": claim("bb", number=10)}
        assert counting(trust, stays | alone, Credited(records)) == "aa"


def test_two_of_five_make_no_chain_of_their_own_by_leaving_the_others_out_in_turns(
    clock: TestClock,
) -> None:
    """In a group of three that one gathered, and then of two that the other did."""
    records = {n: (f"r{n}", "abcde") for n in range(9)} | {9: ("aa", "abc")}
    told = {"a": claim("bad", number=10), "b": claim("bad", number=10)}
    told |= {name: claim("aa", 500, 9) for name in "cde"}
    for me in (WITNESS, "me"):
        assert counting(trust_of(clock, me=me), told, Credited(records)) == "aa"


def test_a_crowd_that_was_let_into_one_record_leads_nobody_away(clock: TestClock) -> None:
    """Each sent a vector of zeros, which no gate leaves out; they were most of the last record."""
    records = {n: (f"r{n}", "abc") for n in range(9)} | {9: ("aa", "abcDEFGHIJK")}
    told = {name: claim("bad", number=10) for name in "defghijk"}
    told |= {name: claim("aa", 500, 9) for name in "abc"}
    for me in (WITNESS, "me"):
        assert counting(trust_of(clock, me=me), told, Credited(records)) == "aa"


def test_who_is_stuck_does_not_keep_the_archive_from_those_who_go_on(clock: TestClock) -> None:
    """Twenty rounds were in no archive, and a, who had been away, in none of them: a was in most of
    ten records, and waited for the archive, this for a. And b and c, too few for a group without d,
    waited for the archive to take what d had made alone.
    """

    def stuck(digest: str, tokens: int = 500, number: int = 9) -> ClaimRecord:
        return replace(claim(digest, tokens, number), stuck=True)

    def credited(*made: str) -> Credited:
        return Credited({n: ("aa" if n == 9 else f"r{n}", by) for n, by in enumerate(made)})

    trust = trust_of(clock, me=WITNESS)
    most_by_a = credited("a", "a", "ab", "ac", "ad", "a", "ab", "ac", "ad", "ab")
    on = {"b": claim("bb"), "c": claim("bb"), "d": claim("b0", 550)}
    assert counting(trust, {"a": claim("aa", 500, 9)} | on, most_by_a) == "aa", "it may be slow"
    assert counting(trust, {"a": stuck("aa")} | on, most_by_a) == "aa bb"
    assert counting(trust, {"a": stuck("r8", 450, 8)} | on, most_by_a) == "bb"
    assert counting(trust, {"a": stuck("a1", 700, 10)} | on, most_by_a) == "a1", "its own fork"
    assert counting(trust_of(clock), {"a": stuck("aa")} | on, most_by_a) == "aa", "not for a peer"

    trust = trust_of(clock, me=WITNESS)
    last_by_d = credited("bcd", "bcd", *["bc"] * 7, "bd")
    waiting = {peer: stuck("aa") for peer in "bc"}
    alone = {"d": stuck("bb", 600, 11)}
    assert counting(trust, waiting | alone, last_by_d) == "aa bb"
    strangers = {name: claim("bad") for name in "xyz"}
    assert counting(trust, waiting | strangers, last_by_d) == "aa"
    assert counting(trust, waiting | {"d": stuck("aa")} | strangers, last_by_d) == "aa"
    once = credited("bcd", "bcd", *["bc"] * 8)
    trust = trust_of(clock, me=WITNESS)
    only_d = waiting | {"d": claim("bb", 600, 11)}
    assert counting(trust, only_d, once) == "aa", "d made two of the ten"
    for _ in range(STUCK_LIFETIMES):
        clock.now += LIFETIME_S
        assert counting(trust, only_d, once) == "aa"
    clock.now += 1.0
    assert counting(trust, only_d | strangers, once) == "aa bb", "nobody else goes on"
    awake = waiting | {"b": claim("aa", 500, 9)}
    assert counting(trust, only_d | awake, once) == "aa"
    assert counting(trust, only_d, once) == "aa", "from now on"
    clock.now += (STUCK_LIFETIMES + 1) * LIFETIME_S
    assert counting(trust, only_d, once) == "aa", "nobody looked meanwhile"


def test_the_witness_believes_half_and_forgets_who_is_gone(clock: TestClock) -> None:
    trust = trust_of(clock, me=WITNESS)
    one = {"c": claim("bb"), "x": claim("bad")}  # c is in 4 of our records, a and b in 5 each
    assert counting(trust, one) == ""
    assert counting(trust, one | {"a": claim("bb")}) == "bb"
    clock.now += LIFETIME_S  # whoever lives has told its own by now
    assert counting(trust, one) == "bb"
    assert counting(trust, one | {"a": claim("aa", 500, 4)}) == "aa", "a is there, and has more"
    assert counting(trust, {"x": claim("bad")}) == "bad", "nobody is left: a stranger goes on"


def test_the_witness_takes_the_first_chain_that_it_sees(clock: TestClock) -> None:
    assert counting(trust_of(clock, me=WITNESS), {"x": claim("bb")}, Credited({})) == "bb"


@pytest.mark.parametrize(
    ("fork_round", "told", "leaves"),
    [
        (1, "bb", True),  # three records of ours were witnessed after round 1
        (0, "bb", False),  # four: no bootstrap may take them back
        (3, "", False),  # it is known by its makers alone, and ours was witnessed
    ],
)
def test_a_fork_is_the_witness_s_to_choose_and_not_further_back_than_three_of_its_records(
    clock: TestClock, fork_round: int, told: str, leaves: bool
) -> None:
    trust, log = trust_of(clock), cast("RoundLog", Credited(LOG))
    counting(trust, {WITNESS: claim("aa", 500, 4)})  # the newest of ours
    counting(trust, {WITNESS: claim(told or "aa", 10, 4)})
    reach = Reached(fork_round=fork_round, fork_digest="b", chain_tokens=900, too_far=False)
    assert (trust.other_chain(log, HEAD) is not None) is bool(told), "whatever tokens it has"
    assert trust.wins("bb", reach, log, HEAD) is leaves


def test_what_the_witness_claims_is_tried_again_where_it_was_out_of_reach(
    clock: TestClock,
) -> None:
    """Else who is on another chain stays there for ever, and whoever waits for it waits as long."""
    trust = trust_of(clock)
    book = ClaimBook(trust)
    told = {WITNESS: claim("bb"), "a": claim("cc"), "b": claim("cc")}
    assert counting(trust, told) == "bb cc"
    for digest in ("bb", "cc"):
        assert not book.failed(digest, SILENT)
    clock.now += LIFETIME_S + 1.0
    for digest in ("bb", "cc"):
        assert book.failed(digest, SILENT)

    def believed() -> list[bool]:
        return [book.believed(claim(digest)) for digest in ("bb", "cc")]

    assert believed() == [False, False]
    clock.now += AGAIN_LIFETIMES * LIFETIME_S
    assert believed() == [True, False]
    assert not book.failed("bb", SILENT), "and believed for another lifetime"
    clock.now += LIFETIME_S + 1.0
    assert book.failed("bb", SILENT)
    clock.now += AGAIN_LIFETIMES * LIFETIME_S
    assert believed() == [False, False], "then ever more rarely"
    clock.now += AGAIN_LIFETIMES * LIFETIME_S
    assert believed() == [True, False]


def test_a_claim_of_our_own_record_with_too_many_tokens_takes_nothing_back(
    clock: TestClock,
) -> None:
    """A bootstrap that claimed the end of the run so had all wait for a state that nobody has."""
    trust, log = trust_of(clock), cast("RoundLog", Credited(LOG))
    counting(trust, {WITNESS: claim("r3", 10**9, 3)})
    reach = Reached(fork_round=3, fork_digest="r3", too_far=False)
    assert not trust.wins("r3", reach, log, HEAD)


def test_of_two_chains_that_nobody_vouched_for_the_one_with_more_tokens_wins(
    clock: TestClock,
) -> None:
    trust, log = trust_of(clock), cast("RoundLog", Credited(LOG))
    counting(trust, {WITNESS: claim("r2", 300, 2)})
    reach = Reached(fork_round=2, fork_digest="b", chain_tokens=900, too_far=False)
    assert trust.wins("bb", reach, log, HEAD)
    assert not trust_of(clock, me=WITNESS).wins("bb", reach, log, HEAD), "it vouched for ours"


def test_who_claims_a_believed_record_with_other_numbers_holds_it_and_states_nothing(
    clock: TestClock,
) -> None:
    """One stranger had all look for a state, and their sends were void meanwhile."""
    trust, log = trust_of(clock), cast("RoundLog", Credited(LOG))
    told = {"x": claim("bb", 2**53, 2**53), WITNESS: claim("bb", 600, 5), "y": claim("aa", 10**9)}
    counted = trust.counting(view(**told), log, HEAD).claims
    assert {(each.round, each.chain_tokens) for each in counted.values()} == {(5, 600), (4, 500)}
    assert holders(view(**counted), "bb") == ["x", WITNESS], "whoever has it may give it"
    makers = {"a": claim("cc", 610, 6), "b": claim("cc", 610, 6), "c": claim("cc", 900, 9)}
    counted = trust.counting(view(x=claim("cc", 2**53), **makers), log, HEAD).claims
    assert {each.chain_tokens for each in counted.values()} == {610}, "as most of them say"


def test_a_copy_of_the_bootstrap_states_nothing_of_what_members_vouch_for(clock: TestClock) -> None:
    trust = Trust(
        me="me",
        witness=WITNESS,
        stand_ins=frozenset({"copy", WITNESS}),
        record_lifetime_s=LIFETIME_S,
        now=clock.monotonic,
    )
    told = {"copy": claim("cc", 2**53, 2**53)}
    told |= {name: claim("cc", 610, 6) for name in "abc"}
    counted = trust.counting(view(**told), cast("RoundLog", Credited(LOG)), HEAD).claims
    assert {each.chain_tokens for each in counted.values()} == {610}


# ---- whom to ask ---------------------------------------------------------------------------------
STRANGERS = [f"x{n}" for n in range(50)]


def test_who_has_a_chain_asks_those_who_made_it_and_the_bootstraps_first(clock: TestClock) -> None:
    trust = trust_of(clock)
    book = ClaimBook(trust)
    trust.counting(view(), cast("RoundLog", Credited(LOG)), HEAD)
    asked = {book.chosen([*STRANGERS, "a", WITNESS]) for _ in range(50)}
    assert asked == {"a", WITNESS}
    assert book.chosen(STRANGERS) in STRANGERS, "nobody else has it"


def test_who_joins_leaves_those_who_are_busy_one_after_the_other(book: ClaimBook) -> None:
    """An honest peer may be busy while many join; strangers could say so for ever."""
    holding = [*STRANGERS, WITNESS]
    for name in ("x0", "x1"):
        book.asked_in_vain(name, BUSY)
        assert len({book.chosen(holding) for _ in range(200)}) > 10
    book.asked_in_vain("x2", BUSY)
    assert {book.chosen(holding) for _ in range(20)} == {WITNESS}
    book.asked_in_vain(WITNESS, BUSY)
    assert len({book.chosen(holding) for _ in range(200)}) > 10


def test_who_joins_asks_anybody_until_one_gives_nothing_and_then_a_bootstrap(
    book: ClaimBook,
) -> None:
    holding = [*STRANGERS, WITNESS]
    assert len({book.chosen(holding) for _ in range(200)}) > 10, "the load is shared"
    book.asked_in_vain("x0", SILENT)
    assert book.chosen(holding) == WITNESS
    book.asked_in_vain(WITNESS, SILENT)
    again = {book.chosen(holding) for _ in range(200)}
    assert WITNESS in again and again & set(STRANGERS) and "x0" not in again
    book.gave(WITNESS)
    assert book.chosen(holding) == WITNESS

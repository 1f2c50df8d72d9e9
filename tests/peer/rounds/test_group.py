"""Groups: who may exchange with whom, from what the members state."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hivemind.utils import MSGPackSerializer
from hypothesis import given
from hypothesis import strategies as st

from dilocox.dht.identity import Identity
from dilocox.dht.manifest import Manifest
from dilocox.dht.manifest_sections import DeadlineSpec
from dilocox.dht.wire import pack
from dilocox.peer.rounds.group import (
    MAX_COUNTED,
    MAX_UNRELIABLE,
    MORE_MEMBERS,
    TICKET_DOMAIN,
    AttemptSetup,
    ExchangeOrder,
    GroupRefused,
    Plan,
    Ticket,
    attempt_setup,
    attempt_times,
)
from dilocox.peer.rounds.record import stage_codec
from dilocox.peer.rounds.standing import MOST_TOKENS, Standing, following_standings
from dilocox.peer.rounds.vote_count import MAX_MEMBERS, may_start
from tests.peer.members import LAYOUT, template
from tests.peer.rounds.voters import ballots_of, cast

MANIFEST = Manifest.from_dict({"name": "test", "model": "tiny", "end_tokens": 1000})
CODEC = stage_codec(MANIFEST, LAYOUT)
PLAN = Plan(
    run="run",
    stage=0,
    round=3,
    attempt=0,
    ranks=CODEC.first_ranks,
    layout=LAYOUT.digest,
    previous="p" * 64,
)


def order_of(**changes: Any) -> ExchangeOrder:
    facts: dict[str, Any] = {
        "plan": PLAN,
        "scheduled_at": 0.0,
        "matchmaking_limit_s": 1.0,
        "tokens": 100,
        "tokens_cap": 1000,
        "counted": ("a", "b", "c"),
        "recent_voters": (),
        "exchange_s": 0.5,
        "step_s": 0.25,
        "anchor_before": "a" * 64,
        "last": template(chain_tokens=7000, next_inner_steps=25),
    }
    return ExchangeOrder(**(facts | changes))


ORDER = order_of()
TICKET = ORDER.ticket()


def setup(tickets: dict[str, Ticket], me: str = "a", **changes: Any) -> AttemptSetup:
    return attempt_setup(order_of(**changes), MANIFEST, CODEC, me, tickets, group=b"group")


def refusal(tickets: dict[str, Ticket], me: str = "a", **changes: Any) -> str:
    with pytest.raises(GroupRefused) as caught:
        setup(tickets, me, **changes)
    return str(caught.value)


# ---- plan and ticket -----------------------------------------------------------------------------
@pytest.mark.parametrize(
    "change",
    [
        {"run": "other"},
        {"stage": 1},
        {"round": 4},
        {"attempt": 1},
        {"ranks": (8, 0)},
        {"layout": "l" * 64},
        {"previous": "q" * 64},
    ],
)
def test_every_field_of_the_plan_is_in_its_key(change: dict[str, Any]) -> None:
    assert replace(PLAN).key == PLAN.key
    assert replace(PLAN, **change).key != PLAN.key


def test_the_scheduled_time_is_in_no_key_so_that_late_callers_still_meet() -> None:
    assert order_of(scheduled_at=99.0, exchange_s=3.0, counted=("a",)).plan.key == PLAN.key


LAST = ("a", "b", "d")


def test_a_ticket_is_read_as_it_was_stated_with_the_mode_that_hivemind_saw() -> None:
    ticket = replace(TICKET, counted=("a", "d"))
    assert not ticket.unreliable
    packed = ticket.pack(LAST)
    assert Ticket.unpack(packed, LAST, client_mode=False) == ticket
    assert Ticket.unpack(packed, LAST[::-1], client_mode=True) == replace(ticket, client_mode=True)
    with pytest.raises(GroupRefused, match="another last record"):
        Ticket.unpack(packed, (), client_mode=False)


def test_a_ticket_counts_only_as_its_owner_signed_it(identities: list[Identity]) -> None:
    """A leader passes on what the others stated; it made each member a record with it alone."""
    owner, leader = identities[:2]
    sent = TICKET.signed(LAST, 1, owner)
    told = Ticket.of_peer(owner.peer_id, sent, LAST, mode=1, client_mode=False)
    assert told == Ticket.unpack(TICKET.pack(LAST), LAST, client_mode=False)
    forged = replace(TICKET, counted=()).signed(LAST, 1, leader)
    facts: list[tuple[object, int]] = [
        (forged, 1),
        ([forged[0], sent[1]], 1),
        (sent, 2),  # hivemind's own field beside it
        ([sent[0]], 1),
        ([*sent, b""], 1),
        ([sent[1], sent[0]], 1),
        (None, 1),
        (TICKET.pack(LAST), 1),
    ]
    for other, mode in facts:
        with pytest.raises(GroupRefused):
            Ticket.of_peer(owner.peer_id, other, LAST, mode=mode, client_mode=False)
    with pytest.raises(GroupRefused, match="did not sign"):
        Ticket.of_peer("nobody", sent, LAST, mode=1, client_mode=False)


@given(
    counted=st.sets(st.sampled_from("abcdefgh"), min_size=1),
    group=st.sets(st.sampled_from("abcdefgh"), min_size=1),
    last=st.sets(st.sampled_from("abcdefgh")),
)
def test_a_ticket_says_enough_to_know_whether_its_group_may_start(
    counted: set[str], group: set[str], last: set[str]
) -> None:
    stated = replace(TICKET, counted=tuple(sorted(counted)))
    read = Ticket.unpack(stated.pack(last), last, client_mode=False)
    for member in group:
        views = dict.fromkeys(group, frozenset(group)) | {member: read.resolved(group)}
        told = dict.fromkeys(group, frozenset(group)) | {member: frozenset(counted)}
        assert may_start(group, views, last) == may_start(group, told, last)


@pytest.mark.parametrize("members", [8, 32, 128])
def test_a_ticket_is_short_in_a_large_group(identities: list[Identity], members: int) -> None:
    """With every counted peer's id it had 6.9 kB in a group of 128, and all get all tickets."""
    names = tuple(f"12D3Koo{place:045d}" for place in range(members))
    ticket = replace(TICKET, counted=names)
    serialized = MSGPackSerializer.dumps(ticket.signed(names, 1, identities[0]))
    assert len(serialized) < 150 + members // 8
    first = MSGPackSerializer.dumps(ticket.signed((), 1, identities[0]))
    assert len(first) < 160 + 10 * members


def test_a_ticket_states_no_more_tokens_than_the_cap() -> None:
    assert order_of(tokens=5000).ticket().tokens == 1000


TIMES = ("exchange_s", "step_s", "stall_s", "codec_s")
FIELDS = ("plan", "tokens", *TIMES, "bits", "others", "expected")


def stated(**changes: object) -> list[object]:
    """A sound ticket, but for these fields."""
    facts = dict(zip((*FIELDS, "abort", "unreliable"), TICKET.pack(LAST), strict=True))
    return list((facts | changes).values())


@pytest.mark.parametrize(
    "facts",
    [
        None,
        [],
        {},
        stated()[:-1],
        [*stated(), 0],
        stated(plan="text"),
        stated(tokens="many"),
        stated(tokens=True),
        stated(tokens=float("inf")),
        stated(exchange_s=10**400),
        stated(exchange_s=float("nan")),
        stated(exchange_s=-1.0),
        stated(exchange_s=1e7),
        stated(step_s=-1.0),
        stated(step_s=float("nan")),
        stated(stall_s=-1.0),
        stated(codec_s=-1.0),
        stated(codec_s=float("nan")),
        stated(stall_s=float("inf")),
        stated(expected="many"),
        stated(bits="abc"),
        stated(bits=b"\x0f"),  # a fourth of three
        stated(bits=b""),
        stated(others="abc"),
        stated(others=[1]),
        stated(others=[b"a"] * (MAX_COUNTED + 1)),
        stated(abort=1 << 40),  # bytes(n) would allocate them
        stated(abort="text"),
        stated(unreliable=[b"a"] * (MAX_UNRELIABLE + 1)),
        stated(unreliable=["a"]),
    ],
)
def test_a_malformed_ticket_is_refused(facts: object) -> None:
    with pytest.raises(GroupRefused):
        Ticket.unpack(facts, LAST, client_mode=False)


NONSENSE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=12,
)


@given(place=st.integers(0, len(FIELDS) + 1), value=NONSENSE)
def test_no_field_of_a_ticket_raises_anything_but_a_refusal(place: int, value: object) -> None:
    facts = stated()
    facts[place] = value
    with contextlib.suppress(GroupRefused):
        read = Ticket.unpack(facts, LAST, client_mode=False)
        assert all(0 <= getattr(read, name) < math.inf for name in TIMES)


@given(sent=NONSENSE | st.binary(max_size=200))
def test_nothing_in_place_of_a_ticket_raises_anything_but_a_refusal(
    identities: list[Identity], sent: object
) -> None:
    owner = identities[0]
    signed = sent if isinstance(sent, bytes) else pack(sent)
    for facts in (sent, [signed, owner.sign(pack([TICKET_DOMAIN, 1, signed]))]):
        with pytest.raises(GroupRefused):
            Ticket.of_peer(owner.peer_id, facts, LAST, mode=1, client_mode=False)


# ---- the agreed facts ----------------------------------------------------------------------------
def test_members_and_parts_are_the_same_whoever_computes_them() -> None:
    tickets = {"c": TICKET, "a": replace(TICKET, tokens=7), "b": TICKET}
    seen = [setup(tickets, me) for me in "abc"]
    same = [replace(each, me="a", plan=seen[0].plan) for each in seen]
    assert same == [seen[0]] * 3
    assert [(member.peer, member.tokens) for member in seen[0].members] == [
        ("a", 7),
        ("b", 100),
        ("c", 100),
    ]
    phases = CODEC.phases(CODEC.first_ranks)
    assert len(phases) == 2
    for number, phase in enumerate(phases):
        shares = [share for share in seen[0].shares if share.phase == number]
        assert sorted(share.reducer for share in shares) == ["a", "b", "c"]
        assert (shares[0].start, shares[-1].stop) == (0, phase.numel)
    assert [share.phase for share in seen[0].shares] == [0, 0, 0, 1, 1, 1]
    assert seen[0].template.previous == PLAN.previous
    assert seen[0].template.chain_tokens == 7000
    assert seen[0].template.next_inner_steps == 25


@pytest.mark.parametrize(
    "change", [{"plan": replace(PLAN, round=4).key}, {"tokens": 0}, {"tokens": -5}]
)
def test_a_member_whose_ticket_makes_no_sense_is_left_out_and_stops_nobody(
    change: dict[str, Any],
) -> None:
    tickets = {"a": TICKET, "b": replace(TICKET, **change), "c": TICKET}
    for me in "ac":
        assert [member.peer for member in setup(tickets, me).members] == ["a", "c"]
    assert "not what it stated" in refusal(tickets, "b")


def test_a_member_that_counts_nobody_stops_nobody() -> None:
    changes: dict[str, Any] = {"recent_voters": ("a", "b", "c")}
    tickets = {"a": TICKET, "b": replace(TICKET, counted=()), "c": TICKET}
    assert [member.peer for member in setup(tickets, **changes).members] == ["a", "b", "c"]


def test_no_member_counts_much_more_than_the_others_learnt_in_the_same_time() -> None:
    def counted(*stated: int) -> list[int]:
        tickets = {
            peer: replace(TICKET, tokens=each) for peer, each in zip("abcd", stated, strict=False)
        }
        return [member.tokens for member in setup(tickets, counted=("a",)).members]

    assert counted(100, 100, 900, 100) == [100, 100, MOST_TOKENS * 100, 100]
    assert counted(100, 100, 5000, 500) == [100, 100, 1000, 500]  # the cap
    assert counted(1, 1, 1000, 1000) == [1, 1, 1000, 1000]
    assert counted(1, 1000) == [1, 1000]  # of two nobody can say who lies


def test_a_group_needs_more_than_half_of_those_that_count_in_every_members_view() -> None:
    assert len(setup({"a": TICKET, "b": TICKET}).members) == 2  # two of a, b, c
    assert "too few" in refusal({"a": TICKET})
    wide = replace(TICKET, counted=("a", "b", "c", "d"))
    assert "too few" in refusal({"a": TICKET, "b": wide})


def test_the_last_records_contributors_decide_where_they_are_still_there() -> None:
    changes: dict[str, Any] = {"recent_voters": ("b", "c")}
    assert "too few" in refusal({"a": TICKET, "b": TICKET}, **changes)
    assert len(setup({"b": TICKET, "c": TICKET}, "b", **changes).members) == 2


def test_a_group_knows_who_of_the_last_records_contributors_did_not_come() -> None:
    sees = {name: replace(TICKET, counted=tuple(name + "xyz")) for name in "abc"}
    tickets = sees | {"b": replace(TICKET, counted=("b", "z"))}
    agreed = setup(tickets, recent_voters=("a", "b", "c", "y"))
    assert agreed.lacking == {"y"}, "z was in no record, and most see y"
    tickets |= {"c": replace(TICKET, counted=("c",))}
    assert not setup(tickets, recent_voters=("a", "b", "c", "y")).lacking


def test_of_more_members_than_a_record_holds_the_newest_leave_before_a_byte_is_sent() -> None:
    names = [f"peer{place:03d}" for place in range(MAX_MEMBERS + 9)]
    old = names[5:]
    ticket = replace(TICKET, counted=tuple(names[:3]))
    known = tuple(Standing(peer=name, round=3, credited=2) for name in old[:-4])
    last = template(chain_tokens=7000, next_inner_steps=25, standings=known)
    tickets = dict.fromkeys(names, ticket)
    members = {each.peer for each in setup(tickets, old[0], last=last).members}
    assert len(members) == MAX_MEMBERS and set(old[:-4]) <= members
    (gone, *_) = sorted(set(names) - members)
    assert "this group takes 256" in refusal(tickets, gone, last=last)
    assert len(setup(dict.fromkeys(names[:MAX_MEMBERS], ticket), names[0]).members) == MAX_MEMBERS


def test_what_a_member_states_of_its_times_is_what_its_record_will_say() -> None:
    ticket = order_of(exchange_s=1.5, step_s=0.25, stall_s=0.125).ticket()
    (member,) = setup({"a": replace(ticket, counted=("a",))}, counted=("a",)).members
    assert (member.exchange_s, member.step_s, member.stall_s) == (1.5, 0.25, 0.125)


def test_members_compute_for_as_long_as_most_of_them_need_within_a_bound() -> None:
    def codec_s(*stated: float) -> float:
        tickets = {
            peer: replace(TICKET, codec_s=each) for peer, each in zip("abc", stated, strict=True)
        }
        return setup(tickets).codec_s

    assert codec_s(0.0, 0.0, 0.0) == 0.0
    assert codec_s(2.0, 50.0, 3.0) == 3.0
    assert codec_s(50.0, 1.0, 40.0) == 40.0
    agreed = setup(dict.fromkeys("abc", replace(TICKET, codec_s=1e5)))
    longest_s = MANIFEST.deadlines.longest_exchange_s
    total_s = agreed.deadlines.exchange_s + len(agreed.phases) * agreed.codec_s
    assert total_s == pytest.approx(longest_s)  # pyright: ignore[reportUnknownMemberType]


def test_larger_ranks_have_more_time_to_move() -> None:
    deadlines = DeadlineSpec(exchange_s=30.0)
    for growth, exchange_s in ((0.5, 30.0), (1.0, 30.0), (3.0, 90.0), (64.0, 120.0)):
        found, _ = attempt_times(deadlines, 2, growth=growth, stated=(0.0,))
        assert found.exchange_s == exchange_s


def test_a_peer_that_can_only_dial_out_never_reduces() -> None:
    client = replace(TICKET, client_mode=True)
    agreed = setup({"a": client, "b": TICKET, "c": TICKET})
    assert sorted(share.reducer for share in agreed.shares) == ["b", "b", "c", "c"]
    assert [member.peer for member in agreed.members] == ["a", "b", "c"]
    assert "nobody can reduce" in refusal({"a": client, "b": client, "c": client})


def test_alone_a_peer_that_can_only_dial_out_averages_its_own_part() -> None:
    alone = replace(TICKET, client_mode=True, counted=("a",))
    agreed = setup({"a": alone}, counted=("a",))
    assert {share.reducer for share in agreed.shares} == {"a"}
    sizes = [phase.numel for phase in CODEC.phases(CODEC.first_ranks)]
    assert [(share.start, share.stop) for share in agreed.shares] == [(0, size) for size in sizes]


# ---- the repeated attempt ------------------------------------------------------------------------
def test_nobody_waits_for_whom_the_first_attempt_blames() -> None:
    """Their record may live on for a while, and they were in the last one."""
    there: dict[str, Any] = {"recent_voters": ("a", "b", "c")}
    assert order_of(expected=3, **there).whole_with == 3
    assert order_of(expected=2, **there).whole_with == 3  # one that sees too few
    assert order_of(expected=2, blamed=("c",), **there).whole_with == 2
    assert order_of(expected=None, blamed=("c",), **there).whole_with is None


def blaming(identities: list[Identity], folder: Path) -> tuple[list[str], bytes, bytes]:
    """Three members; the first two missed the third."""
    names = [identity.peer_id for identity in identities[:3]]
    first, second, _ = ballots_of(identities[:3], folder)
    first.receive(cast(second, None, (names[2],)))
    cast(first, None, (names[2],))
    return names, first.abort(), second.abort()


def test_the_repeated_attempt_leaves_out_whom_the_signed_aborts_blame(
    identities: list[Identity], tmp_path: Path
) -> None:
    names, first, second = blaming(identities, tmp_path)
    plan, last = replace(PLAN, attempt=1), template()
    order = order_of(plan=plan, counted=tuple(names), last=last)
    tickets = dict.fromkeys(names, order.ticket())
    for name, abort in ((names[0], first), (names[1], second)):
        tickets[name] = replace(order.ticket(), abort=abort)
    agreed = attempt_setup(order, MANIFEST, CODEC, names[1], tickets, group=b"g")
    assert [member.peer for member in agreed.members] == names[:2]
    assert agreed.excluded == (names[2],), "the record remembers it"
    with pytest.raises(GroupRefused, match="leave this peer out"):
        attempt_setup(order, MANIFEST, CODEC, names[2], tickets, group=b"g")


@pytest.mark.parametrize("known", [True, False])
def test_who_voids_first_attempts_and_comes_to_no_other_is_remembered(
    identities: list[Identity], tmp_path: Path, known: bool
) -> None:
    """It is in no record since the first of them, nor in the repeated attempt."""
    names, first, second = blaming(identities, tmp_path)
    plan, there = replace(PLAN, attempt=1), names if known else names[:2]
    before = tuple(Standing(peer=each, round=PLAN.round - 1, credited=9) for each in sorted(there))
    last = template(standings=before)
    order = order_of(plan=plan, counted=names[:2], last=last, recent_voters=tuple(names[:2]))
    tickets = {
        name: replace(order.ticket(), abort=abort)
        for name, abort in zip(names[:2], (first, second), strict=True)
    }
    agreed = attempt_setup(order, MANIFEST, CODEC, names[1], tickets, group=b"g")
    assert agreed.excluded == ((names[2],) if known else ())


@pytest.mark.parametrize(
    ("missing", "left_out"),
    [("", False), ("ab", False), ("abc", True), ("abd", True), ("abcd", True)],
)
def test_whom_most_voters_missed_in_void_attempts_is_left_out_and_remembered(
    missing: str, left_out: bool
) -> None:
    """Each says so by itself, of names that others need not know; a new key says nothing."""
    known = tuple(Standing(peer=peer, round=PLAN.round - 1, credited=9) for peer in "abcd")
    there = {"last": template(standings=known), "recent_voters": ("a", "b", "c", "d")}
    order = order_of(unreliable=("d", "gone"), **there)
    told = Ticket.unpack(order.ticket().pack("abcd"), "abcd", client_mode=False)
    quiet = replace(told, unreliable=())
    tickets = {peer: told if peer in missing else quiet for peer in "abcd"} | {"new": told}
    agreed = setup(tickets, **there)
    assert agreed.excluded == (("d",) if left_out else ())
    assert ("d" in {member.peer for member in agreed.members}) is not left_out
    if left_out:
        assert "sits out" in refusal(tickets, "d", **there)


def test_who_sits_out_says_nothing_of_others_and_stays_out_where_too_few_would_be_left() -> None:
    away = {"times": 2, "left_out": PLAN.round - 1}
    known = tuple(
        Standing(peer=peer, round=PLAN.round - 1, credited=9, **(away if peer in "ef" else {}))
        for peer in "abcdef"
    )
    there: dict[str, Any] = {"last": template(standings=known), "recent_voters": tuple("abcd")}
    told = replace(TICKET, counted=tuple("abcd"), unreliable=("d",))
    quiet = replace(told, unreliable=())
    agreed = setup(dict.fromkeys("ab", quiet) | dict.fromkeys("cdef", told), **there)
    assert [member.peer for member in agreed.members] == list("abcd"), "two of four missed it"
    agreed = setup(dict.fromkeys("abcdef", replace(told, unreliable=("c", "d"))), **there)
    assert [member.peer for member in agreed.members] == list("abcd"), "two of four are too few"
    assert agreed.excluded == ()


def test_nobody_is_left_out_for_void_attempts_where_too_few_would_be_left() -> None:
    known = tuple(Standing(peer=peer, round=PLAN.round - 1, credited=9) for peer in "abcd")
    there = {"last": template(standings=known), "recent_voters": ("a", "b", "c", "d")}
    told = replace(TICKET, counted=("a", "b", "c", "d"), unreliable=("c", "d"))
    agreed = setup(dict.fromkeys("abcd", told), **there)
    assert len(agreed.members) == 4 and agreed.excluded == ()


def test_who_sits_out_is_in_no_group_that_can_go_on_without_it() -> None:
    away = Standing(peer="c", round=PLAN.round - 1, times=2, left_out=PLAN.round - 1)
    last = template(standings=(away,))
    there: dict[str, Any] = {"last": last, "recent_voters": ("a", "b", "c")}
    agreed = setup(dict.fromkeys("abc", TICKET), **there)
    assert [member.peer for member in agreed.members] == ["a", "b"]
    assert agreed.template.standings == last.standings
    assert "sits out" in refusal(dict.fromkeys("abc", TICKET), "c", **there)
    # one of two that were in the last record is too few
    agreed = setup(dict.fromkeys("ac", TICKET), **there)
    assert [member.peer for member in agreed.members] == ["a", "c"]
    later = replace(last, standings=(replace(away, left_out=PLAN.round - 3),))
    there["last"] = later
    agreed = setup(dict.fromkeys("abc", TICKET), **there)
    assert len(agreed.members) == 3


@pytest.mark.parametrize("attempt", [0, 1])
def test_a_key_without_a_vote_averages_nothing(attempt: int) -> None:
    """Silent, each voided an attempt; as many as vote had any mean taken that they agreed on."""
    plan = replace(PLAN, round=20, attempt=attempt)
    known = tuple(Standing(peer=peer, round=19, credited=9) for peer in "ab")
    there: dict[str, Any] = {"plan": plan, "recent_voters": ("a", "b")}
    tickets = dict.fromkeys("abn", replace(TICKET, plan=plan.key))
    agreed = setup(tickets, **there, last=template(standings=known))
    assert {share.reducer for share in agreed.shares} == {"a", "b"}
    assert {member.peer for member in agreed.members} == {"a", "b", "n"}
    for peer in "ab":  # unless nobody who votes can be reached
        tickets[peer] = replace(tickets[peer], client_mode=True)
    agreed = setup(tickets, **there, last=template(standings=known))
    assert {share.reducer for share in agreed.shares} == {"n"}


def test_where_voters_average_for_all_they_take_few_new_members() -> None:
    """A crowd would else have a few voters send each of many the whole mean."""
    number, news = 20, [f"new-{place}" for place in range(30)]
    known = [Standing(peer=peer, round=number - 1, credited=9) for peer in "abc"]
    known.append(Standing(peer="d", round=number - 1, credited=1))

    def members(group: bytes) -> set[str]:
        plan = replace(PLAN, round=number)
        order = order_of(
            plan=plan,
            last=template(standings=tuple(known)),
            recent_voters=tuple("abcd"),
        )
        tickets = dict.fromkeys([*"abcd", *news], order.ticket())
        tickets["b"] = tickets["new-0"] = replace(order.ticket(), client_mode=True)
        agreed = attempt_setup(order, MANIFEST, CODEC, "a", tickets, group=group)
        return {member.peer for member in agreed.members}

    groups = [members(f"{number}".encode()) for number in range(20)]
    assert all(len(each) == 3 + 2 + 2 and set("abcd") <= each for each in groups)
    assert len(set[str]().union(*groups)) > 20, "a key that was drawn for it would be in all"
    assert not any("new-0" in each for each in groups), "others can be reached"


@pytest.mark.parametrize(("old", "new"), [(1, 20), (4, 40), (16, 100)])
def test_all_of_many_who_join_at_once_are_in_before_what_they_learnt_is_dropped(
    old: int, new: int
) -> None:
    members = tuple(f"old-{place}" for place in range(old))
    everybody = {*members, *(f"new-{place}" for place in range(new))}
    known = tuple(Standing(peer=peer, round=9, credited=9) for peer in members)
    been, number = set(members), 10
    while been != everybody:
        order = order_of(
            plan=replace(PLAN, round=number),
            counted=members,
            last=template(standings=known),
            recent_voters=members,
        )
        tickets = dict.fromkeys(everybody, order.ticket())
        agreed = attempt_setup(order, MANIFEST, CODEC, "old-0", tickets, group=f"{number}".encode())
        members = tuple(member.peer for member in agreed.members)
        known = following_standings(known, number, dict.fromkeys(members, 1.0), ())
        been |= set(members)
        number += 1
        assert number - 10 < MANIFEST.rounds.max_age


def test_aborts_blame_nobody_in_a_first_attempt(identities: list[Identity], tmp_path: Path) -> None:
    names, abort, _ = blaming(identities, tmp_path)
    order = order_of(counted=tuple(names), abort=abort)
    tickets = dict.fromkeys(names, order.ticket())
    agreed = attempt_setup(order, MANIFEST, CODEC, names[2], tickets, group=b"g")
    assert [member.peer for member in agreed.members] == names


# ---- how long a ticket may be --------------------------------------------------------------------
def test_a_ticket_that_would_keep_a_group_from_forming_is_refused() -> None:
    """Its leader sends each member the tickets of all: one of 50 MB took longer than the round."""
    peers = tuple(f"12D3KooW{number:044d}" for number in range(MAX_MEMBERS))
    order = order_of(counted=peers, recent_voters=peers)
    pack = MSGPackSerializer.dumps
    packed = bytes(pack([None, 0, pack(order.ticket().pack(peers))]) or b"")
    *others, peer = peers
    order.check_length(peer, packed, dict.fromkeys(others, packed))  # a full group of honest ones
    with pytest.raises(GroupRefused, match="in a swarm of 3 peers"):
        ORDER.check_length(peer, bytes(10_000), {})
    with pytest.raises(GroupRefused, match="too long"):
        order.check_length("stranger", bytes(30_000), dict.fromkeys(peers, bytes(30_000)))
    crowd = {f"key {number}": bytes(7_000) for number in range(9)}
    order.check_length("key 9", packed, crowd)
    with pytest.raises(GroupRefused, match="does not know"):
        order.check_length("key 9", bytes(7_000), crowd)
    order.check_length(peer, bytes(7_000), crowd)


def sent(order: ExchangeOrder, identity: Identity) -> bytes:
    """Its ticket as it travels."""
    signed = order.ticket().signed(order.recent_voters, 0, identity)
    return bytes(MSGPackSerializer.dumps([None, 0, MSGPackSerializer.dumps(signed)]) or b"")


def known_to_each_other(members: int, **changes: Any) -> ExchangeOrder:
    peers = tuple(f"12D3KooW{number:044d}" for number in range(members))
    return order_of(counted=peers, recent_voters=peers, **changes)


def test_strangers_make_what_a_small_group_is_told_hardly_longer(
    identities: list[Identity],
) -> None:
    """As many of them as it has places for are let in to it, but no crowd, and no padded ones."""
    order = known_to_each_other(6)
    ticket = sent(order, identities[0])
    asked = {f"new {number}": ticket for number in range(2 * 6 + MORE_MEMBERS)}
    order.check_length("new", ticket, asked)
    for padding, before in ((b"", 100), (bytes(8_000), 1)):
        asked = {f"new {number}": ticket + padding for number in range(before)}
        with pytest.raises(GroupRefused, match="does not know"):
            order.check_length("new", ticket + padding, asked)


def test_how_much_a_leader_tells_follows_from_the_members_and_their_tickets(
    identities: list[Identity],
) -> None:
    """A group of six is told at once, one of 128 takes half a minute on 1 Mbit/s; in a repeated
    attempt others have an abort, even if this peer has none.
    """

    def seconds(members: int, **changes: Any) -> float:
        order = known_to_each_other(members, **changes)
        return order.told_bytes(len(sent(order, identities[0]))) / 125_000

    assert seconds(6) < 0.1
    assert 25 < seconds(128) < 30
    again = replace(PLAN, attempt=1)
    assert 6 < seconds(64) < 8
    assert 30 < seconds(64, plan=again) < 40
    assert seconds(6, plan=again) < 0.5

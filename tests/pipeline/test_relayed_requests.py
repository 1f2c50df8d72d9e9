"""Sealed requests: nobody on their way can make one up, change one, keep one or use it twice."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dilocox.dht.identity import Identity
from dilocox.dht.wire import pack, seal
from dilocox.pipeline import relayed_requests
from dilocox.pipeline.frames import Frame, FrameRefused, encode_prefix_and_header
from dilocox.pipeline.relayed_requests import AHEAD_S, LIFE_S, RelayedRequests

RUN = "0" * 32
RELAY = "relay"
ASK = Frame(kind="reserve", replica="head", epoch=3, facts={"stage": 2})
YES = Frame(kind="yes", replica="head", epoch=3, facts={"state": "reserved"})


class Clock:
    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def time(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def identities(tmp_path_factory: pytest.TempPathFactory) -> list[Identity]:
    folder = tmp_path_factory.mktemp("keys")
    return [Identity.load_or_create(folder / f"{name}.key") for name in ("a", "b", "c")]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def three(identities: list[Identity], clock: Clock) -> list[RelayedRequests]:
    return [RelayedRequests(identity, RUN, clock.time) for identity in identities]


def test_a_request_and_its_answer(three: list[RelayedRequests], identities: list[Identity]) -> None:
    head, far, _ = three
    letter, number = head.write(identities[1].peer_id, ASK)
    assert far.take(letter, RELAY) == (identities[0].peer_id, ASK, number)
    reply = far.reply(identities[0].peer_id, number, YES)
    assert head.read_reply(reply, identities[1].peer_id, number) == YES


def test_a_letter_is_taken_once_and_none_after_a_later_one(
    three: list[RelayedRequests], identities: list[Identity], clock: Clock
) -> None:
    head, far, _ = three
    first, second, third = (head.write(identities[1].peer_id, ASK)[0] for _ in range(3))
    assert far.take(second, RELAY) is not None
    assert far.take(second, RELAY) is None, "it came by another way, too"
    assert far.take(first, RELAY) is None
    assert far.take(third, RELAY) is not None
    assert far.take(second, RELAY) is None, "by another way, late"
    clock.now += 60.0  # what it remembered of the head is gone, and so is the letters' life
    with pytest.raises(FrameRefused, match="of this moment"):
        far.take(third, RELAY)


def test_a_restarted_writer_is_heard(
    three: list[RelayedRequests], identities: list[Identity], clock: Clock
) -> None:
    head, far, _ = three
    for _ in range(10):
        assert far.take(head.write(identities[1].peer_id, ASK)[0], RELAY) is not None
    clock.now += 0.5
    again = RelayedRequests(identities[0], RUN, clock.time)
    assert far.take(again.write(identities[1].peer_id, ASK)[0], RELAY) is not None


def test_who_is_flooded_with_letters_reads_no_more_than_so_many_a_second(
    three: list[RelayedRequests],
    identities: list[Identity],
    clock: Clock,
) -> None:
    head, _, other = three
    to = identities[1].peer_id
    far = RelayedRequests(identities[1], RUN, clock.time, max_writers=1)
    for count in range(relayed_requests.TAKEN_PER_S):
        assert far.take(head.write(to, ASK)[0], f"relay {count % 25}") is not None
    for letter in (head.write(to, ASK)[0], b"nonsense"):
        with pytest.raises(FrameRefused, match=f"{relayed_requests.TAKEN_PER_S} letters in"):
            far.take(letter, RELAY)
    clock.now += 1.0
    with pytest.raises(FrameRefused, match="1 others wrote"):
        far.take(other.write(to, ASK)[0], RELAY)
    clock.now += LIFE_S  # the head's is forgotten
    assert far.take(other.write(to, ASK)[0], RELAY) is not None


def test_who_brings_nonsense_or_copies_has_no_letter_of_others_refused(
    three: list[RelayedRequests], identities: list[Identity]
) -> None:
    head, far, _ = three
    to = identities[1].peer_id
    first, _ = head.write(to, ASK)
    assert far.take(first, RELAY) is not None
    for _ in range(2 * relayed_requests.TAKEN_PER_S):
        assert far.take(first, "echo") is None
    for count in range(2 * relayed_requests.TAKEN_PER_S):
        kind = "letter" if count < relayed_requests.TAKEN_OF_A_BRINGER_PER_S else "crowd"
        with pytest.raises(FrameRefused) as refused:
            far.take(b"nonsense", "stranger")
        assert refused.value.kind == kind
    assert far.take(head.write(to, ASK)[0], RELAY) is not None
    assert far.take(head.write(to, ASK)[0], "echo") is not None, "a copy counts for nothing"


def test_a_letter_lives_seconds_though_clocks_differ_a_little(
    three: list[RelayedRequests], identities: list[Identity], clock: Clock
) -> None:
    head, far, _ = three
    to = identities[1].peer_id
    clock.now += AHEAD_S - 0.1
    ahead, _ = head.write(to, ASK)
    clock.now -= AHEAD_S - 0.1
    assert far.take(ahead, RELAY) is not None
    clock.now += 2 * AHEAD_S
    late, _ = head.write(to, ASK)
    clock.now -= 2 * AHEAD_S
    with pytest.raises(FrameRefused, match="of this moment"):
        far.take(late, RELAY)
    clock.now += 3 * AHEAD_S + LIFE_S
    with pytest.raises(FrameRefused, match="of this moment"):
        far.take(late, RELAY)


def test_nobody_else_takes_it_and_no_reply_of_another_counts(
    three: list[RelayedRequests], identities: list[Identity]
) -> None:
    head, far, relay = three
    letter, number = head.write(identities[1].peer_id, ASK)
    with pytest.raises(FrameRefused, match="for somebody else"):
        relay.take(letter, RELAY)
    with pytest.raises(FrameRefused, match="another purpose"):
        far.read_reply(letter, identities[0].peer_id, number)
    head_id, far_id = identities[0].peer_id, identities[1].peer_id
    for forged in (
        relay.reply(head_id, number, YES),  # signed by whoever passes it on
        far.reply(head_id, number - 1, YES),  # to an earlier letter
    ):
        with pytest.raises(FrameRefused, match="another one's"):
            head.read_reply(forged, far_id, number)


def test_letters_of_another_run_and_records_are_none(
    three: list[RelayedRequests], identities: list[Identity], clock: Clock
) -> None:
    to = identities[1].peer_id
    other, _ = RelayedRequests(identities[0], "1" * 32, clock.time).write(to, ASK)
    record = seal(
        identities[0],
        key=f"{RUN}/stage/1",
        sequence=1,
        expires_at=clock.now + 1,
        payload=encode_prefix_and_header(ASK),
    )
    for data in (other, record):
        with pytest.raises(FrameRefused, match="for another purpose"):
            three[1].take(data, RELAY)


@pytest.mark.parametrize("kind", ["yes", "hello", "go", "dissolve"])
def test_a_letter_holds_a_request(
    three: list[RelayedRequests], identities: list[Identity], kind: str
) -> None:
    letter, _ = three[0].write(identities[1].peer_id, Frame(kind=kind))
    with pytest.raises(FrameRefused, match="in a letter"):
        three[1].take(letter, RELAY)
    reply = three[1].reply(identities[0].peer_id, 1, ASK)
    with pytest.raises(FrameRefused, match="as an answer"):
        three[0].read_reply(reply, identities[1].peer_id, 1)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_whatever_comes_instead_is_refused(identities: list[Identity], data: st.DataObject) -> None:
    clock = Clock()
    head, far = (RelayedRequests(identity, RUN, clock.time) for identity in identities[:2])
    letter, _ = head.write(identities[1].peer_id, ASK)
    spot = data.draw(st.integers(0, len(letter) - 1))
    bit = data.draw(st.integers(0, 7))
    broken = bytearray(letter)
    broken[spot] ^= 1 << bit
    inside = seal(
        identities[0],
        key=f"{RUN}/letter/{identities[1].peer_id}",
        sequence=1,
        expires_at=clock.now + 1,
        payload=data.draw(st.binary(max_size=64)),
    )
    for odd in (bytes(broken), letter[:spot], inside, pack([1, 2])):
        with pytest.raises(FrameRefused):
            far.take(odd, RELAY)

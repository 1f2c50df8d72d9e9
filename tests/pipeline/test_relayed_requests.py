"""Sealed requests: nobody on their way can make one up, change one, keep one or use it twice."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dilocox.dht.identity import Identity
from dilocox.dht.wire import pack, seal
from dilocox.pipeline import relayed_requests
from dilocox.pipeline.frames import Frame, FrameRefused, encode_prefix_and_header
from dilocox.pipeline.relayed_requests import (
    AHEAD_S,
    LIFE_S,
    TAKEN_OF_ONE_PER_S,
    TAKEN_PER_S,
    RelayedRequests,
)

RUN = "0" * 32
RELAY = "relay"
ASK = Frame(kind="reserve", replica="head", epoch=3, facts={"stage": 2})
YES = Frame(kind="yes", replica="head", epoch=3, facts={"state": "reserved"})


class Way:
    """A head that asks a far peer by way of a relay, and the seconds that all of them read."""

    def __init__(self, identities: list[Identity]) -> None:
        self.now = 1_700_000_000.0
        self.identities = identities
        self.head_id, self.far_id, _ = (identity.peer_id for identity in identities)
        self.head, self.far, self.relay = map(self.of, identities)

    def of(self, identity: Identity, run: str = RUN, **options: int) -> RelayedRequests:
        return RelayedRequests(identity, run, lambda: self.now, **options)

    def request(self, frame: Frame = ASK) -> bytes:
        """From the head to the far peer."""
        return self.head.ask(self.far_id, frame)[0]

    def sealed(self, key: str, payload: bytes) -> bytes:
        """Anything that the head signs."""
        expires_at = self.now + 1
        head = self.identities[0]
        return seal(head, key=key, sequence=1, expires_at=expires_at, payload=payload)

    def refuses(self, sealed: bytes, match: str, bringer: str = RELAY) -> None:
        with pytest.raises(FrameRefused, match=match):
            self.far.take(sealed, bringer)


@pytest.fixture(scope="module")
def identities(tmp_path_factory: pytest.TempPathFactory) -> list[Identity]:
    folder = tmp_path_factory.mktemp("keys")
    return [Identity.load_or_create(folder / f"{name}.key") for name in ("a", "b", "c")]


@pytest.fixture
def way(identities: list[Identity]) -> Way:
    return Way(identities)


def test_a_request_and_its_answer(way: Way) -> None:
    sealed, number = way.head.ask(way.far_id, ASK)
    assert way.far.take(sealed, RELAY) == (way.head_id, ASK, number)
    reply = way.far.reply(way.head_id, number, YES)
    assert way.head.read_reply(reply, way.far_id, number) == YES


def test_a_request_is_taken_once_and_none_after_a_later_one(way: Way) -> None:
    first, second, third = (way.request() for _ in range(3))
    assert way.far.take(second, RELAY) is not None
    assert way.far.take(second, RELAY) is None, "it came by another way, too"
    assert way.far.take(first, RELAY) is None
    assert way.far.take(third, RELAY) is not None
    assert way.far.take(second, RELAY) is None, "by another way, late"
    way.now += 60.0  # what it remembered of the head is gone, and so is their life
    way.refuses(third, "of this moment")


def test_a_restarted_asker_is_heard(way: Way) -> None:
    for _ in range(10):
        assert way.far.take(way.request(), RELAY) is not None
    way.now += 0.5
    way.head = way.of(way.identities[0])
    assert way.far.take(way.request(), RELAY) is not None


def test_who_is_flooded_with_requests_opens_no_more_than_so_many_a_second(
    way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relayed_requests, "TAKEN_PER_S", TAKEN_OF_ONE_PER_S + 5)
    way.far = way.of(way.identities[1], max_askers=1)
    for count in range(TAKEN_OF_ONE_PER_S):
        assert way.far.take(way.request(), f"relay {count % 25}") is not None
    way.refuses(way.request(), f"{TAKEN_OF_ONE_PER_S} requests of a peer", "another relay")
    for count in range(5):
        way.refuses(b"nonsense", "sealed", f"relay {count}")
    for sealed in (way.request(), b"nonsense"):
        way.refuses(sealed, f"{TAKEN_OF_ONE_PER_S + 5} sealed requests in")
    way.now += 1.0
    way.refuses(way.relay.ask(way.far_id, ASK)[0], "1 others asked")
    way.now += LIFE_S  # the head's is forgotten
    assert way.far.take(way.relay.ask(way.far_id, ASK)[0], RELAY) is not None


def test_who_brings_nonsense_or_copies_has_no_request_of_others_refused(way: Way) -> None:
    first = way.request()
    assert way.far.take(first, RELAY) is not None
    for _ in range(2 * TAKEN_PER_S):
        assert way.far.take(first, "echo") is None
    for count in range(2 * TAKEN_PER_S):
        kind = "sealed" if count < TAKEN_OF_ONE_PER_S else "crowded"
        way.refuses(b"nonsense", rf"\({kind}\)", "stranger")
    assert way.far.take(way.request(), RELAY) is not None
    assert way.far.take(way.request(), "echo") is not None, "a copy counts for nothing"


def test_a_request_lives_seconds_though_clocks_differ_a_little(way: Way) -> None:
    way.now += AHEAD_S - 0.1
    ahead = way.request()
    way.now -= AHEAD_S - 0.1
    assert way.far.take(ahead, RELAY) is not None
    way.now += 2 * AHEAD_S
    late = way.request()
    way.now -= 2 * AHEAD_S
    way.refuses(late, "of this moment")
    way.now += 3 * AHEAD_S + LIFE_S
    way.refuses(late, "of this moment")


def test_nobody_else_takes_it_and_no_reply_of_another_counts(way: Way) -> None:
    sealed, number = way.head.ask(way.far_id, ASK)
    with pytest.raises(FrameRefused, match="for somebody else"):
        way.relay.take(sealed, RELAY)
    with pytest.raises(FrameRefused, match="another purpose"):
        way.far.read_reply(sealed, way.head_id, number)
    for forged in (
        way.relay.reply(way.head_id, number, YES),  # signed by whoever passes it on
        way.far.reply(way.head_id, number - 1, YES),  # to an earlier request
    ):
        with pytest.raises(FrameRefused, match="another one's"):
            way.head.read_reply(forged, way.far_id, number)


def test_requests_of_another_run_and_records_are_none(way: Way) -> None:
    other = way.of(way.identities[0], "1" * 32).ask(way.far_id, ASK)[0]
    for data in (other, way.sealed(f"{RUN}/stage/1", encode_prefix_and_header(ASK))):
        way.refuses(data, "for another purpose")


@pytest.mark.parametrize("kind", ["yes", "hello", "go", "dissolve"])
def test_a_request_alone_is_taken(way: Way, kind: str) -> None:
    way.refuses(way.request(Frame(kind=kind)), "in a sealed request")
    with pytest.raises(FrameRefused, match="as an answer"):
        way.head.read_reply(way.far.reply(way.head_id, 1, ASK), way.far_id, 1)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_whatever_comes_instead_is_refused(identities: list[Identity], data: st.DataObject) -> None:
    way = Way(identities)
    sealed = way.request()
    spot = data.draw(st.integers(0, len(sealed) - 1))
    broken = bytearray(sealed)
    broken[spot] ^= 1 << data.draw(st.integers(0, 7))
    inside = way.sealed(f"{RUN}/request/{way.far_id}", data.draw(st.binary(max_size=64)))
    for odd in (bytes(broken), sealed[:spot], inside, pack([1, 2])):
        way.refuses(odd, "refused")

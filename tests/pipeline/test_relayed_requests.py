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


class Post:
    """A head that writes to a far peer by way of a relay, and the seconds that all of them read."""

    def __init__(self, identities: list[Identity]) -> None:
        self.now = 1_700_000_000.0
        self.identities = identities
        self.head_id, self.far_id, _ = (identity.peer_id for identity in identities)
        self.head, self.far, self.relay = map(self.desk, identities)

    def desk(self, identity: Identity, run: str = RUN, **options: int) -> RelayedRequests:
        return RelayedRequests(identity, run, lambda: self.now, **options)

    def letter(self, frame: Frame = ASK) -> bytes:
        """From the head to the far peer."""
        return self.head.write(self.far_id, frame)[0]

    def sealed(self, key: str, payload: bytes) -> bytes:
        """Anything that the head signs."""
        expires_at = self.now + 1
        head = self.identities[0]
        return seal(head, key=key, sequence=1, expires_at=expires_at, payload=payload)

    def refuses(self, letter: bytes, match: str, bringer: str = RELAY) -> None:
        with pytest.raises(FrameRefused, match=match):
            self.far.take(letter, bringer)


@pytest.fixture(scope="module")
def identities(tmp_path_factory: pytest.TempPathFactory) -> list[Identity]:
    folder = tmp_path_factory.mktemp("keys")
    return [Identity.load_or_create(folder / f"{name}.key") for name in ("a", "b", "c")]


@pytest.fixture
def post(identities: list[Identity]) -> Post:
    return Post(identities)


def test_a_request_and_its_answer(post: Post) -> None:
    letter, number = post.head.write(post.far_id, ASK)
    assert post.far.take(letter, RELAY) == (post.head_id, ASK, number)
    reply = post.far.reply(post.head_id, number, YES)
    assert post.head.read_reply(reply, post.far_id, number) == YES


def test_a_letter_is_taken_once_and_none_after_a_later_one(post: Post) -> None:
    first, second, third = (post.letter() for _ in range(3))
    assert post.far.take(second, RELAY) is not None
    assert post.far.take(second, RELAY) is None, "it came by another way, too"
    assert post.far.take(first, RELAY) is None
    assert post.far.take(third, RELAY) is not None
    assert post.far.take(second, RELAY) is None, "by another way, late"
    post.now += 60.0  # what it remembered of the head is gone, and so is the letters' life
    post.refuses(third, "of this moment")


def test_a_restarted_writer_is_heard(post: Post) -> None:
    for _ in range(10):
        assert post.far.take(post.letter(), RELAY) is not None
    post.now += 0.5
    post.head = post.desk(post.identities[0])
    assert post.far.take(post.letter(), RELAY) is not None


def test_who_is_flooded_with_letters_reads_no_more_than_so_many_a_second(
    post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relayed_requests, "TAKEN_PER_S", TAKEN_OF_ONE_PER_S + 5)
    post.far = post.desk(post.identities[1], max_writers=1)
    for count in range(TAKEN_OF_ONE_PER_S):
        assert post.far.take(post.letter(), f"relay {count % 25}") is not None
    post.refuses(post.letter(), f"{TAKEN_OF_ONE_PER_S} letters of a peer", "another relay")
    for count in range(5):
        post.refuses(b"nonsense", "letter", f"relay {count}")
    for letter in (post.letter(), b"nonsense"):
        post.refuses(letter, f"{TAKEN_OF_ONE_PER_S + 5} letters in")
    post.now += 1.0
    post.refuses(post.relay.write(post.far_id, ASK)[0], "1 others wrote")
    post.now += LIFE_S  # the head's is forgotten
    assert post.far.take(post.relay.write(post.far_id, ASK)[0], RELAY) is not None


def test_who_brings_nonsense_or_copies_has_no_letter_of_others_refused(post: Post) -> None:
    first = post.letter()
    assert post.far.take(first, RELAY) is not None
    for _ in range(2 * TAKEN_PER_S):
        assert post.far.take(first, "echo") is None
    for count in range(2 * TAKEN_PER_S):
        kind = "letter" if count < TAKEN_OF_ONE_PER_S else "crowd"
        post.refuses(b"nonsense", rf"\({kind}\)", "stranger")
    assert post.far.take(post.letter(), RELAY) is not None
    assert post.far.take(post.letter(), "echo") is not None, "a copy counts for nothing"


def test_a_letter_lives_seconds_though_clocks_differ_a_little(post: Post) -> None:
    post.now += AHEAD_S - 0.1
    ahead = post.letter()
    post.now -= AHEAD_S - 0.1
    assert post.far.take(ahead, RELAY) is not None
    post.now += 2 * AHEAD_S
    late = post.letter()
    post.now -= 2 * AHEAD_S
    post.refuses(late, "of this moment")
    post.now += 3 * AHEAD_S + LIFE_S
    post.refuses(late, "of this moment")


def test_nobody_else_takes_it_and_no_reply_of_another_counts(post: Post) -> None:
    letter, number = post.head.write(post.far_id, ASK)
    with pytest.raises(FrameRefused, match="for somebody else"):
        post.relay.take(letter, RELAY)
    with pytest.raises(FrameRefused, match="another purpose"):
        post.far.read_reply(letter, post.head_id, number)
    for forged in (
        post.relay.reply(post.head_id, number, YES),  # signed by whoever passes it on
        post.far.reply(post.head_id, number - 1, YES),  # to an earlier letter
    ):
        with pytest.raises(FrameRefused, match="another one's"):
            post.head.read_reply(forged, post.far_id, number)


def test_letters_of_another_run_and_records_are_none(post: Post) -> None:
    other = post.desk(post.identities[0], "1" * 32).write(post.far_id, ASK)[0]
    for data in (other, post.sealed(f"{RUN}/stage/1", encode_prefix_and_header(ASK))):
        post.refuses(data, "for another purpose")


@pytest.mark.parametrize("kind", ["yes", "hello", "go", "dissolve"])
def test_a_letter_holds_a_request(post: Post, kind: str) -> None:
    post.refuses(post.letter(Frame(kind=kind)), "in a letter")
    with pytest.raises(FrameRefused, match="as an answer"):
        post.head.read_reply(post.far.reply(post.head_id, 1, ASK), post.far_id, 1)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_whatever_comes_instead_is_refused(identities: list[Identity], data: st.DataObject) -> None:
    post = Post(identities)
    letter = post.letter()
    spot = data.draw(st.integers(0, len(letter) - 1))
    broken = bytearray(letter)
    broken[spot] ^= 1 << data.draw(st.integers(0, 7))
    inside = post.sealed(f"{RUN}/letter/{post.far_id}", data.draw(st.binary(max_size=64)))
    for odd in (bytes(broken), letter[:spot], inside, pack([1, 2])):
        post.refuses(odd, "refused")

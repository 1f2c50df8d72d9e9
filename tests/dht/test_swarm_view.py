"""What follows from one look at the DHT."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dilocox.dht.manifest import Manifest
from dilocox.dht.records import ClaimRecord
from dilocox.dht.swarm_view import SwarmView, believed_first, newest_round
from tests.pipeline.swarms import stage_record


def claim(round_number: int, digest: str, chain_tokens: int = 0) -> ClaimRecord:
    return ClaimRecord(round=round_number, digest=digest, chain_tokens=chain_tokens, record_bytes=1)


def test_counted_are_those_that_train_or_hold_unsent_tokens_and_oneself() -> None:
    view = SwarmView(
        me="m",
        stage={
            "z": stage_record(state="training"),
            "joins": stage_record(state="joining"),
            "spare": stage_record(state="spare"),
            "busy spare": stage_record(state="spare", tokens=5),
            "left": stage_record(state="left"),
        },
    )
    assert view.counted() == ("busy spare", "m", "z")
    assert SwarmView(me="m").counted() == ("m",)


def test_the_best_claim_is_the_chain_with_the_most_tokens_behind_it() -> None:
    claims = {
        "me": claim(9, "own", 950),
        "a": claim(5, "aa", 100),
        "b": claim(7, "bb", 200),
        "c": claim(4, "cc", 900),  # fewer rounds, more tokens: it wins a fork
        "new": claim(-1, "root"),
    }
    view = SwarmView(me="me", claims=claims)
    assert view.best_claim(150, "own") == claims["c"]
    assert view.best_claim(150, "own", ignored={"cc"}) == claims["b"]
    assert view.best_claim(900, "cc") is None  # ours; the others are behind
    assert view.best_claim(900, "own") == claims["c"]  # as many, another digest: a fork
    assert view.best_claim(950, "own") is None
    equal = {"x": claim(5, "bb", 200), "y": claim(5, "aa", 200)}
    best = SwarmView(me="me", claims=equal).best_claim(0, "own")
    assert best == equal["y"]
    assert SwarmView(me="me").best_claim(0, "own") is None


@pytest.mark.parametrize(
    ("tokens", "ended"),
    [
        ([], False),  # nobody has told: the run goes on
        ([999], False),
        ([1000], True),
        ([1000, 999], False),  # half is not most
        ([1000, 2000, 0], True),
        ([10**15, 5, 5], False),  # one peer alone ends nothing
    ],
)
def test_the_run_has_ended_when_most_peers_of_stage_0_hold_all_its_records(
    manifest: Manifest, tokens: list[int], ended: bool
) -> None:
    claims = {f"p{number}": claim(9, "d", each) for number, each in enumerate(tokens)}
    assert SwarmView(me="me", run_claims=claims).says_ended(manifest, "") is ended
    # a stage's own chain says nothing of the run
    assert not SwarmView(me="me", claims=claims).says_ended(manifest, "")


def test_where_peers_are_not_believed_the_witness_ends_a_run_and_they_do_not(
    manifest: Manifest,
) -> None:
    claims = {"peer": claim(9, "d", 1000)}
    view = SwarmView(me="me", run_claims=claims)
    assert not view.says_ended(manifest, "witness", by_peers=False)
    assert view.says_ended(manifest, "peer", by_peers=False)


def test_what_the_model_writes_counts_from_the_witness_alone() -> None:
    claims = {name: replace(claim(3, "d"), written=f"by {name}") for name in ("peer", "witness")}
    view = SwarmView(me="me", run_claims=claims)
    assert view.written("witness") == "by witness"
    assert view.written("another") == SwarmView(me="me").written("witness") == ""


def test_the_round_of_the_run_is_that_of_its_stage_furthest_on_as_the_witness_says() -> None:
    claims = {"peer": replace(claim(3, "d"), run_round=99), "witness": claim(5, "d")}
    assert SwarmView(me="me", run_claims=claims).run_round("witness") == -1
    claims["witness"] = replace(claims["witness"], run_round=7)
    assert SwarmView(me="me", run_claims=claims).run_round("witness") == 7
    assert SwarmView(me="me", run_claims=claims).run_round("another") == -1


@pytest.mark.parametrize(
    ("kept", "held"),
    [([], False), ([6], False), ([7], True), ([6, 8], True), ([-1], False)],
)
def test_a_round_is_held_by_some_when_one_of_them_claims_it(kept: list[int], held: bool) -> None:
    claims = {f"b{number}": claim(each, "d", 1) for number, each in enumerate(kept)}
    view = SwarmView(me="me", claims=claims | {"peer": claim(9, "d", 1)})
    assert view.held_by({"b0", "b1", "b2"}, 7) is held
    assert view.held_by({"b0"}, -1), "there is nothing to hold"


def test_a_peer_that_only_dials_out_asks_those_that_can_be_reached() -> None:
    def view(client_mode: bool) -> SwarmView:
        shut, own = (
            stage_record(state="training"),
            replace(stage_record(state="spare"), client_mode=client_mode),
        )
        peers = {"me": own, "shut": replace(shut, client_mode=True), "open": shut}
        return SwarmView(me="me", stage=peers)

    holders = ["shut", "open", "bootstrap"]
    assert view(True).within_reach(holders) == ["open", "bootstrap"]
    assert view(True).within_reach(["shut"]) == ["shut"]  # its record may be an old one
    assert view(False).within_reach(holders) == holders


FREE = {f"free{number}": claim(900, "nine", 9_000_000) for number in range(5)}


@pytest.mark.parametrize(
    ("claims", "first"),
    [
        # of more tokens than are there, by one
        ({"a": claim(4, "four", 40), "b": claim(4, "four", 40), "c": FREE["free0"]}, "four"),
        # right after a commit
        ({"a": claim(4, "four", 40), "b": claim(5, "five", 50)}, "five"),
        # peer ids cost nothing: with the archive's word they move nobody
        ({**FREE, "boot": claim(4, "four", 40)}, "four"),
        ({**FREE, "boot": claim(-1, "root")}, "nine"),
        ({"new": claim(-1, "root"), "a": claim(0, "none", 1)}, "none"),
    ],
)
def test_who_only_looks_believes_the_archive_then_most(
    claims: dict[str, ClaimRecord], first: str
) -> None:
    believed = believed_first(claims, "boot")
    assert next(iter(believed.values())).digest == first
    assert believed == claims, "none is lost"


def test_the_newest_round_is_the_archives_or_what_most_say_of_the_last_stage_to_have_it() -> None:
    claims = {"a": claim(4, "four", 40), "b": claim(5, "five", 50), "free": FREE["free0"]}
    ahead = {"a": claim(6, "six", 60)}
    assert newest_round([claims, ahead], "boot") == (5, 50)
    assert newest_round([claims, ahead | {"boot": claim(3, "three", 30)}], "boot") == (3, 50)
    assert newest_round([claims | {"boot": claim(4, "four", 40)}, {}], "boot") == (-1, 40)


def test_the_archive_itself_is_the_last_of_those_that_have_its_record() -> None:
    claims = {"boot": claim(4, "four", 40), "peer": claim(4, "four", 40)}
    claims["copies"] = claim(4, "four", 10**9)  # says with its digest that the run has ended
    claims["longer"] = claim(900, "nine", 10**9)
    assert list(believed_first(claims, "boot")) == ["peer", "boot", "longer", "copies"]

"""What an operator may change in a running run, which revision counts, and what follows from it."""

import json
from typing import Any

import pytest

from dilocox.dht.errors import InvalidInput
from dilocox.dht.identity import Identity
from dilocox.dht.invite import run_id
from dilocox.dht.manifest import REVISIONS_OF_A_KEY, Manifest, SignedManifest, hand_over
from dilocox.dht.manifest_revisions import back_to, changes, in_state, revised, under_next_key

SHORT_STEPS = {  # of the preset tiny
    "batch": {"sequence_length": 64, "microbatch_size": 2, "microbatches": 4},
    "rounds": {"inner_steps": 20},
    "data": {"validation_share": 0.05},
}
BASE = {"name": "demo", "model": "tiny", "end_tokens": 1_000_000, "stages": 2}


def run_yaml(**values: Any) -> Manifest:
    return Manifest.from_dict(BASE | values)


@pytest.mark.parametrize(
    "values",
    [
        {"end_tokens": 2_000_000},
        {"inner": {"learning_rate": 5e-4}},
        {"outer": {"learning_rate": 0.4, "momentum": 0.3}},
        {"deadlines": {"exchange_s": 60, "heartbeat_s": 3}},
    ],
)
def test_rates_end_and_deadlines_may_change(values: dict[str, Any]):
    first = run_yaml()
    second = revised(first, run_yaml(**values))
    assert changes(second, run_yaml(**values)) == []
    assert (second.operation.revision, second.rules, second.root) == (1, 1, first.digest)
    assert Manifest.from_bytes(second.to_bytes()) == second


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"model": Manifest.from_dict(BASE | {"model": "small"}).model} | SHORT_STEPS,
            "^model.hidden_size is .* cannot change in a running run .the weights would not",
        ),
        ({"stages": 3}, "stages is 3, the run has 2; .*holds the weights of one of them"),
        (
            {"codec": {"bits": 8}},
            "codec.bits is 8, the run has 4; .*records of the chain are coded",
        ),
        ({"seed": 7}, "seed is 7, the run has 0; .*initial weights"),
        ({"name": "other"}, "name is 'other', the run has 'demo'; .*run id"),
        ({"rounds": {"inner_steps": 50}}, "rounds.inner_steps is 50, .*records of the chain"),
        ({"outer": {"merge": "none"}}, "outer.merge is 'none', .*unsent progress"),
        ({"inner": {"optimizer": "muon"}, "codec": {"scheme": "dense"}}, "cannot change"),
        ({"data": {"parts": 3}}, "data.parts is 3, the run has 64; .*parts are leased"),
        ({}, "nothing differs from the run's manifest"),
    ],
)
def test_what_all_peers_rely_on_is_refused_by_name(values: dict[str, Any], message: str):
    with pytest.raises(InvalidInput, match=message):
        revised(run_yaml(), run_yaml(**values))


def test_every_record_has_the_outer_step_of_its_own_rules():
    first = run_yaml()
    second = revised(first, run_yaml(end_tokens=2_000_000))
    third = revised(second, run_yaml(end_tokens=2_000_000, outer={"learning_rate": 0.4}))
    fourth = in_state(third, "paused")
    fifth = revised(fourth, run_yaml(end_tokens=2_000_000, outer={"learning_rate": 0.2}))
    assert [each.rules for each in (first, second, third, fourth, fifth)] == [0, 1, 2, 2, 4]
    rates = [fifth.outer_under(rules)[0] for rules in (0, 1, 2, 4)]
    assert rates == [0.7, 0.7, 0.4, 0.2]
    assert fifth.root == first.digest
    assert fifth.operation.state == "paused", "new values do not resume a run"


def test_what_is_for_people_only_makes_no_new_rules():
    first = run_yaml()
    words = {"about": "For all.", "licence": "apache-2.0", "samples": {"prompt": "Once"}}
    second = revised(first, run_yaml(**words))
    assert (second.operation.revision, second.rules, second.root) == (1, 0, first.digest)
    assert (second.about, second.licence, second.samples.every) == ("For all.", "apache-2.0", 50)
    third = revised(second, run_yaml(**words, end_tokens=2_000_000))
    assert (third.rules, third.root, third.about) == (2, first.digest, "For all.")


def test_a_state_alone_makes_no_new_rules():
    paused = in_state(run_yaml(), "paused")
    assert (paused.operation.revision, paused.rules) == (1, 0)
    running = in_state(paused, "running")
    assert (running.operation.revision, running.operation.state) == (2, "running")


def test_an_ended_run_is_changed_no_more():
    ended = in_state(run_yaml(), "ended")
    for change in (
        lambda: in_state(ended, "running"),
        lambda: revised(ended, run_yaml(end_tokens=5)),
        lambda: back_to(ended, 3, ["ab" * 32] * 2),
    ):
        with pytest.raises(InvalidInput, match="the run has ended"):
            change()


def test_after_a_rollback_only_later_records_of_earlier_rules_count_no_more():
    base = ["ab" * 32, "cd" * 32]
    once = back_to(run_yaml(), 10, base)  # rules 1
    twice = back_to(in_state(once, "paused"), 5, base)  # rules 3
    assert [twice.base(stage) for stage in range(2)] == base

    def left(manifest: Manifest, rules: int) -> list[int]:
        return [number for number in range(14) if manifest.rolled_back(number, rules)]

    assert left(once, 0) == [11, 12, 13]
    assert left(once, 1) == []
    assert left(twice, 0) == left(twice, 1) == list(range(6, 14))
    assert left(twice, 3) == []


def test_a_run_yaml_has_no_operation(tmp_path: Any):
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(BASE | {"operation": {"state": "paused"}}))
    with pytest.raises(
        InvalidInput, match=r"operation is not for a run.yaml: use `dilocox operate`"
    ):
        Manifest.load(path)


def test_the_revision_of_another_protocol_is_known_but_not_its_content(
    operator: Identity, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("dilocox.dht.manifest.PROTOCOL_VERSION", 99)
    signed = SignedManifest.sign(operator, in_state(run_yaml(protocol=99), "paused"))
    run = signed.run_id
    monkeypatch.undo()
    assert signed.revision_of(run) == 1
    with pytest.raises(InvalidInput, match="protocol is 99; this dilocox speaks protocol"):
        signed.verify(run)


# ---- another key of the operator -----------------------------------------------------------------
def test_a_key_counts_that_the_one_before_it_handed_over_to(identities: list[Identity]):
    first, second, third = identities[:3]
    run, handovers = run_id(first.public_key, "demo"), ()
    signed = SignedManifest.sign(first, run_yaml())
    for old, new in ((first, second), (second, third)):
        handovers = (*handovers, hand_over(old, new.public_key))
        following = under_next_key(signed.verify(run))
        assert following.rules == 0, "no peer starts again for it"
        signed = SignedManifest.sign(new, following, handovers)
        signed = SignedManifest.from_bytes(signed.to_bytes())
        assert signed.revision_of(run) == len(handovers) * REVISIONS_OF_A_KEY
        assert (signed.run_id, signed.run_key) == (run, first.public_key)


@pytest.mark.parametrize(
    ("signer", "rows", "message"),
    [
        (1, [(1, 1)], "a handover of the operator's key is wrong"),  # handed over by itself
        (2, [(0, 1)], "a handover of the operator's key is wrong"),  # to another one
        (2, [(0, 1), (0, 2)], "a handover of the operator's key is wrong"),  # not by the second
        (0, [], "may sign none of that number"),  # the former key, after it was replaced
        (1, [(0, 1), (1, 1)], "may sign none of that number"),
        (1, [], "the invite names run"),  # a stranger
    ],
)
def test_no_other_key_counts(
    identities: list[Identity], signer: int, rows: list[tuple[int, int]], message: str
):
    following = under_next_key(run_yaml())
    handovers = tuple(hand_over(identities[by], identities[to].public_key) for by, to in rows)
    run = run_id(identities[0].public_key, "demo")
    if handovers and rows[0][0] != 0:  # as if the first key had
        handovers = ((identities[0].public_key, handovers[0][1]), *handovers[1:])
    with pytest.raises(InvalidInput, match=message):
        SignedManifest.sign(identities[signer], following, handovers).verify(run)

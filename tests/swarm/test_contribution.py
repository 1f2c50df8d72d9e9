"""The contribution table of the round log is, to the token, what the peers trained.

A peer's contribution to its stage are the tokens of its inner steps that are in committed rounds.
What a killed peer trained and no record holds is nobody's contribution; neither is what a peer
still has unsent. The peers' own account is in their files: what they took for each send ("sent"),
what became of it ("round", "void"), and how much they trained, have unsent, and lost (status.json).
A record counts no more of a send than eight rounds of the largest H can hold; no send here is so
large.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from dilocox.peer.rounds.record import RoundRecord
from tests.swarm.conftest import StartSwarm
from tests.swarm.harness import Peer, ProcessSwarm

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]

ROUNDS_LIMIT_S = 150.0

Logged = Mapping[int, Mapping[str, Any]]


def test_the_table_is_what_peers_trained_though_one_was_killed_one_came_and_one_left(
    start_swarm: StartSwarm,
) -> None:
    swarm = start_swarm(rounds={"inner_steps": 60})
    stayer, victim, leaver = [swarm.add_peer() for _ in range(3)]
    late = _comes_and_goes(swarm, victim=victim, leaver=leaver, going_on=[stayer])
    asked = _log(swarm, swarm.invite)
    assert swarm.terminate(late) == 0
    swarm.wait_for_rounds(1, ROUNDS_LIMIT_S, of=[stayer])
    assert swarm.terminate(stayer) == 0
    _check(swarm, asked, keepers=[stayer], left=[stayer, late, leaver])


def test_the_same_of_two_stages_whose_replicas_dissolved_and_formed_anew(
    start_swarm: StartSwarm,
) -> None:
    swarm = start_swarm(stages=2, rounds={"inner_steps": 100})
    heads = [swarm.add_peer(stage=0) for _ in range(2)]
    member, victim = [swarm.add_peer(stage=1) for _ in range(2)]
    late = _comes_and_goes(swarm, victim=victim, leaver=heads[1], going_on=[heads[0]])
    asked = _log(swarm, swarm.invite)
    others = [late, heads[0], member]
    assert [swarm.terminate(peer) for peer in others] == [0, 0, 0]
    _check(swarm, asked, keepers=[heads[0], member], left=[*others, heads[1]])


def _comes_and_goes(
    swarm: ProcessSwarm, *, victim: Peer, leaver: Peer, going_on: Sequence[Peer]
) -> Peer:
    """One is killed, then another one comes to its stage, then one leaves; who came."""
    swarm.wait_for_rounds(2, ROUNDS_LIMIT_S)
    # in the middle of an exchange, so that its last send may be in a record that it never saw
    swarm.wait(lambda: victim.in_flight is not None, ROUNDS_LIMIT_S, "the victim has sent")
    swarm.kill(victim)
    swarm.wait_until_gone(victim)
    late = swarm.add_peer(stage=victim.stage)
    last = max(swarm.chain(victim.stage))
    swarm.wait_for_counted(late, after_round=last, limit_s=ROUNDS_LIMIT_S)
    assert swarm.terminate(leaver) == 0
    swarm.wait_for_rounds(2, ROUNDS_LIMIT_S, of=[*going_on, late])
    return late


def _check(
    swarm: ProcessSwarm, asked: Logged, *, keepers: Sequence[Peer], left: Sequence[Peer]
) -> None:
    """keepers: of each stage one that kept its whole log. left: who ended in good order."""
    swarm.look()
    for keeper in keepers:
        kept = _log(swarm, str(keeper.state))[keeper.stage]
        log = swarm.round_log(keeper)
        headers = {number: header for number in log.rounds() if (header := log.header(number))}
        assert [each["round"] for each in kept["rounds"]] == sorted(headers)
        assert kept["tokens_before"] == 0, "the log does not reach back to the start"
        assert len({len(each.members) for each in headers.values()}) > 1, "nobody came or went"
        for stage in (asked[keeper.stage], kept):
            told = {each["peer"]: each["tokens"] for each in stage["contributions"]}
            rounds = {each["round"]: headers[each["round"]] for each in stage["rounds"]}
            print(f"stage {keeper.stage}, {len(rounds)} rounds: {sorted(told.values())} tokens")
            peers = swarm.of_stage(keeper.stage)
            own = {peer.peer_id: _committed(peer, rounds) for peer in peers}
            assert told == {peer: tokens for peer, tokens in own.items() if tokens}
    for peer in left:
        status = peer.status
        assert status["state"] == "leaving"
        known = sum(line["tokens"] for line in peer.rounds)  # those of other outcomes say 0
        assert status["tokens"] == known + status["unsent_tokens"] + status["lost_tokens"], status
        assert status["tokens"] > 0 and status["tokens"] % swarm.manifest.batch.tokens_per_step == 0


def _committed(peer: Peer, rounds: Mapping[int, RoundRecord]) -> int:
    """What this peer says of its tokens in these rounds; a send whose end it did not see counts
    where the record holds its values.
    """
    sent = {event["round"]: event["tokens"] for event in peer.of_kind("sent")}
    decided = {event["round"] for event in (*peer.rounds, *peer.of_kind("void"))}
    known = {line["round"]: line["tokens"] for line in peer.rounds if line["outcome"] == "counted"}
    assert {number: sent[number] for number in known} == known
    unseen = [number for number in sent if number not in decided]
    assert len(unseen) <= 1  # a stage has one send in flight
    late = sum(sent[n] for n in unseen if n in rounds and rounds[n].counted(peer.peer_id))
    return late + sum(tokens for number, tokens in known.items() if number in rounds)


def _log(swarm: ProcessSwarm, source: str) -> dict[int, dict[str, Any]]:
    """What `dilocox log` says, by stage."""
    file = swarm.folder / "log.json"
    swarm.run_command("log", source, "--json", str(file), "--host", "127.0.0.1", limit_s=60)
    return {stage["stage"]: stage for stage in json.loads(file.read_text())["stages"]}

"""Strangers who have the invite, and no part in the run: what they make is taken up by nobody, and
rounds go on as fast as before.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from safetensors.torch import load_file

from dilocox.peer.averaging.proven_heads import PROVEN_ROUNDS
from dilocox.peer.os_process import Child, start_process
from tests.attacks.honest import (
    HONEST_S,
    INNER_STEPS,
    LEAST_SHARE,
    MOST_MORE_MB,
    STEP_S,
    rounds_in,
    swarm_of_three,
    taken,
)
from tests.attacks.hostile import FRESH_KEYS
from tests.swarm.conftest import StartSwarm
from tests.swarm.harness import ProcessSwarm
from tests.swarm.small_run import fixed_steps

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(600)]

BEGIN_LIMIT_S = 120.0
JOINERS = 3
HELD_S, HELD_LIMIT_S = 20.0, 90.0
HELD_STREAMS_MB = 50.0  # beside that, where all streams that may be open are: 50 kB each
LEAST_ASKED = 100  # calls of an attack that asks, or is asked; chunks and streams that it has had


class Attack:
    """A hostile client that runs, and what it printed."""

    def __init__(self, child: Child):
        self.child = child

    @property
    def done(self) -> list[dict[str, Any]]:
        """What it did each time that it came through."""
        lines = self.child.log.read_text(errors="replace").splitlines()
        found = [json.loads(line) for line in lines if line.startswith("{")]
        return [each for each in found if "failed" not in each]


@contextmanager
def attacked(swarm: ProcessSwarm, kind: str) -> Iterator[Attack]:
    """A stranger attacks; it has come through three times when this begins."""
    log = swarm.folder / f"{kind}.log"
    command = [sys.executable, "-m", "tests.attacks.hostile", swarm.invite]
    command += [str(swarm.folder / kind), kind]
    child = start_process(command, log, env=swarm.environment("hostile"))
    attack = Attack(child)
    try:
        swarm.wait(lambda: len(attack.done) >= 3, BEGIN_LIMIT_S, f"{kind}: three attacks")
        yield attack
        child.check()
    finally:
        child.terminate()
        child.wait(10.0)


@pytest.mark.parametrize(
    "kind",
    [
        "records",  # A1, A4: certified by keys of its own
        "forks",  # A1: likewise, and whoever takes it leaves what the others have made since
        "claims",  # A8: of what nobody has; A4: of the end of the run
        "echoes",  # A4, A8: of what the others have, with other numbers
        "rounds",  # A2: of rounds that will never be
        "heads",  # A8: of more replicas than there are, which ring far on and not here
        "crowds",  # A9: of more and more keys that say that they host the stage
        "keepers",  # A9: of nodes with drawn keys, which are all that keeps what the others say
        "searches",  # A3: in one call one key again and again
        "places",  # A9: all downloads and streams that it can hold, with keys of its own
    ],
)
def test_what_a_stranger_does_moves_nobody_and_stops_nobody(
    start_swarm: StartSwarm, kind: str
) -> None:
    swarm = swarm_of_three(start_swarm)
    honest = rounds_in(swarm, HONEST_S)
    members, held_mb = {peer.peer_id for peer in swarm.peers}, swarm.bootstrap_mb()
    with attacked(swarm, kind) as attack:
        began = time.monotonic()
        under_attack = rounds_in(swarm, HONEST_S)
        times = len(attack.done)
        joiner = swarm.add_peer(step_s=STEP_S)
        swarm.wait_for_rounds(2, 90, of=[joiner])
        members.add(joiner.peer_id)
        joined_s = time.monotonic() - began - HONEST_S
        more_mb = swarm.bootstrap_mb() - held_mb
    print(
        f"{kind}, {times} times: {honest} rounds in {HONEST_S:.0f} s, {under_attack} under attack; "
        f"a joiner had two rounds after {joined_s:.0f} s; the bootstrap has {more_mb:.0f} MB more"
    )
    assert kind != "keepers" or attack.done[-1]["asked"] > LEAST_ASKED
    assert kind != "crowds" or attack.done[-1]["in_view"] > 3 * FRESH_KEYS
    assert kind != "searches" or attack.done[-1].get("answered", 0) > LEAST_ASKED
    assert kind != "places" or min(attack.done[-1].values()) > LEAST_ASKED
    assert under_attack >= LEAST_SHARE * honest
    assert more_mb < MOST_MORE_MB + (HELD_STREAMS_MB if kind == "places" else 0.0)
    strangers = [
        record.round for record in taken(swarm) if {m.peer for m in record.members} - members
    ]
    assert not strangers, "records of strangers were taken"
    swarm.assert_equal_chains()
    assert not any("Traceback" in peer.log_text() for peer in swarm.peers)


def test_who_joins_and_who_exports_takes_no_weights_of_a_stranger(start_swarm: StartSwarm) -> None:
    # with 32 bits a state is fewer bytes than six records
    swarm = start_swarm(rounds=fixed_steps(INNER_STEPS // 2), codec={"bits": 32})
    members = [swarm.add_peer(step_s=STEP_S) for _ in range(3)]
    swarm.wait_for_rounds(7, 180)
    folder = swarm.folder / "export"
    with attacked(swarm, "weights") as attack:  # A1
        for _ in range(JOINERS):
            joiner = swarm.add_peer(step_s=STEP_S)
            swarm.wait_for_rounds(1, 120, of=[joiner])
            assert joiner.of_kind("resynced"), "it took records, and this shows nothing"
            assert "alarm" not in joiner.log_text()
            shutil.rmtree(folder, ignore_errors=True)
            swarm.run_command("export", swarm.invite, str(folder), limit_s=120)
            # the stranger's are a standard deviation of one
            (exported,) = folder.glob("*.safetensors")
            for name, values in load_file(exported).items():
                assert values.std() < 0.9 or "norm" in name, name
        print(f"a stranger of {len(attack.done)} claims gave {attack.done[-1]['given']} bytes")
        assert not attack.done[-1]["given"]
    swarm.wait_for_rounds(9, 60, of=members)
    swarm.assert_equal_chains()


@pytest.mark.parametrize(
    ("kind", "stages"),
    [
        ("hosts", 1),  # A8: train, if one believes them, and come to no group
        ("crowds", 1),  # A9: likewise, and more and more of them
        ("claims", 2),  # A4: of the end of the run, by half of the keys before its first record
    ],
)
def test_a_run_begins_though_strangers_are_there_before_it(
    start_swarm: StartSwarm, kind: str, stages: int
) -> None:
    swarm = start_swarm(stages=stages, rounds=fixed_steps(INNER_STEPS))
    with attacked(swarm, kind):
        for number in range(3 if stages == 1 else 4):
            swarm.add_peer(stage=number % stages, step_s=STEP_S)
        swarm.wait_for_rounds(3, 240)  # the first ones wait for who is silent
    first = min(swarm.peers[0].rounds, key=lambda line: line["round"])
    print(f"{kind}: the first record is of round {first['round']}, by {first['members']} members")
    swarm.assert_equal_chains()


def test_nobody_goes_on_with_a_run_that_is_paused_and_left(start_swarm: StartSwarm) -> None:
    swarm = swarm_of_three(start_swarm)
    members = {peer.peer_id for peer in swarm.peers}
    swarm.operate("pause")
    swarm.let_pass(HELD_S)  # a round whose bell had rung is sent yet
    for peer in swarm.peers:
        swarm.terminate(peer)
    swarm.let_pass(2 * swarm.manifest.deadlines.record_lifetime_s)
    newest = max(swarm.archived(0))
    with attacked(swarm, "records"):  # A1
        swarm.let_pass(HELD_S)
        assert max(swarm.archived(0)) == newest
    swarm.operate("resume")
    for peer in swarm.peers:
        swarm.restart(peer)
    swarm.wait_for_rounds(2, 120)
    assert not [each.round for each in taken(swarm) if {m.peer for m in each.members} - members]
    swarm.assert_equal_chains()


def test_a_replica_heals_though_a_crowd_of_keys_holds_every_spare(
    start_swarm: StartSwarm,
) -> None:
    swarm = start_swarm(stages=2, rounds=fixed_steps(INNER_STEPS))
    head, *others = (swarm.add_peer(stage=stage, step_s=STEP_S) for stage in (0, 1, 1))
    swarm.wait(lambda: len(head.rounds) > PROVEN_ROUNDS, 180, "the head is known to train")
    (member,) = (peer for peer in others if peer.peer_id in head.of_kind("replica")[-1]["members"])
    (spare,) = (peer for peer in others if peer is not member)

    def healed(since: float) -> bool:
        seen = [*head.of_kind("replica"), *head.of_kind("healed")]
        return any(spare.peer_id in each["members"] for each in seen if each["time"] > since)

    with attacked(swarm, "reserves") as attack:
        swarm.wait(lambda: spare.of_kind("replica"), BEGIN_LIMIT_S, "the spare is a stranger's")
        swarm.let_pass(HELD_S)
        assert attack.done[-1]["spares"] == len(others)
        killed = time.time()
        swarm.kill(member)
        swarm.wait(lambda: healed(killed), HELD_LIMIT_S, "the head has the spare")
        print(f"the head has the spare {time.time() - killed:.0f} s after its member died")
        swarm.wait_for_counted(spare, after_round=max(swarm.chain(1)), limit_s=HELD_LIMIT_S)

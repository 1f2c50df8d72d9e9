"""A member that lies to its group: what it makes is in no record, and rounds go on."""

from __future__ import annotations

import itertools
import re
from functools import partial

import pytest

from tests.attacks.honest import INNER_STEPS, LEAST_SHARE, STEP_S, rounds_in, taken
from tests.swarm.conftest import StartSwarm
from tests.swarm.harness import START_LIMIT_S, Peer, ProcessSwarm
from tests.swarm.small_run import fixed_steps

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(600)]

HONEST_S, FIRST_S, ATTACKED_S = 60.0, 60.0, 120.0
# What a lie raises that the product has left behind: its peer is silent then, and no liar.
BROKEN = re.compile(r"^(AttributeError|NameError|TypeError)", re.MULTILINE)
LEAST_IN = 0.5  # of the records, is each of the others a member


@pytest.mark.parametrize(
    ("how", "liars", "others"),
    [
        ("sends", 1, 4),  # A5: ten times the opposite of what it learnt
        ("weighs", 1, 4),  # A5: the opposite, and a hundred times the tokens
        ("sends", 1, 3),  # of four in all, of whom three would be too few to judge each other
        ("weighs", 1, 3),
        ("reduces", 1, 4),  # A6: a false mean, the same to all
        ("splits", 1, 4),  # A7: one mean to half of the others, another one to the other half
        ("leaves", 1, 4),  # A7: falls silent in every exchange
        ("leaves", 5, 4),  # likewise: more of them than there are others
        ("leaves 0, leaves 1", 2, 4),  # likewise, one in first attempts and one in second ones
        ("states", 1, 4),  # A7: a ticket that makes no sense
        ("counts", 1, 4),  # A7: says in its ticket that peers train which are not there
        ("leads", 1, 4),  # A7: gathers every group, and gives each member another ticket of its own
        ("forges", 1, 4),  # likewise, another ticket of the others
        ("gathers", 2, 4),  # gather every group, and never begin
        ("chooses", 1, 4),  # gathers every group, of as few as may begin, and always the same ones
        ("sends on", 1, 4),  # gathers every group, and sends the others in a circle
        ("withholds", 1, 4),  # gives its mean to one of the others, and does not vote
        ("fills", 1, 4),  # comes to every group with six fresh keys
    ],
)
def test_members_that_lie_stop_nobody_and_turn_nothing(
    start_swarm: StartSwarm, how: str, liars: int, others: int
) -> None:
    swarm = start_swarm(rounds=fixed_steps(INNER_STEPS))
    for _ in range(others):
        swarm.add_peer(step_s=STEP_S)
    swarm.wait_for_rounds(2, 120)
    honest, loss = rounds_in(swarm, HONEST_S), loss_of(swarm)
    for _, lie in zip(range(liars), itertools.cycle(how.split(", "))):
        swarm.add_peer(step_s=STEP_S, lies=lie)
    crowd = [swarm.peers.pop() for _ in range(liars)]  # what they say of rounds is not waited for
    try:
        before = max(record.round for record in taken(swarm))
        for liar in crowd:
            swarm.wait(partial(_trains, liar), START_LIMIT_S, f"{liar.name} trains")
        first, attacked = rounds_in(swarm, FIRST_S), rounds_in(swarm, ATTACKED_S)
    finally:
        for liar in crowd:
            liar.child.terminate()
        for liar in crowd:
            liar.child.wait(30.0)
    assert not any(BROKEN.search(liar.log_text()) for liar in crowd), "a lie broke off"
    names = {liar.peer_id for liar in crowd}
    records = {record.round: record for record in taken(swarm) if record.round > before}
    with_liar = [
        number
        for number, record in records.items()
        if names & {member.peer for member in record.members}
    ]
    print(
        f"{how}, {liars} beside {others}: {honest} rounds in {HONEST_S:.0f} s; with liars {first} "
        f"in {FIRST_S:.0f} s, then {attacked} in {ATTACKED_S:.0f} s; one is a member of "
        f"{len(with_liar)} of {len(records)}; validation {loss:.2f}, then {loss_of(swarm):.2f}"
    )
    assert attacked / ATTACKED_S >= LEAST_SHARE * honest / HONEST_S
    assert loss_of(swarm) < loss + 0.1
    if how == "fills":
        assert "one of the crowd is in a group" in crowd[0].log_text()
    if how == "chooses":
        shares = sorted(
            sum(
                peer.peer_id in {member.peer for member in record.members}
                for record in records.values()
            )
            for peer in swarm.peers
        )
        print(f"the others are in {shares} of them")
        assert shares[0] >= LEAST_IN * len(records), "it left out whom it likes"
    if how == "sends":
        assert len(with_liar) < len(records), "nobody let it sit out"
    if how in ("reduces", "splits"):
        false = [
            number
            for number, record in records.items()
            for part in record.parts
            if part.reducer in names and part.numel
        ]
        assert not false, "a mean of a liar's was taken"
    swarm.assert_equal_chains()


def _trains(peer: Peer) -> bool:
    peer.look()
    return bool(peer.of_kind("training"))


def loss_of(swarm: ProcessSwarm) -> float:
    """The newest validation loss that the first peer tells."""
    return next(line["val_loss"] for line in swarm.peers[0].rounds[::-1] if line["val_loss"])

"""Groups in rows and columns: who reduces what, equal records, and members that die on the way."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from dilocox.compression.group_quantization import GroupCodec
from dilocox.compression.layout import FlatLayout
from dilocox.compression.stage_codec import Compression, Phase, StageCodec
from dilocox.dht.identity import Identity
from dilocox.dht.manifest_sections import RobustRule
from dilocox.peer.rounds.grid import Grid
from dilocox.peer.rounds.group import AttemptResult, Mean
from dilocox.peer.rounds.shares import encode
from dilocox.peer.rounds.vote_count import Verdict
from tests.peer.averaged import own_contribution
from tests.peer.members import (
    LIMIT_S,
    VOTE_S,
    Group,
    Passes,
    blamed,
    everything,
    record_of,
    seconds,
    spoil,
    verdicts,
)
from tests.sweeps import sweep

Take = Callable[[str, Mean], Awaitable[None]]
pytestmark = pytest.mark.usefixtures("no_fault_of_ours")

COUNT, ROW = 12, 4
SLOW_S, QUIET_S = 8.0, 2.0  # of an exchange of twelve on a busy machine


@pytest.fixture(scope="module")
def twelve(tmp_path_factory: pytest.TempPathFactory) -> list[Identity]:
    folder = tmp_path_factory.mktemp("keys")
    return [Identity.load_or_create(folder / f"{index}.key") for index in range(COUNT)]


def grid_of(
    identities: list[Identity],
    folder: Path,
    passes: Passes,
    scheme: str = "dense",
    robust: RobustRule = "none",
) -> Group:
    return Group(
        identities,
        folder,
        passes=passes,
        scheme=scheme,
        exchange_s=SLOW_S,
        silence_s=QUIET_S,
        group_size=ROW,
        robust=robust,
    )


# ---- the arrangement -----------------------------------------------------------------------------
def names(count: int) -> list[str]:
    return [f"peer{number:03d}" for number in range(count)]


@pytest.mark.parametrize(
    ("count", "clients", "row_size"),
    [(1, 0, 32), (4, 0, 32), (33, 0, 32), (12, 0, 4), (13, 3, 4), (10, 8, 4), (128, 40, 32)],
)
def test_rows_are_of_nearly_equal_size_and_each_has_reducers(
    count: int, clients: int, row_size: int
) -> None:
    peers = names(count)
    reachable = set(peers[clients:])
    grid = Grid.of(b"id", peers, reachable, row_size)
    assert sorted(peer for row in grid.rows for peer in row) == peers
    assert max(map(len, grid.rows)) - min(map(len, grid.rows)) <= 1
    assert grid.width >= 1
    assert len(grid.rows) == min(-(-count // row_size), len(reachable))
    for row in grid.rows:
        assert set(row[: grid.width]) <= reachable, "one that only dials out would reduce"
    assert Grid.of(b"id", peers[::-1], sorted(reachable), row_size) == grid
    if count > row_size:
        assert Grid.of(b"other", peers, reachable, row_size) != grid


@pytest.mark.parametrize(("count", "row_size"), [(12, 4), (13, 4), (11, 4), (128, 32), (5, 2)])
def test_what_a_row_voted_reaches_every_other_member_once(count: int, row_size: int) -> None:
    grid = Grid.of(b"id", names(count), names(count), row_size)
    for row in grid.rows:
        told = [other for peer in row for other in grid.opposite(peer)]
        assert sorted(told) == sorted(set(names(count)) - set(row))


@pytest.mark.parametrize("numel", [64, 640, 6400, 6401])
@pytest.mark.parametrize(("bits", "group_size"), [(4, 64), (2, 256)])
def test_shares_tile_each_phase_by_whole_units(numel: int, bits: int, group_size: int) -> None:
    codec = GroupCodec(bits)
    phase = Phase(numel=numel, codec=codec, row_codec=GroupCodec(16))
    grid = Grid.of(b"id", names(12), names(12), 4)
    shares = grid.shares([phase, phase])
    assert [share.phase for share in shares] == [0] * 12 + [1] * 12
    for number in (0, 1):
        own = [share for share in shares if share.phase == number]
        assert own[0].start == 0 and own[-1].stop == numel
        assert all(left.stop == right.start for left, right in pairwise(own))
        assert all(share.stop % group_size == 0 or share.stop == numel for share in own)
    assert {share.reducer for share in shares} == set(names(12))


@pytest.mark.parametrize("bits", [2, 4, 8, 16])
def test_what_a_member_takes_out_of_its_message_is_what_it_sent(bits: int) -> None:
    """A member encodes a column, and its residual is measured by the shares of the record."""
    layout = FlatLayout.of([("weight", (123, 97))])
    scheme = Compression(
        scheme="dense", bits=bits, max_factor=2.0**16, rank=1, min_rank=1, max_rank=1
    )
    codec = StageCodec(layout, scheme)
    (phase,), rows = codec.phases(()), 3
    shares = Grid.of(b"id", names(12), names(12), 4).shares([phase])
    message = torch.randn(layout.numel, generator=torch.Generator().manual_seed(0))
    sent = torch.empty(layout.numel)
    for first in range(0, len(shares), rows):
        column = slice(shares[first].start, shares[first + rows - 1].stop)
        payload = phase.codec.encode(message[column])
        sent[column] = phase.codec.decode(payload, column.stop - column.start)
    left = message.clone()
    codec.means((), ()).take_out(left, [slice(share.start, share.stop) for share in shares])
    assert torch.equal(left, message - sent)


# ---- without faults ------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("scheme", "bits"), sweep([("dense", 32), ("low_rank", 8), ("dense", 4), ("dense", 8)], 2)
)
def test_twelve_members_in_rows_of_four_make_the_record_of_the_flat_exchange(
    twelve: list[Identity], tmp_path: Path, scheme: str, bits: int
) -> None:
    rows, flat = (
        Group(
            twelve,
            tmp_path / str(size),
            passes=everything,
            scheme=scheme,
            bits=bits,
            exchange_s=SLOW_S,
            silence_s=SLOW_S,  # nobody dies here
            group_size=size,
        )
        for size in (ROW, COUNT)
    )
    assert (len(rows.grid.rows), len(flat.grid.rows)) == (3, 1)
    record = record_of(rows, asyncio.run(rows.run()))
    expected = record_of(flat, asyncio.run(flat.run())).average(flat.codec)
    assert all(part.contributors == tuple(rows.peers) for part in record.parts)
    assert record.tokens == sum(rows.tokens)
    # a row's mean travels with 16 bits, and then both are coded once
    off = (record.average(rows.codec) - expected).norm() / expected.norm()
    assert off <= {4: 0.3, 8: 0.02, 32: 1e-4}[bits]
    if bits == 32:
        assert off > 0, "nothing travelled between rows"


# ---- faults --------------------------------------------------------------------------------------
def killed_at(moment: str, group_of: list[Group], victim: int) -> Passes:
    """A member is gone from its first message of a kind on."""
    began: list[str] = []

    def passes(sender: str, receiver: str, kind: str) -> bool:
        name = group_of[0].peers[victim]
        if sender == name and kind == moment:
            began.append(kind)
        return not (began and name in (sender, receiver))

    return passes


def retried(twelve: list[Identity], folder: Path, results: list[AttemptResult | None]) -> Group:
    """The repeated attempt, as the driver begins it: without those whom the aborts blame."""
    out = blamed(results)
    left = [identity for identity in twelve if identity.peer_id not in out]
    return Group(
        left, folder, passes=everything, exchange_s=SLOW_S, silence_s=QUIET_S, group_size=ROW
    )


@pytest.mark.parametrize("moment", sweep(["mean0", "part0", "row0", "vote"]))
@pytest.mark.parametrize("frozen", sweep([False, True]))
def test_a_reducer_that_is_gone_costs_at_most_one_attempt(
    twelve: list[Identity], tmp_path: Path, moment: str, frozen: bool
) -> None:
    groups: list[Group] = []
    victim = 5
    passes = killed_at(moment, groups, victim)

    def freezes(sender: str, receiver: str, kind: str) -> bool:
        if not passes(sender, receiver, kind):
            groups[0].frozen.add(groups[0].peers[victim])
        return True

    groups.append(grid_of(twelve, tmp_path / "first", freezes if frozen else passes))
    results = asyncio.run(until_others_end(groups[0], victim))
    assert verdicts(results) in ({Verdict.COMMITTED}, {Verdict.VOID})
    assert seconds(results) < SLOW_S + VOTE_S
    if moment == "vote":
        assert verdicts(results) == {Verdict.COMMITTED}, "all means were there"
    if verdicts(results) == {Verdict.VOID}:
        assert seconds(results) < SLOW_S, "the others were not told that it is gone"
        assert blamed(results) == [groups[0].peers[victim]], "a sound member is left out"
        again = retried(twelve, tmp_path / "second", results)
        record_of(again, asyncio.run(again.run()))


def test_a_reducer_killed_in_the_second_phase_is_blamed(
    twelve: list[Identity], tmp_path: Path
) -> None:
    groups: list[Group] = []
    group = grid_of(twelve, tmp_path, everything, scheme="low_rank")
    victim = group.peers.index(
        next(share.reducer for share in group.shares if share.phase == 1 and share.numel)
    )
    groups.append(group)
    group.passes = killed_at("mean1", groups, victim)
    results = asyncio.run(until_others_end(group, victim))
    assert verdicts(results) == {Verdict.VOID}
    assert blamed(results) == [group.peers[victim]]


async def until_others_end(group: Group, victim: int) -> list[AttemptResult | None]:
    """The results of all but a member that is gone."""

    async def one(peer: str) -> AttemptResult:
        return await group.attempts[peer].run()

    tasks = [asyncio.create_task(one(peer)) for peer in group.peers]
    others = [task for index, task in enumerate(tasks) if index != victim]
    results = list(await asyncio.wait_for(asyncio.gather(*others), 2 * LIMIT_S))
    tasks[victim].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return [*results]


def slice_of(group: Group, row: int, column: int) -> tuple[int, str]:
    """A share of phase 0, and the member that encodes it."""
    part = column * len(group.grid.rows) + row
    return part, group.shares[part].reducer


def test_a_row_whose_mean_does_not_arrive_is_left_out_of_that_share_only(
    twelve: list[Identity], tmp_path: Path
) -> None:
    """Its members take back what they sent for that share, and all get the result."""
    part, reducer = slice_of(group := grid_of(twelve, tmp_path, everything), row=0, column=1)
    lost = group.grid.rows[2][1]
    group.passes = lambda a, b, kind: (a, b, kind) != (lost, reducer, "row0")
    record = record_of(group, asyncio.run(group.run()))
    missing = group.grid.rows[2]
    for index, each in enumerate(record.parts):
        left_out = set(group.peers) - set(each.contributors)
        assert left_out == (set(missing) if index == part else set())
    cut = slice(record.parts[part].start, record.parts[part].stop)
    for peer in missing:
        assert record.left_out(peer, group.codec) == [cut]
        message = group.messages[group.peers.index(peer)]
        assert not own_contribution(record, peer, message, group.codec)[cut].any()
    there = [at for at, peer in enumerate(group.peers) if peer not in missing]
    total = sum(group.tokens[at] for at in there)
    expected = sum(group.messages[at][cut] * (group.tokens[at] / total) for at in there)
    assert (record.average(group.codec)[cut] - expected).abs().max() < 0.5
    assert record.tokens == sum(group.tokens), "they are in the other shares"


def test_a_malformed_row_mean_leaves_that_row_out_and_blames_its_sender(
    twelve: list[Identity], tmp_path: Path
) -> None:
    part, reducer = slice_of(group := grid_of(twelve, tmp_path, everything), row=1, column=0)
    liar = group.grid.rows[0][0]
    attempt = group.attempts[reducer]
    honest = attempt.on_row

    async def receive(peer: str, mean: Mean) -> None:
        if peer == liar:
            mean = Mean(part=mean.part, contributors=mean.contributors, payload=b"\xff" * 40)
        await honest(peer, mean)

    attempt.on_row = receive  # type: ignore[method-assign]
    record = record_of(group, asyncio.run(group.run()))
    others = set(group.grid.rows[1]) | set(group.grid.rows[2])
    assert set(record.parts[part].contributors) == others


def test_a_row_mean_of_any_length_moves_the_average_by_two_rows_and_nobody_is_blamed(
    twelve: list[Identity], tmp_path: Path
) -> None:
    """Added as it is it would leave nothing that its reducer could encode."""
    group = grid_of(twelve, tmp_path, everything, robust="gate")
    part, reducer = slice_of(group, row=1, column=0)
    liar = group.grid.rows[0][0]
    codec, numel = group.codec.phases(())[0].row_codec, group.shares[part].numel
    attempt = group.attempts[reducer]
    honest = attempt.on_row

    async def receive(peer: str, mean: Mean) -> None:
        if peer == liar:
            mean = replace(mean, payload=encode(codec, torch.full((numel,), 2.6e8)))
        await honest(peer, mean)

    attempt.on_row = receive  # type: ignore[method-assign]
    record = record_of(group, asyncio.run(group.run()))
    share = slice(record.parts[part].start, record.parts[part].stop)
    message = max(float(each[share].norm()) for each in group.messages)
    assert record.average(group.codec)[share].norm() < 2 * message


@pytest.mark.parametrize("sound", [False, True])
def test_what_one_member_tells_its_row_wrongly_costs_nothing(
    twelve: list[Identity], tmp_path: Path, sound: bool
) -> None:
    """Of malformed means the row asks who made them; by those that are sound, yet not the ones
    that all others got, its votes alone change, and it fetches the record of the others.
    """
    group = grid_of(twelve, tmp_path, everything)
    liar = group.grid.rows[1][2]

    def told(mean: Mean) -> Mean:
        share = group.shares[mean.part]
        payload = b"\xff"
        if sound:
            payload = encode(group.codec.phases(())[0].codec, torch.zeros(share.numel))
        lies = share.numel if sound else share.reducer != liar
        return replace(mean, payload=payload) if lies else mean

    for peer in set(group.grid.rows[1]) - {liar}:
        attempt = group.attempts[peer]

        async def receive(sender: str, mean: Mean, honest: Take = attempt.on_mean) -> None:
            await honest(sender, told(mean) if sender == liar else mean)

        attempt.on_mean = receive  # type: ignore[method-assign]
    record_of(group, asyncio.run(group.run()))


def test_a_member_whose_parts_are_malformed_is_left_out_of_them(
    twelve: list[Identity], tmp_path: Path
) -> None:
    group = grid_of(twelve, tmp_path, everything)
    row = group.grid.rows[2]
    spoil(group, row[0], row[3], part=0)
    record = record_of(group, asyncio.run(group.run()))
    for index, part in enumerate(record.parts):
        assert (row[3] in part.contributors) == (index >= len(group.grid.rows))


def test_those_that_only_dial_out_are_in_every_mean_and_hear_every_vote(
    twelve: list[Identity], tmp_path: Path
) -> None:
    clients = frozenset(range(0, 12, 2))
    group = Group(
        twelve,
        tmp_path,
        passes=everything,
        clients=clients,
        exchange_s=SLOW_S,
        silence_s=QUIET_S,
        group_size=ROW,
    )
    shut = {group.peers[at] for at in clients}
    called: set[tuple[str, str]] = set()

    def passes(sender: str, receiver: str, kind: str) -> bool:
        called.add((sender, receiver))
        return not {sender, receiver} <= shut

    group.passes = passes
    record = record_of(group, asyncio.run(group.run()))
    assert all(part.contributors == tuple(group.peers) for part in record.parts)
    assert not {share.reducer for share in group.shares} & shut
    assert not any({sender, receiver} <= shut for sender, receiver in called)


# ---- cost ----------------------------------------------------------------------------------------
def test_a_member_reaches_its_row_and_column_and_not_the_group(
    twelve: list[Identity], tmp_path: Path
) -> None:
    """Each of the other eleven in a flat group."""
    reached: dict[str, set[str]] = {}

    def passes(sender: str, receiver: str, kind: str) -> bool:
        reached.setdefault(sender, set()).add(receiver)
        return True

    group = grid_of(twelve, tmp_path, passes)
    record_of(group, asyncio.run(group.run()))
    for peer, others in reached.items():
        near = set(group.grid.row(peer)) | set(group.grid.column(peer))
        assert others <= near | set(group.grid.opposite(peer)), "it called somebody far"
        assert len(others) <= ROW - 1 + 2


def test_every_row_has_voters_and_there_are_no_more_rows_than_these() -> None:
    """A row of a crowd alone would judge itself."""
    crowd, voters = names(60), [f"voter {place}" for place in range(5)]
    peers = [*crowd, *voters]
    grid = Grid.of(b"id", peers, peers, 6, voters)
    assert len(grid.rows) == 5
    assert all(len(set(row) & set(voters)) == 1 for row in grid.rows)
    assert sorted(peer for row in grid.rows for peer in row) == sorted(peers)

"""How far a reducer believes each member, and what of liars is in its mean."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TypeVar, get_args

import pytest
import torch
from torch import Tensor

from benchmarks.attacks import TENTH, UNUSUAL, WORKERS
from benchmarks.convergence_rules import DEFAULTS, TWO_BIT, WORLD, rules
from benchmarks.simulated_swarm import Trial, run_trials
from dilocox.compression.group_quantization import GroupCodec
from dilocox.compression.workers import PIECE, Workers
from dilocox.dht.identity import Identity
from dilocox.dht.manifest_sections import RobustRule
from dilocox.peer.rounds.robust import Likeness, belief, likeness, median_of, not_of_ours
from dilocox.peer.rounds.shares import Reduction, RowMean, Shares, combine, encode
from dilocox.peer.rounds.signed_means import MeanSeal
from dilocox.peer.rounds.standing import bounded_weights, voters
from tests.peer.members import Group
from tests.sweeps import sweep

T = TypeVar("T")
RULES: tuple[RobustRule, ...] = get_args(RobustRule)
MEMBERS = "abcdefgh"
LIAR, HONEST = MEMBERS[0], MEMBERS[1:]


def parts(liar: float, numel: int = 500) -> Tensor:
    """Seven members that go one way, each with its own noise, and one that goes `liar` times it."""
    draw = torch.Generator().manual_seed(1)
    way = torch.randn(numel, generator=draw)
    found = way + torch.randn(8, numel, generator=draw)
    found[0] = liar * way
    return found


def reduced(
    rule: RobustRule,
    sent: Sequence[Tensor],
    *,
    bits: int = 32,
    names: Sequence[str] = MEMBERS,
    threads: int = 1,
    tokens: Sequence[int] = (1,) * 8,
    voters: Sequence[str] = (),
) -> RowMean:
    codec = GroupCodec(bits, workers=Workers(threads))
    stated = dict(zip(names, tokens, strict=False))
    weight = bounded_weights(stated, {})
    reduction = Reduction(codec, weight, sent[0].numel(), rule, voters, stated)
    for name, values in zip(names, sent, strict=True):
        reduction.add(name, encode(codec, values))
    return require(reduction.finish())


@pytest.mark.parametrize("bits", [4, 32])
def test_the_gate_leaves_out_who_goes_against_the_others_and_nobody_else(bits: int) -> None:
    assert reduced("gate", list(parts(-10.0)), bits=bits).contributors == tuple(HONEST)
    assert reduced("gate", list(parts(1.0)), bits=bits).contributors == tuple(MEMBERS)
    assert reduced("clip", list(parts(-10.0)), bits=bits).contributors == tuple(MEMBERS)


def test_the_gate_believes_who_has_nothing_to_say() -> None:
    assert reduced("gate", list(parts(0.0))).contributors == tuple(MEMBERS)


@pytest.mark.parametrize("rule", ["gate", "centered", "clip"])
@pytest.mark.parametrize("count", [3, 5])
def test_beside_most_that_have_nothing_to_say_a_part_of_which_nothing_is_left_is_not_in_the_mean(
    rule: RobustRule, count: int
) -> None:
    names = MEMBERS[:count]
    sent = [torch.zeros(64)] * (count - 1) + [torch.ones(64)]
    found = reduced(rule, sent, names=names)
    assert not found.values.any()
    assert found.contributors == tuple(names[:-1]), "it keeps what it has sent"


def test_liars_that_have_an_honest_part_left_out_are_no_further_from_the_mean_for_that() -> None:
    """Two of five push the median to the lowest honest values, so that one honest part goes against
    it, and are huge where it is not seen: of those that are believed they would be half.
    """
    draw = torch.Generator().manual_seed(3)
    honest = 0.15 * torch.randn(4000, generator=draw) + torch.randn(3, 4000, generator=draw)
    lie = torch.where(honest.sum(dim=0) > 0, honest.min(dim=0).values, honest.max(dim=0).values)
    lie -= 2.0 * honest[0]
    lie[:80] = 1e9 * lie[:80].sign()
    found = reduced("gate", [*honest, lie, lie], names="abcde")
    assert float(found.values.norm()) < 10 * float(honest.norm(dim=1).max())


@pytest.mark.parametrize("rule", ["clip", "gate", "centered"])
@pytest.mark.parametrize("liar", [-10.0, 10.0])
def test_one_liar_moves_the_average_little(rule: RobustRule, liar: float) -> None:
    sent = parts(liar)
    honest = sent[1:].mean(dim=0)
    plain = reduced("none", list(sent)).values
    judged = reduced(rule, list(sent)).values
    assert (judged - honest).norm() < 0.5 * (plain - honest).norm()


def test_the_only_row_s_mean_that_came_may_be_none() -> None:
    """Where one's own row has none there is nothing that it is too long beside."""
    codec = GroupCodec(bits=4)
    rows = [RowMean(("a",), torch.full((64,), 2.6e8)), RowMean(("b",), torch.ones(64))]
    for own in (None, 1):
        mean = combine(0, rows, codec, {"a": 1, "b": 1}, rule="gate", own=own)
        assert mean is not None and mean.contributors == ("a", "b")
    assert combine(0, rows[:1], codec, {"a": 1}, rule="gate") is None


@pytest.mark.parametrize("rule", RULES)
def test_members_that_agree_are_averaged_whatever_the_rule(rule: RobustRule) -> None:
    alike = list(parts(1.0)[1:2].expand(8, -1))
    torch.testing.assert_close(reduced(rule, alike).values, alike[0])


@pytest.mark.parametrize("rule", RULES)
def test_one_member_alone_is_not_rounded(rule: RobustRule) -> None:
    sent = parts(1.0)[:1]
    assert torch.equal(reduced(rule, list(sent), names="a").values, sent[0])


def test_of_three_members_nobody_is_left_out_but_the_longest_is_shortened() -> None:
    sent = parts(-10.0)[:3]
    found = reduced("gate", list(sent), names="abc")
    assert found.contributors == ("a", "b", "c")
    limit = float(sent.norm(dim=1).median())
    shortened = [values * min(1.0, limit / float(values.norm())) for values in sent]
    torch.testing.assert_close(found.values, torch.stack(shortened).mean(dim=0))


@pytest.mark.parametrize("voters", ["abcd", "abc", "a"])
def test_a_crowd_of_new_members_is_judged_by_those_who_vote_and_not_the_other_way_round(
    voters: str,
) -> None:
    """All of it sends the same lie, which would be the median."""
    sent = parts(-10.0)
    honest = sent[1 : 1 + len(voters)]
    names, crowd = list(voters), [f"new {place}" for place in range(9)]
    lies = [sent[0]] * len(crowd)
    found = reduced("gate", [*honest, *lies], names=names + crowd, tokens=(1,) * 13, voters=voters)
    assert found.contributors == tuple(voters)
    friend = reduced(
        "gate", [*honest, sent[7]], names=[*voters, "new"], tokens=(1,) * 13, voters=voters
    )
    assert friend.contributors == (*voters, "new"), "who is new and honest is heard"


def test_where_no_voter_s_part_came_there_is_no_mean() -> None:
    reduction = Reduction(GroupCodec(32), {"new": 1}, 64, "gate", voters=["old"])
    reduction.add("new", encode(GroupCodec(32), torch.ones(64)))
    assert reduction.finish() is None


def test_who_states_ten_times_the_tokens_moves_a_mean_twice_at_most() -> None:
    sent = list(parts(1.0)[:4])
    heavy = reduced("none", sent, names="abcd", tokens=(1000, 1, 1, 1)).values
    assert torch.allclose(heavy, (2 * sent[0] + sent[1] + sent[2] + sent[3]) / 5)


@pytest.mark.parametrize(
    ("along", "believed"),
    [
        ([1.0, 1.0, -0.2, 2.0], [0, 1, 3]),
        ([1.0, 1.0, -0.1, 2.0], [0, 1, 2, 3]),  # against them by less than a quarter
        ([-1.0, -1.0, 0.0, -2.0], [0, 1, 2, 3]),  # nobody goes with the others
    ],
)
def test_a_part_is_left_out_that_goes_against_the_median_by_a_quarter_of_the_usual_cosine(
    along: list[float], believed: list[int]
) -> None:
    norms = [1.0, 1.0, 1.0, 4.0]
    products = torch.diag(torch.tensor([*norms, 1.0], dtype=torch.float64).square())
    products[-1, :-1] = products[:-1, -1] = torch.tensor(along)
    even = [1.0] * 4
    assert belief("gate", even, even, norms, [True] * 4, lambda _: products).believed == believed


def clipped_about_the_median(
    sent: Tensor, tokens: Sequence[int], weights: Sequence[int], voters: Sequence[int]
) -> Tensor:
    """Centered clipping in the values themselves, as its papers have it, by distances that do not
    grow, of members that are expected at the root of their tokens times the point; none counts more
    than two usual ones.
    """
    centre, shares = median_of(sent[voters]).double(), torch.tensor(weights).double()
    shares /= shares.sum()
    stated = torch.tensor(tokens, dtype=torch.float64)
    pace = (stated / stated[voters].quantile(0.5)).clamp(1 / 8, 2).sqrt()
    excess = (pace**3 / 2).clamp(min=1)
    pace /= shares @ pace
    limit = torch.tensor(torch.inf, dtype=torch.float64)
    for _ in range(5):
        away = sent.double() - pace[:, None] * centre
        norms = away.norm(dim=1) / pace
        limit = torch.minimum(limit, norms[voters].quantile(0.5))
        by = (limit / norms / excess).clamp(max=1)
        centre = centre + (shares[:, None] * away * by[:, None]).sum(0)
    return centre.float()


@pytest.mark.parametrize("rule", ["gate", "centered"])
@pytest.mark.parametrize("voters", [8, 5])
@pytest.mark.parametrize(
    "tokens",
    [
        (1,) * 8,
        (3, 1, 1, 2, 1, 1, 2, 1),
        (1, 16, 16, 16, 4, 2, 16, 99),
        (2, 1, 2, 4, 2, 16, 16, 99),
    ],
)
def test_whom_the_gate_believes_are_clipped_about_their_median(
    rule: RobustRule, voters: int, tokens: Sequence[int]
) -> None:
    sent = parts(5.0)
    found = reduced(rule, list(sent), tokens=tokens, voters=MEMBERS[:voters])
    weights = [*bounded_weights(dict(zip(MEMBERS, tokens, strict=True)), {}).values()]
    expected = clipped_about_the_median(sent, tokens, weights, range(voters))
    torch.testing.assert_close(found.values, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("rule", "common", "least"),
    [("gate", 0.05, 0.985), ("centered", 0.4, 0.985), ("clip", 0.05, 0.97), ("clip", 0.4, 0.9)],
)
def test_honest_members_of_unlike_speeds_are_hardly_held_back(
    rule: RobustRule, common: float, least: float
) -> None:
    """As far as their steps lead, which add up along the way, and by their root beside it."""
    draw = torch.Generator().manual_seed(4)
    tokens = (8, 6, 4, 2) * 2
    steps = torch.tensor(tokens)[:, None]
    way, noise = torch.randn(4000, generator=draw), torch.randn(8, 4000, generator=draw)
    sent = list(common * steps * way + steps.sqrt() * noise)
    plain = reduced("none", sent, tokens=tokens).values
    judged = reduced(rule, sent, tokens=tokens).values
    along = float(judged @ way / (plain @ way))
    assert least < along < 1.015, f"{along:.3f} of the way"


def off_by(
    rule: RobustRule, stated: int, records: Mapping[str, int], liars: Sequence[str]
) -> float:
    """How far a mean is from the honest one, in its lengths, where liars go their own way, which
    the gate believes, and state so many tokens where an honest member has 100.
    """
    draw, names = torch.Generator().manual_seed(6), sorted(records)
    sent = torch.randn(4000, generator=draw) + torch.randn(len(names), 4000, generator=draw)
    lie = 10 * float(sent.norm(dim=1).median()) / 4000**0.5
    for place, name in enumerate(names):
        if name in liars:
            sent[place] = lie
    tokens = {name: stated if name in liars else 100 for name in names}
    weight, judges = bounded_weights(tokens, records), voters(records)
    reduction = Reduction(GroupCodec(32), weight, 4000, rule, judges, tokens)
    plain, total = torch.zeros(4000), 0
    for name, values in zip(names, sent, strict=True):
        reduction.add(name, encode(GroupCodec(32), values))
        if name not in liars:
            plain.add_(values, alpha=weight[name])
            total += weight[name]
    mean = require(reduction.finish())
    assert mean.contributors == tuple(names)
    return float((mean.values - plain / total).norm() / (plain / total).norm())


OLD = dict.fromkeys(MEMBERS, 10)


@pytest.mark.parametrize(
    ("rule", "records", "liars", "most"),
    [
        ("gate", OLD, "ab", 2.8),  # their weight alone doubles it and a little more
        ("clip", OLD, "ab", 1.75),
        ("gate", OLD | {"a": 3, "b": 3}, "ab", 2.4),
        ("gate", OLD | dict.fromkeys("ijklmnop", 0), "ijklmnop", 2.4),
        ("gate", {"a": 10, "b": 0, "c": 0, "d": 0}, "bcd", 1.7),  # a third together, and no more
    ],
)
def test_who_states_more_tokens_than_it_made_gains_little_by_its_pace(
    rule: RobustRule, records: Mapping[str, int], liars: Sequence[str], most: float
) -> None:
    honest = off_by(rule, 100, records, liars)
    assert off_by(rule, 160, records, liars) < most * honest
    assert off_by(rule, 1000, records, liars) < most * honest


@pytest.mark.parametrize("rule", ["gate", "clip"])
@pytest.mark.parametrize("records", [(10, 10, 4, 4, 4, 4, 4, 4), (10, 3, 3, 3, 3, 3, 3, 3)])
def test_founders_among_newer_voters_are_not_taken_for_liars(
    rule: RobustRule, records: Sequence[int]
) -> None:
    """They weigh more, but have stated no more."""
    credited = dict(zip(MEMBERS, records, strict=True))
    assert off_by(rule, 100, credited, ()) < 0.1


def test_a_newcomer_is_expected_as_far_as_its_tokens_and_not_its_weight() -> None:
    """Whose weight grows over its first records, while it makes as many steps as the others."""
    sent = list(parts(1.0))
    codec, weight = GroupCodec(32), dict.fromkeys(MEMBERS, 11) | {LIAR: 1}
    reduction = Reduction(
        codec, weight, sent[0].numel(), "gate", HONEST, dict.fromkeys(MEMBERS, 100)
    )
    for name, values in zip(MEMBERS, sent, strict=True):
        reduction.add(name, encode(codec, values))
    found = require(reduction.finish())
    everybody = torch.stack(sent), [100] * 8, [*weight.values()], range(1, 8)
    expected = clipped_about_the_median(*everybody)
    torch.testing.assert_close(found.values, expected, rtol=1e-4, atol=1e-5)


def test_two_that_go_their_own_way_move_a_gated_mean_less_than_one_that_is_only_shortened() -> None:
    """Two constants are at right angles to what the others learnt: the gate believes them."""
    draw = torch.Generator().manual_seed(2)
    way = torch.randn(4000, generator=draw)
    sent = way + torch.randn(8, 4000, generator=draw)
    honest = sent[2:].mean(dim=0)
    sent[:2] = 10 * float(honest.norm()) / 4000**0.5
    found = {rule: reduced(rule, list(sent)) for rule in RULES}
    assert found["gate"].contributors == tuple(MEMBERS)
    off = {rule: float((each.values - honest).norm()) for rule, each in found.items()}
    assert off["gate"] < 0.8 * off["clip"] < 0.2 * off["none"]


@pytest.mark.parametrize("rule", RULES)
def test_a_part_of_many_pieces_has_the_bytes_of_one_thread(rule: RobustRule) -> None:
    sent = list(parts(-3.0, PIECE // 4 + 100)[:4])
    found = [reduced(rule, sent, bits=4, names="abcd", threads=n) for n in (1, 3)]
    assert torch.equal(found[0].values, found[1].values)
    assert found[0].contributors == found[1].contributors


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize(("who", "codec"), sweep(product(list(UNUSUAL)[1:], (DEFAULTS, TWO_BIT))))
def test_who_honestly_has_little_or_other_data_is_heard_in_every_round(
    who: str, codec: str
) -> None:
    sizes = replace(WORLD, workers=WORKERS, inner_steps=TENTH, rounds=7, batch=(2, 16), held_out=2)
    world = replace(sizes, **UNUSUAL[who])
    rule = replace(rules(world)[codec], robust="gate")
    (outcome,) = run_trials(world, [Trial(rule=rule, seed=40)])
    first = outcome.hearings[0]
    assert first.left_out < 0.1
    assert first.unheard == first.sat_out == 0


def judged(sent: Tensor, spoil: Callable[[Tensor, Tensor], Tensor], *, columns: int) -> int:
    """How many of these members would vote against the reducer of the first of so many columns.

    sent: [m, columns * n]. spoil: of a mean, and noise of its norm.
    """
    draw, members = torch.Generator().manual_seed(5), len(sent)
    names = tuple(f"{place:03d}" for place in range(members))
    means = list[RowMean]()
    for part in sent.chunk(columns, dim=1):
        means.append(reduced("gate", list(part), bits=4, names=names, tokens=(1,) * members))
    first = means[0].values
    noise = torch.randn(first.shape, generator=draw)
    means[0] = RowMean(means[0].contributors, spoil(first, noise / noise.norm() * first.norm()))
    against = 0
    for name, own in zip(names, sent, strict=True):
        found = dict[int, Likeness]()
        for index, (mean, part) in enumerate(zip(means, own.chunk(columns), strict=True)):
            weight = (name in mean.contributors) / len(mean.contributors)
            found[index] = require(likeness(mean.values, part, weight, len(mean.contributors)))
        doubted = not_of_ours(found)
        assert doubted <= {0}, "a sound mean was doubted"
        against += bool(doubted)
    return against


def require(found: T | None) -> T:
    assert found is not None
    return found


def members_of(count: int, numel: int, common: float, longer: float = 1.0) -> Tensor:
    """Members whose values have this correlation; of each two one is so many times longer."""
    draw = torch.Generator().manual_seed(count)
    way = torch.randn(numel, generator=draw) * (common / (1 - common)) ** 0.5
    found = way + torch.randn(count, numel, generator=draw)
    return found * torch.tensor([1.0, longer]).repeat(count)[:count, None]


SIZES = [(4, 2000), (8, 3000), (8, 20_000)]


@pytest.mark.parametrize(("count", "numel"), sweep([(8, 100), *SIZES, (32, 5000)], 4))
@pytest.mark.parametrize("common", [0.0, 0.02, 0.5])
@pytest.mark.parametrize("longer", [1.0, 20.0])
@pytest.mark.parametrize("against", [None, 0.0, 0.1])
def test_no_member_doubts_a_sound_mean(
    count: int, numel: int, common: float, longer: float, against: float | None
) -> None:
    """Nor one whose part goes across those of the others, or a little against them."""
    sent = members_of(count, 8 * numel, common, longer)
    if against is not None:
        way = sent[1:].mean(dim=0)
        odd = torch.randn(way.shape, generator=torch.Generator().manual_seed(9))
        sent[0] = (odd / odd.norm() - against * way / way.norm()) * sent[0].norm()
    assert judged(sent, lambda mean, noise: mean, columns=8) == 0


@pytest.mark.parametrize(("count", "numel"), sweep([*SIZES, (32, 20_000)], 3))  # many need more
@pytest.mark.parametrize(
    "spoil",
    [
        lambda mean, noise: -mean,
        lambda mean, noise: 20 * mean,
        lambda mean, noise: noise,
        lambda mean, noise: mean + 10 * noise,
        lambda mean, noise: torch.full_like(mean, float(mean.norm()) / len(mean) ** 0.5),
    ],
    ids=["opposite", "longer", "noise", "beside", "constant"],
)
def test_half_of_the_members_find_a_mean_that_is_not_theirs(
    count: int, numel: int, spoil: Callable[[Tensor, Tensor], Tensor]
) -> None:
    assert 2 * judged(members_of(count, 8 * numel, 0.1), spoil, columns=8) >= count


def test_members_of_a_group_are_expected_by_their_tokens(
    identities: list[Identity], tmp_path: Path
) -> None:
    """Not by their weight, of which those that are new have little."""
    group = Group(identities[:4], tmp_path, passes=lambda *_: True, scheme="dense", robust="gate")
    me, new = group.peers[0], group.peers[3]
    setup = replace(group.setups[me], credited=dict.fromkeys(group.peers, 9) | {new: 0})
    shares = Shares(setup, asyncio.to_thread, MeanSeal(group.identities[0], group.ballot))
    column, asked = next(iter(shares.columns.items()))
    tokens = dict(zip(group.peers, group.tokens, strict=True))
    codec, span = setup.phases[0].codec, setup.span(column)
    numel = span.stop - span.start
    weight = bounded_weights(tokens, setup.credited)
    known = Reduction(codec, weight, numel, "gate", setup.voters, tokens)
    draw = torch.Generator().manual_seed(7)
    for peer in group.peers:
        payload = encode(codec, torch.randn(numel, generator=draw))
        for each in (asked, known):
            each.add(peer, payload)
    assert torch.equal(require(asked.finish()).values, require(known.finish()).values)

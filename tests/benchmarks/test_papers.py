"""benchmarks/papers.py in a tiny world, and the uneven swarms that it compares."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks import papers, papers_opendiloco, papers_study
from benchmarks.convergence_rules import FOUR_BIT, SYNCHRONOUS, WORLD, rules
from benchmarks.simulated_swarm import Trial, World, run_trials
from benchmarks.uneven_swarm import UnevenSwarm, steps_now
from dilocox.compression.layout import FlatLayout
from dilocox.dht.manifest import CodecSpec, OuterSpec, RoundSpec

TINY = replace(WORLD, workers=2, rounds=2, inner_steps=2, arrival=1, batch=(1, 8), held_out=2)
H = 4
RAW: Any = {"scheme": "dense", "bits": 32}


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(papers_study, "WORLD", TINY)
    monkeypatch.setattr(papers_study, "ROUNDS", TINY.rounds)
    monkeypatch.setattr(papers_study, "QUICK_ROUNDS", TINY.rounds)


def shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> str:
    monkeypatch.setattr("sys.argv", ["papers.py", "--processes", "1", *arguments])
    papers.main()
    return capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_a_quick_run_prints_two_rows_of_a_part_and_writes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    arguments = ("--quick", "--part", "precision", "links", "--out", str(tmp_path))
    said = shown(monkeypatch, capsys, *arguments)
    rows = (tmp_path / "papers-precision.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows] == ["", "fp32", "fp16"]
    assert "1.1 B, 500 Mbit/s, 500 ms" in said
    assert "90 to 95 % of the time computing" in said
    assert "pseudo-gradients in fp16 cost nothing" not in said  # two rows of one seed claim nothing


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_a_whole_part_says_of_each_claim_whether_it_was_reached(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = shown(monkeypatch, capsys, "--part", "precision", "merges", "--seeds", "1")
    assert "none, outer 0.7/0.9" in said
    assert "pseudo-gradients in fp16 cost nothing" in said
    [verdict] = [line for line in said.splitlines() if "rebase ends lower" in line]
    assert verdict.endswith(("reached", "NOT REACHED"))


def test_every_part_has_a_table_of_its_own() -> None:
    assert len(papers.PARTS) == 11
    assert all(part.__doc__ for part in papers.PARTS.values())


# ---- links ---------------------------------------------------------------------------------------
def test_an_exchange_takes_the_time_of_its_bytes_and_its_trips() -> None:
    layout = FlatLayout.of([("w", (1000, 1000))])
    seconds = papers_opendiloco.exchange_s(layout, None, 12.0, 100.0)
    assert seconds == pytest.approx(3 / 2 * 2e6 * 8 / 12e6 + 0.6)
    four_bit = rules(TINY)[FOUR_BIT].compression
    fewer = papers_opendiloco.exchange_s(layout, four_bit, 12.0, 0.0)
    assert fewer == pytest.approx(2.0 * 4.25 / 16, rel=1e-3)


# ---- uneven swarms -------------------------------------------------------------------------------
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", [SYNCHRONOUS, FOUR_BIT])
def test_workers_of_one_pace_are_an_even_swarm(name: str) -> None:
    def outcome(world: World) -> Any:
        return run_trials(world, [Trial(rule=rules(world)[name], seed=3)])[0]

    even, paced = outcome(TINY), outcome(replace(TINY, paces=(2, 2)))
    assert paced.loss == pytest.approx(even.loss, abs=1e-6)
    assert paced.bytes_sent == even.bytes_sent


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_a_slow_worker_sees_fewer_tokens() -> None:
    world = replace(TINY, paces=(1, 2))
    assert world.tokens == TINY.tokens * 3 // 4
    [outcome] = run_trials(world, [Trial(rule=rules(world)[SYNCHRONOUS], seed=3)])
    assert outcome.curve[-1].tokens == world.tokens
    with pytest.raises(ValueError, match="one for each worker"):
        replace(TINY, paces=(1,))


@pytest.mark.parametrize("pace", [1, 3, 4])
def test_a_pace_is_the_number_of_its_steps_in_a_round(pace: int) -> None:
    assert sum(steps_now(pace, H, position) for position in range(1, H + 1)) == pace


def swarm_of(models: list[nn.Linear], **facts: Any) -> UnevenSwarm:
    outer = OuterSpec(merge="none", learning_rate=1.0, momentum=0.0)
    rounds = RoundSpec(inner_steps=H, robust="none")
    codec = CodecSpec(**RAW, residual_decay=0.0)
    given: Any = {"paces": (H,) * len(models), "absent": False, "half": False} | facts
    given |= {"attack": None}
    return UnevenSwarm(models, rounds=rounds, arrival=0, outer=outer, codec=codec, **given)


def replicas(count: int) -> list[nn.Linear]:
    found: list[nn.Linear] = []
    for _ in range(count):
        torch.manual_seed(1)
        found.append(nn.Linear(48, 96))
    return found


def train(swarm: UnevenSwarm, models: list[nn.Linear], paces: tuple[int, ...]) -> None:
    """A round in which worker n takes n + 1 hundredths off each weight with each of its steps."""
    for position in range(1, H + 1):
        for worker, model in enumerate(models):
            if steps_now(paces[worker], H, position):
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.sub_((worker + 1) / 100)
        swarm.trained(8)


def weight(swarm: UnevenSwarm) -> Tensor:
    return swarm.layout.view(swarm.anchor)["weight"].clone()


def test_progress_counts_by_its_tokens_and_never_over_twice_the_median() -> None:
    models, paces = replicas(3), (1, 1, 4)
    before = models[0].weight.detach().clone()
    swarm = swarm_of(models, paces=paces)
    train(swarm, models, paces)
    moved = (1 * 0.01 + 1 * 0.02 + 2 * 4 * 0.03) / (1 + 1 + 2)
    torch.testing.assert_close(weight(swarm), before - moved)


def test_what_an_absent_worker_learnt_goes_with_its_next_round() -> None:
    models, paces = replicas(2), (H, H)
    swarm = swarm_of(models, absent=True)
    first = weight(swarm)
    train(swarm, models, paces)  # without worker 0
    torch.testing.assert_close(weight(swarm), first - H * 0.02)
    train(swarm, models, paces)  # without worker 1, with two rounds of worker 0
    torch.testing.assert_close(weight(swarm), first - H * 0.02 - 2 * H * 0.01)


def test_half_sends_half_of_the_bytes_and_rounds() -> None:
    sent: list[float] = []
    ends: list[Tensor] = []
    for half in (False, True):
        models = replicas(2)
        swarm = swarm_of(models, half=half)
        train(swarm, models, (H, H))
        sent.append(swarm.bytes_sent)
        ends.append(weight(swarm))
    assert sent[1] == sent[0] / 2
    assert not torch.equal(*ends)
    torch.testing.assert_close(*ends, rtol=0, atol=0.06 / 2**11)

"""The plan of a run: hand calculation, agreement with what the product itself says, the command."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.grid import sent_by
from dilocox.dht.errors import InvalidInput
from dilocox.dht.manifest import Manifest
from dilocox.dht.manifest_sections import CodecSpec, InitialSpec
from dilocox.peer.process.prepare import StageNeeds
from dilocox.peer.process.run_plan import (
    LAST_WAYS,
    STALL_S,
    WIRE,
    Machines,
    RunPlan,
    flops_per_token,
    traffic,
)
from dilocox.peer.rounds.grid import Grid
from dilocox.peer.rounds.record import stage_codec
from dilocox.peer.rounds.round_end import LOOK_S, NOTICE_S
from dilocox.pipeline.frames import encoded_bytes
from dilocox.pipeline.partition import hidden_size
from dilocox.pipeline.stage import stage_layout
from tests.peer.real_commands import error_line, run_here

pytestmark = pytest.mark.usefixtures("activations_are_reckoned_once")

DENSE = {"scheme": "dense", "bits": 4}
MBIT = 1e6 / 8


def run(**given: Any) -> Manifest:
    described = {"name": "planned", "model": "tiny", "end_tokens": 10**9, "codec": DENSE}
    return Manifest.from_dict(described | given)


def machines(**given: Any) -> Machines:
    usual: dict[str, Any] = {
        "peers": 4,
        "up_bytes_s": 10 * MBIT,
        "down_bytes_s": 10 * MBIT,
        "rtt_s": 0.1,
        "stage_tokens_s": (1000.0,),
    }
    return Machines(**(usual | given))


def planned(manifest: Manifest, **given: Any) -> RunPlan:
    return RunPlan(manifest, machines(**given), memory=False)


# ---- by hand -------------------------------------------------------------------------------------
def test_a_run_of_one_stage_equals_the_hand_calculation() -> None:
    manifest = run(rounds={"inner_steps": 100}, data={"source": "stdlib"})
    found = planned(manifest)
    record = StageNeeds(manifest, 0).record_bytes
    step_s = manifest.batch.tokens_per_step / 1000.0
    assert found.step.total_s == found.step.computing_s == pytest.approx(step_s)
    # parts to three others, then means to them, a quarter of the vector each
    assert found.exchange.up_bytes == pytest.approx(2 * record * 3 / 4, rel=1e-3)
    assert found.exchange.wire_s == pytest.approx(
        WIRE * found.exchange.up_bytes / (10 * MBIT - 3500), rel=1e-3
    )
    assert found.exchange.ways_s == pytest.approx((2 + LAST_WAYS) * 0.05)
    heard_s = max(LOOK_S, 100 * step_s / 32)
    stall_s = STALL_S * found.stages[0].values
    assert found.ours.round_s == pytest.approx(100 * step_s + heard_s + stall_s)
    tokens = 4 * (100 * step_s + heard_s) * 1000.0
    assert found.ours.tokens_per_s == pytest.approx(tokens / found.ours.round_s)
    assert found.days == pytest.approx(10**9 / found.ours.tokens_per_s / 86400)
    gradient = 2 * 2 * found.stages[0].values * 3 / 4
    (allreduce,) = [method for method in found.methods if method.name == "AllReduce"]
    seconds = step_s + WIRE * gradient / (10 * MBIT) + 2 * 3 * 0.05
    assert allreduce.tokens_per_s == pytest.approx(4000.0 * step_s / seconds)


def test_a_replica_of_two_stages_equals_the_hand_calculation() -> None:
    manifest = run(
        stages=2,
        batch={"sequence_length": 128, "microbatch_size": 4, "microbatches": 8},
        pipeline={"codec": "int8"},
    )
    found = planned(manifest, peers=2, stage_tokens_s=(2000.0, 1000.0))
    fast, slow = 512 / 2000.0, 512 / 1000.0
    payload = encoded_bytes("int8", (4, 128, hidden_size(manifest.model)))
    line_s = WIRE * payload / (10 * MBIT)
    travel_s = 2 * line_s + 0.1
    assert found.step.total_s == pytest.approx(fast + slow + travel_s + 7 * slow)
    assert found.step.computing_s == pytest.approx(8 * (fast + slow) / 2)
    assert found.step.sent_bytes == 8 * payload and found.step.limit == "computing"
    assert found.exchange.up_bytes == 0, "there is one replica"
    # a thin line holds the stages up, and a long way unless more microbatches are in flight
    thin = planned(manifest, peers=2, stage_tokens_s=(2000.0, 1000.0), up_bytes_s=payload)
    assert thin.step.limit == thin.limit == "the links between stages"
    assert thin.step.total_s == pytest.approx(fast + slow + 2 * WIRE + 0.1 + 7 * WIRE)
    narrow = replace(manifest, pipeline=replace(manifest.pipeline, window=1))
    far = planned(narrow, peers=2, stage_tokens_s=(2000.0, 1000.0), rtt_s=3.0)
    assert far.limit == "the round trip of a microbatch"


def test_flops_are_six_a_weight_and_what_attention_adds() -> None:
    manifest = run(batch={"sequence_length": 256})
    model = manifest.model
    width, inner, layers = (
        model[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")
    )
    heads = model["num_key_value_heads"] * width // model["num_attention_heads"]
    weights = layers * (2 * width * width + 2 * width * heads + 3 * width * inner)
    weights += model["vocab_size"] * width
    expected = 6 * weights + 6 * layers * 256 * width
    assert flops_per_token(manifest, 0) == pytest.approx(expected, rel=0.01)
    twice = replace(manifest, pipeline=replace(manifest.pipeline, recompute=True))
    assert flops_per_token(twice, 0) == pytest.approx(flops_per_token(manifest, 0) * 4 / 3)
    told = planned(manifest, stage_tokens_s=(), flops=flops_per_token(manifest, 0) * 1000.0)
    assert told.ours == planned(manifest).ours


# ---- what the product itself says ----------------------------------------------------------------
@pytest.mark.parametrize("codec", [DENSE, DENSE | {"bits": 2}, {"scheme": "low_rank", "rank": 8}])
@pytest.mark.parametrize(("members", "row"), [(2, 32), (3, 32), (12, 4), (13, 4)])
def test_bytes_are_those_of_the_codec_in_the_grid(
    codec: dict[str, Any], members: int, row: int
) -> None:
    manifest = run(codec=codec, rounds={"group_size": row})
    codec_of = stage_codec(manifest, stage_layout(manifest, 0))
    phases = codec_of.phases(codec_of.first_ranks)
    names = [f"peer{number}" for number in range(members)]
    grid = Grid.of(b"group", names, names, row)
    turns = traffic(grid, phases)
    assert len(turns) == len(phases) * (2 if members <= row else 3)
    sent = 0
    for phase in phases:
        shares = grid.shares([phase])
        sent += max(sent_by(grid, shares, phase, name)[0] for name in names)
    # of each turn that member counts that sends most, and this is not always the same one
    assert sent <= sum(up for up, _ in turns) <= 1.15 * sent
    if members <= row:
        needs = StageNeeds(manifest, 0).exchange_bytes(members)
        assert sum(up for up, _ in turns) == pytest.approx(needs, rel=0.01)


def test_rows_appear_where_there_are_more_members_than_a_group_has() -> None:
    manifest = run(rounds={"group_size": 4})
    assert planned(manifest, peers=4).exchange.rows == 1
    rows = planned(manifest, peers=12).exchange
    assert rows.rows == 3
    assert rows.ways_s == pytest.approx((3 + LAST_WAYS) * 0.05)


def test_memory_is_what_a_stage_needs_and_the_fewest_stages_are_those_that_fit() -> None:
    manifest = run(stages=2)
    needs = [StageNeeds(manifest, stage).memory for stage in range(2)]
    found = RunPlan(manifest, machines(memory_bytes=2e9))
    assert [each.memory_bytes for each in found.stages] == [each.on_cpu for each in needs]
    assert found.fits and found.fewest_stages == 1
    small = RunPlan(manifest, machines(memory_bytes=5e8))
    assert not small.fits and small.fewest_stages is None and small.limit.startswith("memory")
    of_a_checkpoint = InitialSpec(source="folder", anchors=("a" * 64, "b" * 64))
    begun = replace(manifest, initial=of_a_checkpoint)
    assert RunPlan(begun, machines(memory_bytes=5e8)).fewest_stages is None


# ---- which way it goes ---------------------------------------------------------------------------
@pytest.mark.parametrize(("stages", "merge"), [(1, "rebase"), (2, "rebase"), (1, "none")], ids=str)
def test_more_of_a_line_never_makes_a_run_slower(stages: int, merge: str) -> None:
    manifest = run(stages=stages, outer={"merge": merge}, batch={"microbatches": 8})
    found = [
        planned(manifest, up_bytes_s=up * MBIT, down_bytes_s=100 * MBIT)
        for up in (0.05, 0.5, 5, 50, 500)
    ]
    for thin, wide in pairwise(found):
        assert wide.exchange.seconds <= thin.exchange.seconds
        assert wide.ours.round_s <= thin.ours.round_s
        # where nothing waits, a longer round has a little less that a round costs once
        assert wide.ours.tokens_per_s >= 0.999 * thin.ours.tokens_per_s
    waits = merge == "none" or stages > 1
    assert (found[0].ours.tokens_per_s < 0.9 * found[-1].ours.tokens_per_s) == waits


def test_a_thin_line_makes_rounds_longer_but_only_waiting_costs_tokens() -> None:
    manifest = run(rounds={"inner_steps": 10})
    thin, wide = (planned(manifest, up_bytes_s=up * MBIT) for up in (0.1, 100.0))
    assert thin.ours.round_s > NOTICE_S + thin.exchange.seconds > 2 * wide.ours.round_s
    assert thin.limit == "the exchange: the uplink"
    assert thin.ours.tokens_per_s == pytest.approx(wide.ours.tokens_per_s, rel=0.02)
    waiting = replace(manifest, outer=replace(manifest.outer, merge="none"))
    lost = planned(waiting, up_bytes_s=0.1 * MBIT).ours
    assert lost.tokens_per_s < 0.5 * thin.ours.tokens_per_s and lost.computing < 0.5


def test_h_and_rank_that_hide_an_exchange_do_so() -> None:
    manifest = run(codec={"scheme": "low_rank", "rank": 16}, rounds={"inner_steps": 20})
    found = planned(manifest, up_bytes_s=0.3 * MBIT, stage_tokens_s=(50_000.0,))
    assert found.hidden_steps > 20
    half = found.hidden_steps * found.step.total_s / 2
    assert half - found.step.total_s <= found.exchange.seconds <= half
    assert 0 <= found.hidden_rank < 16
    assert planned(manifest, up_bytes_s=1e9, down_bytes_s=1e9, rtt_s=0.0).hidden_rank == 64


def test_bits_of_a_dense_codec_that_hide_an_exchange_do_so() -> None:
    manifest = run(codec={"scheme": "low_rank", "rank": 16}, rounds={"inner_steps": 20})
    seconds = {}
    for bits in (4, 2):
        dense = replace(manifest, codec=CodecSpec(scheme="dense", bits=bits))
        seconds[bits] = planned(dense).exchange.seconds
    assert 0 < seconds[2] < seconds[4]
    for room_s, bits in ((seconds[4], 4), (0.99 * seconds[4], 2), (0.99 * seconds[2], 0)):
        tokens_s = manifest.batch.tokens_per_step * 20 / (2 * room_s)
        assert planned(manifest, stage_tokens_s=(tokens_s,)).hidden_bits == bits


# ---- mistakes ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"peers": 1}, "--peers 1: a replica of this run takes 2"),
        ({"stage_tokens_s": (1.0, 2.0, 3.0)}, "3 values for 2 stages"),
        ({"flops": 1e12}, "give either --tflops or --tokens-per-s"),
        ({"stage_tokens_s": ()}, "give either --tflops or --tokens-per-s"),
    ],
)
def test_machines_that_cannot_be_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        planned(run(stages=2), **given)


# ---- the command ---------------------------------------------------------------------------------
@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    described = {"name": "planned", "model": "tiny", "stages": 2, "end_tokens": 10**9}
    path.write_text(yaml.safe_dump(described))
    return path


TOLD = ("--peers", "5", "--mbit", "50", "--up-mbit", "10", "--rtt-ms", "40", "--memory-gb", "4")


def test_the_command_says_what_an_operator_asks(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_here(monkeypatch, "plan", str(file), *TOLD, "--tokens-per-s", "900,800") == 0
    said = capsys.readouterr().out
    for words in (
        "2 stages; 5 peers make 2 replicas and 1 spare",
        "the fewest stages that fit: 1",
        "bottleneck",
        "hidden",
        "low rank up to",
        "dense",
        "one more peer",
        "twice the uplink",
        "GB a month",
        "AllReduce",
        "OpenDiLoCo",
        "DiLoCoX",
    ):
        assert words in said, words


def test_its_json_has_stable_names_and_a_run_that_does_not_fit_an_exit_code(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_here(monkeypatch, "plan", str(file), *TOLD, "--tflops", "0.1", "--json", "-") == 0
    told = json.loads(capsys.readouterr().out)
    assert set(told) == {
        *("run", "machines", "replicas", "spares", "fits", "fewest_stages", "stages", "step"),
        *("exchange", "inner_steps_a_round", "days", "month_gb", "hidden_inner_steps"),
        *("hidden_rank", "hidden_bits", "bottleneck", "methods", "changes", "measured"),
    }
    assert [method["name"] for method in told["methods"]] == [
        "this run",
        "DiLoCoX",
        "OpenDiLoCo",
        "AllReduce",
    ]
    keys = {"name", "step_bytes", "round_s", "tokens_per_s", "computing"}
    assert all(set(each) == keys for each in (*told["methods"], *told["changes"].values()))
    assert told["exchange"]["seconds"] > told["exchange"]["wire_s"] > 0
    little = (*TOLD[:-1], "0.5", "--tflops", "0.1", "--json", str(file.with_suffix(".json")))
    assert run_here(monkeypatch, "plan", str(file), *little) == 1
    assert json.loads(file.with_suffix(".json").read_text())["fits"] is False


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--tflops", "1"), "--mbit is missing"),
        (("--mbit", "10"), "give either --tflops or --tokens-per-s"),
        (("--mbit", "10", "--tokens-per-s", "fast"), "give a number, or one for each stage"),
        (("--mbit", "10", "--tflops", "1", "--peers", "1"), "a replica of this run takes 2"),
    ],
)
def test_what_is_missing_or_wrong_is_one_line(
    file: Path,
    arguments: tuple[str, ...],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_here(monkeypatch, "plan", str(file), *arguments) == 2
    assert said in error_line(capsys.readouterr().err)

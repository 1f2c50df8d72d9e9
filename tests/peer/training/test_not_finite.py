"""Weights that are not finite heal: back to the anchor, with new moments, counted and told."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest
import torch

from dilocox.peer.training.unsent_progress import ROW_VALUES, norm
from tests.peer.loops import STEP_TOKENS, Loop, manifest


@pytest.fixture(params=[0, 1], ids=["head", "member"])
def loop(tmp_path: Path, request: pytest.FixtureRequest) -> Loop:
    return Loop(tmp_path, manifest(stages=2), stage=request.param)


def step(loop: Loop) -> None:
    """An inner step of the real optimizer, skipped where it cannot be taken."""
    gradient = torch.ones(())
    if not bool(loop.live.isfinite().all()):
        gradient = gradient * torch.nan  # as what comes out of such weights
    for parameter in loop.model.stage.parameters():
        parameter.grad = gradient.expand_as(parameter).clone()
    taken = loop.model.optimizer.step(1.0, 1e-3)
    loop.train(skipped=not taken)


def test_a_peer_whose_weights_are_not_finite_contributes_again_in_the_next_round(
    loop: Loop, caplog: pytest.LogCaptureFixture
) -> None:
    step(loop)
    loop.send(0)
    loop.fake.events.put(loop.committed(0, 0.1, mine=True))
    step(loop)
    loop.live[3] = torch.nan  # as a bad memory cell
    loop.learner.take_events()  # the record changes nothing about it
    assert not math.isfinite(norm(loop.live))
    step(loop)  # cannot be taken
    assert torch.equal(loop.live, loop.model.merge.anchor)
    assert "test its memory" in caplog.text
    (event,) = loop.events("started_over")
    assert event["tokens"] == STEP_TOKENS
    assert loop.model.merge.lost_tokens == STEP_TOKENS
    assert loop.fake.status.started_over
    assert loop.fake.status.unsent_tokens == 0
    assert ("announce",) in loop.fake.told
    step(loop)
    assert not loop.fake.status.started_over
    loop.send(1)
    assert [told[1] for told in loop.fake.of_kind("submit")] == [0, 1]
    assert math.isfinite(norm(loop.buffers.message))


def test_a_send_that_is_not_finite_does_not_leave_and_the_next_one_does(loop: Loop) -> None:
    step(loop)
    loop.live[3] = torch.inf
    loop.send(0)
    assert loop.fake.of_kind("submit") == [] and loop.fake.of_kind("skip") == [("skip", 0)]
    assert torch.equal(loop.live, loop.model.merge.anchor)
    assert not loop.again().snapshots.sent_since
    step(loop)
    loop.send(1)
    assert loop.fake.of_kind("submit")[0][:2] == ("submit", 1)
    assert math.isfinite(norm(loop.buffers.message))


def test_moments_that_are_not_finite_heal_with_the_weights(loop: Loop) -> None:
    step(loop)
    for name, tensor in loop.model.optimizer.state_dict().tensors.items():
        if name.startswith("exp_avg/"):
            tensor.fill_(torch.nan)
    for _ in range(4):
        step(loop)
    assert len(loop.events("started_over")) == 1
    assert bool(loop.live.isfinite().all())
    moments = loop.model.optimizer.state_dict().tensors.values()
    assert moments and all(bool(tensor.isfinite().all()) for tensor in moments)
    assert loop.model.merge.tokens > 0


def test_a_send_in_flight_outlives_it(loop: Loop) -> None:
    step(loop)
    loop.send(0)
    step(loop)
    loop.live[0] = torch.nan
    step(loop)
    merge = loop.model.merge
    assert list(merge.in_flight) == [0] and not merge.can_send, "one send at a time"
    expected = merge.anchor - merge.config.weight * merge.in_flight[0].delta
    torch.testing.assert_close(loop.live, expected)
    loop.fake.events.put(loop.committed(0, merge.in_flight[0].message, mine=True))
    loop.learner.take_events()
    assert (merge.counted_tokens, merge.lost_tokens) == (STEP_TOKENS, STEP_TOKENS)
    torch.testing.assert_close(loop.live, merge.anchor)


def test_what_was_healed_is_on_the_disk(loop: Loop) -> None:
    step(loop)
    loop.live[0] = torch.nan
    loop.learner.leave(ended=False)  # a state that is not finite
    (not_finite,) = (loop.folder / "snapshots").glob("*[0-9]")
    again = loop.again()
    step(again)
    end = time.monotonic() + 20
    while not_finite.exists() and time.monotonic() < end:
        again.learner.snapshot_if_due()  # in the background, but at once
    # read only now: no peer starts in a folder in which another one takes the old one away
    assert bool(again.again().live.isfinite().all())


def test_a_step_that_another_stage_skipped_costs_nothing(loop: Loop) -> None:
    step(loop)
    before = loop.live.clone()
    loop.train(skipped=True)
    assert torch.equal(loop.live, before)
    assert not loop.events("started_over") and loop.model.merge.tokens == STEP_TOKENS


@pytest.mark.parametrize("numel", [1, ROW_VALUES, 2 * ROW_VALUES + 3])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_the_norm_is_not_finite_where_a_value_is_not(numel: int, bad: float) -> None:
    values = torch.linspace(-1.0, 1.0, numel) + 2.0
    assert math.isfinite(norm(values))
    for place in {0, numel // 2, numel - 1}:
        other = values.clone()
        other[place] = bad
        assert not math.isfinite(norm(other))

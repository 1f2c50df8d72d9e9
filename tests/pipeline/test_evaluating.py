"""Validation losses of a replica's anchors, through the chain."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dilocox.peer.training.data import validation_loss
from dilocox.pipeline import head
from dilocox.pipeline.frames import Frame
from dilocox.pipeline.head import STALL_LIMIT_S
from dilocox.pipeline.link import LinkFacts
from dilocox.pipeline.stage import build_stage
from tests.pipeline.chains import SEED, batches
from tests.pipeline.histories import check_weights, equal
from tests.pipeline.peers import TINY, Plan
from tests.pipeline.replicas import Swarm

PLAN = Plan(microbatches=2)
BATCHES = batches(TINY, 4, 2)


HELD_OUT = batches(TINY, 1, 7)[0]  # 14 windows
WINDOWS = torch.cat(HELD_OUT)
VALIDATION = list(WINDOWS.split(8))


class TestEvaluating:
    def expected(self) -> float:
        """Of the anchors: those that all stages began with."""
        whole = build_stage(TINY, 0, 1, SEED)
        return validation_loss(whole, WINDOWS) * WINDOWS[:, 1:].numel()

    @pytest.mark.parametrize("num_stages", [1, 2, 3])
    def test_it_is_the_loss_of_the_whole_model_on_the_anchors(self, num_stages: int) -> None:
        swarm = Swarm(Plan(num_stages=num_stages, microbatches=2))
        swarm.leader.form()
        for batch in BATCHES[:2]:
            swarm.leader.step(batch)
        swarm.settle()
        before = [peer.weights() for peer in swarm.alive]
        for _ in range(2):
            total = swarm.leader.head.evaluate(VALIDATION)
            assert total == pytest.approx(self.expected(), rel=1e-6)
        assert all(equal(p.weights(), b) for p, b in zip(swarm.alive, before, strict=True))
        swarm.leader.step(BATCHES[2])
        check_weights(swarm)
        assert swarm.leader.head.anchors_at(0)
        assert not swarm.leader.head.anchors_at(1)

    @pytest.mark.parametrize("stage", [0, 1, 2])
    def test_there_is_none_while_a_stage_has_another_anchor(self, stage: int) -> None:
        swarm = Swarm(PLAN)
        swarm.leader.form()
        swarm.alive[stage].anchor.round = 1
        assert swarm.leader.head.evaluate(VALIDATION) is None
        swarm.leader.step(BATCHES[0])
        assert not swarm.leader.head.anchors_at(0)
        assert not swarm.leader.head.anchors_at(1)
        for peer in swarm.alive:
            peer.anchor.round = 1
        swarm.leader.step(BATCHES[1])
        assert swarm.leader.head.anchors_at(1)
        assert swarm.leader.head.evaluate(VALIDATION) == pytest.approx(self.expected())

    def test_members_say_which_anchor_they_have_without_a_step(self) -> None:
        swarm = Swarm(PLAN)
        swarm.leader.form()
        peers = [swarm.peers["1a"], swarm.peers["2a"]]
        for peer, rounds in zip(peers, ({"round": 3}, {"round": 2}), strict=True):
            peer.reservation.open(rounds)
        assert not swarm.leader.head.anchors_now_at(3)
        peers[1].reservation.open({"round": 3})
        assert swarm.leader.head.anchors_now_at(3)
        assert not swarm.leader.head.anchors_now_at(2)

    def test_a_member_that_does_not_answer_keeps_no_evaluation_from_being_tried(self) -> None:
        """Else nobody found that it is gone, and the run's last loss was waited for in vain."""
        swarm = Swarm(PLAN, spares=1)
        leader = swarm.leader
        leader.form()
        leader.step(BATCHES[0])
        swarm.settle()
        for peer in swarm.alive:
            peer.reservation.open({"round": 0})
        _, answers, silent = leader.members
        swarm.wires.kill(silent, flushed=True)
        swarm.peers[answers].reservation.open({"round": 1})
        assert not leader.head.anchors_now_at(0)
        swarm.peers[answers].reservation.open({"round": 0})
        assert leader.head.anchors_now_at(0)
        assert leader.head.evaluate(VALIDATION) is None
        assert leader.members[1] == answers and leader.members[2] != silent
        assert leader.head.anchors_now_at(0)
        assert leader.head.evaluate(VALIDATION) == pytest.approx(self.expected())

    @pytest.mark.parametrize("seed", range(5))
    def test_late_answers_belong_to_no_later_evaluation(self, seed: int) -> None:
        swarm = Swarm(PLAN, seed=seed)
        swarm.leader.form()
        last = swarm.peers["2a"]
        last.anchor.round = 1
        answers = 0

        def look(frame: Frame) -> None:
            nonlocal answers
            answers += frame.kind == "evaluated"
            if answers == 1:  # from now on it answers with numbers
                last.anchor.round = 0

        swarm.wires.on_frame = look
        assert swarm.leader.head.evaluate([*VALIDATION, *HELD_OUT]) is None
        with torch.no_grad():
            last.anchor.weights[-1].mul_(0.5)
        late = swarm.leader.head.evaluate(VALIDATION)
        swarm.settle()
        assert late == swarm.leader.head.evaluate(VALIDATION)
        assert late != pytest.approx(self.expected())

    @pytest.mark.parametrize("moment", range(5))
    def test_a_member_that_is_lost_meanwhile_is_replaced(self, moment: int) -> None:
        swarm = Swarm(PLAN, spares=1, seed=moment)
        swarm.leader.form()
        victim = swarm.leader.members[1 + moment % 2]
        due = swarm.wires.delivered + moment

        def look(_: Frame) -> None:
            if swarm.wires.delivered == due:
                swarm.wires.kill(victim, flushed=False)

        swarm.wires.on_frame = look
        if moment == 0:
            swarm.wires.kill(victim, flushed=False)
        assert swarm.leader.head.evaluate(VALIDATION) is None
        assert victim not in swarm.leader.members
        assert swarm.leader.head.evaluate(VALIDATION) == pytest.approx(self.expected())
        assert swarm.leader.step(BATCHES[0]) is not None
        check_weights(swarm)

    @pytest.mark.parametrize("num_stages", [1, 3])
    def test_it_may_take_long_as_long_as_it_goes_on(self, num_stages: int) -> None:
        """As of a billion parameters; weights are exchanged once, not for each batch."""
        swarm = Swarm(Plan(num_stages=num_stages, microbatches=2))
        swarm.leader.form()
        swarm.leader.step(BATCHES[0])
        swarm.settle()
        worker, anchor = swarm.leader.peer.worker, swarm.leader.peer.anchor
        evaluate, began, writes = worker.evaluate, swarm.wires.now, anchor.writes

        def slow(inputs: Tensor | None, windows: Tensor) -> Tensor | float:
            swarm.wires.now += STALL_LIMIT_S / 3
            return evaluate(inputs, windows)

        worker.evaluate = slow  # type: ignore[method-assign]
        many = [*VALIDATION] * 5
        total = swarm.leader.head.evaluate(many)
        assert total == pytest.approx(5 * self.expected(), rel=1e-6)
        assert swarm.wires.now - began > 3 * STALL_LIMIT_S
        there_and_back = 2 * len(swarm.leader.peer.parameters)
        assert anchor.writes - writes == there_and_back

    def test_a_slow_line_is_given_a_batch_when_it_is_done_with_the_one_before(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """All at once they would fill somebody's memory, and the first loss is long in coming."""
        line_s, frame_bytes = 20.0, 4 * VALIDATION[0][:, 1:].numel() * 16
        monkeypatch.setattr(head, "SLOW_LINK", frame_bytes / line_s)
        monkeypatch.setattr(head, "EVALUATED_BYTES", 5 * frame_bytes // 2)
        swarm = Swarm(PLAN)
        swarm.leader.form()
        for peer in swarm.alive:
            peer.box.measured = LinkFacts(received_bytes_per_s=frame_bytes / line_s)
        swarm.leader.step(BATCHES[0])
        swarm.settle()
        worker, times = swarm.leader.peer.worker, list[float]()
        evaluate = worker.evaluate

        def timed(inputs: Tensor | None, windows: Tensor) -> Tensor | float:
            times.append(swarm.wires.now)
            return evaluate(inputs, windows)

        worker.evaluate = timed  # type: ignore[method-assign]
        swarm.peers["2a"].busy = True
        assert swarm.leader.head.evaluate([*VALIDATION] * 2) is None
        first, second = times  # and no third one while these two are on their way
        assert line_s <= second - first < line_s + 1
        assert swarm.wires.now - first >= 1.5 * STALL_LIMIT_S + 2 * 2 * line_s
        swarm.peers["2a"].busy = False
        assert swarm.leader.head.evaluate(VALIDATION) == pytest.approx(self.expected())

    def test_a_speed_that_a_member_states_has_nobody_wait_longer_than_for_a_slow_line(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        line_s, frame_bytes = 20.0, 4 * VALIDATION[0][:, 1:].numel() * 16
        monkeypatch.setattr(head, "SLOW_LINK", frame_bytes / line_s)
        swarm = Swarm(PLAN)
        swarm.leader.form()
        swarm.peers["2a"].box.measured = LinkFacts(received_bytes_per_s=1e-300)
        swarm.leader.step(BATCHES[0])
        swarm.settle()
        swarm.peers["2a"].busy, start, before = True, swarm.wires.now, swarm.wires.pass_time
        longest_s = 1.5 * STALL_LIMIT_S + 2 * 2 * line_s

        def passes(seconds: float) -> None:
            before(seconds)
            assert swarm.wires.now - start < longest_s + 1, "it waits without end"

        swarm.wires.pass_time = passes
        assert swarm.leader.head.evaluate(VALIDATION) is None
        swarm.peers["2a"].busy = False
        assert swarm.leader.head.evaluate(VALIDATION) == pytest.approx(self.expected())

    def test_anchors_that_are_not_finite_give_no_number(self) -> None:
        swarm = Swarm(PLAN)
        swarm.leader.form()
        swarm.peers["1a"].anchor.weights[-1].fill_(math.nan)
        total = swarm.leader.head.evaluate(VALIDATION)
        assert total is not None
        assert math.isnan(total)

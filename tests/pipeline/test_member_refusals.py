"""Frames that a member cannot take: the link breaks, and nothing else happens."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from dilocox.pipeline.activation_codec import tensor_frame
from dilocox.pipeline.frames import Frame
from dilocox.pipeline.link import Arrived
from dilocox.pipeline.messages import Fault
from tests.pipeline.alone import BATCH, SHAPE, Alone, go_facts, sum_facts


class TestRefusals:
    """A link over which came what cannot be is broken, and nothing else happens."""

    def check(self, alone: Alone, side: str, reason: str) -> None:
        assert alone.refused == [(side, reason)]
        assert alone.member.assignment is not None

    @pytest.mark.parametrize("step", [1, 99])
    def test_of_another_step(self, step: int) -> None:
        for act, side in (
            (lambda a: a.forward(step=step), "upper"),
            (lambda a: a.hear("upper", "go", step=step, facts=go_facts()), "upper"),
            (lambda a: a.gradient(step=step), "lower"),
            (lambda a: a.hear("lower", "sum", step=step, facts=sum_facts()), "lower"),
        ):
            alone = Alone()
            alone.take_up()
            assert act(alone) is None
            self.check(alone, side, "step")

    @pytest.mark.parametrize(
        "kind", ["gradient", "sum", "ready", "fault", "evaluated", "hello", "heartbeat", "yes"]
    )
    def test_what_only_comes_from_below(self, kind: str) -> None:
        alone = Alone()
        alone.take_up()
        assert alone.hear("upper", kind, facts=sum_facts()) is None
        self.check(alone, "upper", "kind")

    @pytest.mark.parametrize("kind", ["forward", "go", "evaluate", "dissolve", "hello", "ping"])
    def test_what_only_comes_from_above(self, kind: str) -> None:
        alone = Alone()
        alone.take_up()
        assert alone.hear("lower", kind, facts=go_facts()) is None
        self.check(alone, "lower", "kind")

    def test_go_before_all_gradients(self) -> None:
        alone = Alone()
        alone.take_up()
        alone.forward()
        alone.member.work()
        before = alone.weights()
        assert alone.hear("upper", "go", facts=go_facts()) is None
        self.check(alone, "upper", "order")
        assert all(torch.equal(a, b) for a, b in zip(alone.weights(), before, strict=True))
        assert alone.kinds("lower") == ["forward"]

    @pytest.mark.parametrize("microbatch", [0, 2])
    def test_a_microbatch_twice_or_one_too_many(self, microbatch: int) -> None:
        alone = Alone()
        alone.take_up()
        alone.forward()
        alone.forward(microbatch)
        self.check(alone, "upper", "order")

    def test_a_gradient_that_nobody_waits_for(self) -> None:
        alone = Alone()
        alone.take_up()
        alone.forward()
        alone.gradient()
        self.check(alone, "lower", "order")

    @pytest.mark.parametrize(
        ("side", "kind", "facts"),
        [
            ("upper", "go", go_facts(learning_rate=-1.0)),
            ("upper", "go", go_facts(learning_rate=math.nan)),
            ("upper", "go", go_facts(codecs=["fp32"])),
            ("upper", "go", go_facts(codecs=["fp32", "zip"])),
            ("upper", "go", {}),
            ("lower", "sum", sum_facts(compute_s=[math.nan])),
            ("lower", "sum", sum_facts(leaving=[])),
            ("lower", "sum", sum_facts(squared_norm="much")),
            ("lower", "sum", {}),
            ("lower", "fault", {"stage": 3, "seen_by": 0, "reason": "closed", "after_s": 0.0}),
            ("lower", "fault", {"stage": 1, "seen_by": 0, "reason": "bored", "after_s": 0.0}),
            ("lower", "evaluated", {"loss": "low"}),
        ],
    )
    def test_odd_facts(self, side: str, kind: str, facts: dict[str, object]) -> None:
        alone = Alone()
        alone.take_up()
        alone.compute()
        sent = len(alone.sent)
        assert alone.hear(side, kind, facts=facts) is None
        self.check(alone, side, "header")
        assert len(alone.sent) == sent

    @pytest.mark.parametrize(("stage", "seen_by"), [(0, 0), (1, 0), (2, 1), (2, 2), (2, 3)])
    def test_a_fault_that_its_sender_cannot_have_seen(self, stage: int, seen_by: int) -> None:
        alone = Alone(clients=(False,) * 4)
        alone.take_up()
        facts = Fault(stage=stage, seen_by=seen_by, reason="closed").to_facts()
        assert alone.hear("lower", "fault", facts=facts) is None
        self.check(alone, "lower", "header")
        assert alone.sent == []

    @pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, 2.0**50, "big"])
    def test_an_odd_loss_scale(self, scale: object) -> None:
        alone = Alone()
        alone.take_up()
        assert alone.forward(loss_scale=scale) is None
        self.check(alone, "upper", "header")
        assert alone.peer.worker.idle

    def test_tokens_beyond_the_vocabulary(self) -> None:
        alone = Alone()
        alone.take_up()
        frame = Frame(kind="forward", replica="p0", epoch=1)
        odd = BATCH[0].clone()
        odd[0, 0] = 31
        made = tensor_frame(frame, "fp32", torch.zeros(SHAPE), odd)
        for kind, facts in (("forward", {}), ("evaluate", {"round": 0})):
            alone.refused.clear()
            arrived = Arrived(alone.key("upper"), replace(made, kind=kind, facts=facts))
            assert alone.member.handle(arrived) is None
            self.check(alone, "upper", "values")

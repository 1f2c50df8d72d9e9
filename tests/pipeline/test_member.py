"""One member between its neighbours: what it dials, what it passes on, and what it refuses."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from dilocox.peer.training.inner_optimizer import InnerOptimizer
from dilocox.pipeline.activation_codec import tensor_frame
from dilocox.pipeline.frames import Frame
from dilocox.pipeline.link import Arrived, Broken, LinkFacts, LinkKey, Opened, Wake
from dilocox.pipeline.messages import (
    Dissolved,
    Evaluated,
    Fault,
    Ready,
    StageReport,
    Stepped,
    Totals,
)
from tests.pipeline.alone import BATCH, SHAPE, Alone, go_facts, sum_facts
from tests.pipeline.chains import SPEC


@pytest.fixture
def alone() -> Alone:
    """A member of stage 1 that was taken up into a replica of three."""
    alone = Alone()
    alone.take_up()
    return alone


class TestLinks:
    @pytest.mark.parametrize(
        ("clients", "upper", "lower"),
        [
            ((False, False, False), "expects", "dials"),
            ((True, False, False), "expects", "dials"),
            ((False, True, False), "dials", "dials"),  # it can only dial out
            ((False, False, True), "expects", "expects"),
            ((True, False, True), "expects", "expects"),
        ],
    )
    def test_who_can_be_dialled_is(self, clients: tuple[bool, ...], upper: str, lower: str) -> None:
        alone = Alone(clients=clients)
        alone.take_up(epoch=7)
        assert alone.asked == [
            (upper, LinkKey("p0", 7, 0, "upper"), "p0"),
            (lower, LinkKey("p0", 7, 1, "lower"), "p2"),
        ]

    def test_the_ends_of_the_chain_have_one_link(self) -> None:
        for stage, side in ((0, "lower"), (2, "upper")):
            alone = Alone(stage)
            alone.take_up()
            assert [key.side for _, key, _ in alone.asked] == [side]

    @pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (2, 1, 0)])
    def test_it_is_ready_when_its_links_stand_and_all_below_are(
        self, order: tuple[int, ...]
    ) -> None:
        alone = Alone()
        alone.take_up()
        steps = (
            lambda: alone.member.handle(Opened(alone.key("upper"))),
            lambda: alone.member.handle(Opened(alone.key("lower"))),
            lambda: alone.hear("lower", "ready"),
        )
        happened = [steps[number]() for number in order]
        assert happened == [None, None, Ready()]
        assert alone.kinds("upper") == ["ready"]

    def test_a_new_epoch_begins_from_nothing(self, alone: Alone) -> None:
        alone.hear("lower", "ready")
        alone.member.handle(Opened(alone.key("upper")))
        alone.forward()
        alone.member.work()
        alone.take_up(epoch=2, step=4)
        assert alone.peer.clean
        assert alone.member.step == 4
        opened = [alone.member.handle(Opened(alone.key(s, 2))) for s in ("upper", "lower")]
        assert opened == [None, None], "below is not known to be ready in this epoch"

    def test_what_comes_over_links_of_another_epoch_is_nothing(self) -> None:
        alone = Alone()
        alone.take_up(epoch=2)
        for side in ("upper", "lower"):
            key = alone.key(side, epoch=1)
            for message in (Opened(key), Broken(key, "closed", 0.0)):
                assert alone.member.handle(message) is None
            assert alone.member.handle(Arrived(key, Frame(kind="go"))) is None
        assert alone.member.handle(Wake()) is None
        assert not alone.sent
        assert not alone.refused


class TestFaults:
    def test_a_link_that_breaks_below_is_told_above(self) -> None:
        alone = Alone()
        alone.take_up()
        fault = alone.member.handle(Broken(alone.key("lower"), "silent", 5.0))
        assert fault == Fault(stage=2, seen_by=1, reason="silent", after_s=5.0)
        [(side, frame)] = alone.sent
        assert (side, frame.kind) == ("upper", "fault")
        assert Fault.from_facts(frame.facts, 3) == fault

    def test_one_that_breaks_above_cannot_be(self, alone: Alone) -> None:
        fault = alone.member.handle(Broken(alone.key("upper"), "closed", 1.0))
        assert fault == Fault(stage=0, seen_by=1, reason="closed", after_s=1.0)
        assert not alone.sent

    def test_a_fault_from_below_is_passed_on(self) -> None:
        alone = Alone(clients=(False,) * 4)
        alone.take_up()
        fault = Fault(stage=3, seen_by=2, reason="closed", after_s=0.5)
        assert alone.hear("lower", "fault", facts=fault.to_facts()) == fault
        assert alone.kinds("upper") == ["fault"]

    def test_a_replicas_end_is_passed_down(self) -> None:
        alone = Alone()
        alone.take_up()
        assert alone.hear("upper", "dissolve") == Dissolved()
        assert alone.kinds("lower") == ["dissolve"]
        assert alone.kinds("upper") == []


class TestTheInnerStep:
    def test_sums_go_up_once_all_below_have_them(self, alone: Alone) -> None:
        alone.compute()
        assert alone.kinds("lower") == ["forward"] * 2
        assert alone.kinds("upper") == ["gradient"] * 2
        assert alone.member.totals is None
        alone.measured = LinkFacts(round_trip_s=0.25, received_bytes_per_s=1e6)
        alone.member.leaving = alone.peer.anchor.undecided = True
        alone.hear("lower", "sum", facts=sum_facts())
        assert alone.kinds("upper") == ["gradient", "gradient", "sum"]
        totals = Totals.from_facts(alone.sent[-1][1].facts, 2)
        own = alone.peer.worker.squared_norm()
        assert own > 0
        assert totals.squared_norm == 4.0 + own
        assert totals.loss == 2.0
        mine, below = totals.reports
        assert below == StageReport(anchor_round=3, compute_s=0.5)
        assert mine == StageReport(
            anchor_round=0,
            compute_s=alone.peer.worker.compute_s,
            upper_bytes_per_s=1e6,
            lower_bytes_per_s=1e6,
            lower_round_trip_s=0.25,
            window=5,
            undecided=True,
            leaving=True,
        )

    def test_a_sum_that_comes_early_waits_for_the_stages_own(self, alone: Alone) -> None:
        alone.hear("lower", "sum", facts=sum_facts())
        assert alone.kinds("upper") == []
        alone.compute()
        assert alone.kinds("upper") == ["gradient", "gradient", "sum"]
        alone.hear("lower", "sum", facts=sum_facts())  # who says it for ever is no nearer the end
        assert alone.kinds("upper") == ["gradient", "gradient", "sum"]
        assert alone.refused == [("lower", "order")]

    def test_go_is_passed_down_and_taken_once(self, alone: Alone) -> None:
        alone.compute()
        alone.hear("lower", "sum", facts=sum_facts())
        before = alone.weights()
        stepped = alone.hear("upper", "go", facts=go_facts())
        assert stepped == Stepped(step=0, loss=2.0, skipped=False)
        assert alone.kinds("lower")[-1] == "go"
        after = alone.weights()
        assert not all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert alone.hear("upper", "go", facts=go_facts()) is None
        assert alone.refused == [("upper", "step")]
        assert all(torch.equal(a, b) for a, b in zip(alone.weights(), after, strict=True))
        # its codecs count from the next step on
        alone.forward(step=1)
        alone.member.work()
        assert alone.sent[-1][1].codec == "int8"

    @pytest.mark.parametrize(
        ("computed", "done", "takes"),
        [
            (True, (0, 0.5, 1e-2), True),
            (True, None, False),  # it is replayed
            (False, (0, 0.5, 1e-2), False),  # not by this one
            (True, (1, 0.5, 1e-2), False),
        ],
    )
    def test_a_missed_go_is_made_up_for_with_the_next_epoch(
        self, computed: bool, done: tuple[int, float, float] | None, takes: bool
    ) -> None:
        missed, heard = Alone(), Alone()
        for alone in (missed, heard):
            alone.take_up()
            if computed:
                alone.compute()
        before = missed.weights()
        stepped = missed.take_up(epoch=2, step=2, done=done)
        assert (stepped is not None) == takes
        if computed:
            heard.hear("upper", "go", facts=go_facts())
        expected = heard.weights() if takes else before
        assert all(torch.equal(a, b) for a, b in zip(missed.weights(), expected, strict=True))
        assert missed.peer.clean
        assert missed.member.step == 2

    def test_not_in_another_replica(self) -> None:
        alone = Alone()
        alone.take_up()
        alone.compute()
        alone.member.end()
        assert alone.peer.clean
        assert alone.take_up(epoch=2, step=1, done=(0, 0.5, 1e-2)) is None


class TestEvaluating:
    def test_windows_go_down_and_losses_up(self, alone: Alone) -> None:
        frame = Frame(kind="evaluate", replica="p0", epoch=1, microbatch=5, facts={"round": 0})
        made = tensor_frame(frame, "fp32", torch.randn(SHAPE), BATCH[0])
        assert alone.member.handle(Arrived(alone.key("upper"), made)) is None
        [(side, passed)] = alone.sent
        assert (side, passed.kind, passed.microbatch) == ("lower", "evaluate", 5)
        assert (passed.codec, passed.facts) == ("fp32", {"round": 0})
        alone.sent.clear()
        told = alone.hear("lower", "evaluated", microbatch=5, facts={"loss": 3.5})
        assert told == Evaluated(batch=5, loss=3.5)
        assert [(to, f.microbatch, f.facts) for to, f in alone.sent] == [
            ("upper", 5, {"loss": 3.5})
        ]

    @pytest.mark.parametrize("facts", [{"round": 1}, {}, {"round": "0"}])
    def test_of_another_round_it_answers_that_there_is_none(
        self, alone: Alone, facts: dict[str, object]
    ) -> None:
        frame = Frame(kind="evaluate", replica="p0", epoch=1, microbatch=5, facts=facts)
        made = tensor_frame(frame, "fp32", torch.randn(SHAPE), BATCH[0])
        assert alone.member.handle(Arrived(alone.key("upper"), made)) is None
        [(side, answer)] = alone.sent
        assert (side, answer.kind, answer.facts) == ("upper", "evaluated", {"loss": None})
        assert alone.hear("lower", "evaluated", facts={"loss": None}) == Evaluated(
            batch=0, loss=None
        )


def test_outside_of_a_replica_it_has_nothing_to_say() -> None:
    alone = Alone()
    with pytest.raises(RuntimeError, match="outside of a replica"):
        alone.member.dissolve()
    assert not alone.member.work()
    alone.member.end()
    assert alone.member.handle(Opened(alone.key("upper"))) is None


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
        ("side", "kind"),
        [
            *(("upper", kind) for kind in ("gradient", "sum", "ready", "fault", "evaluated")),
            *(("lower", kind) for kind in ("forward", "go", "evaluate", "dissolve")),
            *((side, kind) for side in ("upper", "lower") for kind in ("hello", "yes")),
        ],
    )
    def test_what_comes_from_the_other_side_only(self, alone: Alone, side: str, kind: str) -> None:
        assert alone.hear(side, kind) is None
        self.check(alone, side, "kind")

    def test_go_before_all_gradients(self, alone: Alone) -> None:
        alone.forward()
        alone.member.work()
        before = alone.weights()
        assert alone.hear("upper", "go", facts=go_facts()) is None
        self.check(alone, "upper", "order")
        assert all(torch.equal(a, b) for a, b in zip(alone.weights(), before, strict=True))
        assert alone.kinds("lower") == ["forward"]

    @pytest.mark.parametrize("microbatch", [0, 2])
    def test_a_microbatch_twice_or_one_too_many(self, alone: Alone, microbatch: int) -> None:
        alone.forward()
        alone.forward(microbatch)
        self.check(alone, "upper", "order")

    def test_a_gradient_that_nobody_waits_for(self, alone: Alone) -> None:
        alone.forward()
        alone.gradient()
        self.check(alone, "lower", "order")

    @pytest.mark.parametrize(
        ("side", "kind", "facts"),
        [
            ("upper", "go", go_facts(codecs=("fp32",))),
            ("upper", "go", {}),
            ("lower", "sum", sum_facts(leaving=())),
            ("lower", "sum", {}),
            ("lower", "fault", {"stage": 3, "seen_by": 0, "reason": "closed", "after_s": 0.0}),
            ("lower", "evaluated", {"loss": "low"}),
        ],
    )
    def test_odd_facts(self, alone: Alone, side: str, kind: str, facts: dict[str, object]) -> None:
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

    def test_of_a_fault_that_it_passes_on_only_what_it_knows(self) -> None:
        """Unknown facts grew in the next header, and one that was too long ended the process."""
        alone = Alone(clients=(False,) * 4)
        alone.take_up()
        facts = Fault(stage=3, seen_by=2, reason="silent").to_facts()
        alone.hear("lower", "fault", facts={**facts, "more": [[0.5] * 256] * 19})
        [(side, frame)] = alone.sent
        assert (side, frame.facts) == ("upper", facts)

    def test_more_evaluations_than_any_head_asks_for(self, alone: Alone) -> None:
        """Each that was not taken below lay in memory, eight times as large as it came."""
        for number in range(20):
            alone.evaluate(number)
            if alone.refused:
                break
        assert alone.refused == [("upper", "flood")]
        assert len(alone.sent) < 20

    @pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, 2.0**50, "big"])
    def test_an_odd_loss_scale(self, scale: object) -> None:
        alone = Alone()
        alone.take_up()
        assert alone.forward(loss_scale=scale) is None
        self.check(alone, "upper", "header")
        assert alone.peer.worker.idle

    def test_tokens_beyond_the_vocabulary(self, alone: Alone) -> None:
        frame = Frame(kind="forward", replica="p0", epoch=1)
        odd = BATCH[0].clone()
        odd[0, 0] = 31
        made = tensor_frame(frame, "fp32", torch.zeros(SHAPE), odd)
        for kind, facts in (("forward", {}), ("evaluate", {"round": 0})):
            alone.refused.clear()
            arrived = Arrived(alone.key("upper"), replace(made, kind=kind, facts=facts))
            assert alone.member.handle(arrived) is None
            self.check(alone, "upper", "values")


def test_a_head_that_feeds_more_than_it_was_told_to_takes_no_memory(alone: Alone) -> None:
    alone.member.window_limit = lambda: 1
    alone.forward(0)
    alone.forward(1)
    assert alone.member.work()
    assert not alone.member.work(), "its gradient is to come first"
    alone.gradient(0)
    assert alone.member.work() and alone.member.work()
    assert alone.kinds("lower") == ["forward", "forward"]


def test_more_than_its_head_may_have_in_flight_is_not_kept() -> None:
    alone = Alone(first_window=1)
    alone.member.window_limit = lambda: 1
    alone.take_up()
    alone.forward(0)
    assert not alone.refused
    alone.forward(1)
    assert alone.refused == [("upper", "flood")]


def test_without_a_scale_of_its_head_it_has_none_of_its_own(alone: Alone) -> None:
    """One of exactly 1 is not sent, and a fresh member scaled by 65,536."""
    spec = replace(SPEC, precision="fp16")
    optimizer = InnerOptimizer(alone.peer.module.named_parameters(), spec)
    alone.member.worker.optimizer = optimizer
    alone.forward(0)
    assert optimizer.loss_scale == 1.0

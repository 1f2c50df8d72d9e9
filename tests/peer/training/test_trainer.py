"""The training loop: what comes when, for a head and for any other member alike."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from dilocox.dht.errors import EnvironmentFault, UnreadableManifest
from dilocox.peer.averaging.averager import AveragerStuck
from dilocox.peer.averaging.coordinator import ChildDied
from dilocox.peer.training import roles
from dilocox.peer.training.loop import Learner, Move, Revised
from dilocox.peer.training.offload import gpu_memory
from dilocox.peer.training.roles import Leading


class Script:
    """Learner and role in one: notes what is called; `turns` says what happens in each turn."""

    def __init__(self, *turns: Callable[[], None]):
        self.calls: list[str] = []
        self.turns = deque(turns)
        self.between_steps = True
        self.ended = False

    def turn(self) -> None:
        self.calls.append("turn")
        self.turns.popleft()()

    def let_go(self) -> None:
        self.calls.append("let go")

    def release(self, *, ended: bool) -> None:
        self.calls.append(f"release ended={ended}")

    @property
    def learner(self) -> Learner:
        def leave(*, ended: bool) -> None:
            self.calls.append(f"leave ended={ended}")

        noted: Any = SimpleNamespace(
            join=lambda: self.calls.append("join"),
            between_steps=lambda: self.calls.append("between"),
            leave=leave,
            keep=lambda: self.calls.append("keep"),
        )
        return noted


@pytest.fixture
def stop() -> threading.Event:
    return threading.Event()


def train(script: Script, stop: threading.Event) -> list[str]:
    try:
        roles.train(script.learner, cast("Leading", script), stop)
    finally:
        assert not script.turns, "it ended too early"
    return script.calls


def nothing() -> None:
    pass


def test_records_and_sends_come_between_turns_until_it_is_told_to_stop(
    stop: threading.Event,
) -> None:
    script = Script(nothing, stop.set)
    assert train(script, stop) == [
        "join",
        "between",
        "turn",
        "between",
        "turn",
        "release ended=False",
        "leave ended=False",
    ]


def test_within_an_inner_step_nothing_is_merged(stop: threading.Event) -> None:
    script = Script()

    def within(*, step: bool) -> Callable[[], None]:
        return lambda: setattr(script, "between_steps", not step)

    script.turns.extend([within(step=True), nothing, within(step=False), stop.set])
    calls = train(script, stop)
    assert calls[1:-2] == ["between", "turn", "turn", "turn", "between", "turn"]


def test_it_ends_when_there_is_nothing_more_to_do(stop: threading.Event) -> None:
    script = Script(nothing)
    script.turns.append(lambda: setattr(script, "ended", True))
    assert train(script, stop)[-3:] == ["turn", "release ended=True", "leave ended=True"]


def test_a_stop_before_training_still_leaves_in_order(stop: threading.Event) -> None:
    stop.set()
    assert train(Script(), stop) == ["join", "release ended=False", "leave ended=False"]


@pytest.mark.parametrize("why", [Move(2), Revised(), UnreadableManifest("update dilocox")])
def test_who_cannot_stay_as_it_is_leaves_with_all_on_disk_and_then_says_why(
    why: Exception, stop: threading.Event
) -> None:
    def ends() -> None:
        raise why

    script = Script(nothing, ends)
    with pytest.raises(type(why)) as said:
        train(script, stop)
    assert said.value is why
    assert script.calls[-2:] == ["release ended=False", "leave ended=False"]


def test_a_failure_is_raised_at_once(stop: threading.Event) -> None:
    def fails() -> None:
        raise RuntimeError("the averaging process has died")

    script = Script(fails)
    with pytest.raises(RuntimeError, match="has died"):
        train(script, stop)
    assert script.calls == ["join", "between", "turn"]


@pytest.mark.parametrize(
    "why", [ChildDied("p2pd is gone"), AveragerStuck("no answer"), EnvironmentFault("no hub")]
)
def test_what_fails_beside_the_training_costs_nothing_that_was_learnt(
    why: Exception, stop: threading.Event
) -> None:
    def fails() -> None:
        raise why

    script = Script(fails)
    with pytest.raises(type(why)):
        train(script, stop)
    assert script.calls[-2:] == ["let go", "keep"]


@pytest.mark.parametrize("words", ["CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED"])
def test_other_errors_of_a_full_gpu_are_known(words: str) -> None:
    with pytest.raises(EnvironmentFault, match="no memory left"), gpu_memory([]):
        raise RuntimeError(words)
    with pytest.raises(RuntimeError, match="another"), gpu_memory([]):
        raise RuntimeError("another fault")


@pytest.mark.parametrize("untried", [[], ["--recompute"], ["--recompute", "--offload"]])
def test_a_gpu_without_memory_ends_the_peer_in_one_line_and_writes_nothing_of_the_step(
    untried: list[str], stop: threading.Event
) -> None:
    def full() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 ...")

    script = Script(full)
    with pytest.raises(EnvironmentFault) as said, gpu_memory(untried):
        train(script, stop)
    assert script.calls == ["join", "between", "turn"]  # neither a release nor a snapshot
    [line] = str(said.value).splitlines()
    assert "--device cpu" in line
    assert all(option in line for option in untried)
    assert ("start with" in line) is bool(untried)

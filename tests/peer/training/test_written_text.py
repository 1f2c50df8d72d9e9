"""What a model writes now, in one line for people: from held-out text, in little time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from dilocox.peer.training import data as data_module
from dilocox.peer.training import report
from dilocox.peer.training.data import PROMPT_TOKENS, WRITTEN_TOKENS, open_tokenizer, written_text
from tests.clocks import TestClock
from tests.peer.loops import Loop

BYTES = open_tokenizer("byt5")
TEXT = b"import sys\n\x1b[2J def main(" + b"x" * 400


def windows_of(text: bytes, length: int) -> Tensor:
    return torch.from_numpy(BYTES.encode(text)[:length].astype("int64"))[None]


def always(letter: str) -> Tensor:
    logits = torch.full((384,), -1e4)
    logits[ord(letter) + 3] = 0.0
    return logits


def test_the_beginning_of_a_held_out_window_is_continued() -> None:
    seen: list[int] = []

    def next_logits(ids: Tensor) -> Tensor:
        seen.append(ids.shape[1])
        return always("a")

    text = written_text(next_logits, BYTES, windows_of(TEXT, 300))
    assert text == f'"import sys [2J def main" with "{48 * "a"}"'
    assert seen == list(range(PROMPT_TOKENS, PROMPT_TOKENS + WRITTEN_TOKENS))


def test_no_more_is_written_than_a_window_has_room_for() -> None:
    text = written_text(lambda _: always("b"), BYTES, windows_of(TEXT, 9))
    assert text == '"impo" with "bbbbb"'


def test_a_slow_model_writes_less_and_one_that_is_not_finite_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = TestClock()
    monkeypatch.setattr(data_module, "time", clock)

    def slow(_: Tensor) -> Tensor:
        clock.now += 1.0
        return always("a")

    assert written_text(slow, BYTES, windows_of(TEXT, 300)).endswith('with "aaa"')
    broken = torch.full((384,), torch.nan)
    assert written_text(lambda _: broken, BYTES, windows_of(TEXT, 300)).endswith('with ""')


def test_a_peer_says_every_hundred_rounds_what_it_gave_and_what_the_model_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "CONTRIBUTION_EVERY", 2)
    loop = Loop(tmp_path)
    loop.meter.start()
    loop.meter.sample = lambda: '"def" with "ault"'
    for number in range(3):
        loop.end_round(2, number=number)
        loop.own_record()
        loop.learner.between_steps()
    (told,) = loop.events("gave")
    assert (told["rounds"], told["tokens"], told["of_tokens"]) == (2, 64, 400)
    assert told["sample"] == '"def" with "ault"'
    loop.stop.set()  # Ctrl-C
    loop.learner.leave(ended=False)
    assert [each["rounds"] for each in loop.events("gave")] == [2, 3]


def test_a_peer_that_starts_again_at_once_or_gave_nothing_says_nothing(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.meter.start()
    loop.stop.set()
    loop.learner.leave(ended=False)
    loop.stop.clear()
    loop.end_round(2)
    loop.own_record()
    loop.learner.between_steps()
    loop.learner.leave(ended=False)
    assert loop.events("gave") == []

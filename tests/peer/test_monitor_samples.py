"""What a monitor asks the model for people: when, within which bounds, and what it keeps of it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dilocox.dht.manifest import Manifest
from dilocox.dht.manifest_revisions import in_state
from dilocox.peer.monitor.samples import MAX_TEXT, Sampler
from tests.dht.processes import wait_until
from tests.peer.fabricated import INVITE, NOW, RUN, ToldSwarm, manifest_of

PROMPT = "--once <b>upon</b>"
ANSWER = 'import sys; print("a warning"); print(sys.argv[-1] + " a time\\x1b[31m\\nthere was")'
MANIFEST = manifest_of(1, samples={"prompt": PROMPT, "every": 10, "tokens": 5})


class Asked:
    """A sampler whose children are this program in place of dilocox."""

    def __init__(self, folder: Path, program: str, *, parameters: int | None = 7):
        # it stands where `python -m dilocox` does, and has the arguments that this would have
        python = (sys.executable, "-c", program)
        self.sampler = Sampler(INVITE, folder, RUN, python=python, share=1.0, first_s=0.0)
        if parameters is not None:
            self.sampler.kept.parameters = parameters

    def until_asked(self, manifest: Manifest, number: int, answers: int) -> None:
        def there() -> bool:
            self.sampler.turn(manifest, number, 1000 * number, NOW)
            return len(self.sampler.rows(manifest.samples.prompt)) == answers

        wait_until(there, 30)

    def rounds(self) -> list[int]:
        return [row.round for row in self.sampler.rows(PROMPT)]


@pytest.fixture
def asked(tmp_path: Path) -> Iterator[Asked]:
    made = Asked(tmp_path, ANSWER)
    yield made
    made.sampler.close()


def test_what_the_model_writes_is_kept_for_the_next_start(asked: Asked, tmp_path: Path) -> None:
    asked.until_asked(MANIFEST, 3, 1)
    (row,) = asked.sampler.rows(PROMPT)
    assert (row.round, row.tokens, row.at) == (3, 3000, NOW)
    assert row.text == " a time [31m\nthere was", "lines stay, what steers a terminal does not"
    again = Sampler(INVITE, tmp_path, RUN)
    assert again.rows(PROMPT) == [row] and again.kept.parameters == 7


def test_it_asks_again_only_after_so_many_rounds_and_once_at_the_end(asked: Asked) -> None:
    asked.until_asked(MANIFEST, 3, 1)
    asked.sampler.turn(MANIFEST, 12, 0, NOW)
    asked.until_asked(MANIFEST, 13, 2)
    assert asked.rounds() == [13, 3]
    asked.until_asked(in_state(MANIFEST, "ended"), 14, 3)
    assert asked.rounds() == [14, 13, 3]


def test_samples_of_rounds_that_the_operator_set_aside_go(asked: Asked) -> None:
    asked.until_asked(MANIFEST, 40, 1)
    asked.sampler.turn(MANIFEST, 2, 0, NOW)
    assert asked.rounds() == []


def test_another_prompt_begins_anew(asked: Asked) -> None:
    asked.until_asked(MANIFEST, 3, 1)
    other = replace(MANIFEST, samples=replace(MANIFEST.samples, prompt="other"))
    assert asked.sampler.rows("other") == []
    asked.until_asked(other, 4, 1)


def test_an_endless_answer_is_cut(tmp_path: Path) -> None:
    asked = Asked(tmp_path, 'import sys; print(sys.argv[-1] + "x" * 10**6)')
    asked.until_asked(MANIFEST, 3, 1)
    assert len(asked.sampler.rows(PROMPT)[0].text) == MAX_TEXT


def test_without_a_prompt_nobody_asks(tmp_path: Path) -> None:
    asked = Asked(tmp_path, f'open({str(tmp_path / "ran")!r}, "w")')
    for _ in range(3):
        asked.sampler.turn(manifest_of(1), 5, 0, NOW)
    asked.sampler.close()
    assert not (tmp_path / "ran").exists()


def test_one_that_fails_is_no_sample_and_costs_no_more_than_its_share(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    program = f'open({str(ran)!r}, "a").write("x"); raise SystemExit("no anchors")'
    sampler = Sampler(INVITE, tmp_path, RUN, python=(sys.executable, "-c", program), first_s=0.0)
    sampler.kept.parameters = 7

    def there() -> bool:
        sampler.turn(MANIFEST, 3, 0, NOW)
        return ran.exists() and ran.read_text() == "x"

    wait_until(there, 30)
    for _ in range(20):
        sampler.turn(MANIFEST, 3, 0, NOW)
    sampler.close()
    assert ran.read_text() == "x" and sampler.rows(PROMPT) == []


def test_the_parameters_of_the_model_are_counted_first(tmp_path: Path) -> None:
    asked = Asked(tmp_path, "print(51790336)", parameters=None)

    def there() -> bool:
        asked.sampler.turn(manifest_of(1), None, 0, NOW)
        return asked.sampler.kept.parameters is not None

    wait_until(there, 30)
    assert asked.sampler.kept.parameters == 51790336


def test_the_page_gets_the_newest_samples_and_some_older_ones(asked: Asked) -> None:
    asked.until_asked(MANIFEST, 1, 1)
    first = asked.sampler.rows(PROMPT)[0]
    rows = [replace(first, round=number) for number in range(40, 0, -1)]
    swarm = ToldSwarm(stages=1)
    seen = replace(swarm.seen(swarm.look()), samples=rows)
    from dilocox.peer.monitor.status import status_of

    assert [row["round"] for row in status_of(seen)["samples"]] == [40, 39, 38, 36, 32, 24, 8, 1]

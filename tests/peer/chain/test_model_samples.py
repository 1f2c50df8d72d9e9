"""What a bootstrap asks the model for people: when, within which bounds, and what is kept of it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dilocox.dht.manifest import Manifest
from dilocox.dht.manifest_revisions import back_to, in_state
from dilocox.peer.chain import model_samples as samples
from dilocox.peer.chain.model_samples import Sampler
from dilocox.peer.chain.round_history import (
    MAX_LETTERS,
    HistoryRow,
    ModelSample,
    RoundHistory,
    parsed_sample,
)
from dilocox.peer.os_process import Child, start_process
from tests.clocks import TestClock
from tests.dht.processes import wait_until
from tests.peer.fabricated import INVITE, NOW, ToldSwarm, digest, manifest_of

PROMPT = "--once <b>upon</b>"
ANSWER = 'import sys; p = sys.argv[-1]; print("of", p); print(p + " a time\\x1b[31m\\nthere was")'
MANIFEST = manifest_of(1, samples={"prompt": PROMPT, "every": 10, "tokens": 5})


class Asked:
    """A sampler whose children run this program in place of dilocox, and the history it fills."""

    def __init__(self, folder: Path, program: str, *, share: float = 1.0):
        # it gets the arguments that `python -m dilocox` would get
        python = (sys.executable, "-c", program)
        self.history = RoundHistory(folder / "history.jsonl", MANIFEST)
        self.sampler = Sampler(INVITE, folder / "said.log", self.history, python, share)

    def commit(self, number: int) -> None:
        self.history.add(HistoryRow(number, 0, digest(0, number)[:16], NOW, 1000))

    def turn(self, manifest: Manifest = MANIFEST, now: float = NOW) -> None:
        self.sampler.turn(manifest, now)

    def until_asked(self, number: int, manifest: Manifest = MANIFEST) -> None:
        """Commit this round, and ask until there is an answer of it."""
        self.commit(number)

        def there() -> bool:
            self.turn(manifest)
            newest = self.history.newest_sample(manifest.samples.prompt)
            return newest is not None and newest.round == number

        wait_until(there, 30)

    @property
    def rounds(self) -> list[int]:
        return [each.round for each in self.history.samples()]


@pytest.fixture
def asked(tmp_path: Path) -> Iterator[Asked]:
    made = Asked(tmp_path, ANSWER)
    yield made
    made.sampler.close()


def test_what_the_model_writes_is_kept_for_the_next_start(asked: Asked, tmp_path: Path) -> None:
    asked.until_asked(3)
    (row,) = asked.history.samples()
    assert (row.round, row.tokens, row.at) == (3, 1000, NOW)
    assert row.text == " a time [31m\nthere was", "lines stay, what steers a terminal does not"
    again = RoundHistory(tmp_path / "history.jsonl", MANIFEST)
    assert again.samples() == [row] and [each.round for each in again.rows()] == [3]


def test_it_asks_again_only_after_so_many_rounds_and_once_at_the_end(asked: Asked) -> None:
    asked.until_asked(3)
    asked.commit(12)
    asked.turn()
    asked.until_asked(13)
    assert asked.rounds == [3, 13]
    asked.until_asked(14, in_state(MANIFEST, "ended"))
    assert asked.rounds == [3, 13, 14]


def test_the_last_round_of_all_tokens_is_asked_of_too(asked: Asked) -> None:
    manifest = replace(MANIFEST, end_tokens=1000)
    asked.until_asked(3, manifest)
    asked.until_asked(4, manifest)
    assert asked.rounds == [3, 4]


def test_an_answer_of_blanks_is_one_and_one_without_the_prompt_is_none(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    blank = Asked(tmp_path, "import sys; print(sys.argv[-1] + '   ')")
    blank.until_asked(3)
    assert [each.text for each in blank.history.samples()] == [""]
    (tmp_path / "other").mkdir()
    other = Asked(tmp_path / "other", f"open({str(ran)!r}, 'a').write('x'); print('hello')")
    other.commit(3)
    wait_until(lambda: other.turn() or ran.exists(), 30)
    other.commit(13)
    wait_until(lambda: other.turn() or len(ran.read_text()) > 1, 30)
    other.sampler.close()
    assert other.rounds == []


def test_what_a_child_leaves_behind_goes_with_it(tmp_path: Path) -> None:
    places = tmp_path / "places"
    program = (
        "import os, signal, tempfile; "
        f"open({str(places)!r}, 'a').write(tempfile.mkdtemp() + chr(10)); "
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    asked = Asked(tmp_path, program)
    asked.commit(3)

    def gone() -> bool:
        asked.turn()
        written = places.read_text().splitlines() if places.exists() else []
        return bool(written) and not Path(written[0]).exists()

    wait_until(gone, 30)
    asked.sampler.close()


def test_samples_of_rounds_that_the_operator_set_aside_do_not_count(asked: Asked) -> None:
    for number in (0, 40):
        asked.until_asked(number)
    asked.history.revise(back_to(MANIFEST, 2, [digest(0, 2)]))
    assert asked.rounds == [0]


def test_samples_of_rounds_that_do_not_count_any_more_go(tmp_path: Path) -> None:
    kept = RoundHistory(tmp_path / "history.jsonl", MANIFEST)
    for number in range(4):
        kept.add(HistoryRow(number, 0, digest(0, number)[:16], NOW, 1000))
        kept.keep_sample(ModelSample(number, 0, 100, NOW, PROMPT, " upon"))
    kept.add(HistoryRow(2, 0, "f" * 16, NOW, 1000))  # the archive has changed to another chain
    assert [each.round for each in kept.samples()] == [0, 1]
    kept.revise(back_to(MANIFEST, 0, [digest(0, 0)]))
    kept.keep_sample(ModelSample(1, 1, 100, NOW, PROMPT, " again"))
    assert [(each.round, each.rules) for each in kept.samples()] == [(0, 0), (1, 1)]


def test_a_sample_of_a_newer_version_with_a_column_more_is_read() -> None:
    made = ModelSample(1, 0, 100, NOW, PROMPT, " upon")
    assert parsed_sample([*made, "more"]) == made


def test_another_prompt_begins_anew(asked: Asked) -> None:
    asked.until_asked(3)
    other = replace(MANIFEST, samples=replace(MANIFEST.samples, prompt="other"))
    asked.until_asked(4, other)
    assert asked.rounds == [3, 4]


def test_an_endless_answer_is_cut(tmp_path: Path) -> None:
    asked = Asked(tmp_path, 'import sys; print(sys.argv[-1] + "x" * 10**6)')
    asked.until_asked(3)
    assert len(asked.history.samples()[0].text) == MAX_LETTERS


def test_without_a_prompt_nobody_asks(tmp_path: Path) -> None:
    asked = Asked(tmp_path, f'open({str(tmp_path / "ran")!r}, "w")')
    asked.commit(3)
    for _ in range(3):
        asked.turn(manifest_of(1))
    asked.sampler.close()
    assert not (tmp_path / "ran").exists()


def test_one_that_fails_is_no_sample_and_tried_again_only_when_the_next_one_is_due(
    tmp_path: Path,
) -> None:
    ran = tmp_path / "ran"
    program = (
        "import sys; archive = '--archive-first' in sys.argv; "
        f'open({str(ran)!r}, "a").write("av"[not archive]); raise SystemExit("no anchors")'
    )
    asked = Asked(tmp_path, program)

    def after(number: int, rules: int = 0) -> str:
        """What has run soon after this round."""
        asked.history.add(HistoryRow(number, rules, digest(0, number)[:16], NOW, 1000))
        for _ in range(50):
            asked.turn(in_state(MANIFEST, "paused"))
            time.sleep(0.02)
        return ran.read_text() if ran.exists() else ""

    asked.commit(3)
    wait_until(lambda: asked.turn() or ran.exists(), 30)
    assert after(12) == "a", "from the archive here, whose bytes cost no volunteer's line"
    asked.commit(13)
    wait_until(lambda: asked.turn() or ran.read_text() == "aa", 30)
    assert after(14) == "aa"
    back = back_to(MANIFEST, 3, [digest(0, 3)])
    asked.history.revise(back)
    assert after(4, back.rules) == "aaa", "of what was set aside nothing counts"
    asked.sampler.close()
    assert asked.rounds == []


@pytest.mark.parametrize("ended", [True, False])
def test_the_finished_models_that_fails_is_tried_again_after_a_while(
    tmp_path: Path, ended: bool
) -> None:
    """No round comes any more with which the next one would be due."""
    ran, manifest = tmp_path / "ran", in_state(MANIFEST, "ended" if ended else "running")
    asked = Asked(tmp_path, f'open({str(ran)!r}, "a").write("x"); raise SystemExit("no anchors")')

    def at(now: float) -> int:
        """How many have run soon after that."""
        for _ in range(50):
            asked.turn(manifest, now)
            time.sleep(0.02)
        return len(ran.read_text())

    asked.commit(3)
    wait_until(lambda: asked.turn(manifest) or ran.exists(), 30)
    assert at(NOW + samples.LAST_AGAIN_S - 1) == 1
    later = NOW + samples.LAST_AGAIN_S + 1
    if ended:
        wait_until(lambda: asked.turn(manifest, later) or len(ran.read_text()) == 2, 30)
    assert at(later + samples.LAST_AGAIN_S - 1) == 1 + ended
    asked.sampler.close()


@pytest.mark.parametrize(
    ("burnt_s", "waited_s", "rest_s"),
    [
        pytest.param(0.0, 600, (10, 20), id="the time for which a busy machine lets it wait"),
        pytest.param(1.5, 0, (20, 60), id="what it computed"),
    ],
)
def test_its_share_is_of_processor_seconds(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    burnt_s: float,
    waited_s: float,
    rest_s: tuple[float, float],
) -> None:
    clock, started = TestClock(), list[Child]()

    def start(*given: Any, **named: Any) -> Child:
        started.append(start_process(*given, **named))
        return started[-1]

    monkeypatch.setattr(samples, "time", clock)
    monkeypatch.setattr(samples, "start_process", start)
    burn = f"import time\nwhile time.process_time() < {burnt_s}: pass\n"
    asked = Asked(tmp_path, burn + ANSWER, share=0.05)
    clock.now += 20
    asked.commit(3)
    asked.turn()
    clock.now += waited_s
    wait_until(lambda: asked.turn() or asked.rounds, 30)
    asked.commit(30)
    least, most = rest_s
    clock.now += least
    asked.turn()
    assert len(started) == 1, "another one would be more than its share"
    clock.now += most - least
    asked.turn()
    assert len(started) == 2
    asked.sampler.close()


def test_a_child_is_what_a_system_without_memory_ends_first(tmp_path: Path) -> None:
    output = tmp_path / "said"
    command = (*samples.QUIET, "-c", "print(open('/proc/self/oom_score_adj').read())")
    child = start_process(command, output, env={})
    child.wait(30)
    assert (child.returncode, output.read_text().strip()) == (0, "1000")


def test_the_page_gets_the_newest_samples_and_some_older_ones() -> None:
    swarm = ToldSwarm(stages=1)
    swarm.manifest = MANIFEST
    for number in range(40):
        swarm.history.samples_told[number] = ModelSample(number, 0, 0, NOW, PROMPT, "text")
    status = swarm.status(swarm.look())
    assert [row["round"] for row in status["samples"]] == [39, 38, 37, 35, 31, 23, 7, 0]

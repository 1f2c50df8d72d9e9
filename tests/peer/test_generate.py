"""`dilocox generate`: which weights it takes, what it keeps, what it says when there are none."""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dilocox.dht import join
from dilocox.dht.errors import EnvironmentFault, InvalidInput
from dilocox.dht.invite import Invite
from dilocox.dht.records import ClaimRecord, claim_key
from dilocox.peer.chain import download as download_module
from dilocox.peer.commands import export, generate
from dilocox.peer.commands.generate import (
    is_newest,
    newest_claim,
    run_generate_command,
)
from dilocox.peer.options import GenerateOptions
from tests.peer.fabricated import claim_record, manifest_of
from tests.peer.test_cli import INVITE

RUN = Invite.parse(INVITE).run_id


# ---- whether what is there will do ---------------------------------------------------------------
@pytest.mark.parametrize(
    ("newest", "current"),
    [
        ([(4, "a4"), (4, "b4")], True),
        ([(5, "a5"), (4, "b4")], True),  # stage 1 is not there yet: 4 is what they have in common
        ([(5, "a5"), (5, "b5")], False),
        ([(4, "a4"), (4, "fork")], False),
        ([(4, "fork"), (5, "b5")], False),
        ([(3, "a3"), (4, "b4")], False),  # the run went back
        ([(4, "a4")], False),
    ],
)
def test_kept_weights_will_do_while_they_are_of_the_newest_round_of_all_stages(
    newest: list[tuple[int, str]], current: bool
) -> None:
    claims = [claim_record(number, digest) for number, digest in newest]
    assert is_newest([(4, "a4"), (4, "b4")], claims) == current


def test_the_newest_claim_is_that_of_the_longest_chain() -> None:
    claims = {
        "new": claim_record(-1, "root"),
        "behind": claim_record(3, "three", 900),
        "light": claim_record(4, "fork", 300),
        "heavy": claim_record(4, "four", 400),
    }
    assert newest_claim(claims) == claims["heavy"]
    assert newest_claim({"new": claims["new"]}) is None


# ---- the command, with a swarm that is only told -------------------------------------------------
@dataclass
class Anchor:
    digest: str


class Told:
    """A run of two stages; `downloads` counts what was fetched, `texts` is what was continued."""

    def __init__(self) -> None:
        self.claims: dict[int, dict[str, ClaimRecord]] = {0: {}, 1: {}}
        self.manifest = manifest_of(2)
        self.downloads = 0
        self.texts: list[tuple[Path, tuple[Any, ...], dict[str, Any]]] = []

    @contextmanager
    def joined(self, *_: Any, **__: Any) -> Generator[Any]:
        keys = {claim_key(RUN, stage): claims for stage, claims in self.claims.items()}
        swarm = SimpleNamespace(read_many=lambda wanted: {key: keys[key] for key in wanted})
        yield SimpleNamespace(run=RUN, manifest=self.manifest, swarm=swarm)

    def commit(self, number: int) -> None:
        for stage, claims in self.claims.items():
            claims["peer"] = claim_record(number, f"{stage}.{number}")

    def download(self, _place: Any, *, timeout_s: float) -> list[Anchor]:
        self.downloads += 1
        return [Anchor(claims["peer"].digest) for claims in self.claims.values()]

    def write(self, folder: Path, _place: Any, anchors: list[Anchor]) -> None:
        folder.mkdir(parents=True)
        number = int(anchors[0].digest.partition(".")[2])
        stages = [{"round": number, "digest": each.digest} for each in anchors]
        (folder / "dilocox.json").write_text(json.dumps({"stages": stages}))

    def continue_text(self, folder: Path, *given: Any, **named: Any) -> str:
        self.texts.append((folder, given, named))
        named["tell"](" the end")
        return " the end"


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    swarm = Told()
    monkeypatch.setattr(generate, "LOOK_LIMIT_S", 0.05)
    monkeypatch.setattr(generate, "LOOK_PAUSE_S", 0.01)
    monkeypatch.setattr(join, "join_run", swarm.joined)
    monkeypatch.setattr(download_module, "download_anchors", swarm.download)
    monkeypatch.setattr(export, "write_anchors", swarm.write)
    monkeypatch.setattr(export, "continue_text", swarm.continue_text)
    return swarm


def run(cache: Path, text: str = "once", seed: int | None = 5) -> int:
    options = GenerateOptions(
        invite=Invite.parse(INVITE),
        text=text,
        tokens=None,
        temperature=0.5,
        seed=seed,
        cache=cache,
        host="127.0.0.1",
        timeout_s=5.0,
    )
    return run_generate_command(options)


def test_a_round_is_downloaded_once_and_two_of_them_are_kept(
    told: Told, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told.commit(4)
    for _ in range(2):
        assert run(tmp_path) == 0
    assert told.downloads == 1
    told_people = capsys.readouterr()
    assert told_people.out == 2 * "once the end\n"
    assert told_people.err == 2 * f"looking for the run {RUN} ...\n"
    assert told.texts[0][0] == told.texts[1][0]
    for number in (5, 6):
        told.commit(number)
        assert run(tmp_path) == 0
        for age, folder in enumerate(generate._kept(tmp_path / RUN)):
            os.utime(folder, times=(1000 - age, 1000 - age))  # clocks of disks are coarse
    assert told.downloads == 3
    rounds = [generate._digests(folder)[0][0] for folder in generate._kept(tmp_path / RUN)]
    assert rounds == [6, 5]
    given, named = told.texts[0][1:]
    assert (given, named["temperature"]) == (("once", None, 5), 0.5)


def test_without_a_seed_each_text_is_another(told: Told, tmp_path: Path) -> None:
    told.commit(4)
    for _ in range(2):
        run(tmp_path, seed=None)
    assert told.texts[0][1][2] != told.texts[1][1][2]


def test_a_folder_that_says_nothing_is_passed_over(told: Told, tmp_path: Path) -> None:
    told.commit(4)
    broken = tmp_path / RUN / "broken"
    broken.mkdir(parents=True)
    (broken / "dilocox.json").write_text("{")
    assert run(tmp_path) == 0
    assert told.downloads == 1


def test_a_run_without_a_round_and_a_stage_without_peers_are_told_apart(
    told: Told, tmp_path: Path
) -> None:
    with pytest.raises(EnvironmentFault, match=r"stage 0: nobody who holds its weights is in view"):
        run(tmp_path)
    told.commit(4)
    told.claims[1] = {"peer": claim_record(-1, "root")}
    with pytest.raises(EnvironmentFault, match=r"stage 1: .* no committed round yet"):
        run(tmp_path)
    assert told.downloads == 0


def test_an_empty_text_is_said_before_anything_is_joined(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="TEXT is empty"):
        run(tmp_path, text="")

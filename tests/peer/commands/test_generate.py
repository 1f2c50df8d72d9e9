"""`dilocox generate`: which weights it takes, and what it does with them."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dilocox.dht import join
from dilocox.dht.errors import EnvironmentFault
from dilocox.dht.invite import Invite
from dilocox.dht.manifest import Manifest
from dilocox.peer.commands import export, model_memory
from dilocox.peer.commands.export import run_generate_command
from dilocox.peer.options import GenerateOptions
from tests.peer.fabricated import INVITE

Texts = list[tuple[tuple[Any, ...], dict[str, Any]]]


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> Texts:
    """What was continued, with a swarm that is only told."""
    told: Texts = []

    manifest = Manifest.from_dict({"name": "tales", "model": "small", "end_tokens": 10**6})

    @contextmanager
    def joined(*_: Any, **__: Any) -> Generator[Any]:
        yield SimpleNamespace(manifest=manifest)

    def write(joined: Any, folder: Path, options: GenerateOptions) -> None:
        folder.mkdir()
        name = joined.manifest.name
        (folder / "weights").write_text(f"{options.dtype} for {options.timeout_s} s of {name}")

    def go_on(folder: Path, *given: Any, **named: Any) -> str:
        told.append(((folder, (folder / "weights").read_text(), *given), named))
        named["tell"](" the end")
        return " the end"

    monkeypatch.setattr(join, "join_run", joined)
    monkeypatch.setattr(export, "export_run", write)
    monkeypatch.setattr(export, "continue_text", go_on)
    return told


def run(seed: int | None) -> int:
    invite = Invite.parse(INVITE)
    options = GenerateOptions(invite=invite, text="once", temperature=0.5, seed=seed, timeout_s=5.0)
    return run_generate_command(options)


def test_the_text_is_continued_with_the_newest_anchors_and_nothing_is_left_of_them(
    texts: Texts, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(seed=5) == 0
    assert capsys.readouterr().out == "once the end\n"
    (((folder, *given), named),) = texts
    assert given == ["fp32 for 5.0 s of tales", "once", None, 5]
    assert named["temperature"] == 0.5
    assert not folder.exists()


def test_memory_that_is_not_there_is_said_before_anything_is_downloaded(
    texts: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_memory, "available_bytes", lambda: 800_000_000)
    with pytest.raises(EnvironmentFault, match=r"of memory, 800 MB are free: take --dtype bf16"):
        run(seed=5)
    assert texts == []


def test_without_a_seed_each_text_is_another(texts: Texts) -> None:
    for _ in range(2):
        run(seed=None)
    assert texts[0][0][4] != texts[1][0][4]

"""`dilocox push`: what the real client of huggingface_hub puts into a repository of a hub on this
machine, when it pushes again, and what it says where the hub refuses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from transformers import AutoModelForCausalLM

from dilocox.dht.errors import EnvironmentFault, InvalidInput
from dilocox.dht.invite import Invite
from dilocox.dht.manifest import Manifest
from dilocox.dht.manifest_revisions import in_state
from dilocox.dht.records import ClaimRecord
from dilocox.peer.chain.visitor_download import AnchorPlace
from dilocox.peer.commands import push
from dilocox.peer.commands.export import CheckpointDraft, model_card
from dilocox.peer.commands.push import Repository, run_push_command
from dilocox.peer.options import PushOptions
from tests.peer.commands.checkpoints import stage_tensors
from tests.peer.commands.hub import OWNER, READ_ONLY, TOKEN, Hub, serving
from tests.peer.fabricated import INVITE, RUN

NAME = f"{OWNER}/tales"
MANIFEST = Manifest.from_dict({"name": "tales", "model": "tiny", "stages": 2, "end_tokens": 900})


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A hub that this process takes for the real one, and an account there."""
    with serving() as hub:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub


@dataclass(eq=False)
class ToldSwarm:
    """A run whose rounds come as they are told, one at each look.

    rounds: the newest of both stages, now and as each further look sees it; the last one stays.
    """

    rounds: list[int]
    manifest: Manifest = MANIFEST
    exported: list[int] = field(default_factory=list[int])
    admission: None = None
    gone: bool = False  # whether the command's own DHT node has ended
    peers: int = 1
    liar: ClaimRecord | None = None  # what one more of them claims, of each stage

    def read_many(self, keys: Mapping[str, type]) -> dict[str, dict[str, ClaimRecord]]:
        if len(self.rounds) > 1:
            self.rounds.pop(0)
        number = self.rounds[0]
        claim = ClaimRecord(
            digest="ab" * 32,
            round=number,
            chain_tokens=100 * (number + 1),
            record_bytes=1000,
        )
        liar = {} if self.liar is None else {"liar": self.liar}
        return dict.fromkeys(keys, {f"peer {each}": claim for each in range(self.peers)} | liar)

    def newest_manifest(self, _: float) -> Any:
        return SimpleNamespace(
            revision_of=lambda _: self.manifest.operation.revision,
            verify=lambda _: self.manifest,
        )

    def export(self, joined: Any, folder: Path, *_: Any, **__: Any) -> list[AnchorPlace]:
        """What `export_run` would write of the newest round."""
        number = self.rounds[0]
        self.exported.append(number)
        model = joined.manifest.model
        places = [
            AnchorPlace(stage=stage, round=number, digest="ab" * 32, chain_tokens=100 * number)
            for stage in range(2)
        ]
        with CheckpointDraft(folder, model, 2, "byt5", RUN) as draft:
            for stage in range(2):
                draft.add({"stage": stage}, stage_tensors(model, 2, stage, seed=number))
            info = {"run": RUN, "tokens": 100 * number, "stages": [{"round": number}] * 2}
            draft.finish(info, model_card(joined.manifest, info, {}))
        return places


@pytest.fixture
def swarm(monkeypatch: pytest.MonkeyPatch) -> ToldSwarm:
    told = ToldSwarm(rounds=[4])

    @contextmanager
    def visiting(*_: Any) -> Iterator[Any]:
        @dataclass
        class Place:
            swarm: ToldSwarm = told
            run: str = RUN
            manifest: Manifest = MANIFEST
            witness: str = ""
            dht: Any = field(default_factory=lambda: SimpleNamespace(running=not told.gone))

        yield Place()

    monkeypatch.setattr(push, "visiting", visiting)
    monkeypatch.setattr(push, "export_run", told.export)
    for name, limit_s in {"LOOK_S": 0.01, "RETRY_S": 0.01, "SETTLED_S": 0.3}.items():
        monkeypatch.setattr(push, name, limit_s)
    return told


def options(tmp_path: Path, **given: Any) -> PushOptions:
    place = {"repository": NAME, "folder": tmp_path / "model"}
    return PushOptions(invite=Invite.parse(INVITE), **(place | given))


def test_a_push_is_one_commit_of_the_whole_checkpoint_with_its_card(
    hub: Hub, swarm: ToldSwarm, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_push_command(options(tmp_path)) == 0
    said = "".join(capfd.readouterr())
    assert "it/s" not in said, "bars are for terminals"
    ((summary, files),) = hub.commits[NAME]
    assert summary == "round 4, 400 tokens"
    card = files["README.md"].decode()
    assert f'AutoModelForCausalLM.from_pretrained("{NAME}")' in card and "# tales" in card
    assert not hub.private
    fetched = tmp_path / "fetched"  # as somebody gets it who downloads the repository
    for name, content in files.items():
        (fetched / name).parent.mkdir(parents=True, exist_ok=True)
        (fetched / name).write_bytes(content)
    model: Any = AutoModelForCausalLM.from_pretrained(str(fetched), local_files_only=True)
    given = stage_tensors(MANIFEST.model, 2, 1, seed=4)
    weights = model.state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in given.items())
    assert f"pushed {summary}: {hub.url}/{NAME}/commit/" in said
    assert TOKEN not in said


def test_it_pushes_again_every_so_many_rounds_and_last_when_the_run_is_over(
    hub: Hub, swarm: ToldSwarm, tmp_path: Path
) -> None:
    # at 900 tokens, which are those of round 8, the run has ended
    swarm.rounds = [1, 1, 2, 3, 4, 5, 6, 7, 8]
    assert run_push_command(options(tmp_path, every=3, private=True)) == 0
    assert swarm.exported == [1, 4, 7, 8]
    assert len(hub.commits[NAME]) == 4 and hub.private == {NAME}


def test_no_single_peer_says_that_the_run_is_over(
    hub: Hub, swarm: ToldSwarm, tmp_path: Path
) -> None:
    swarm.rounds, swarm.peers = [1, 1, 2, 3, 4, 5, 6, 7, 8], 2
    swarm.liar = ClaimRecord(digest="cd" * 32, round=1, chain_tokens=10**9, record_bytes=1000)
    assert run_push_command(options(tmp_path, every=100)) == 0
    assert swarm.exported == [1, 8]


def test_a_run_that_its_operator_ends_is_pushed_to_its_last_round(
    hub: Hub, swarm: ToldSwarm, tmp_path: Path
) -> None:
    swarm.rounds, swarm.manifest = [2, 2, 3], in_state(MANIFEST, "ended")
    assert run_push_command(options(tmp_path, every=100)) == 0
    assert swarm.exported == [2, 3]
    swarm.rounds = [3]
    assert run_push_command(options(tmp_path, every=100)) == 0
    assert swarm.exported == [2, 3, 3], "what was pushed is not pushed again"


def test_it_does_not_wait_on_when_its_own_node_has_ended(
    hub: Hub, swarm: ToldSwarm, tmp_path: Path
) -> None:
    swarm.gone = True
    with pytest.raises(EnvironmentFault, match="DHT node has ended"):
        run_push_command(options(tmp_path, every=100))
    assert len(hub.commits[NAME]) == 1


def test_trouble_of_the_hub_in_the_middle_of_a_run_is_waited_out(
    hub: Hub,
    swarm: ToldSwarm,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    swarm.rounds = [1, 4, 8]

    def export(*given: Any, **named: Any) -> list[AnchorPlace]:
        places = swarm.export(*given, **named)
        hub.broken = len(swarm.exported) == 2
        return places

    monkeypatch.setattr(push, "export_run", export)
    assert run_push_command(options(tmp_path, every=1)) == 0
    assert "took nothing" in caplog.text and "trying again" in caplog.text
    assert [summary[:7] for summary, _ in hub.commits[NAME]] == ["round 1", "round 8"]


@pytest.mark.parametrize(
    ("token", "repository", "said"),
    [
        ("", NAME, "no token of the Hugging Face hub: set HF_TOKEN"),
        ("hf_wrong", NAME, "refuses the token: set HF_TOKEN"),
        (READ_ONLY, NAME, f"not let this token write to {NAME}: name a repository of this"),
        (TOKEN, "others/tales", "not let this token write to others/tales"),
        (TOKEN, "a/b/c", "'a/b/c' is no repository of the hub; name it OWNER/NAME"),
    ],
)
def test_what_the_hub_refuses_is_said_in_one_line_before_anything_is_downloaded(
    hub: Hub,
    swarm: ToldSwarm,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    token: str,
    repository: str,
    said: str,
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(InvalidInput, match=said) as caught:
        run_push_command(options(tmp_path, repository=repository))
    assert "\n" not in str(caught.value)
    assert not token or token not in str(caught.value)
    assert swarm.exported == []


def test_a_storage_that_refuses_a_large_file_leaves_no_commit_and_says_what_it_met(
    hub: Hub, swarm: ToldSwarm, tmp_path: Path
) -> None:
    hub.full = True
    with pytest.raises(EnvironmentFault, match=r"took nothing for .*no more room") as caught:
        run_push_command(options(tmp_path))
    assert "\n" not in str(caught.value)
    assert hub.commits[NAME] == []
    hub.full = False
    assert run_push_command(options(tmp_path)) == 0, "the same command goes on"
    assert len(hub.commits[NAME]) == 1


def test_a_hub_that_does_not_answer_is_the_machines_trouble(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(EnvironmentFault, match=r"took nothing for .*; check the network") as caught:
        Repository(NAME).make(private=False)
    assert "\n" not in str(caught.value) and TOKEN not in str(caught.value)

"""The initial weights of a run that starts from a checkpoint: pinned, archived, and taken.

The checkpoint has the weights that the seed makes, so that a chain made from these stands on it.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from dilocox.compression.layout import FlatLayout
from dilocox.dht.errors import EnvironmentFault, InvalidInput
from dilocox.dht.identity import Identity
from dilocox.dht.manifest import InitialSpec, Manifest, SignedManifest
from dilocox.dht.manifest_revisions import changes
from dilocox.dht.rpc import PeerBusy
from dilocox.peer.averaging.local_peer import LocalPeer
from dilocox.peer.chain.archive import StageArchive
from dilocox.peer.chain.chain_client import ChainClient, ChainEnd, WantedState
from dilocox.peer.chain.record_check import RecordCheck
from dilocox.peer.chain.replay import replay
from dilocox.peer.chain.snapshot_files import STATE_FILE, write_state
from dilocox.peer.chain.store import (
    INITIAL_NAME,
    KeptChain,
    RoundLog,
    Store,
    archive_folder,
    kept_run,
    kept_state,
)
from dilocox.peer.chain.uploads import Source, open_state
from dilocox.peer.chain.visitor_download import claimed_chain, download_chain
from dilocox.peer.commands.export import CheckpointDraft
from dilocox.peer.commands.operate import checked_manifest
from dilocox.peer.process.initial_weights import archive_initial, load_initial
from dilocox.peer.rounds.outer_step import anchor_sha256
from dilocox.pipeline.pretrained import Checkpoint
from dilocox.pipeline.stage import (
    build_stage,
    flatten_parameters,
    parameter_shapes,
    stage_layout,
)
from tests.peer.kept_chains import RUN, ChainMaker
from tests.peer.memory_swarm import Find, MemorySwarm

BOOTSTRAP = "12D3KooWHNxS8DPg8kHGhZkrxNZ6rnvZpXGqGjCHG5JGtDhMWwvT"


def export(folder: Path, config: Mapping[str, Any], parameters: Mapping[str, Tensor]) -> None:
    """As an earlier run of one stage exported it."""
    with CheckpointDraft(folder, config, 1, "byt5", RUN) as draft:
        draft.add({"stage": 0}, parameters)
        draft.finish({}, "")


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dilocox.peer.process.initial_weights.LOOK_S", 0.05)


@pytest.fixture(scope="module")
def run_yaml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run in two stages that goes on from an export; the folder `checkpoint` lies beside."""
    folder = tmp_path_factory.mktemp("run")
    preset = Manifest.from_dict({"name": "t", "model": "tiny", "end_tokens": 1}).model
    stage = dict(build_stage(preset, 0, 1, seed=0).named_parameters())
    export(folder / "checkpoint", preset, stage)
    run = {"name": "t", "model": {"from": str(folder / "checkpoint")}, "end_tokens": 1000}
    (folder / "run.yaml").write_text(yaml.safe_dump(run | {"stages": 2}))
    return folder / "run.yaml"


@pytest.fixture(scope="module")
def manifest(run_yaml: Path) -> Manifest:
    return checked_manifest(run_yaml)


@contextmanager
def out_of_reach(run_yaml: Path) -> Generator[Path]:
    """The checkpoint is where nobody looks for it."""
    here = run_yaml.parent / "checkpoint"
    away = here.rename(run_yaml.parent / "away")
    try:
        yield away
    finally:
        away.rename(here)


@pytest.fixture
def away(run_yaml: Path) -> Iterator[Path]:
    with out_of_reach(run_yaml) as away:
        yield away


@pytest.fixture
def maker(identities: list[Identity], tmp_path: Path, manifest: Manifest) -> ChainMaker:
    return ChainMaker(identities[0], tmp_path / "donor", manifest)


def archive(folder: Path, manifest: Manifest) -> StageArchive:
    """That of stage 0, as it begins."""
    archive_initial(folder, RUN, manifest)
    return StageArchive(
        archive_folder(folder, RUN, manifest) / "stage0",
        me=BOOTSTRAP,
        witness=BOOTSTRAP,
        check=RecordCheck(RUN, 0, manifest, stage_layout(manifest, 0)),
        record_lifetime_s=60.0,
        keep_bytes=1 << 30,
        client=MemorySwarm().client(),
        compute=asyncio.to_thread,
    )


class Joiner:
    """A peer of stage 0 without a snapshot, and what it begins with."""

    def __init__(self, folder: Path, manifest: Manifest, **finds: Find):
        self.swarm = MemorySwarm(**finds)
        self.claims: dict[str, Any] = {}
        place = self.swarm.place(manifest, lambda _: self.claims)
        options = SimpleNamespace(invite=SimpleNamespace(peer_ids=(BOOTSTRAP,)))
        self.layout = stage_layout(manifest, 0)
        self.local = cast(
            "LocalPeer",
            SimpleNamespace(
                **vars(place), stage=0, layout=self.layout, options=options, folder=folder
            ),
        )
        self.local.open_log = lambda: LocalPeer.open_log(self.local)  # type: ignore[method-assign]
        self.anchor = torch.zeros(self.layout.numel)
        self.momentum = torch.ones(self.layout.numel)

    def begin(self, wait_s: float = 20.0) -> tuple[int, str]:
        self.momentum.zero_()
        return load_initial(self.local, self.anchor, self.momentum, wait_s=wait_s)


def test_the_manifest_pins_configuration_tokenizer_and_weights(manifest: Manifest) -> None:
    initial = manifest.initial
    assert manifest.model["hidden_size"] and manifest.data.tokenizer == "byt5"
    assert len(set(initial.anchors)) == 2
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest
    bare = replace(manifest, initial=InitialSpec())
    assert "initial" not in bare.to_dict()  # versions that know of none read it, too
    assert {change.field for change in changes(bare, manifest)} == {
        "initial.source",
        "initial.anchors",
    }
    with pytest.raises(InvalidInput, match=r"initial\.anchors has 1 of 2 stages"):
        replace(manifest, initial=replace(initial, anchors=initial.anchors[:1]))


def test_the_manifest_of_the_most_stages_still_fits_the_dht(
    manifest: Manifest, identities: list[Identity]
) -> None:
    anchors = tuple(hashlib.sha256(bytes([stage])).hexdigest() for stage in range(256))
    initial = replace(manifest.initial, anchors=anchors)
    SignedManifest.sign(identities[0], replace(manifest, stages=256, initial=initial))


def test_an_export_of_a_run_begins_another_one_with_the_same_weights(
    manifest: Manifest, maker: ChainMaker
) -> None:
    # the maker's are those of the seed, from which the export was made
    assert maker.anchors == [manifest.initial.anchors[0]]


def test_a_model_whose_head_stayed_tied_is_exported_and_begun_with_again(tmp_path: Path) -> None:
    preset = Manifest.from_dict({"name": "t", "model": "tiny", "end_tokens": 1}).model
    tied = {**preset, "tie_word_embeddings": True}
    stage = build_stage(tied, 0, 1, seed=0)
    export(tmp_path / "e", tied, dict(stage.named_parameters()))
    checkpoint = Checkpoint(str(tmp_path / "e"))
    assert checkpoint.model(1)["tie_word_embeddings"] is True
    live = flatten_parameters(stage, FlatLayout.of(parameter_shapes(tied, 1, 0)))
    assert torch.equal(checkpoint.stage(checkpoint.model(1), 1, 0), live)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "e").train()
    ids = torch.arange(8)[None]
    assert torch.equal(plain(input_ids=ids, use_cache=False).logits, stage(ids))


def test_the_bootstrap_keeps_each_stage_once_and_says_when_the_checkpoint_is_another(
    manifest: Manifest, tmp_path: Path, away: Path
) -> None:
    with pytest.raises(InvalidInput, match="there is no such folder here; check the path"):
        archive_initial(tmp_path, RUN, manifest)
    here = Path(manifest.initial.source)
    shutil.copytree(away, here)
    file = here / "model-00001-of-00001.safetensors"
    tensors = load_file(file)
    changed = {name: tensor * 2 for name, tensor in tensors.items()}
    save_file(changed, file)
    with pytest.raises(InvalidInput, match=r"weights of stage 0 have the digest .*; put the check"):
        archive_initial(tmp_path, RUN, manifest)
    save_file(tensors, file)
    archive_initial(tmp_path, RUN, manifest)
    shutil.rmtree(here)
    archive_initial(tmp_path, RUN, manifest)  # needs no checkpoint any more
    for stage in range(2):
        folder = archive_folder(tmp_path, RUN, manifest) / f"stage{stage}" / INITIAL_NAME
        kept = kept_state(folder)
        assert kept is not None and (kept.round, kept.digest) == (-1, manifest.root)


def test_initial_weights_with_a_changed_byte_are_made_anew(
    manifest: Manifest, tmp_path: Path, run_yaml: Path, caplog: pytest.LogCaptureFixture
) -> None:
    archive_initial(tmp_path, RUN, manifest)
    folder = archive_folder(tmp_path, RUN, manifest) / "stage1" / INITIAL_NAME
    sound = {path: path.read_bytes() for path in folder.glob("*/*")}
    assert len(sound) == 3
    for path, data in sound.items():
        for place in (0, len(data) // 2, len(data) - 1):
            wrong = bytearray(data)
            wrong[place] ^= 1
            path.write_bytes(wrong)
            caplog.clear()
            archive_initial(tmp_path, RUN, manifest)
            assert f"{folder}: damaged" in caplog.text, f"byte {place} of {path.name}"
            assert {path: path.read_bytes() for path in folder.glob("*/*")} == sound
    (folder / "00000000" / STATE_FILE).write_bytes(b"")
    with out_of_reach(run_yaml):  # the bootstrap begins without them
        archive_initial(tmp_path, RUN, manifest)
    assert "stage 1 has no initial weights" in caplog.text and kept_state(folder) is None
    archive_initial(tmp_path, RUN, manifest)
    assert {path: path.read_bytes() for path in folder.glob("*/*")} == sound


def test_a_peer_reads_its_stage_where_the_checkpoint_is(manifest: Manifest, tmp_path: Path) -> None:
    joiner = Joiner(tmp_path, manifest)
    assert joiner.begin() == (-1, manifest.root)
    assert anchor_sha256(joiner.anchor) == manifest.initial.anchors[0]
    assert not joiner.swarm.asked


def test_who_lacks_the_checkpoint_takes_the_same_bytes_from_the_bootstrap(
    manifest: Manifest, tmp_path: Path, run_yaml: Path
) -> None:
    kept = archive(tmp_path / "bootstrap", manifest)
    joiner = Joiner(tmp_path / "peer", manifest, **{BOOTSTRAP: kept.find})
    with out_of_reach(run_yaml):
        assert joiner.begin() == (-1, manifest.root)
    assert anchor_sha256(joiner.anchor) == manifest.initial.anchors[0]
    assert not joiner.momentum.any()
    assert not list((tmp_path / "peer").glob("incoming/*"))


def test_who_must_go_back_to_the_beginning_takes_them_again(
    manifest: Manifest, tmp_path: Path, maker: ChainMaker
) -> None:
    """Where the archive's chain wins, and is too young for a state: they come from there, too."""
    maker.train(0, 1)
    kept = archive(tmp_path / "bootstrap", manifest)

    def find(want: dict[str, Any]) -> Source | None:
        return kept.find(want) if want["what"] == "state" else maker.find(want)

    client, check = MemorySwarm(boot=find).client(), RecordCheck(RUN, 0, manifest, maker.layout)
    end = ChainEnd(digest=maker.digests[-1], round=1, teller="boot")
    log = RoundLog(tmp_path / "log", manifest_digest=manifest.root, codec=maker.codec)
    wanted = WantedState(end=end, or_initial=True)
    taking = ChainClient(client, check, ["boot"]).state("boot", tmp_path / "log", log, wanted)
    anchor, momentum = (torch.ones(maker.layout.numel) for _ in range(2))
    taken = asyncio.run(taking).load(anchor, momentum, log, check)
    assert (taken.round, taken.anchor_sha256) == (-1, manifest.initial.anchors[0])
    assert not momentum.any() and log.rounds() == [0, 1]


def test_a_bootstrap_that_serves_others_first_is_waited_for(
    manifest: Manifest, tmp_path: Path, run_yaml: Path
) -> None:
    kept = archive(tmp_path / "bootstrap", manifest)
    joiner = Joiner(tmp_path / "peer", manifest, **{BOOTSTRAP: kept.find})
    asked = list[float]()

    async def before(*_: object) -> None:
        asked.append(time.monotonic())
        if asked[-1] - asked[0] < 2.5:
            raise PeerBusy("8 downloads are served at once")

    joiner.swarm.before = before
    with out_of_reach(run_yaml):
        assert joiner.begin(wait_s=1.5) == (-1, manifest.root)
    assert asked[-1] - asked[0] > 2.5, "longer than it waits for somebody who has them"


def late_joiner(tmp_path: Path, manifest: Manifest, maker: ChainMaker) -> Joiner:
    """One that comes after two rounds, to a peer with a snapshot of the second."""
    maker.train(0, 1)
    maker.snapshot()
    joiner = Joiner(tmp_path / "peer", manifest, **{maker.peer: maker.find})
    joiner.claims = {maker.peer: maker.claim()}
    return joiner


def test_a_late_joiner_takes_the_newest_state_and_its_record_instead(
    manifest: Manifest, tmp_path: Path, maker: ChainMaker, away: Path
) -> None:
    joiner = late_joiner(tmp_path, manifest, maker)
    assert joiner.begin() == (1, maker.digests[-1])
    assert torch.equal(joiner.anchor, maker.anchor)
    assert torch.equal(joiner.momentum, maker.momentum)
    assert joiner.local.open_log().head().digest == maker.digests[-1]


def test_who_was_killed_before_its_first_snapshot_takes_a_newer_state_all_the_same(
    manifest: Manifest, tmp_path: Path, maker: ChainMaker, away: Path
) -> None:
    """It has a log that begins in the midst, to which the initial weights are of no use."""
    joiner = late_joiner(tmp_path, manifest, maker)
    assert joiner.begin()[0] == 1
    maker.train(2)
    Store(tmp_path / "peer" / "log").share(maker.log, [2])
    joiner.claims = {maker.peer: maker.claim()}
    assert joiner.begin() == (1, maker.digests[2])
    assert joiner.local.open_log().rounds() == [1, 2], "what it has since stays"


@pytest.mark.parametrize("lie", ["anchor", "momentum"])
def test_other_initial_weights_than_the_pinned_ones_are_refused_and_the_wait_ends(
    manifest: Manifest, tmp_path: Path, maker: ChainMaker, away: Path, lie: str
) -> None:
    folder = tmp_path / "lies" / "00000000"
    folder.mkdir(parents=True)
    vectors = {"anchor": maker.anchor, "momentum": maker.momentum}
    vectors[lie] = vectors[lie] + 1e-3
    write_state(folder, -1, manifest.root, vectors["anchor"], vectors["momentum"])
    joiner = Joiner(
        tmp_path / "peer",
        manifest,
        **{BOOTSTRAP: lambda want: open_state(folder.parent, want)},
    )
    with pytest.raises(EnvironmentFault, match=r"sent other initial weights .*; or put the check"):
        joiner.begin(wait_s=0.5)


def test_the_archive_gives_the_initial_weights_as_long_as_the_run(
    manifest: Manifest, tmp_path: Path, maker: ChainMaker
) -> None:
    kept = archive(tmp_path / "bootstrap", manifest)
    found = kept.find({"what": "state"})
    assert found is not None and found.facts["round"] == -1
    maker.train(0, 1)
    # what an archive has once it has taken a newer state
    newer = archive_folder(tmp_path / "bootstrap", RUN, manifest) / "stage0" / "00000000"
    shutil.copytree(maker.snapshot(), newer / "state" / "00000000")
    Store(newer / "log").share(maker.log, [1])
    kept = archive(tmp_path / "bootstrap", manifest)
    rounds = [kept.find({"what": "state", **more}) for more in ({}, {"initial": True})]
    assert [each and each.facts["round"] for each in rounds] == [1, -1]


def test_a_chain_is_replayed_from_the_pinned_weights_and_from_no_others(
    manifest: Manifest, tmp_path: Path, maker: ChainMaker
) -> None:
    maker.train(0, 1)
    archive_initial(tmp_path, RUN, manifest)
    folder = archive_folder(tmp_path, RUN, manifest)
    (folder / "stage0").mkdir(exist_ok=True)
    states = kept_run(folder).stages[0].states
    records = maker.log.entries()
    found = replay(manifest, RUN, 0, records, states)
    assert (found.replayed, found.anchor_sha256) == ((0, 1), maker.anchors[-1])
    assert replay(manifest, RUN, 0, records).replayed == ()
    other = tmp_path / "other" / "00000000"
    other.mkdir(parents=True)
    write_state(other, -1, manifest.root, maker.anchor, maker.momentum)
    flaws = replay(manifest, RUN, 0, records, [kept_state(other.parent)]).flaws  # type: ignore[list-item]
    assert "not the one that the manifest pins" in flaws[0]


def test_a_downloaded_chain_comes_with_the_initial_weights_that_it_stands_on(
    manifest: Manifest, tmp_path: Path, maker: ChainMaker
) -> None:
    kept = archive(tmp_path / "bootstrap", manifest)
    maker.train(0, 1)

    def find(want: dict[str, Any]) -> Source | None:
        return kept.find(want) if want["what"] == "state" else maker.find(want)

    place = MemorySwarm(**{maker.peer: find}).place(manifest, lambda _: {maker.peer: maker.claim()})

    async def download() -> KeptChain:
        return (await download_chain(await claimed_chain(place, 0), tmp_path / "chain"))[0]

    chain = asyncio.run(download())
    found = replay(manifest, RUN, 0, chain.records, chain.states)
    assert (found.replayed, found.flaws) == ((0, 1), ())

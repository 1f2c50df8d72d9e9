"""`dilocox init` and `bootstrap --check`: what is asked, written, refused and left alone."""

from __future__ import annotations

import io
import os
import pty
import re
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console
from transformers import GPT2Config

from dilocox.dht.errors import InvalidInput
from dilocox.dht.manifest import Manifest, preset_names
from dilocox.peer.commands.init import machines_of, run_init_command, token_count
from dilocox.peer.commands.operate import checked_manifest
from dilocox.peer.options import InitOptions
from dilocox.peer.process import sizes
from tests.peer.fabricated import INVITE
from tests.peer.real_commands import error_line, run_here, write_manifest

pytestmark = pytest.mark.usefixtures("activations_are_reckoned_once")


def written(folder: Path, **given: Any) -> Manifest:
    """What `init --yes` writes, read as `bootstrap` reads it."""
    file = folder / "run.yaml"
    assert run_init_command(InitOptions(file=file, yes=True, **given)) == 0
    return Manifest.load(file)


@pytest.fixture
def unsized(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the table of sizes: a minute for the largest model."""
    monkeypatch.setattr(sizes, "print_sizes", lambda _: None)


def everything_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


# ---- init ----------------------------------------------------------------------------------------
def test_the_defaults_make_a_file_that_the_check_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_here(monkeypatch, "init", "--yes") == 0
    said = capsys.readouterr().out
    assert "0 of 1" in said and "wrote run.yaml: 1 stage, so 4 machines make 4 replicas" in said
    place = ["--port", "0", "--metrics-port", "0"]
    assert run_here(monkeypatch, "bootstrap", "run.yaml", "--check", *place) == 0
    said = capsys.readouterr().out
    assert "0 of 1" in said and "run.yaml is good: my-run would be a new run" in said
    assert everything_in(tmp_path) == {"run.yaml"}
    lines = (tmp_path / "run.yaml").read_text().splitlines()
    assert Manifest.load(tmp_path / "run.yaml").samples.prompt == "def "
    fields = [line for line in lines if ": " in line.partition("#")[0]]
    assert len(fields) > 12 and sum("#" in line for line in fields) > 9, "a word on each choice"


def test_the_sizes_of_a_large_run_are_whole_at_80_columns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from dilocox.peer.process import sizes

    stages, told = 24, io.StringIO()
    layers = {"model_type": "llama", "vocab_size": 384, "num_hidden_layers": stages}
    large = ["12 of 24", "1037.0", "123.4", "123.4 + 45.6", "1234.5", "1010.25", "10.90 / 40.10"]
    monkeypatch.setattr(sizes, "row", lambda *_: large)
    monkeypatch.setattr(sizes, "wide_console", lambda: Console(width=80, file=told))
    facts = {"name": "x" * 64, "model": layers, "stages": stages, "end_tokens": 10**7}
    sizes.print_sizes(Manifest.from_dict(facts))
    lines = told.getvalue().splitlines()
    assert [line for line in lines if all(cell in line for cell in large)] == lines[-6:-3]
    assert re.search(r"the bootstrap: \d[\d.]* GB of memory, at most \d+ GB of disk", lines[-3])
    assert re.search(r"dense codec: \d+\.\d MB of 4 bits or \d+\.\d MB of 2 bits", lines[-2])
    assert "muon" in lines[-1]
    assert "…" not in told.getvalue() and max(map(len, lines)) <= 80


def test_a_bootstrap_of_large_stages_is_told_what_memory_and_disk_it_takes() -> None:
    """Or the kernel ends it at its first new state, and again after each start."""
    from dilocox.peer.process import sizes

    model = {"model_type": "llama", "vocab_size": 384, "num_hidden_layers": 8, "hidden_size": 1024}
    facts: dict[str, Any] = {"name": "x", "model": model, "stages": 1, "end_tokens": 10**7}
    cut = Manifest.from_dict(facts | {"stages": 4})
    whole = Manifest.from_dict(facts)
    values = sizes.StageNeeds(whole, 0).values
    (memory, disk), (of_cut, disk_of_cut) = map(sizes.bootstrap_needs, (whole, cut))
    assert memory > 0.8e9 + 8 * values, "two vectors, to make the weights of the seed"
    assert of_cut < 0.8e9 + 5 * values, "of one stage at a time"
    assert disk > 24 * values and disk_of_cut > disk, "three states, and records by stage"


def test_the_name_of_a_volunteer_is_not_that_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DILOCOX_NAME", "Ada's laptop")
    assert run_here(monkeypatch, "init", "--yes", "--model", "tiny") == 0
    assert Manifest.load(tmp_path / "run.yaml").name == "my-run"
    (tmp_path / "run.yaml").unlink()
    monkeypatch.setenv("DILOCOX_RUN_NAME", "tales")
    assert run_here(monkeypatch, "init", "--yes", "--model", "tiny") == 0
    assert Manifest.load(tmp_path / "run.yaml").name == "tales"


def test_a_file_that_is_there_is_never_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("precious")
    with pytest.raises(InvalidInput, match=r"run\.yaml is there already: name another file"):
        run_init_command(InitOptions(file=file, yes=True))
    assert file.read_text() == "precious"
    with pytest.raises(InvalidInput, match="nothing can be written there; name another file"):
        run_init_command(InitOptions(file=tmp_path / "no" / "run.yaml", yes=True))


def test_without_a_terminal_what_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_here(monkeypatch, "init", "--name", "x", "--model", "tiny") == 2
    line = error_line(capsys.readouterr().err)
    assert "no terminal to ask at: give --data, or --yes for the default (stdlib)" in line
    assert everything_in(tmp_path) == set()


def test_at_a_terminal_it_asks_five_questions_and_again_after_a_slip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ours, theirs = pty.openpty()
    os.write(ours, b"my run\nmy-tales\nhuge\ntiny\n\nmany\n2x4GB@10\n5M\n")
    with open(theirs) as terminal:  # noqa: PTH123
        monkeypatch.setattr("sys.stdin", terminal)
        code = run_here(monkeypatch, "init", str(tmp_path / "run.yaml"))
    os.close(ours)
    output = "".join(capfd.readouterr())
    assert code == 0, output
    questions = ("Name of the run", "Model: ", "Text: ", "Machines: ", "Tokens to train on")
    assert [output.count(each) for each in questions] == [2, 2, 1, 2, 1]
    for said in ("1 to 64 letters", "presets are llama-150m", "say 6x16GB@20"):
        assert said in " ".join(output.split())
    manifest = Manifest.load(tmp_path / "run.yaml")
    assert (manifest.name, manifest.preset) == ("my-tales", "tiny")
    assert manifest.end_tokens == 5_000_000


def test_what_follows_from_the_answers(tmp_path: Path) -> None:
    manifest = written(tmp_path, model="tiny", machines="9x4GB@0.02", stages=4, tokens="1_000_000")
    assert manifest.stages == 4 == manifest.batch.microbatches
    assert manifest.inner.warmup_tokens == 10_000
    # twice what the link needs, in whole seconds
    assert manifest.deadlines.exchange_s > 30 and manifest.deadlines.exchange_s % 1 == 0


@pytest.mark.usefixtures("unsized")
def test_a_model_is_cut_into_as_few_stages_as_fit_the_memory(tmp_path: Path) -> None:
    roomy = written(tmp_path, model="small", machines="4x8GB@20", tokens="1e8")
    assert roomy.stages == 1
    tight = tmp_path / "tight"
    tight.mkdir()
    assert written(tight, model="small", machines="4x1.3GB@20", tokens="1e8").stages > 1
    other = InitOptions(
        file=tmp_path / "other.yaml", yes=True, model="small", machines="4x0.5GB@20"
    )
    with pytest.raises(InvalidInput, match=r"--machines 4x0\.5GB@20: a stage takes .* of memory"):
        run_init_command(other)


@pytest.mark.sweep
@pytest.mark.usefixtures("unsized")
def test_a_tied_checkpoint_is_cut_though_of_several_stages_it_is_another_model(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "checkpoint"
    GPT2Config(
        n_embd=512,
        n_layer=4,
        n_head=8,
        vocab_size=8192,
        n_positions=512,
        bos_token_id=0,
        eos_token_id=0,
    ).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    (folder / "tokenizer.json").write_text("{}")
    file = tmp_path / "run.yaml"
    options = InitOptions(file=file, yes=True, model=str(folder), machines="4x2GB@20", tokens="1e8")
    assert run_init_command(options) == 0
    assert yaml.safe_load(file.read_text())["stages"] > 1


@pytest.mark.usefixtures("unsized")
@pytest.mark.parametrize("name", preset_names())
def test_the_text_says_the_same_as_the_plan(name: str, tmp_path: Path) -> None:
    manifest = written(tmp_path, model=name, stages=2, name="1e5", tokens="30B")
    preset = Manifest.from_dict(
        {"name": "1e5", "model": name, "stages": 2, "end_tokens": 3 * 10**10}
    )
    batch = replace(preset.batch, microbatches=max(2, preset.batch.microbatches))
    assert (manifest.batch, manifest.codec) == (batch, preset.codec)
    assert (manifest.rounds, manifest.data) == (preset.rounds, preset.data)
    assert manifest.inner.learning_rate == preset.inner.learning_rate
    replicas = 2  # of four machines
    assert manifest.inner.warmup_tokens == (replicas * preset.inner.warmup_tokens or 3 * 10**8)


@pytest.mark.usefixtures("unsized")
def test_data_are_found_here_or_on_the_hub_or_refused(tmp_path: Path) -> None:
    texts = tmp_path / "texts: a [few]"
    texts.mkdir()
    (texts / "a.jsonl").write_text('{"text": "once"}\n')
    manifest = written(tmp_path, model="tiny", data=str(texts), tokens="1e6")
    assert (manifest.data.source, manifest.data.format) == (str(texts), "json")
    (tmp_path / "run.yaml").unlink()
    manifest = written(tmp_path, model="tiny", data="roneneldan/TinyStories", tokens="1e6")
    assert manifest.data.format == "hub"
    (tmp_path / "run.yaml").unlink()
    (texts / "notes.md").write_text("once upon a time")
    for there in (texts / "notes.md", tmp_path / "texts*" / "*.md"):
        manifest = written(tmp_path, model="tiny", data=str(there), tokens="1e6")
        assert (manifest.data.source, manifest.data.format) == (str(there), "text")
        (tmp_path / "run.yaml").unlink()
    with pytest.raises(InvalidInput, match=r"--data /no/where: it is not on this machine"):
        run_init_command(InitOptions(file=tmp_path / "other.yaml", yes=True, data="/no/where"))


@pytest.mark.parametrize(
    ("text", "count"), [("2_000", 2000), ("2e9", 2 * 10**9), ("1.5B", 15 * 10**8), ("3m", 3000000)]
)
def test_tokens_are_read_as_people_write_them(text: str, count: int) -> None:
    assert token_count(text) == count


@pytest.mark.parametrize("text", ["", "0", "many", "-3", "1e99", "1e9x", "9" * 400])
def test_what_is_no_count_of_tokens_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match=r"--tokens .*: give a number"):
        token_count(text)


def test_machines_are_read_with_and_without_units() -> None:
    plain, with_units = machines_of("6x16@20"), machines_of(" 6 x 16 GB @ 20 Mbit/s ")
    for each in (plain, with_units):
        assert (each.number, each.memory_bytes, each.upload_bytes_s) == (6, 16e9, 2.5e6)
    for wrong in ("6", "x16@20", "0x16@20", "6x16", "6x0@20", "6x16@0"):
        with pytest.raises(InvalidInput, match=f"--machines {wrong}: give how many"):
            machines_of(wrong)


# ---- bootstrap --check ---------------------------------------------------------------------------
def check(monkeypatch: pytest.MonkeyPatch, file: Path, *more: str) -> int:
    state = ["--state", str(file.parent / "state")]
    return run_here(monkeypatch, "bootstrap", str(file), "--check", *state, *more)


def test_a_check_finds_what_a_start_would_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    free = ("--port", "0", "--metrics-port", "0")
    for changes, said in [
        ({"stages": 9}, "9 stages of at least one layer each do not fit"),
        ({"data": {"source": "/no/where.txt"}}, "data.source '/no/where.txt' is not on this"),
        ({"data": {"tokenizer": "/no/where"}}, "data.tokenizer"),
        ({"deadlines": {"exchange_s": 0.1}, "model": "llama-1b"}, "it must be at most"),
    ]:
        file = write_manifest(tmp_path / "run.yaml", **changes)
        if "model" in changes:
            file = write_manifest(file, **changes, batch={"sequence_length": 4096})
        assert check(monkeypatch, file, *free) in (1, 2)
        assert said in error_line(capsys.readouterr().err)
    write_manifest(file)
    with socket.create_server(("0.0.0.0", 0)) as busy:
        port = str(busy.getsockname()[1])
        assert check(monkeypatch, file, "--port", port, "--metrics-port", "0") == 1
        assert f"port {port} of 0.0.0.0 is in use" in error_line(capsys.readouterr().err)
    stranger = f"dilocox:{'ab' * 16}@/ip4/127.0.0.1/tcp/1/p2p/12D3KooWxx"
    assert check(monkeypatch, file, *free, "--join", stranger) == 2
    assert check(monkeypatch, file, *free) == 0
    assert everything_in(tmp_path) == {"run.yaml"}


def test_a_check_in_the_folder_of_a_run_says_that_it_goes_on_or_why_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from dilocox.dht.identity import Identity
    from dilocox.dht.invite import run_id
    from dilocox.dht.manifest import SignedManifest
    from dilocox.dht.manifest_revisions import RevisionFolder

    free = ("--port", "0", "--metrics-port", "0")
    file, state = write_manifest(tmp_path / "run.yaml"), tmp_path / "state"
    state.mkdir()
    identity = Identity.load_or_create(state / "identity.key")
    run = run_id(identity.public_key, "test")
    RevisionFolder(state, run).add(SignedManifest.sign(identity, checked_manifest(file)))
    before = everything_in(tmp_path)
    assert check(monkeypatch, file, *free) == 0
    assert f"test goes on as run {run}; nothing was published" in capsys.readouterr().out
    write_manifest(file, rounds={"inner_steps": 9})
    assert check(monkeypatch, file, *free) == 2
    assert "inner_steps" in error_line(capsys.readouterr().err)
    assert everything_in(tmp_path) == before


def test_an_invite_has_nothing_to_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_here(monkeypatch, "bootstrap", INVITE, "--check", "--metrics-port", "0") == 2
    assert "--check is for a run.yaml" in error_line(capsys.readouterr().err)

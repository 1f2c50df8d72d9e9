"""A manifest is checked field by field, travels as the same bytes, and proves its run."""

import dataclasses
import os
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dilocox.dht.errors import InvalidInput
from dilocox.dht.identity import Identity
from dilocox.dht.manifest import (
    CodecSpec,
    InnerSpec,
    Manifest,
    OuterSpec,
    RoundSpec,
    SignedManifest,
    preset_names,
    warnings,
)
from dilocox.dht.wire import pack

SHORT = "name: demo\nmodel: tiny\nend_tokens: 2e6\n"


def load(folder: Path, text: str) -> Manifest:
    path = folder / "run.yaml"
    path.write_text(text)
    return Manifest.load(path)


def test_what_a_run_does_without_is_not_in_its_bytes(tmp_path: Path):
    plain = load(tmp_path, SHORT)
    assert b"samples" not in plain.to_bytes() and b"licence" not in plain.to_bytes()
    spoken = load(tmp_path, SHORT + "about: |-\n  For all.\n  Come in.\nsamples: {prompt: Once}\n")
    again = Manifest.from_bytes(spoken.to_bytes())
    assert again == spoken and again.about == "For all.\nCome in." and again.samples.tokens == 64


def test_three_fields_make_a_manifest(tmp_path: Path):
    manifest = load(tmp_path, SHORT)
    assert (manifest.name, manifest.end_tokens, manifest.preset) == ("demo", 2_000_000, "tiny")
    assert manifest.model["model_type"] == "llama"
    assert manifest.data.source == "stdlib"
    assert manifest.deadlines.record_lifetime_s == 3 * manifest.deadlines.heartbeat_s
    assert manifest.batch.tokens_per_step == 64 * 2 * 4, "those of the preset"
    assert manifest.outer == OuterSpec(), "what a preset leaves out is the default"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("rounds: {inner_steps: 0}", "rounds.inner_steps is 0; it must be an integer from 1 to 10"),
        ("rounds: {inner_steps: 1.5}", "rounds.inner_steps is 1.5; it must be an integer"),
        ("rounds: {inner_steps: true}", "rounds.inner_steps is True; it must be an integer"),
        ("rounds: {inner_stps: 5}", "rounds.inner_stps is not a field.*did you mean inner_steps?"),
        ("pipeline: {codec: zip}", "codec is 'zip'; it must be auto, fp32, bf16, int8 or int4"),
        ("pipeline: {codec: gzip}", "codec is 'gzip'; it must be auto, fp32, bf16, int8 or int4"),
        ("pipeline: {recompute: 1}", "pipeline.recompute is 1; it must be False or True"),
        ("pipeline: {window: -1}", "pipeline.window is -1; it must be an integer from 0 to 1024"),
        (f"about: {'a' * 501}", "about is 'aaa.*; it must be text of at most 500 characters"),
        ('samples: {prompt: "two\\nlines"}', r"samples.prompt is .*it must be text of one line"),
        ("samples: {tokens: 513}", "samples.tokens is 513; it must be an integer from 1 to 512"),
        ("colour: red", "colour is not a field of the manifest; known here: name"),
        ("codec: {bits: 5}", "codec.bits is 5; it must be 2, 4, 8, 16 or 32"),
        ("codec: {bits: four}", "codec.bits is 'four'; it must be 2, 4, 8, 16 or 32"),
        ("data: {more: [3]}", r"data.more\[0\] is 3; it must hold named fields"),
        ("data: {more: [{wait: 3}]}", r"data.more\[0\].wait is not a field.*did you mean weight"),
        ("operation: {rollbacks: [[1]]}", r"operation.rollbacks is \[\[1\]\]; it must be rows"),
        ("3: 4", "3 is not a field of the manifest; known here: name"),
        ("inner: {betas: [0.9]}", "inner.betas is .* two numbers"),
        ("inner: {learning_rate: 0}", "inner.learning_rate is 0; it must be a number above 0"),
        ("inner: {learning_rate: fast}", "inner.learning_rate is 'fast'; it must be a number"),
        ("inner: {optimizer: sgd}", "inner.optimizer is 'sgd'; it must be adamw or muon"),
        ("inner: {muon_learning_rate: 0}", "inner.muon_learning_rate is 0; it must be a number"),
        ("inner: {muon_momentum: 1}", "inner.muon_momentum is 1; it must be a number from 0 to"),
        ("inner: 3", "inner is 3; it must hold named fields"),
        ("inner: {warmup_tokens: 3000000}", "inner.warmup_tokens.* less than end_tokens"),
        ("deadlines: {vote_s: .inf}", "deadlines.vote_s is inf; it must be a number"),
        ("outer: {merge: replace}", "outer.merge is 'replace'; it must be rebase, reset or none"),
        ("stages: 0", "stages is 0; it must be an integer from 1"),
        ("seed: -1", "seed is -1"),
        ("name: my run", "name is 'my run'; it must be 1 to 64 letters"),
        (f"end_tokens: 1{'0' * 400}", "end_tokens is 10"),
        (f"inner: {{eps: 1{'0' * 400}}}", "inner.eps is 10"),
        ("end_tokens: 0", "end_tokens is 0; it must be an integer from 1"),
        ("model: huge", "model is 'huge'; presets are llama-150m, .*, small, tiny"),
        ("model: 7", "model is 7; it must be the name of a preset or a Hugging Face"),
        ("model: {vocab_size: 384}", "it must name its model_type"),
        ("model: {model_type: llama}", "model.vocab_size is None; the byt5 tokenizer needs.*384"),
        ("model: {model_type: llama, vocab_size: 256}", "model.vocab_size is 256; .* at least 384"),
        ("batch: {sequence_length: 4096}", "sequence_length is 4096.*max_position_embeddings"),
        (
            "model: {model_type: gpt2, vocab_size: 384, n_positions: 64}",
            r"sequence_length is \d+; it must be at most model.n_positions \(64\)",
        ),
        ("data: {end_of_text: -1}", "data.end_of_text is -1; it must be a token id or nothing"),
        ("rounds: {inner_steps: 9, max_inner_steps: 5}", "inner_steps is 9; it must lie between"),
        ("data: {source: corpus.bin}", "data.format is missing; it must be text, json"),
        ("data: {format: text}", "data.format is 'text' with data.source 'stdlib'"),
        ("data: {held_out: xyz}", "data.held_out is 'xyz'; it must be 64 hex digits or empty"),
        ("codec: {scheme: top_k}", "codec.scheme is 'top_k'; it must be low_rank or dense"),
        ("protocol: 5", "protocol is 5; this dilocox speaks protocol 17: install the version"),
        ("protocol: 18\nnew_field: 1", "protocol is 18; this dilocox speaks protocol 17: install"),
        ("protocol: one", "protocol is 'one'; this dilocox speaks protocol 17"),
    ],
)
def test_wrong_field_is_named_with_value_and_mend(tmp_path: Path, lines: str, message: str):
    field = lines.partition(":")[0]
    rest = "\n".join(line for line in SHORT.splitlines() if not line.startswith(f"{field}:"))
    with pytest.raises(InvalidInput, match=message) as caught:
        load(tmp_path, f"{rest}\n{lines}\n")
    assert str(caught.value).startswith(f"{tmp_path}/run.yaml: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("field", ["name", "model", "end_tokens"])
def test_missing_field_is_named(tmp_path: Path, field: str):
    rest = "\n".join(line for line in SHORT.splitlines() if not line.startswith(field))
    with pytest.raises(InvalidInput, match=f"{field} is missing; it must"):
        load(tmp_path, rest)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty; describe the run in it"),
        ("# to come\n", "is empty; describe the run in it"),
        ("- a\n", "must hold named fields"),
        ("just text\n", "must hold named fields"),
        ("name: [\n", "is not valid YAML .line 2"),
        ("a: b: c\n", "is not valid YAML .line 1"),
        ("\x00", "is not valid YAML"),
        ("[" * 5000, "is not valid YAML"),
        (SHORT + "inner:\n\tlearning_rate: 1\n", "line 5: .*; indent with spaces, not tabs"),
    ],
)
def test_file_that_is_no_manifest_is_refused_by_name(tmp_path: Path, text: str, message: str):
    with pytest.raises(InvalidInput, match=rf"run\.yaml: .*{message}"):
        load(tmp_path, text)
    with pytest.raises(InvalidInput, match=r"other\.yaml: cannot be read .*; name a run\.yaml"):
        Manifest.load(tmp_path / "other.yaml")


def test_numbers_that_yaml_reads_as_text_are_numbers(tmp_path: Path):
    manifest = load(tmp_path, SHORT + "inner: {learning_rate: 3e-4}\n")
    assert manifest.inner.learning_rate == 3e-4


def test_defaults_follow_from_what_is_given(tmp_path: Path):
    reset = load(tmp_path, SHORT + "outer: {merge: reset}\n").outer
    assert (reset.apply, reset.learning_rate, reset.momentum) == ("round_end", 0.7, 0.0)
    rounds = load(tmp_path, SHORT + "rounds: {inner_steps: 40}\n").rounds
    assert (rounds.min_inner_steps, rounds.max_inner_steps) == (10, 160)
    assert load(tmp_path, SHORT + "data: {source: a/*.jsonl}\n").data.format == "json"


def test_sections_made_in_code_are_checked_too():
    with pytest.raises(ValueError, match="inner_steps"):
        RoundSpec(inner_steps=0)
    with pytest.raises(ValueError, match="bits"):
        CodecSpec(bits=3)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", preset_names())
def test_preset_makes_a_valid_manifest(name: str):
    manifest = Manifest.from_dict({"name": "demo", "model": name, "end_tokens": 10**10})
    assert manifest.preset == name and manifest == Manifest.from_bytes(manifest.to_bytes())
    assert (manifest.model["vocab_size"] == 384) == (manifest.data.tokenizer == "byt5")
    assert manifest.model["tie_word_embeddings"] is False
    assert (manifest.outer.merge, manifest.outer.learning_rate) == ("rebase", 0.7)
    assert manifest.outer.momentum == 0.5 and not warnings(manifest)
    steps = manifest.inner.warmup_tokens / manifest.batch.tokens_per_step
    assert steps in (0, 1000), "as many as OpenDiLoCo's"


def test_run_yaml_overrides_a_preset_field_by_field(tmp_path: Path):
    head = "name: demo\nmodel: llama-150m\nend_tokens: 1e10\n"
    manifest = load(
        tmp_path,
        head + "batch: {microbatches: 2}\nrounds: {inner_steps: 40}\ncodec: {bits: 16}\n"
        "data: {source: a.txt}\n",
    )
    preset = load(tmp_path, head)
    assert manifest.batch.microbatches == 2
    assert manifest.batch.sequence_length == preset.batch.sequence_length == 1024
    assert (manifest.rounds.min_inner_steps, manifest.rounds.max_inner_steps) == (10, 160)
    assert (preset.rounds.min_inner_steps, preset.rounds.max_inner_steps) == (31, 500)
    assert (manifest.codec.scheme, manifest.codec.rank) == ("dense", preset.codec.rank)
    assert manifest.data.tokenizer == preset.data.tokenizer
    with pytest.raises(InvalidInput, match="batch is 7; it must hold named fields"):
        load(tmp_path, head + "batch: 7\n")


@pytest.mark.parametrize(
    ("sections", "count"),
    [
        ({}, 0),
        ({"outer": OuterSpec(momentum=0.9)}, 1),
        ({"outer": OuterSpec(merge="none", momentum=0.9)}, 0),
        ({"outer": OuterSpec(merge="reset", apply="round_end", momentum=0.0)}, 0),
        ({"outer": OuterSpec(merge="reset", momentum=0.0)}, 1),
        ({"outer": OuterSpec(merge="reset", momentum=0.9)}, 2),
        ({"inner": InnerSpec(optimizer="muon")}, 1),
        ({"inner": InnerSpec(optimizer="muon"), "codec": CodecSpec(scheme="dense")}, 0),
    ],
)
def test_pairings_that_train_badly_are_warned_about(
    manifest: Manifest, sections: dict[str, Any], count: int
):
    assert len(warnings(dataclasses.replace(manifest, **sections))) == count


def test_document_masks_without_their_token_are_not_taken_from_the_operator(
    operator: Identity, manifest: Manifest, run: str
):
    assert manifest.document_end is None
    masked = dataclasses.replace(manifest.data, document_masks=True)
    signed = SignedManifest.sign(operator, dataclasses.replace(manifest, data=masked))
    with pytest.raises(InvalidInput, match=r"without data\.end_of_text.*`dilocox bootstrap`"):
        signed.verify(run)
    masked = dataclasses.replace(masked, end_of_text=1)
    signed = SignedManifest.sign(operator, dataclasses.replace(manifest, data=masked))
    assert signed.verify(run).document_end == 1


def test_bytes_are_canonical_and_read_back_equal(manifest: Manifest):
    again = Manifest.from_bytes(manifest.to_bytes())
    assert again == manifest
    assert again.to_bytes() == manifest.to_bytes()
    assert again.digest == manifest.digest
    assert dataclasses.replace(manifest, seed=1).digest != manifest.digest


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=10,
)
FIELDS = st.sampled_from([field.name for field in dataclasses.fields(Manifest)])


@settings(deadline=None, max_examples=200)
@given(st.dictionaries(FIELDS, JSON, max_size=5))
def test_any_values_make_a_manifest_or_a_users_mistake(values: dict[str, Any]):
    try:
        Manifest.from_dict({"name": "demo", "model": "tiny", "end_tokens": 1000, **values})
    except InvalidInput as error:
        assert "\n" not in str(error)


def test_signed_manifest_proves_its_run(operator: Identity, manifest: Manifest, run: str):
    signed = SignedManifest.sign(operator, manifest)
    assert SignedManifest.from_bytes(signed.to_bytes()).verify(run) == manifest
    assert signed.run_id == run


def test_manifest_of_another_key_or_name_or_changed_proves_nothing(
    operator: Identity, stranger: Identity, manifest: Manifest, run: str
):
    renamed = SignedManifest.sign(operator, dataclasses.replace(manifest, name="other"))
    for other in (SignedManifest.sign(stranger, manifest), renamed):
        with pytest.raises(InvalidInput, match=f"the invite names run {run}"):
            other.verify(run)
    changed = dataclasses.replace(manifest, seed=7).to_bytes()
    signed = dataclasses.replace(SignedManifest.sign(operator, manifest), manifest_bytes=changed)
    with pytest.raises(InvalidInput, match="its signature is wrong"):
        signed.verify(run)


def test_manifest_too_large_for_the_dht_is_refused_with_its_size(
    operator: Identity, manifest: Manifest
):
    model = manifest.model | {"notes": os.urandom(22_000).hex()}
    with pytest.raises(InvalidInput, match=r"manifest has 2\d{4} bytes compressed.*24576"):
        SignedManifest.sign(operator, dataclasses.replace(manifest, model=model))


def test_manifest_that_unpacks_to_gigabytes_is_refused_early():
    bomb = zlib.compress(bytes(20_000_000))
    assert len(bomb) < 24 * 1024
    tracemalloc.start()
    with pytest.raises(InvalidInput, match="damaged"):
        SignedManifest.from_bytes(bomb)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 2_000_000


def test_signed_manifest_of_a_newer_version_is_refused_by_its_version():
    newer = zlib.compress(pack([3, b"", b"", b""]))
    with pytest.raises(InvalidInput, match="version 3, this dilocox reads 2"):
        SignedManifest.from_bytes(newer)


@settings(deadline=None)
@given(st.binary(max_size=500), st.booleans())
def test_any_bytes_are_a_signed_manifest_or_refused(data: bytes, compressed: bool):
    with pytest.raises(InvalidInput):
        SignedManifest.from_bytes(zlib.compress(data) if compressed else data)

"""The sections of a manifest: what the operator decides once and every peer follows.

Each section stands alone; what concerns several of them (a model's vocabulary and the tokenizer,
the warmup and the end of the run) is checked where they meet, in manifest.py.

`with_defaults` fills in what a run.yaml may leave out because it follows from something else, and
the model of a preset, which names nothing more. The manifest that is signed spells everything out,
so that peers of another version never fill in another default.
"""

from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar, Literal

import yaml

from dilocox.dht.errors import InvalidInput
from dilocox.dht.field_rules import (
    Section,
    checked,
    integer,
    number,
    pair_of_fractions,
    rows,
    sections,
    shown,
    text,
    texts,
)

ENDINGS = {".txt": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}


def preset_names() -> list[str]:
    """Names that `model` may give instead of a configuration."""
    folder = resources.files("dilocox.dht") / "presets"
    return sorted(entry.name[:-5] for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def with_defaults(given: dict[str, Any]) -> dict[str, Any]:
    """Fill in what follows from other fields; mistakes are left to the checks."""
    model = given.get("model")
    if isinstance(model, str):
        given |= {"model": _preset(model), "preset": model}
    match given.get("data"):
        case {"more": [*others]}:
            more = [_with_format(other, f"data.more[{n}]") for n, other in enumerate(others)]
            given["data"] = _with_format(given["data"] | {"more": more}, "data")
        case {"source": str()}:
            given["data"] = _with_format(given["data"], "data")
        case _:
            pass
    match given.get("outer"):
        case {"merge": "reset"}:
            given["outer"] = {"apply": "round_end", "momentum": 0.0} | given["outer"]
        case _:
            pass
    match given.get("codec"):
        case {"bits": 16 | 32, **rest} if "scheme" not in rest:
            given["codec"] = {"scheme": "dense"} | given["codec"]
        case _:
            pass
    match given.get("rounds"):
        case {"inner_steps": int(steps)} if 1 <= steps <= 100_000:
            bounds = {
                "min_inner_steps": max(1, steps // 4),
                "max_inner_steps": min(4 * steps, 100_000),
            }
            given["rounds"] = bounds | given["rounds"]
        case _:
            pass
    return given


def _with_format(given: Any, where: str) -> Any:
    match given:
        case {"source": str(source), **rest} if "format" not in rest and source != "stdlib":
            ending = ENDINGS.get(Path(source).suffix)
            if ending is None:
                raise InvalidInput(
                    f"{where}.format is missing; it must be text, json, parquet or hub"
                )
            return given | {"format": ending}
        case _:
            return given


def _preset(name: str) -> dict[str, Any]:
    if name not in preset_names():
        raise InvalidInput(f"model is {shown(name)}; presets are {', '.join(preset_names())}")
    file = resources.files("dilocox.dht") / "presets" / f"{name}.yaml"
    return yaml.safe_load(file.read_text(encoding="utf-8"))


MAX_TOKENS = 10**15
# Long heartbeats would make records outlive what the DHT keeps (records.MAX_LIFETIME_S).
MAX_HEARTBEAT_S = 600.0
MAX_REVISION = 2**31
MAX_REVISIONS_NOTED = 256
MAX_STAGES = 256
LONGEST = 8  # exchange_s: the longest exchange

_SOME_TEXT = r"[^\x00-\x1f]{1,512}"


@dataclass(frozen=True, kw_only=True)
class SourceSpec(Section):
    """Where text comes from.

    source: "stdlib" (the source of Python's standard library), a path or glob, or a name on the
        hub.
    format: "stdlib", "text", "json" (lines), "parquet" or "hub"; follows from the source's ending
        if left out.
    subset, revision, split: of a hub data set: its configuration, a commit or tag of its
        repository (the newest files if left out, which may change during the run), and the split.
    text_field: the field that holds the text, where there are fields.
    weight: the share of its bytes in what is trained on, over the sum of the weights.

    SOURCE, FORMAT: what messages name when the source, or its format, is at fault.
    """

    SOURCE: ClassVar[str] = "data.source"
    FORMAT: ClassVar[str] = "data.format"

    source: str = checked(text(_SOME_TEXT, "stdlib, a path or a hub name"), "stdlib")
    format: Literal["stdlib", "text", "json", "parquet", "hub"] = "stdlib"
    subset: str | None = checked(text(_SOME_TEXT, "text or nothing", optional=True), None)
    revision: str | None = checked(text(_SOME_TEXT, "a commit or tag", optional=True), None)
    split: str = checked(text(_SOME_TEXT, "the name of a split"), "train")
    text_field: str = checked(text(_SOME_TEXT, "the name of a field"), "text")
    weight: float = checked(number(0, 1e6, above=True), 1.0)


@dataclass(frozen=True, kw_only=True)
class DataSpec(SourceSpec):
    """What is trained on.

    more: sources beside the first; a part of the data is that part of each of them, mixed.
    tokenizer: "byt5" (bytes, needs no files), or a hub name or folder.
    tokenizer_digest: sha256 (hex) of what it makes of text; empty until `dilocox bootstrap` fills
        it in.
    parts: number of disjoint parts that heads lease.
    held_out: sha256 (hex) of the held-out part; empty until `dilocox bootstrap` fills it in.
    held_out_windows: windows of the validation loss.
    validation_share: the share of a replica's time that its evaluations of anchors may take; of
        short rounds not each is evaluated.
    """

    more: tuple[SourceSpec, ...] = checked(sections(SourceSpec, "data.more", most=15), ())
    tokenizer: str = checked(text(_SOME_TEXT, "byt5, a hub name or a folder"), "byt5")
    tokenizer_digest: str = checked(text(r"([0-9a-f]{64})?", "64 hex digits or empty"), "")
    parts: int = checked(integer(1, 65536), 64)
    held_out: str = checked(text(r"([0-9a-f]{64})?", "64 hex digits or empty"), "")
    held_out_windows: int = checked(integer(1, 65536), 64)
    validation_share: float = checked(number(0.0001, 1), 0.005)


@dataclass(frozen=True, kw_only=True)
class BatchSpec(Section):
    """The tokens of one inner step of a replica: windows of `sequence_length` tokens,
    `microbatch_size` of them at a time, `microbatches` times.
    """

    sequence_length: int = checked(integer(2, 1_048_576), 256)
    microbatch_size: int = checked(integer(1, 65536), 8)
    microbatches: int = checked(integer(1, 65536), 1)

    @property
    def tokens_per_step(self) -> int:
        return self.sequence_length * self.microbatch_size * self.microbatches


@dataclass(frozen=True, kw_only=True)
class PipelineSpec(Section):
    """How the stages of one replica work together.

    codec: of activations and their gradients; "auto" chooses bf16, int8 or int4 for each link by
        its speed.
    recompute: of a microbatch keep only what goes into each layer, and run the layers again before
        their backwards; less memory, a third more computing. A peer may choose it for itself.
    window: microbatches in flight at once; 0 lets the head choose by what it measures.
    """

    codec: Literal["auto", "fp32", "bf16", "int8", "int4"] = "auto"
    recompute: bool = False
    window: int = checked(integer(0, 1024), 0)


@dataclass(frozen=True, kw_only=True)
class InnerSpec(Section):
    """The inner optimizer. Its learning rate warms up over `warmup_tokens` of the run, then follows
    `schedule` down to `final_fraction` of itself at the run's end. `precision` is that of a GPU; a
    CPU computes in fp32.

    schedule: "cosine" or "linear" all the way; "wsd" (warmup, stable, decay) falls in a line over
        the last `decay_share` of the run; "constant" never falls.
    optimizer: "adamw", or "muon" for the 2-D weights of the layers and AdamW for the rest.
    muon_learning_rate: follows the same schedule. It is scaled by 0.2 * sqrt(the longer side) of
        each matrix, so that an update is as large as a typical one of AdamW at the same rate.
    weight_decay: of both, each times its own learning rate; not on vectors.
    """

    optimizer: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = checked(number(0, 10, above=True), 1e-3)
    muon_learning_rate: float = checked(number(0, 10, above=True), 1e-3)
    muon_momentum: float = checked(number(0, 0.999), 0.95)
    betas: tuple[float, float] = checked(pair_of_fractions, (0.9, 0.95))
    eps: float = checked(number(0, 1, above=True), 1e-8)
    weight_decay: float = checked(number(0, 10), 0.1)
    clip_norm: float = checked(number(0, 1e6, above=True), 1.0)
    warmup_tokens: int = checked(integer(0, MAX_TOKENS), 0)
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    decay_share: float = checked(number(0, 1, above=True), 0.2)
    final_fraction: float = checked(number(0, 1), 0.1)
    precision: Literal["fp32", "bf16", "fp16"] = "bf16"


@dataclass(frozen=True, kw_only=True)
class OuterSpec(Section):
    """How averages enter the model.

    merge: "rebase" keeps local progress on top of a new anchor, "reset" drops it, "none" waits for
        the average.
    apply: an average is applied on "arrival" or at the "round_end".
    rebase_weight: share of the unsent progress that a rebase keeps in the live weights.
    learning_rate, momentum: outer Nesterov SGD.
    """

    merge: Literal["rebase", "reset", "none"] = "rebase"
    apply: Literal["arrival", "round_end"] = "arrival"
    rebase_weight: float = checked(number(0, 1), 0.75)
    learning_rate: float = checked(number(0, 10, above=True), 0.7)
    momentum: float = checked(number(0, 0.999), 0.5)


@dataclass(frozen=True, kw_only=True)
class CodecSpec(Section):
    """How pseudo-gradients travel.

    scheme: "low_rank" sends the factors of every matrix that gains from it, "dense" all values;
        low_rank if left out, with 16 or 32 bits dense.
    bits: 4, 8 or 16 per value in groups of 64, or 32 for raw fp32.
    rank: of the first exchange. adaptive: later ones have, per matrix, the rank that holds `energy`
        of the average, from min_rank to max_rank.
    residual_decay: what is kept of the codec's error each round.
    max_factor: the largest factor of a part; a part with a larger one is refused.
    """

    scheme: Literal["low_rank", "dense"] = "low_rank"
    bits: Literal[4, 8, 16, 32] = 4
    rank: int = checked(integer(1, 64), 16)
    adaptive: bool = True
    energy: float = checked(number(0, 1, above=True), 0.95)
    min_rank: int = checked(integer(1, 64), 4)
    max_rank: int = checked(integer(1, 64), 64)
    residual_decay: float = checked(number(0, 1), 0.95)
    max_factor: float = checked(number(0, 1e30, above=True), 1e4)


@dataclass(frozen=True, kw_only=True)
class RoundSpec(Section):
    """The length of a round.

    inner_steps: H, inner steps of a round.
    min_inner_steps, max_inner_steps: bounds for what a record may name as the next H; a quarter
        and four times of inner_steps if left out.
    max_age: unsent progress older than this many records is dropped.
    records_kept: records that every peer keeps for those who missed them.
    log_bytes: of its records a peer keeps no more than so many bytes, but the newest four; the
        bootstrap keeps so many bytes of every stage's older records, too.
    group_size: a group of more members than this averages in rows of at most so many.
    """

    inner_steps: int = checked(integer(1, 100_000), 100)
    min_inner_steps: int = checked(integer(1, 100_000), 25)
    max_inner_steps: int = checked(integer(1, 100_000), 400)
    max_age: int = checked(integer(1, 1000), 8)
    records_kept: int = checked(integer(1, 100_000), 64)
    log_bytes: int = checked(integer(0, 2**53), 1 << 30)
    group_size: int = checked(integer(2, 256), 32)


@dataclass(frozen=True, kw_only=True)
class DeadlineSpec(Section):
    """Seconds after which somebody is given up.

    heartbeat_s: between two announcements in the DHT.
    silence_s: a member of an exchange, or a neighbour in a replica, that is silent this long
        counts as dead.
    matchmaking_s: for finding the group.
    exchange_s: for moving the bytes of one exchange under the ranks of the first; more for larger
        ranks, and for what members say that they compute meanwhile.
    vote_s: for the vote that follows.
    """

    heartbeat_s: float = checked(number(0.1, MAX_HEARTBEAT_S), 10.0)
    silence_s: float = checked(number(0.1, 3600), 5.0)
    matchmaking_s: float = checked(number(0.1, 3600), 3.0)
    exchange_s: float = checked(number(0.1, 86400), 30.0)
    vote_s: float = checked(number(0.1, 3600), 10.0)

    @property
    def record_lifetime_s(self) -> float:
        """How long a record in the DHT is valid: three heartbeats."""
        return 3 * self.heartbeat_s

    @property
    def longest_exchange_s(self) -> float:
        """What no exchange takes longer than, whatever its ranks and its members' codecs."""
        return LONGEST * self.exchange_s


@dataclass(frozen=True, kw_only=True)
class InitialSpec(Section):
    """The checkpoint that the run starts from; empty where its seed makes the initial weights.
    `dilocox bootstrap` writes it for a run.yaml that says `model: {from: ...}`.

    source: a folder, or a name on the hub and a commit.
    anchors: by stage, the sha256 of its initial weights as the flat fp32 vector of an anchor.
    """

    source: str = checked(text(r"[^\x00-\x1f]{0,512}", "a folder or a hub name"), "")
    anchors: tuple[str, ...] = checked(texts(r"[0-9a-f]{64}", "64 hex digits", most=MAX_STAGES), ())


@dataclass(frozen=True, kw_only=True)
class OperationSpec(Section):
    """What the operator changed since the run began. `dilocox operate` writes it; a run.yaml has
    none of it.

    revision: of the manifest; of several that the operator signed, the highest counts.
    state: "paused" peers keep what they have and train no more; of an "ended" run they leave.
    rules: the revision that last changed anything but `state`. Every round record names the rules
        it was made under, and only peers under the same rules make one together.
    root: sha256 (hex) of the first revision, on which the chain of every stage begins; empty in it.
    outer: outer learning rate and momentum of earlier rules, oldest first, as rows of [last rules
        under which they held, learning rate, momentum].
    rollbacks: rows of [rules, round]: of the records under earlier rules, those of later rounds do
        not count any more.
    base: of the last rollback, by stage: the digest of the record that the stage goes on from, or
        the root.
    """

    revision: int = checked(integer(0, MAX_REVISION), 0)
    state: Literal["running", "paused", "ended"] = "running"
    rules: int = checked(integer(0, MAX_REVISION), 0)
    root: str = checked(text(r"([0-9a-f]{64})?", "64 hex digits or empty"), "")
    outer: tuple[tuple[int, float, float], ...] = checked(
        rows(
            integer(0, MAX_REVISION),
            number(0, 10, above=True),
            number(0, 0.999),
            most=MAX_REVISIONS_NOTED,
        ),
        (),
    )
    rollbacks: tuple[tuple[int, int], ...] = checked(
        rows(integer(1, MAX_REVISION), integer(-1, 2**53), most=MAX_REVISIONS_NOTED), ()
    )
    base: tuple[str, ...] = checked(texts(r"[0-9a-f]{64}", "64 hex digits", most=MAX_STAGES), ())

"""The sections of a manifest: what the operator decides once and every peer follows.

Each section stands alone; what concerns several of them (a model's vocabulary and the tokenizer,
the warmup and the end of the run) is checked where they meet, in manifest.py.

`with_defaults` fills in what a run.yaml may leave out because it follows from something else, and
what a preset has: a model, and the fields of other sections that fit it, each of which a run.yaml
may override. The manifest that is signed spells everything out, so that peers of another version
never fill in another default.
"""

from collections.abc import Mapping
from importlib import resources
from typing import Annotated, Any, ClassVar, Literal

import yaml
from pydantic import Field, StrictBool
from pydantic.dataclasses import dataclass

from dilocox.dht.errors import InvalidInput
from dilocox.dht.field_rules import CHECKED, Digest, DigestOrEmpty, Integer, Number, Text, shown
from dilocox.dht.invite import PEER_ID
from dilocox.dht.wire import MAX_INTEGER

ENDINGS: Mapping[str, tuple[str, ...]] = {
    "text": (".txt",),
    "json": (".json", ".jsonl", ".ndjson", ".json.gz", ".jsonl.gz", ".json.zst", ".jsonl.zst"),
    "parquet": (".parquet",),
}


def format_of(name: str) -> str | None:
    """The format of a file, or of the files of a pattern, by its ending; None if that says none."""
    return next((each for each, endings in ENDINGS.items() if name.endswith(endings)), None)


def preset_names() -> list[str]:
    """Names that `model` may give instead of a configuration."""
    folder = resources.files("dilocox.dht") / "presets"
    return sorted(entry.name[:-5] for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def with_defaults(given: dict[str, Any]) -> dict[str, Any]:
    """Fill in what follows from other fields; mistakes are left to the checks."""
    model = given.get("model")
    if isinstance(model, str):
        for section, values in _preset(model).items():
            own: Any = {} if section == "model" else given.get(section, {})
            given[section] = values | own if isinstance(own, dict) else own
        given["preset"] = model
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
        case {"bits": 2 | 16 | 32, **rest} if "scheme" not in rest:
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
            if (found := format_of(source)) is None:
                raise InvalidInput(
                    f"{where}.format is missing; it must be text, json, parquet or hub"
                )
            return given | {"format": found}
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
MAX_ADMITTED = 4096  # the DHT takes a manifest of about 600: ids do not compress
MAX_STAGES = 256
LONGEST = 8  # exchange_s: the longest exchange
NO_GROUP_S = 2.5  # after the scheduled time nobody new joins a group

DIGESTS = f"at most {MAX_STAGES} digests of 64 hex digits"

Beta = Annotated[Number, Field(ge=0, lt=1)]
PeerId = Annotated[str, Field(pattern=f"^{PEER_ID}$")]
Day = Annotated[int, Field(ge=0, le=2**31)]
Revision = Annotated[int, Field(ge=0, le=MAX_REVISION)]
RoundNumber = Annotated[int, Field(ge=-1, le=MAX_INTEGER)]
OuterRate = Annotated[float, Field(gt=0, le=10)]
Momentum = Annotated[float, Field(ge=0, le=0.999)]


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class SourceSpec:
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

    source: Text = Field(default="stdlib", description="stdlib, a path or a hub name")
    format: Literal["stdlib", "text", "json", "parquet", "hub"] = "stdlib"
    subset: Text | None = Field(default=None, description="text or nothing")
    revision: Text | None = Field(default=None, description="a commit or tag")
    split: Text = Field(default="train", description="the name of a split")
    text_field: Text = Field(default="text", description="the name of a field")
    weight: Number = Field(default=1.0, gt=0, le=1e6)


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class DataSpec(SourceSpec):
    """What is trained on.

    more: sources beside the first; a part of the data is that part of each of them, mixed.
    tokenizer: "byt5" (bytes, needs no files), or a hub name or folder.
    tokenizer_digest: sha256 (hex) of what it makes of text; empty until `dilocox bootstrap` fills
        it in.
    document_masks: whether tokens see those before them in their own document only, and count
        positions from its beginning.
    end_of_text: the id that ends each document, for stages that open no tokenizer; None until
        `dilocox bootstrap` fills it in, where there are document masks.
    parts: number of disjoint parts that heads lease.
    held_out: sha256 (hex) of the held-out part; empty until `dilocox bootstrap` fills it in.
    held_out_windows: windows of the validation loss.
    validation_share: the share of a replica's time that its evaluations of anchors may take; of
        short rounds not each is evaluated.
    """

    more: tuple[SourceSpec, ...] = Field(
        default=(), max_length=15, description="a list of at most 15 sections"
    )
    tokenizer: Text = Field(default="byt5", description="byt5, a hub name or a folder")
    tokenizer_digest: DigestOrEmpty = Field(default="", description="64 hex digits or empty")
    document_masks: StrictBool = False
    end_of_text: Annotated[Integer, Field(ge=0, le=2**31)] | None = Field(
        default=None, description="a token id or nothing"
    )
    parts: Integer = Field(default=64, ge=1, le=65536)
    held_out: DigestOrEmpty = Field(default="", description="64 hex digits or empty")
    held_out_windows: Integer = Field(default=64, ge=1, le=65536)
    validation_share: Number = Field(default=0.005, ge=0.0001, le=1)


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class BatchSpec:
    """The tokens of one inner step of a replica: windows of `sequence_length` tokens,
    `microbatch_size` of them at a time, `microbatches` times.
    """

    sequence_length: Integer = Field(default=256, ge=2, le=1_048_576)
    microbatch_size: Integer = Field(default=8, ge=1, le=65536)
    microbatches: Integer = Field(default=1, ge=1, le=65536)

    @property
    def tokens_per_step(self) -> int:
        return self.sequence_length * self.microbatch_size * self.microbatches


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class PipelineSpec:
    """How the stages of one replica work together.

    codec: of activations and their gradients; "auto" chooses bf16, int8 or int4 for each link by
        its speed.
    recompute: of a microbatch keep only what goes into each layer, and run the layers again before
        their backwards; less memory, a third more computing. A peer may choose it for itself.
    window: microbatches in flight at once; 0 lets the head choose by what it measures.
    """

    codec: Literal["auto", "fp32", "bf16", "int8", "int4"] = "auto"
    recompute: StrictBool = False
    window: Integer = Field(default=0, ge=0, le=1024)


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class InnerSpec:
    """The inner optimizer. Its learning rate warms up over `warmup_tokens` of the run, those of all
    replicas together, then follows `schedule` down to `final_fraction` of itself at the run's end.
    `precision` is that of a GPU; a CPU computes in fp32.

    schedule: "cosine" or "linear" all the way; "wsd" (warmup, stable, decay) falls in a line over
        the last `decay_share` of the run; "constant" never falls.
    optimizer: "adamw", or "muon" for the 2-D weights of the layers and AdamW for the rest.
    muon_learning_rate: follows the same schedule. It is scaled by 0.2 * sqrt(the longer side) of
        each matrix, so that an update is as large as a typical one of AdamW at the same rate.
    weight_decay: of both, each times its own learning rate; not on vectors.
    """

    optimizer: Literal["adamw", "muon"] = "adamw"
    learning_rate: Number = Field(default=1e-3, gt=0, le=10)
    muon_learning_rate: Number = Field(default=1e-3, gt=0, le=10)
    muon_momentum: Number = Field(default=0.95, ge=0, le=0.999)
    betas: tuple[Beta, Beta] = Field(
        default=(0.9, 0.95), description="two numbers from 0 to below 1, like [0.9, 0.95]"
    )
    eps: Number = Field(default=1e-8, gt=0, le=1)
    weight_decay: Number = Field(default=0.1, ge=0, le=10)
    clip_norm: Number = Field(default=1.0, gt=0, le=1e6)
    warmup_tokens: Integer = Field(default=0, ge=0, le=MAX_TOKENS)
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    decay_share: Number = Field(default=0.2, gt=0, le=1)
    final_fraction: Number = Field(default=0.1, ge=0, le=1)
    precision: Literal["fp32", "bf16", "fp16"] = "bf16"


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class OuterSpec:
    """How averages enter the model.

    merge: "rebase" keeps local progress on top of a new anchor, "reset" drops it, "none" waits for
        the average.
    apply: an average is applied on "arrival" or at the "round_end".
    rebase_weight: share of the unsent progress that a rebase keeps in the live weights.
    learning_rate, momentum: outer Nesterov SGD.
    """

    merge: Literal["rebase", "reset", "none"] = "rebase"
    apply: Literal["arrival", "round_end"] = "arrival"
    rebase_weight: Number = Field(default=0.75, ge=0, le=1)
    learning_rate: Number = Field(default=0.7, gt=0, le=10)
    momentum: Number = Field(default=0.5, ge=0, le=0.999)


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class CodecSpec:
    """How pseudo-gradients travel.

    scheme: "low_rank" sends the factors of every matrix that gains from it, "dense" all values;
        low_rank if left out, with 2, 16 or 32 bits dense.
    bits: 4, 8 or 16 per value in groups of 64, 2 in groups of 256, or 32 for raw fp32.
    rank: of the first exchange. adaptive: later ones have, per matrix, the rank that holds `energy`
        of the average, from min_rank to max_rank.
    residual_decay: what is kept of the codec's error each round.
    max_factor: the largest factor of a part; a part with a larger one is refused.
    """

    scheme: Literal["low_rank", "dense"] = "low_rank"
    bits: Literal[2, 4, 8, 16, 32] = 4
    rank: Integer = Field(default=16, ge=1, le=64)
    adaptive: StrictBool = True
    energy: Number = Field(default=0.95, gt=0, le=1)
    min_rank: Integer = Field(default=4, ge=1, le=64)
    max_rank: Integer = Field(default=64, ge=1, le=64)
    residual_decay: Number = Field(default=0.95, ge=0, le=1)
    max_factor: Number = Field(default=1e4, gt=0, le=1e30)


RobustRule = Literal["gate", "centered", "clip", "none"]
"""How far reducers believe members: peer/rounds/robust.py."""


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class RoundSpec:
    """The length of a round.

    inner_steps: H, inner steps of a round.
    min_inner_steps, max_inner_steps: bounds for what a record may name as the next H; a quarter
        and four times of inner_steps if left out.
    max_age: unsent progress older than this many records is dropped, and so is the residual of a
        peer that was in none of so many.
    records_kept: records that every peer keeps for those that missed them.
    log_bytes: of its records a peer keeps no more than so many bytes, but the newest four; the
        bootstrap keeps so many bytes of every stage's older records, too.
    group_size: a group of more members than this averages in rows of at most so many.
    robust: how far reducers believe members (peer/rounds/robust.py).
    """

    inner_steps: Integer = Field(default=100, ge=1, le=100_000)
    min_inner_steps: Integer = Field(default=25, ge=1, le=100_000)
    max_inner_steps: Integer = Field(default=400, ge=1, le=100_000)
    max_age: Integer = Field(default=8, ge=1, le=1000)
    records_kept: Integer = Field(default=64, ge=1, le=100_000)
    log_bytes: Integer = Field(default=1 << 30, ge=0, le=MAX_INTEGER)
    group_size: Integer = Field(default=32, ge=2, le=256)
    robust: RobustRule = "gate"


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class DeadlineSpec:
    """Seconds after which somebody is given up.

    heartbeat_s: between two announcements in the DHT, at least.
    silence_s: a member of an exchange, or a neighbour in a replica, that is silent this long
        counts as dead.
    matchmaking_s: for finding the group.
    exchange_s: for moving the bytes of one exchange under the ranks of the first; more for larger
        ranks, and for what members say that they compute meanwhile.
    vote_s: for the vote that follows.
    """

    heartbeat_s: Number = Field(default=10.0, ge=0.1, le=MAX_HEARTBEAT_S)
    silence_s: Number = Field(default=5.0, ge=0.1, le=3600)
    matchmaking_s: Number = Field(default=3.0, ge=0.1, le=3600)
    exchange_s: Number = Field(default=30.0, ge=0.1, le=86400)
    vote_s: Number = Field(default=10.0, ge=0.1, le=3600)

    @property
    def record_lifetime_s(self) -> float:
        """The shortest that a record in the DHT lives: three heartbeats."""
        return 3 * self.heartbeat_s

    @property
    def longest_exchange_s(self) -> float:
        """What no exchange takes longer than, whatever its ranks and its members' codecs."""
        return LONGEST * self.exchange_s

    @property
    def attempts_s(self) -> float:
        """What the two attempts of a round, each with its vote, take no longer than."""
        return 2 * (self.longest_exchange_s + self.vote_s)

    @property
    def group_s(self) -> float:
        """For how long after its scheduled time a group is looked for."""
        return self.matchmaking_s + NO_GROUP_S


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class InitialSpec:
    """The checkpoint that the run starts from; empty where its seed makes the initial weights.
    `dilocox bootstrap` writes it for a run.yaml that says `model: {from: ...}`.

    source: a folder, or a name on the hub and a commit.
    anchors: by stage, the sha256 of its initial weights as the flat fp32 vector of an anchor.
    """

    source: Text | Literal[""] = Field(default="", description="a folder or a hub name")
    anchors: tuple[Digest, ...] = Field(default=(), max_length=MAX_STAGES, description=DIGESTS)


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class SampleSpec:
    """What the bootstrap lets the model continue, for people to see how it gets better.

    prompt: empty: nothing. every: rounds between two answers, at least. tokens: of one, at most.
    """

    prompt: Text | Literal[""] = Field(default="", description="text of one line, 512 characters")
    every: Integer = Field(default=50, ge=1, le=1_000_000)
    tokens: Integer = Field(default=64, ge=1, le=512)


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class OperationSpec:
    """What the operator changed since the run began. `dilocox operate` writes it; a run.yaml has
    none of it.

    revision: of the manifest; of several that the operator signed, the highest counts.
    state: "paused" peers keep what they have and train no more; of an "ended" run they leave.
    rules: the revision that last changed anything but `state`, `admitted` and what is for people
        only. Every round record names the rules it was made under, and only peers under the same
        rules make one together.
    root: sha256 (hex) of the first revision, on which the chain of every stage begins; empty in it.
    outer: outer learning rate and momentum of earlier rules, oldest first, as rows of [last rules
        under which they held, learning rate, momentum].
    rollbacks: rows of [rules, round]: of the records under earlier rules, those of later rounds do
        not count any more.
    base: of the last rollback, by stage: the digest of the record that the stage goes on from, or
        the root.
    admitted: rows of [peer id, day]: until that day, of those since 1970, the peer may take part
        where `admission` is "listed".
    """

    revision: Integer = Field(default=0, ge=0, le=MAX_REVISION)
    state: Literal["running", "paused", "ended"] = "running"
    rules: Integer = Field(default=0, ge=0, le=MAX_REVISION)
    root: DigestOrEmpty = Field(default="", description="64 hex digits or empty")
    outer: tuple[tuple[Revision, OuterRate, Momentum], ...] = Field(
        default=(), max_length=MAX_REVISIONS_NOTED, description="rows that `dilocox operate` writes"
    )
    rollbacks: tuple[tuple[Revision, RoundNumber], ...] = Field(
        default=(), max_length=MAX_REVISIONS_NOTED, description="rows that `dilocox operate` writes"
    )
    base: tuple[Digest, ...] = Field(default=(), max_length=MAX_STAGES, description=DIGESTS)
    admitted: tuple[tuple[PeerId, Day], ...] = Field(
        default=(), max_length=MAX_ADMITTED, description="rows that `dilocox operate` writes"
    )

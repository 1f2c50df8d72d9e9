"""The manifest: everything that the peers of a run agree on, written by the operator as run.yaml.

It is checked field by field, written as canonical JSON, signed with the operator's key and found in
the DHT under the run id. The run id is the hash of that key and the run's name, so nobody else can
sign a manifest for it.
"""

import contextlib
import hashlib
import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import yaml
from pydantic import Field
from pydantic.dataclasses import dataclass as checked_dataclass

from dilocox.dht.errors import InvalidInput, UnreadableManifest, in_one_line
from dilocox.dht.field_rules import CHECKED, Integer, ModelConfiguration, Text, build, shown
from dilocox.dht.identity import Identity, verify
from dilocox.dht.invite import run_id as run_id_of
from dilocox.dht.manifest_sections import (
    MAX_STAGES,
    MAX_TOKENS,
    BatchSpec,
    CodecSpec,
    DataSpec,
    DeadlineSpec,
    InitialSpec,
    InnerSpec,
    OperationSpec,
    OuterSpec,
    PipelineSpec,
    RoundSpec,
    SampleSpec,
    preset_names,
    with_defaults,
)
from dilocox.dht.wire import MAX_INTEGER, Malformed, pack, unpack

__all__ = [
    "PROTOCOL_VERSION",
    "BatchSpec",
    "CodecSpec",
    "DataSpec",
    "DeadlineSpec",
    "InitialSpec",
    "InnerSpec",
    "Manifest",
    "OperationSpec",
    "OuterSpec",
    "PipelineSpec",
    "RoundSpec",
    "SignedManifest",
    "preset_names",
    "warnings",
]

PROTOCOL_VERSION = 17
SIGNED_VERSION = 2
REVISIONS_OF_A_KEY = 1 << 20  # after n handovers revisions begin at n times this
MAX_HANDOVERS = 64
MAX_STORED_BYTES = 24 * 1024
MAX_MANIFEST_BYTES = 256 * 1024
BYT5_VOCABULARY = 384  # ByT5Tokenizer().vocab_size says 256, but its ids go up to 383

OTHER_VERSION = "install the version that the operator runs"

_SIGNATURE_PURPOSE = b"dilocox manifest\0"
_HANDOVER_PURPOSE = b"dilocox handover\0"

Handover = tuple[bytes, bytes]
"""A public key of the operator, and its signature over the one that follows it."""


def hand_over(identity: Identity, public_key: bytes) -> Handover:
    """Let another key sign the revisions of all runs that this one signs."""
    return identity.public_key, identity.sign(_HANDOVER_PURPOSE + public_key)


@checked_dataclass(frozen=True, kw_only=True, config=CHECKED)
class Manifest:
    """One run. Only `name`, `model` and `end_tokens` must be given.

    name: of the run; it enters the run id.
    protocol: version of the rules that all peers follow.
    seed: of the initial weights and the order of the data.
    model: Hugging Face configuration with its model_type; in run.yaml also the name of a preset, or
        {from: a checkpoint}, which pipeline/pretrained.py reads.
    preset: the preset that `model` came from.
    stages: slices that the model is cut into.
    end_tokens: the run ends when it has trained on so many.
    admission: which peers may take part: all that have the invite, or those the operator listed.
    about: the operator's words on the run, for its visitors.
    licence: of the model that the run makes.
    """

    name: Annotated[str, Field(pattern="^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] = Field(
        description="1 to 64 letters, digits or -_."
    )
    protocol: Integer = Field(default=PROTOCOL_VERSION, ge=1, le=1_000_000)
    seed: Integer = Field(default=0, ge=0, le=MAX_INTEGER)
    model: ModelConfiguration = Field(
        description="the name of a preset or a Hugging Face configuration"
    )
    preset: Annotated[str, Field(pattern="^[a-z0-9._-]{1,64}$")] | None = Field(
        default=None, description="a preset's name"
    )
    stages: Integer = Field(default=1, ge=1, le=MAX_STAGES)
    end_tokens: Integer = Field(ge=1, le=MAX_TOKENS)
    admission: Literal["open", "listed"] = "open"
    about: Annotated[str, Field(pattern=r"^[^\x00-\x09\x0b-\x1f]{0,500}$")] = Field(
        default="", description="text of at most 500 characters"
    )
    licence: Text | Literal[""] = Field(default="", description="the name of a licence")
    data: DataSpec = DataSpec()
    batch: BatchSpec = BatchSpec()
    pipeline: PipelineSpec = PipelineSpec()
    inner: InnerSpec = InnerSpec()
    outer: OuterSpec = OuterSpec()
    codec: CodecSpec = CodecSpec()
    rounds: RoundSpec = RoundSpec()
    deadlines: DeadlineSpec = DeadlineSpec()
    initial: InitialSpec = InitialSpec()
    samples: SampleSpec = SampleSpec()
    operation: OperationSpec = OperationSpec()

    def __post_init__(self) -> None:
        _check_protocol(self.protocol)
        _check_together(self)

    @classmethod
    def load(
        cls, path: Path, completed: Callable[[dict[str, Any]], dict[str, Any]] = dict
    ) -> "Manifest":
        """Read run.yaml; raises `InvalidInput` that starts with the file's name.

        completed: fills in what is found elsewhere, before anything is checked.
        """
        try:
            content = path.read_text(encoding="utf-8")
            data = yaml.safe_load(content)
        except OSError as error:
            raise InvalidInput(
                f"{path}: cannot be read ({error.strerror}); name a run.yaml"
            ) from error
        except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
            mark: Any = getattr(error, "problem_mark", None)
            place = f"line {mark.line + 1}: " if mark else ""
            reason = getattr(error, "problem", None) or in_one_line(error)
            remedy = "; indent with spaces, not tabs" if r"'\t'" in reason else ""
            raise InvalidInput(f"{path}: is not valid YAML ({place}{reason}){remedy}") from error
        if data is None:
            raise InvalidInput(f"{path}: is empty; describe the run in it")
        try:
            if isinstance(data, dict):
                if "initial" in data:
                    raise InvalidInput("initial is not for a run.yaml: use model: {from: ...}")
                data = completed(cast("dict[str, Any]", data))
            manifest = cls.from_dict(data)
            if manifest.operation != OperationSpec():
                raise InvalidInput("operation is not for a run.yaml: use `dilocox operate`")
            return manifest
        except InvalidInput as error:
            raise InvalidInput(f"{path}: {error}") from error

    @classmethod
    def from_dict(cls, data: object) -> "Manifest":
        """Check what YAML or JSON gave and fill in the defaults; raises `InvalidInput`."""
        if not isinstance(data, Mapping):
            return build(cls, data)
        given = dict(cast(Mapping[str, Any], data))
        # First of all: a later protocol may have fields that this program does not know.
        _check_protocol(given.get("protocol", PROTOCOL_VERSION))
        return build(cls, with_defaults(given))

    @property
    def document_end(self) -> int | None:
        """The token behind each document, where `data.document_masks` keeps them apart.

        Raises `InvalidInput` where nothing says which one it is.
        """
        if not self.data.document_masks:
            return None
        if self.data.end_of_text is None:
            raise InvalidInput(
                "data.document_masks is true without data.end_of_text, the id that ends a "
                "document: publish run.yaml with `dilocox bootstrap`, which fills it in"
            )
        return self.data.end_of_text

    def to_dict(self) -> dict[str, Any]:
        """Plain values that `from_dict` reads.

        What came later and is not used is left out: so versions that know none of it read it, too.
        """
        values = asdict(self)
        for name, unused in _UNSAID.items():
            if getattr(self, name) == unused:
                del values[name]
        return values

    def to_bytes(self) -> bytes:
        """Canonical JSON: every field of `to_dict`, sorted, without spaces."""
        return json.dumps(
            self.to_dict(),
            sort_keys=True,
            separators=(",", ":"),
            ensure_ascii=False,
            allow_nan=False,
        ).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Manifest":
        """Read what `to_bytes` wrote; raises `InvalidInput`."""
        if len(data) > MAX_MANIFEST_BYTES:
            raise InvalidInput(f"manifest has {len(data)} bytes; it may have {MAX_MANIFEST_BYTES}")
        try:
            manifest = cls.from_dict(json.loads(data))
            _ = manifest.document_end
            return manifest
        except (ValueError, RecursionError) as error:
            raise InvalidInput(f"manifest is no valid JSON ({error})") from error
        except InvalidInput as error:
            raise InvalidInput(f"manifest: {error}") from error

    @property
    def digest(self) -> str:
        """sha256 (hex) of the canonical JSON."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    # ---- revisions (manifest_revisions.py) -------------------------------------------------------
    @property
    def root(self) -> str:
        """Digest of the run's first revision: record -1 of every stage's chain."""
        return self.operation.root or self.digest

    @property
    def rules(self) -> int:
        """The number that new round records name; see `OperationSpec`."""
        return self.operation.rules

    def outer_under(self, rules: int) -> tuple[float, float]:
        """Learning rate and momentum of the outer step of a record that names these rules."""
        for last, learning_rate, momentum in self.operation.outer:
            if rules <= last:
                return learning_rate, momentum
        return self.outer.learning_rate, self.outer.momentum

    def ended_at(self, tokens: int) -> bool:
        """Whether the run has ended, of which so many tokens are trained."""
        return self.operation.state == "ended" or tokens >= self.end_tokens

    def rolled_back(self, round_number: int, rules: int) -> bool:
        """Whether the operator went back behind the record of this round and these rules."""
        return any(
            rules < since and round_number > last for since, last in self.operation.rollbacks
        )

    def base(self, stage: int) -> str:
        """Digest of the record that every chain of a stage must hold now, or the root."""
        base = self.operation.base
        return base[stage] if stage < len(base) else self.root


_UNSAID = {"initial": InitialSpec(), "samples": SampleSpec(), "about": "", "licence": ""}


@dataclass(frozen=True)
class SignedManifest:
    """A manifest as it travels: its canonical bytes, the operator's public key and signature.

    handovers: from the key that the run id was made of to this one, where the operator replaced it.
    """

    manifest_bytes: bytes
    public_key: bytes
    signature: bytes
    handovers: tuple[Handover, ...] = ()

    @classmethod
    def sign(
        cls, identity: Identity, manifest: Manifest, handovers: tuple[Handover, ...] = ()
    ) -> "SignedManifest":
        """Sign as the operator; raises `InvalidInput` when it is too large for the DHT."""
        manifest_bytes = manifest.to_bytes()
        signature = identity.sign(_SIGNATURE_PURPOSE + manifest_bytes)
        signed = cls(manifest_bytes, identity.public_key, signature, handovers)
        size = len(signed.to_bytes())
        if size > MAX_STORED_BYTES:
            raise InvalidInput(
                f"manifest has {size} bytes compressed; the DHT takes {MAX_STORED_BYTES}: "
                "shorten the model's configuration, or revoke peers that are gone"
            )
        return signed

    @property
    def run_id(self) -> str:
        """The run that this manifest says it is for; only `verify` proves it."""
        return run_id_of(self.run_key, Manifest.from_bytes(self.manifest_bytes).name)

    @property
    def run_key(self) -> bytes:
        """The public key that the run id was made of, which the operator's bootstrap has."""
        return self.handovers[0][0] if self.handovers else self.public_key

    def verify(self, run_id: str) -> Manifest:
        """The manifest, proven to be the operator's for this run; raises `InvalidInput`.

        `UnreadableManifest` where it is the operator's, but this program knows less than it says.
        """
        revision = self.revision_of(run_id)
        try:
            return Manifest.from_bytes(self.manifest_bytes)
        except InvalidInput as error:
            said = str(error).removesuffix(f": {OTHER_VERSION}")
            raise UnreadableManifest(
                f"this dilocox cannot read revision {revision} of the operator's {said}: "
                f"{OTHER_VERSION}"
            ) from error

    def readable(self, run_id: str) -> Manifest | None:
        """As `verify`; None where this program cannot read it."""
        with contextlib.suppress(UnreadableManifest):
            return self.verify(run_id)
        return None

    def revision_of(self, run_id: str) -> int:
        """Its revision, proven to be the operator's for this run; raises `InvalidInput`.

        Of a manifest of another protocol, too, which this program cannot read: its peers pass it on
        to those that can, and to those that then say why they cannot.
        """
        if not verify(self.public_key, _SIGNATURE_PURPOSE + self.manifest_bytes, self.signature):
            raise InvalidInput(
                f"manifest of run {run_id}: its signature is wrong; ask for a new invite"
            )
        keys = [*(key for key, _ in self.handovers), self.public_key]
        for (key, signature), to in zip(self.handovers, keys[1:], strict=True):
            if not verify(key, _HANDOVER_PURPOSE + to, signature):
                raise InvalidInput(
                    f"manifest of run {run_id}: a handover of the operator's key is wrong"
                )
        try:
            match json.loads(self.manifest_bytes):
                case {"name": str(name), "operation": {"revision": int(revision)}}:
                    pass
                case {"name": str(name)}:
                    revision = 0
                case _:
                    raise InvalidInput(f"manifest of run {run_id} has no name")
        except (ValueError, RecursionError) as error:
            raise InvalidInput(f"manifest of run {run_id} is no valid JSON ({error})") from error
        found = run_id_of(self.run_key, name)
        if found != run_id:
            raise InvalidInput(
                f"manifest is of run {found}, the invite names run {run_id}: check the invite"
            )
        if revision // REVISIONS_OF_A_KEY != len(self.handovers):
            raise InvalidInput(
                f"manifest of run {run_id}: the operator's key that signed revision {revision} may "
                f"sign none of that number, after {len(self.handovers)} handovers"
            )
        return revision

    def to_bytes(self) -> bytes:
        """Compressed msgpack."""
        return zlib.compress(
            pack(
                [
                    SIGNED_VERSION,
                    self.manifest_bytes,
                    self.public_key,
                    self.signature,
                    self.handovers,
                ]
            ),
            level=9,
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> "SignedManifest":
        """Read what `to_bytes` wrote, never unpacking more than a manifest may have
        (`InvalidInput`).
        """
        if len(data) > MAX_STORED_BYTES:
            raise InvalidInput(
                f"signed manifest has {len(data)} bytes; it may have {MAX_STORED_BYTES}"
            )
        try:
            unpacked = zlib.decompressobj().decompress(data, MAX_MANIFEST_BYTES)
            value = unpack(unpacked, MAX_MANIFEST_BYTES)
        except (zlib.error, Malformed) as error:
            raise InvalidInput(f"signed manifest is damaged ({error})") from error
        match cast("list[Any]", value) if isinstance(value, list) else []:
            case [int(version), *_] if version != SIGNED_VERSION:
                raise InvalidInput(
                    f"signed manifest has version {version}, this dilocox reads "
                    f"{SIGNED_VERSION}: {OTHER_VERSION}"
                )
            case [int(), bytes(manifest), bytes(public_key), bytes(signature), rows]:
                return cls(manifest, public_key, signature, _handovers(rows))
            case _:
                raise InvalidInput("signed manifest is damaged (wrong fields)")


def _handovers(rows: object) -> tuple[Handover, ...]:
    made: list[Handover] = []
    for row in cast("list[Any]", rows) if isinstance(rows, list) else [rows]:
        match row:
            case [bytes(key), bytes(signature)] if len(made) < MAX_HANDOVERS:
                made.append((key, signature))
            case _:
                raise InvalidInput("signed manifest is damaged (wrong handovers)")
    return tuple(made)


def warnings(manifest: Manifest) -> list[str]:
    """What a manifest may say but is known to train badly; one line each."""
    outer, lines = manifest.outer, list[str]()
    if outer.merge == "reset" and outer.apply == "arrival":
        lines.append(
            "outer.merge reset with outer.apply arrival drops progress in mid-round; "
            "use apply: round_end"
        )
    if outer.merge != "none" and outer.momentum >= 0.9:
        lines.append(
            f"outer.momentum {outer.momentum:g} suffers from delayed averages; with merge "
            f"{outer.merge} "
            f"use {'0.0' if outer.merge == 'reset' else '0.5'}"
        )
    if manifest.inner.optimizer == "muon" and manifest.codec.scheme == "low_rank":
        lines.append(
            "inner.optimizer muon makes updates that no low rank holds; use codec.scheme: dense"
        )
    return lines


def _check_protocol(protocol: object) -> None:
    if protocol != PROTOCOL_VERSION:
        raise InvalidInput(
            f"protocol is {shown(protocol)}; this dilocox speaks protocol {PROTOCOL_VERSION}: "
            + OTHER_VERSION
        )


def _check_together(manifest: Manifest) -> None:
    """Raise `InvalidInput` for the first field that does not fit another one."""
    model, data, rounds = manifest.model, manifest.data, manifest.rounds
    vocabulary = model.get("vocab_size")
    for name, source in [
        ("data", data),
        *((f"data.more[{n}]", m) for n, m in enumerate(data.more)),
    ]:
        if (source.source == "stdlib") != (source.format == "stdlib"):
            raise InvalidInput(
                f"{name}.format is {source.format!r} with {name}.source {source.source!r}; "
                "stdlib goes with stdlib only"
            )
    if data.tokenizer == "byt5" and not (
        isinstance(vocabulary, int) and vocabulary >= BYT5_VOCABULARY
    ):
        raise InvalidInput(
            f"model.vocab_size is {shown(vocabulary)}; "
            f"the byt5 tokenizer needs at least {BYT5_VOCABULARY}"
        )
    for name in ("max_position_embeddings", "n_positions"):  # the latter in gpt2
        positions = model.get(name)
        if isinstance(positions, int) and manifest.batch.sequence_length > positions:
            raise InvalidInput(
                f"batch.sequence_length is {manifest.batch.sequence_length}; "
                f"it must be at most model.{name} ({positions})"
            )
    codec = manifest.codec
    if codec.scheme != "dense" and codec.bits not in (4, 8):
        raise InvalidInput(
            f"codec.bits is {codec.bits} with codec.scheme {codec.scheme}; it must be 4 or 8, "
            "or the scheme dense"
        )
    if not codec.min_rank <= codec.rank <= codec.max_rank:
        raise InvalidInput(
            f"codec.rank is {codec.rank}; it must lie between codec.min_rank ({codec.min_rank}) "
            f"and codec.max_rank ({codec.max_rank})"
        )
    if not rounds.min_inner_steps <= rounds.inner_steps <= rounds.max_inner_steps:
        raise InvalidInput(
            f"rounds.inner_steps is {rounds.inner_steps}; it must lie between "
            f"rounds.min_inner_steps ({rounds.min_inner_steps}) and "
            f"rounds.max_inner_steps ({rounds.max_inner_steps})"
        )
    if len(manifest.initial.anchors) not in (0, manifest.stages):
        raise InvalidInput(
            f"initial.anchors has {len(manifest.initial.anchors)} of {manifest.stages} stages; "
            "only `dilocox bootstrap` writes this"
        )
    operation = manifest.operation
    if operation.rules > operation.revision or len(operation.base) not in (0, manifest.stages):
        raise InvalidInput(
            f"operation.rules is {operation.rules} in revision {operation.revision}, with bases of "
            f"{len(operation.base)} of {manifest.stages} stages; only `dilocox operate` writes this"
        )
    if manifest.inner.warmup_tokens >= manifest.end_tokens:
        raise InvalidInput(
            f"inner.warmup_tokens is {manifest.inner.warmup_tokens}; "
            f"it must be less than end_tokens ({manifest.end_tokens})"
        )

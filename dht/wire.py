"""Bytes on the wire: msgpack with bounds, so that no input from the network can ask for memory it
did not send.

Only plain values pass (no extension types, no objects), text must be UTF-8, map keys must be text.
Only this file knows the msgpack package.

And the envelope that a record travels in: its owner, key, expiry and sequence number, and the
signature over these. hivemind shows a validator only the hash of a key, so the key itself stands
inside the envelope, under the signature; so do run (the key starts with it), owner (the peer id is
the hash of the public key), sequence number and expiry. A stranger can neither forge a record, nor
move it to another key or owner, nor make it live longer. hivemind's own declarations in matchmaking
are sealed the same way, with the hash in the place of the key.
"""

import reprlib
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, cast

import msgpack  # pyright: ignore[reportMissingTypeStubs]
from pydantic import FailFast, TypeAdapter, ValidationError

from dilocox.dht.identity import Identity, peer_id_bytes_of, peer_id_of, verify

MAX_ITEMS = 1024

T = TypeVar("T")
# as many as a stranger likes: their errors would take a thousand times the memory
Many = Annotated[tuple[T, ...], FailFast()]


class Malformed(ValueError):
    """Bytes that are not what they claim to be."""


def pack(value: object) -> bytes:
    """Encode None, bool, int, float, str, bytes, lists, tuples and dicts of them (`Malformed`)."""
    try:
        return cast(bytes, msgpack.packb(value, use_bin_type=True))  # pyright: ignore
    except (ValueError, TypeError, OverflowError) as error:
        raise Malformed(f"cannot be written as msgpack: {error}") from error


def unpack(data: bytes, max_bytes: int, *, max_items: int = MAX_ITEMS) -> object:
    """Decode `data`; raises `Malformed` if it is over `max_bytes` or not one plain value.

    max_items: of a list or a map.
    """
    if len(data) > max_bytes:
        raise Malformed(f"{len(data)} bytes, at most {max_bytes} are allowed")
    try:
        return cast(
            object,
            msgpack.unpackb(  # pyright: ignore
                data,
                raw=False,
                strict_map_key=True,
                ext_hook=_no_extensions,
                max_array_len=max_items,
                max_map_len=max_items,
                max_str_len=max_bytes,
                max_bin_len=max_bytes,
            ),
        )
    except (ValueError, TypeError, RecursionError) as error:
        raise Malformed(f"no valid msgpack: {error}") from error


def checked(value: object, kind: TypeAdapter[T]) -> T:
    """What was decoded as a value of this type; raises `Malformed`."""
    try:
        return kind.validate_python(value)
    except ValidationError as error:
        raise Malformed(first_flaw(error)) from None


def first_flaw(error: ValidationError) -> str:
    """What is wrong and where, in one line, however large the value is."""
    first = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(map(str, first["loc"])) or "it"
    return f"{where}: {first['msg']}: {reprlib.repr(first['input'])}"


def _no_extensions(code: int, data: bytes) -> Any:
    raise Malformed(f"extension type {code} is not allowed")


VERSION = 1
# hivemind 1.1.12 was seen to die of larger values; nothing that we store comes near.
MAX_VALUE_BYTES = 32 * 1024
MAX_INTEGER = 2**53  # of whatever counts: a float64 still tells such numbers apart

_PURPOSE = b"dilocox record\0"


class Refused(ValueError):
    """A value from the network that is not accepted; `kind` is one word for the metric."""

    def __init__(self, kind: str, reason: str):
        super().__init__(f"{kind}: {reason}")
        self.kind = kind


@dataclass(frozen=True, kw_only=True)
class Envelope:
    """An opened envelope.

    key: the DHT key, or the 20 byte hash of a foreign one.
    sequence: grows with every record that the owner writes.
    expires_at: run time in seconds.
    """

    key: str | bytes
    sequence: int
    expires_at: float
    payload: bytes
    public_key: bytes

    @property
    def owner(self) -> str:
        """Peer id (base58) of its signer."""
        return peer_id_of(self.public_key)

    @property
    def owner_bytes(self) -> bytes:
        """The same as bytes: the subkey of the record."""
        return peer_id_bytes_of(self.public_key)


def seal(
    identity: Identity, *, key: str | bytes, sequence: int, expires_at: float, payload: bytes
) -> bytes:
    """Sign a payload; raises `Refused` when the envelope is too large to be stored."""
    body = [VERSION, key, sequence, float(expires_at), payload, identity.public_key]
    data = pack([*body, identity.sign(_PURPOSE + pack(body))])
    if len(data) > MAX_VALUE_BYTES:
        raise Refused("size", f"{len(data)} bytes, the DHT takes {MAX_VALUE_BYTES}")
    return data


def unseal(data: bytes, *, check_signature: bool = True) -> Envelope:
    """Open an envelope and check its signature, unless that was done before; raises `Refused`."""
    if len(data) > MAX_VALUE_BYTES:
        raise Refused("size", f"{len(data)} bytes, at most {MAX_VALUE_BYTES} are allowed")
    try:
        value = unpack(data, MAX_VALUE_BYTES)
    except Malformed as error:
        raise Refused("malformed", str(error)) from error
    match value:
        case [
            int(version),
            str() | bytes() as key,
            int(sequence),
            float(expires_at),
            bytes(payload),
            bytes(public_key),
            bytes(signature),
        ] if version == VERSION and 0 <= sequence <= MAX_INTEGER:
            body = [version, key, sequence, expires_at, payload, public_key]
        case _:
            raise Refused("malformed", "not an envelope of this version")
    if check_signature and not verify(public_key, _PURPOSE + pack(body), signature):
        raise Refused("signature", "the signature is wrong")
    return Envelope(
        key=key, sequence=sequence, expires_at=expires_at, payload=payload, public_key=public_key
    )


def sealed_bytes(value: bytes) -> bytes:
    """The envelope in a value as hivemind stores it: msgpack around its bytes (`Refused`)."""
    try:
        sealed = unpack(value, MAX_VALUE_BYTES)
    except Malformed as error:
        raise Refused("malformed", str(error)) from error
    if not isinstance(sealed, bytes):
        raise Refused("malformed", "it has no envelope")
    return sealed

"""A peer's identity: one Ed25519 key that is its libp2p identity and signs everything it says.

The key file has the format that p2pd reads (a libp2p `PrivateKey` message around the key), so the
peer id that others see on a connection and the owner of a signed record are the same thing. The
operator's key is the same kind of file. Signatures have 64 bytes and public keys 32; with RSA keys,
which hivemind would make, both were two thirds of every record in the DHT. Peer ids and the key's
message are computed here rather than by hivemind, whose import takes seconds.
"""

import contextlib
import errno
import os
import stat
from functools import lru_cache
from pathlib import Path

from base58 import b58decode, b58encode
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from dilocox.dht.errors import EnvironmentFault, InvalidInput
from dilocox.dht.invite import PEER_ID_START

MAX_FILE_BYTES = 8192
SEED_BYTES = PUBLIC_KEY_BYTES = 32
NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.ENOSYS}

# protobuf: field 1 (key type) is Ed25519, field 2 (data) follows: the seed, then the public key.
_PRIVATE_KEY_MESSAGE = b"\x08\x01\x12\x40"


class Identity:
    """An Ed25519 key with its file.

    The signer puts the purpose into the first bytes of the data, so that a signature made for one
    purpose never fits another.
    """

    def __init__(self, path: Path, seed: bytes):
        self.path = path
        self._seed = seed
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self.public_key = self._key.public_key().public_bytes_raw()
        self.peer_id = peer_id_of(self.public_key)

    def __reduce__(self) -> tuple[type["Identity"], tuple[Path, bytes]]:
        return Identity, (self.path, self._seed)

    @classmethod
    def load_or_create(cls, path: Path) -> "Identity":
        """Read the key file, or write a new one with mode 0600.

        Raises `InvalidInput` when others may read the file or it holds no key, `EnvironmentFault`
        when it cannot be written.
        """
        try:
            return cls._load(path)
        except FileNotFoundError:
            _write_new_key(path)
            return cls._load(path)

    @classmethod
    def _load(cls, path: Path) -> "Identity":
        try:
            with path.open("rb") as file:
                mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
                data = file.read(MAX_FILE_BYTES)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise InvalidInput(
                f"key file {path} cannot be read ({error.strerror}): "
                "make it a file that this user owns"
            ) from error
        if mode & 0o077:
            raise InvalidInput(
                f"key file {path} has mode {mode:04o}, so others can use this identity: "
                f"run `chmod 600 {path}`"
            )
        try:
            return cls(path, _unwrap(data))
        except ValueError as error:
            raise InvalidInput(
                f"key file {path} holds no Ed25519 identity ({error}): "
                "restore it from a backup, or move it away to get a new identity"
            ) from error

    def sign(self, data: bytes) -> bytes:
        return self._key.sign(data)


def peer_id_of(public_key: bytes) -> str:
    """The libp2p peer id (base58) of a public key; empty, nobody's, for bytes that are none.

    A stranger's bytes may be long, and base58 takes time with the square of their length.
    """
    return _peer_id(public_key) if len(public_key) == PUBLIC_KEY_BYTES else ""


@lru_cache(maxsize=4096)
def _peer_id(public_key: bytes) -> str:
    return b58encode(peer_id_bytes_of(public_key)).decode()


def peer_id_bytes_of(public_key: bytes) -> bytes:
    """The libp2p peer id as bytes: the public key itself in two envelopes."""
    return PEER_ID_START + public_key


def public_key_of(peer_id: str) -> bytes:
    """The public key that a peer id holds; empty, nobody's, where it is none of ours."""
    length = len(PEER_ID_START) + PUBLIC_KEY_BYTES
    try:
        data = b58decode(peer_id[: 2 * length])
    except ValueError:
        return b""
    public_key = data[len(PEER_ID_START) :]
    return public_key if peer_id_of(public_key) == peer_id else b""


def verify(public_key: bytes, data: bytes, signature: bytes) -> bool:
    """Whether `signature` over `data` was made with the private half of `public_key`."""
    if len(public_key) != PUBLIC_KEY_BYTES:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


def _write_new_key(path: Path) -> None:
    key = Ed25519PrivateKey.generate()
    message = _PRIVATE_KEY_MESSAGE + key.private_bytes_raw() + key.public_key().public_bytes_raw()
    draft = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(message)
            file.flush()
            os.fsync(file.fileno())
        # A link never replaces a key that another process wrote in the meantime.
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    except OSError as error:
        # FAT, of which a memory stick has one, knows neither links nor who may read a file
        no_links = error.errno in NO_LINKS
        where = "on a disk that keeps permissions" if no_links else "that this user can write to"
        raise EnvironmentFault(
            f"key file {path} cannot be written ({error.strerror}): choose a folder {where}"
        ) from error
    finally:
        draft.unlink(missing_ok=True)


def _unwrap(message: bytes) -> bytes:
    if not message.startswith(_PRIVATE_KEY_MESSAGE):
        raise ValueError("it does not start like one")
    body = message[len(_PRIVATE_KEY_MESSAGE) :]
    if len(body) != SEED_BYTES + PUBLIC_KEY_BYTES:
        raise ValueError(f"{len(body)} bytes where {SEED_BYTES + PUBLIC_KEY_BYTES} are announced")
    seed, public_key = body[:SEED_BYTES], body[SEED_BYTES:]
    if Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw() != public_key:
        raise ValueError("its two halves do not belong together")
    return seed

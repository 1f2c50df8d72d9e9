"""Who a peer is: one RSA key that is its libp2p identity and signs everything it says.

The key file has the format that hivemind's p2pd reads (a libp2p `PrivateKey` message around a
PKCS#1 key), so the peer id that others see on a connection and the owner of a signed record are the
same thing. The operator's key is the same kind of file. Peer ids and the two small messages are
computed here rather than by hivemind, whose import takes seconds.
"""

import contextlib
import hashlib
import os
import stat
from functools import lru_cache
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from dilocox.dht.errors import EnvironmentFault, InvalidInput
from dilocox.dht.invite import BASE58, SHA256_MULTIHASH

KEY_BITS = 2048
# Verifying with a larger key or another exponent would let a stranger choose how much work we do.
MAX_KEY_BITS = 4096
PUBLIC_EXPONENT = 65537
MAX_FILE_BYTES = 8192

_SHA256 = hashes.SHA256()
_PADDING = padding.PSS(mgf=padding.MGF1(_SHA256), salt_length=padding.PSS.DIGEST_LENGTH)
_RSA_MESSAGE = b"\x08\x00\x12"  # protobuf: field 1 (key type) is RSA, field 2 (data) follows


class Identity:
    """An RSA key with its file.

    Signatures are RSA-PSS over SHA-256. Whoever signs puts the purpose into the first bytes of the
    data, so that a signature made for one purpose never fits another.
    """

    def __init__(self, path: Path, private_key_der: bytes):
        self.path = path
        self._private_key_der = private_key_der
        key = serialization.load_der_private_key(private_key_der, password=None)
        if not isinstance(key, rsa.RSAPrivateKey):
            raise ValueError("not an RSA key")
        self._key = key
        self.public_key = key.public_key().public_bytes(
            serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        if _load_public_key(self.public_key) is None:
            raise ValueError(f"an RSA key of {key.key_size} bits is not accepted")
        self.peer_id = peer_id_of(self.public_key)

    def __reduce__(self) -> tuple[type["Identity"], tuple[Path, bytes]]:
        return Identity, (self.path, self._private_key_der)

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
        except (ValueError, TypeError) as error:
            raise InvalidInput(
                f"key file {path} holds no RSA identity ({error}): "
                "restore it from a backup, or move it away to get a new identity"
            ) from error

    def sign(self, data: bytes) -> bytes:
        """Sign `data` (256 bytes with a 2048 bit key)."""
        return self._key.sign(data, _PADDING, _SHA256)


def peer_id_of(public_key: bytes) -> str:
    """The libp2p peer id (base58) of a DER SubjectPublicKeyInfo."""
    return base58_encode(peer_id_bytes_of(public_key))


@lru_cache(maxsize=4096)
def peer_id_bytes_of(public_key: bytes) -> bytes:
    """The libp2p peer id as bytes: a multihash of the public key message."""
    digest = hashlib.sha256(_RSA_MESSAGE + _varint(len(public_key)) + public_key).digest()
    return SHA256_MULTIHASH + digest


def verify(public_key: bytes, data: bytes, signature: bytes) -> bool:
    """Whether `signature` over `data` was made with the private half of `public_key` (DER)."""
    key = _load_public_key(public_key)
    if key is None:
        return False
    try:
        key.verify(signature, data, _PADDING, _SHA256)
    except InvalidSignature:
        return False
    return True


def base58_encode(data: bytes) -> str:
    """Bitcoin's base58, as libp2p writes peer ids."""
    number = int.from_bytes(data, "big")
    digits = ""
    while number:
        number, digit = divmod(number, 58)
        digits = BASE58[digit] + digits
    return "1" * (len(data) - len(data.lstrip(b"\0"))) + digits


@lru_cache(maxsize=4096)
def _load_public_key(public_key: bytes) -> rsa.RSAPublicKey | None:
    try:
        key = serialization.load_der_public_key(public_key)
    except Exception:  # noqa: BLE001 - parsers of foreign bytes raise what they like
        return None
    if not isinstance(key, rsa.RSAPublicKey) or not KEY_BITS <= key.key_size <= MAX_KEY_BITS:
        return None
    return key if key.public_numbers().e == PUBLIC_EXPONENT else None


def _write_new_key(path: Path) -> None:
    key = rsa.generate_private_key(public_exponent=PUBLIC_EXPONENT, key_size=KEY_BITS)
    der = key.private_bytes(
        serialization.Encoding.DER,
        serialization.PrivateFormat.TraditionalOpenSSL,
        serialization.NoEncryption(),
    )
    draft = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(_RSA_MESSAGE + _varint(len(der)) + der)
            file.flush()
            os.fsync(file.fileno())
        # A link never replaces a key that another process wrote in the meantime.
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    except OSError as error:
        raise EnvironmentFault(
            f"key file {path} cannot be written ({error.strerror}): "
            "choose a folder that this user can write to"
        ) from error
    finally:
        draft.unlink(missing_ok=True)


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*encoded, number])


def _unwrap(message: bytes) -> bytes:
    """The data of a libp2p PrivateKey message of type RSA."""
    if not message.startswith(_RSA_MESSAGE):
        raise ValueError("it does not start like one")
    length, shift, position = 0, 0, len(_RSA_MESSAGE)
    while position < len(message):
        byte = message[position]
        length |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            break
    if length != len(message) - position:
        raise ValueError(f"{len(message) - position} bytes where {length} are announced")
    return message[position:]

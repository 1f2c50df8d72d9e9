"""The key file is p2pd's, its owner alone may read it, and signatures belong to one key."""

import asyncio
import errno
import os
import stat
from pathlib import Path

import pytest
from hivemind.p2p import P2P

from dilocox.dht.errors import EnvironmentFault, InvalidInput
from dilocox.dht.identity import Identity, peer_id_of, verify


def test_new_key_is_private_to_its_owner_and_loads_as_the_same_identity(tmp_path: Path):
    path = tmp_path / "state" / "identity.key"
    created = Identity.load_or_create(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(path.parent.iterdir()) == [path]
    assert Identity.load_or_create(path).peer_id == created.peer_id


def test_key_written_by_hivemind_is_refused_with_what_to_do(tmp_path: Path):
    path = tmp_path / "identity.key"
    P2P.generate_identity(str(path))
    path.chmod(0o600)
    with pytest.raises(InvalidInput, match=r"holds no Ed25519 identity .* move it away"):
        Identity.load_or_create(path)


def test_a_disk_that_knows_no_permissions_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def link(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(EnvironmentFault, match="choose a folder on a disk that keeps permissions"):
        Identity.load_or_create(tmp_path / "operator.key")
    assert list(tmp_path.iterdir()) == []


def test_p2pd_takes_the_key_file_and_shows_the_same_peer_id(volunteer: Identity):
    async def shown() -> str:
        p2p = await P2P.create(identity_path=str(volunteer.path), startup_timeout=60)
        try:
            return str(p2p.peer_id)
        finally:
            await p2p.shutdown()

    assert asyncio.run(shown()) == volunteer.peer_id


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_key_that_others_can_use_is_refused_with_the_command_that_mends_it(
    key_file: Path, mode: int
):
    key_file.chmod(mode)
    with pytest.raises(InvalidInput, match=f"run `chmod 600 {key_file}`"):
        Identity.load_or_create(key_file)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"garbage",
        b"\x08\x00\x12\x05short",
        b"\x08\x01\x12\x00",
        b"\x08\x01\x12\x40" + bytes(64),
    ],
)
def test_damaged_key_file_is_refused_by_name(key_file: Path, content: bytes):
    key_file.write_bytes(content)
    with pytest.raises(InvalidInput, match=f"{key_file} holds no Ed25519 identity"):
        Identity.load_or_create(key_file)


@pytest.mark.parametrize(
    ("path", "error"),
    [("/", InvalidInput), ("/proc/no-such-folder/identity.key", EnvironmentFault)],
)
def test_a_place_that_can_be_no_key_file_is_named(path: str, error: type[Exception]):
    with pytest.raises(error, match=r"key file .* cannot be (read|written)"):
        Identity.load_or_create(Path(path))


def test_signature_fits_its_data_and_its_key_only(volunteer: Identity, stranger: Identity):
    signature = volunteer.sign(b"vote")
    assert verify(volunteer.public_key, b"vote", signature)
    assert not verify(volunteer.public_key, b"vote!", signature)
    assert not verify(volunteer.public_key, b"vote", signature[:-1] + bytes([signature[-1] ^ 1]))
    assert not verify(stranger.public_key, b"vote", signature)


def test_what_is_no_public_key_verifies_nothing(volunteer: Identity):
    signature = volunteer.sign(b"data")
    for public_key in (b"", volunteer.public_key[:-1], volunteer.public_key + b"\0", bytes(32)):
        assert not verify(public_key, b"data", signature)


def test_what_is_no_public_key_is_nobodys_and_costs_nothing():
    """Base58 of 64 kB takes 15 s, and a stranger sends as many votes as he likes."""
    assert peer_id_of(bytes(64_000)) == ""
    assert peer_id_of(b"") == ""

"""Keys, manifests and nodes for the tests of dht/."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hivemind.p2p import P2P

from dilocox.dht import streams
from dilocox.dht.clock import RunClock
from dilocox.dht.identity import Identity
from dilocox.dht.invite import run_id
from dilocox.dht.manifest import Manifest
from dilocox.dht.node import RunDHT, open_dht
from dilocox.dht.swarm import Swarm
from dilocox.dht.validator import RunRecordValidator

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)


@pytest.fixture(scope="session")
def identities(tmp_path_factory: pytest.TempPathFactory) -> list[Identity]:
    folder = tmp_path_factory.mktemp("keys")
    return [Identity.load_or_create(folder / f"{index}.key") for index in range(3)]


@pytest.fixture(scope="session")
def operator(identities: list[Identity]) -> Identity:
    return identities[0]


@pytest.fixture(scope="session")
def volunteer(identities: list[Identity]) -> Identity:
    return identities[1]


@pytest.fixture(scope="session")
def stranger(identities: list[Identity]) -> Identity:
    return identities[2]


@pytest.fixture(scope="session")
def manifest() -> Manifest:
    return Manifest.from_dict({"name": "demo", "model": "tiny", "end_tokens": 1000})


@pytest.fixture(scope="session")
def run(operator: Identity, manifest: Manifest) -> str:
    return run_id(operator.public_key, manifest.name)


@pytest.fixture
def key_file(tmp_path: Path, volunteer: Identity) -> Path:
    path = tmp_path / "identity.key"
    path.write_bytes(volunteer.path.read_bytes())
    path.chmod(0o600)
    return path


@pytest.fixture(scope="session")
def daemons() -> Iterator[list[P2P]]:
    """Three p2pd, of which all but the first have dialled the first; a scene of a test has handles
    of its own to them.
    """
    streams.install()  # as every process that answers has it
    started: list[P2P] = []

    async def start() -> None:
        for _ in range(3):
            first = await started[0].get_visible_maddrs() if started else None
            p2p = await P2P.create(
                initial_peers=first, nat_port_map=False, startup_timeout=60, dht_mode="client"
            )
            started.append(p2p)

    async def end() -> None:
        for p2p in started:
            await p2p.shutdown()

    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(start())
        yield started
    finally:
        loop.run_until_complete(end())
        loop.close()


@pytest.fixture(scope="module")
def open_node(run: str) -> Iterator[Callable[..., tuple[RunDHT, Swarm, RunClock]]]:
    """Opens nodes on loopback that live until the module's last test."""
    with contextlib.ExitStack() as stack:

        def open_one(identity: Identity, **options: Any) -> tuple[RunDHT, Swarm, RunClock]:
            clock = options.pop("clock", None) or RunClock()
            given: dict[str, Any] = {
                "bootstraps": (),
                "listen": LOOPBACK,
                "announce": (),
                "client_mode": False,
                "validator": RunRecordValidator(run, identity),
                **options,
            }
            dht = open_dht(identity=identity, clock=clock, **given)
            stack.callback(dht.close)
            return dht, Swarm(dht, run, identity, clock), clock

        yield open_one

"""The bootstrap's invite is all that a peer needs to find a manifest that proves itself."""

import os
import queue
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dilocox.dht import invite as invite_module
from dilocox.dht.bootstrap_node import BootstrapNode, Renewals, bootstrap_node
from dilocox.dht.errors import EnvironmentFault, InvalidInput
from dilocox.dht.identity import Identity
from dilocox.dht.invite import Invite, invite_addresses
from dilocox.dht.manifest import Manifest
from dilocox.dht.manifest_keeper import ManifestCopy, OwnManifest
from dilocox.dht.manifest_revisions import RevisionFolder
from dilocox.dht.swarm import Swarm

PEER = "12D3KooWEXWcUQWJ6amCxHKtPFrcNxgepcmy7YXo7tirWjgiJ9Fr"


class RunningBootstrap:
    """A bootstrap in a thread; `fault` is what ended it."""

    def __init__(self, **options: Any):
        self.nodes: queue.Queue[BootstrapNode] = queue.Queue()
        self.stop = threading.Event()
        self.fault: Exception | None = None
        self._look_s, self._options = options.pop("look_s", 1.0), options
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            with bootstrap_node(**self._options) as node:
                self.nodes.put(node)
                while not self.stop.wait(self._look_s):
                    node.tick()
        except EnvironmentFault as error:
            self.fault = error

    def __enter__(self) -> "RunningBootstrap":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.join()

    def invite(self) -> Invite:
        return self.nodes.get(timeout=60.0).invite

    def join(self) -> None:
        self._thread.join(30.0)
        assert not self._thread.is_alive()


@pytest.fixture
def options(operator: Identity, manifest: Manifest, run: str, tmp_path: Path) -> dict[str, Any]:
    return {
        "keeper": OwnManifest(operator, manifest, RevisionFolder(tmp_path, run)),
        "identity": operator,
        "listen": ("/ip4/127.0.0.1/tcp/0",),
        "announce": (),
        "others": (),
    }


def test_manifest_is_found_through_the_invite(
    options: dict[str, Any],
    open_node: Callable[..., Any],
    manifest: Manifest,
    volunteer: Identity,
    run: str,
):
    with RunningBootstrap(**options) as running:
        invite = Invite.parse(str(running.invite()))
        assert invite.run_id == run
        dht, swarm, clock = open_node(volunteer, bootstraps=invite.bootstraps)
        assert swarm.fetch_manifest(10.0).verify(invite.run_id) == manifest
        with pytest.raises(InvalidInput, match="know no run"):
            Swarm(dht, "ab" * 16, volunteer, clock).fetch_manifest(0.6)
        dht.close()
    assert running.fault is None


def test_a_copy_lets_others_join_when_it_comes_back_and_the_operator_does_not(
    options: dict[str, Any],
    open_node: Callable[..., Any],
    manifest: Manifest,
    volunteer: Identity,
    stranger: Identity,
    run: str,
    tmp_path: Path,
):
    def copy() -> dict[str, Any]:
        keeper = ManifestCopy(run, tmp_path / "run.manifest")
        return options | {"identity": stranger, "keeper": keeper}

    with RunningBootstrap(**options) as first:
        others = first.invite().bootstraps
        with RunningBootstrap(**copy() | {"others": others}) as running:
            invite = running.invite()
            assert invite.bootstraps[-len(others) :] == others
    with RunningBootstrap(**copy() | {"others": others}) as running:
        invite = running.invite()
        dht, swarm, _ = open_node(volunteer, bootstraps=invite.bootstraps)
        assert swarm.fetch_manifest(10.0).verify(run) == manifest
        dht.close()
    assert running.fault is None


def test_manifest_is_kept_alive(
    options: dict[str, Any], manifest: Manifest, operator: Identity, run: str, tmp_path: Path
):
    published: queue.Queue[bool] = queue.Queue()

    class Watched(OwnManifest):
        def publish(self, swarm: Swarm) -> bool:
            taken = super().publish(swarm)
            published.put(taken)
            return taken

    keeper = Watched(operator, manifest, RevisionFolder(tmp_path, run))
    options |= {"keeper": keeper, "look_s": 0.01, "refresh_s": 0.0}
    with RunningBootstrap(**options):
        assert [published.get(timeout=60.0) for _ in range(4)] == [True] * 4


def test_a_manifest_that_is_not_renewed_is_told_when_that_lasts_and_once(
    caplog: pytest.LogCaptureFixture,
):
    caplog.set_level("INFO", "dilocox")
    renewals = Renewals()
    for now in (0.0, 60.0):
        renewals.note(False, now)
    renewals.note(True, 120.0)
    for now in (180.0, 240.0, 420.0):
        renewals.note(False, now)
    assert not caplog.records
    for now in (480.0, 540.0):
        renewals.note(False, now)
    (warning,) = caplog.records
    assert "could not be renewed for 5 minutes" in warning.getMessage()
    renewals.note(True, 600.0)
    renewals.note(True, 660.0)
    assert [record.getMessage() for record in caplog.records[1:]] == [
        "the manifest is renewed again"
    ]


def test_bootstrap_whose_node_died_says_so(options: dict[str, Any]):
    with RunningBootstrap(**options) as running:
        # the node ends with it; killed itself, it could take a lock of hivemind's along
        p2pd = running.nodes.get(timeout=60.0).dht.p2pd_pid
        assert p2pd
        os.kill(p2pd, signal.SIGKILL)
        running.join()
    assert "start the bootstrap again" in str(running.fault)


def address(host: str) -> str:
    return f"/ip4/{host}/tcp/31337/p2p/{PEER}"


def test_invite_names_the_addresses_that_reach_furthest():
    public, local, loopback = address("8.8.8.8"), address("192.168.1.5"), address("127.0.0.1")
    assert invite_addresses((), [loopback, local, public], PEER) == (public, local)
    assert invite_addresses((), [loopback], PEER) == (loopback,)
    named = "/dns4/boot.example.org/tcp/443"
    assert invite_addresses((named,), [public], PEER) == (f"{named}/p2p/{PEER}",)
    assert len(invite_addresses((), [local] * 9, PEER)) == invite_module.MAX_INVITE_ADDRESSES

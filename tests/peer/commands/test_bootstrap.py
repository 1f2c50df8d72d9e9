"""A bootstrap's other bootstraps, and what it shows of itself."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Generator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dilocox.dht.errors import EnvironmentFault, InvalidInput, UnknownRun
from dilocox.dht.identity import peer_id_of
from dilocox.dht.invite import Invite
from dilocox.dht.records import MANIFEST_LIFETIME_S
from dilocox.peer.commands import bootstrap
from dilocox.peer.commands.bootstrap import (
    LOOK_PERIOD_S,
    STUCK_AFTER_S,
    BootstrapFacts,
    BootstrapServices,
    bytes_by_stage,
    other_bootstraps,
    run_bootstrap_command,
)
from dilocox.peer.options import BootstrapOptions
from tests.peer.fabricated import RUN
from tests.peer.shown_metrics import BOOTSTRAP, bootstrap_text

ME, OTHER, THIRD = (peer_id_of(bytes([n]) * 32) for n in (1, 2, 3))
NAMES = {
    "build_info": {"run", "version", "protocol", "role"},
    "ready": {"run"},
    "dht_peers": {"run"},
    "memory_bytes": {"run"},
    "manifest_expiry_timestamp_seconds": {"run"},
    "admission_end_timestamp_seconds": {"run"},
    "archive_bytes": {"run", "stage"},
    "archive_round": {"run", "stage"},
    "served_bytes_total": {"run", "kind"},
    "refused_total": {"run", "reason"},
}


def address(peer: str, port: int = 1) -> str:
    return f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer}"


def options(source: Path | Invite, *join: str, state: Path = Path()) -> BootstrapOptions:
    return BootstrapOptions(
        manifest=source,
        state=state,
        host="127.0.0.1",
        port=0,
        join=join,
        metrics_port=0,
    )


# ---- other bootstraps ----------------------------------------------------------------------------
def test_others_are_those_of_the_invite_and_those_to_join_without_itself() -> None:
    invite = Invite(RUN, (address(ME), address(OTHER)))
    more = Invite(RUN, (address(OTHER), address(THIRD)))
    found = other_bootstraps(options(invite, str(more), address(ME, 2)), RUN, ME)
    assert found == (address(OTHER), address(THIRD))
    assert other_bootstraps(options(Path("run.yaml")), RUN, ME) == ()
    assert other_bootstraps(options(Path("run.yaml"), address(THIRD)), RUN, ME) == (address(THIRD),)


def test_a_bootstrap_of_another_run_is_not_joined() -> None:
    stranger = Invite("f" * 32, (address(OTHER),))
    with pytest.raises(InvalidInput, match=r"--join.*is of run f{32}"):
        other_bootstraps(options(Path("run.yaml"), str(stranger)), RUN, ME)
    with pytest.raises(InvalidInput, match="multiaddr"):
        other_bootstraps(options(Path("run.yaml"), "example.org:31337"), RUN, ME)


def test_a_bootstrap_that_joined_others_goes_on_with_them_until_it_is_told_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, run_yaml = tmp_path / "state", tmp_path / "run.yaml"
    run_yaml.write_text("{name: x, model: tiny, end_tokens: 1000}")
    begun: list[tuple[str, ...]] = []

    @contextmanager
    def node(
        *, keeper: Any, identity: Any, others: tuple[str, ...], **_: Any
    ) -> Generator[SimpleNamespace]:
        begun.append(others)
        keeper.publish(
            SimpleNamespace(  # what makes the run known in this folder
                newest_manifest=lambda: None,
                fetch_manifest=_unknown,
                publish_manifest=lambda _: True,
            )
        )
        invite = Invite(keeper.run, (address(identity.peer_id), *others))
        yield SimpleNamespace(invite=invite, dht=None, swarm=None)

    def _unknown(*_: object) -> None:
        raise UnknownRun("nobody knows it")

    def stopped(*_: object) -> SimpleNamespace:
        os.kill(os.getpid(), signal.SIGINT)
        return SimpleNamespace(close=lambda: None)

    monkeypatch.setattr(bootstrap, "bootstrap_node", node)
    monkeypatch.setattr(bootstrap, "BootstrapServices", stopped)
    for join in ((address(OTHER),), (), (), (address(THIRD),), ()):
        assert run_bootstrap_command(options(run_yaml, *join, state=state)) == 0
    assert begun == [(address(peer),) for peer in (OTHER, OTHER, OTHER, THIRD, THIRD)]
    invite = (state / "invite").read_text()
    (state / "invite").write_text(invite.replace(invite[8:40], RUN))  # of another run
    assert run_bootstrap_command(options(run_yaml, state=state)) == 0
    (state / "invite").write_text("damaged")
    assert run_bootstrap_command(options(run_yaml, state=state)) == 0
    assert begun[5:] == [(), ()]


def test_a_copy_of_itself_is_refused(tmp_path: Path) -> None:
    from dilocox.dht.identity import Identity

    me = Identity.load_or_create(tmp_path / "identity.key").peer_id
    with pytest.raises(InvalidInput, match=r"names this bootstrap alone.*run\.yaml"):
        run_bootstrap_command(options(Invite(RUN, (address(me),)), state=tmp_path))


def test_a_bootstrap_ticks_what_runs_beside_it_closes_it_before_its_node_and_says_that_it_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", "dilocox")
    done: list[str] = []

    def tick(of: str) -> None:
        done.append(of)
        if len(done) == 4:
            os.kill(os.getpid(), signal.SIGINT)

    @contextmanager
    def node(**_: object) -> Generator[SimpleNamespace]:
        invite = Invite(RUN, (address(ME),))
        yield SimpleNamespace(invite=invite, dht=None, swarm=None, tick=partial(tick, "node"))
        done.append("node closed")

    beside = SimpleNamespace(tick=partial(tick, "beside"), close=lambda: done.append("closed"))
    monkeypatch.setattr(bootstrap, "bootstrap_node", node)
    monkeypatch.setattr(bootstrap, "BootstrapServices", lambda *_: beside)
    run_yaml = tmp_path / "run.yaml"
    run_yaml.write_text("{name: x, model: tiny, end_tokens: 1000}")
    assert run_bootstrap_command(options(run_yaml, state=tmp_path / "state")) == 0
    assert done == ["node", "beside", "node", "beside", "closed", "node closed"]
    assert caplog.messages[-1] == "left: stopped on request"


# ---- the operator's key --------------------------------------------------------------------------
def test_what_the_loss_of_the_key_means_is_said_when_it_is_made_and_never_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_yaml = tmp_path / "run.yaml"
    run_yaml.write_text("{name: x, model: tiny, end_tokens: 1000}")
    stranger = str(Invite("f" * 32, (address(OTHER),)))  # what ends each start behind the key

    def said(source: Path | Invite, state: Path) -> str:
        caplog.clear()
        with pytest.raises(InvalidInput, match="--join"):
            run_bootstrap_command(options(source, stranger, state=state))
        assert (state / "identity.key").exists()
        return "\n".join(caplog.messages)

    own, copy = tmp_path / "own", tmp_path / "copy"
    first = said(run_yaml, own)
    assert str(own / "identity.key") in first
    for words in ("nobody else can", "secret", "keep a copy", "if it is lost", "is stolen"):
        assert words in first
    assert f" {MANIFEST_LIFETIME_S / 86400:.0f} days" in first
    assert "key" not in said(run_yaml, own)
    assert "key" not in said(Invite(RUN, (address(THIRD),)), copy)


# ---- what it shows -------------------------------------------------------------------------------
def series(text: str) -> dict[str, float]:
    """By name without prefix, and labels without the run."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.removeprefix("dilocox_bootstrap_")
            assert sample.labels.keys() == NAMES[name]
            assert sample.labels.pop("run") == RUN[:12]
            found[" ".join([name, *sample.labels.values()])] = sample.value
    return found


def test_every_figure_has_the_agreed_name_and_labels() -> None:
    found = series(bootstrap_text(BOOTSTRAP))
    assert {name.split()[0] for name in found} == NAMES.keys()
    assert found["archive_round 0"] == 11
    assert found["archive_bytes 1"] == 2000
    assert (found["served_bytes_total state"], found["served_bytes_total record"]) == (5, 0)
    assert found["refused_total dht_expiry"] == 3
    assert found["ready"] == 1


def test_what_is_not_known_yet_is_left_out() -> None:
    found = series(bootstrap_text(BootstrapFacts(role="operator")))
    assert found["ready"] == 0
    unknown = {"dht_peers", "memory_bytes", "manifest_expiry_timestamp_seconds"}
    assert not (unknown | {"admission_end_timestamp_seconds"}) & found.keys()


def test_a_dead_node_a_dead_archive_and_a_stuck_thread_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0

    def gone(_limit_s: float) -> int:
        raise EnvironmentFault("the DHT process is gone or stuck")

    def nothing() -> None:
        pass

    reminded = list[str]()
    kept = SimpleNamespace(
        refused=Counter({"disk": 1}),
        probe_refused=SimpleNamespace(read=lambda: {"busy": 2}),
        served=Counter(),
        rounds={0: 4},
    )
    archive = SimpleNamespace(keeper=kept, tick=nothing, close=nothing)
    dht: Any = SimpleNamespace(
        running=True,
        visible_addresses=lambda: (f"/ip4/127.0.0.1/tcp/31337/p2p/{ME}",),
        pid=None,
        p2pd_pid=0,
        known_nodes=lambda _: 5,
    )
    signed = SimpleNamespace(
        manifest_bytes=b"",
        run_key=b"",
        verify=lambda _: SimpleNamespace(root="r" * 64, stages=1),
    )
    keeper: Any = SimpleNamespace(run=RUN, own=True, expires_at=1.8e9, signed=signed)
    me: Any = SimpleNamespace(peer_id=ME)
    swarm: Any = SimpleNamespace(
        all_refused=Counter({"type": 3}),
        admit_by=lambda *_: None,
        admits=lambda _: True,
        time=lambda: 0.0,
        admission=SimpleNamespace(first_end=1_790_000_000, remind=reminded.append),
    )
    monkeypatch.setattr(bootstrap, "Archive", lambda **_: archive)
    given = options(Path("run.yaml"), state=tmp_path)
    with closing(BootstrapServices(given, keeper, me, dht, swarm, clock=lambda: now)) as shown:
        pages = shown.pages()
        assert pages["/readyz"]().status == 503  # before the first look
        stage = tmp_path / f"{RUN}-archive-{'r' * 16}" / "stage0"
        stage.mkdir(parents=True)
        (stage / "record").write_bytes(b"12345")
        shown.tick()
        assert (pages["/readyz"]().status, pages["/healthz"]().status) == (200, 200)
        found = series(pages["/metrics"]().body.decode())
        assert (found["dht_peers"], found["archive_bytes 0"], found["archive_round 0"]) == (5, 5, 4)
        assert found["refused_total dht_type"] == 3
        assert (found["admission_end_timestamp_seconds"], reminded) == (1_790_000_000, [ME])
        assert found["refused_total archive_disk"] == 1
        assert found["refused_total probe_busy"] == 2

        now += LOOK_PERIOD_S
        dht.known_nodes, dht.running = gone, False
        shown.tick()
        assert b"gone or stuck" in pages["/readyz"]().body
        assert b"DHT process" in pages["/healthz"]().body
        assert series(pages["/metrics"]().body.decode())["ready"] == 0

        now += LOOK_PERIOD_S
        dht.known_nodes, dht.running, archive.keeper = (lambda _: 5), True, None
        shown.tick()
        assert b"archive" in pages["/readyz"]().body
        assert pages["/healthz"]().body == b"dead: archive\n"
        archive.keeper = kept
        now += STUCK_AFTER_S
        assert pages["/healthz"]().body == b"dead: main thread\n"


def test_a_folder_that_vanishes_while_its_bytes_are_counted_counts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for generation in ("00000000", "00000001"):
        folder = tmp_path / "stage0" / generation / "log"
        folder.mkdir(parents=True)
        (folder / "record").write_bytes(b"x" * 100)
    scandir = os.scandir

    def of_what_is_left(path: Any) -> Any:
        if Path(path).name == "00000000":  # its archive has a newer one
            raise FileNotFoundError(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", of_what_is_left)
    assert bytes_by_stage(tmp_path) == {0: 100}

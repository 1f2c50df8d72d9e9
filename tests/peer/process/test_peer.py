"""How a peer's process begins, where nothing of it can be shown by a part alone."""

from __future__ import annotations

import os
import signal
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dilocox.dht.addresses import NO_FALLBACK
from dilocox.dht.errors import AdmissionLapsed, BootstrapsSilent, EnvironmentFault, NotAdmitted
from dilocox.dht.files import bytes_below
from dilocox.dht.manifest_revisions import back_to
from dilocox.peer.options import PeerOptions
from dilocox.peer.os_process import StopSignal
from dilocox.peer.process import peer
from dilocox.peer.training.data_sources import HubAway
from tests.peer.local_peers import INVITE, MANIFEST, RUN, local_peer


class StartedAgain(BaseException):
    """The process would become another one here."""


@pytest.fixture
def starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that would start again, which it does at once, raises StartedAgain."""

    def again() -> None:
        raise StartedAgain

    monkeypatch.setattr(peer, "wait_for_entry", lambda *_: NO_FALLBACK)
    monkeypatch.setattr(peer, "start_again", again)
    monkeypatch.setattr(peer, "BETWEEN_TRIES_S", 0.0)


@pytest.mark.usefixtures("starts_again")
@pytest.mark.parametrize("has_been_in_it", [True, False])
@pytest.mark.parametrize("fault", [BootstrapsSilent, HubAway])
def test_who_has_been_in_a_run_is_not_lost_where_what_it_needs_goes_away_meanwhile(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fault: type[EnvironmentFault],
    has_been_in_it: bool,
) -> None:
    def silent(*_: Any, **__: Any) -> Any:
        raise fault("no answer")

    monkeypatch.setattr(peer, "join_run", silent)
    monkeypatch.setenv(peer.HUB_PAUSE, "0.0")
    options = PeerOptions(invite=INVITE, state=tmp_path)
    if has_been_in_it:
        (tmp_path / f"{RUN}-stage1").mkdir()
    with pytest.raises(StartedAgain if has_been_in_it else fault):
        peer.run_peer(options)
    assert ("trying again" in caplog.text) is has_been_in_it


@pytest.mark.usefixtures("starts_again")
def test_the_hub_is_asked_less_and_less_often_while_it_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults: list[EnvironmentFault] = [HubAway("429"), HubAway("429"), HubAway("429")]
    faults += [BootstrapsSilent("no answer"), HubAway("429")]  # it was there meanwhile

    def away(*_: Any, **__: Any) -> Any:
        raise faults.pop(0)

    monkeypatch.setattr(peer, "join_run", away)
    monkeypatch.setattr(peer, "FIRST_PAUSE_S", 0.125)
    monkeypatch.setattr(peer, "LONGEST_PAUSE_S", 0.375)
    monkeypatch.setenv(peer.HUB_PAUSE, "0.125")  # and so it is put back at the end
    (tmp_path / f"{RUN}-stage1").mkdir()
    handed_on = list[str | None]()
    while faults:
        with pytest.raises(StartedAgain):
            peer.run_peer(PeerOptions(invite=INVITE, state=tmp_path))
        handed_on.append(os.environ.get(peer.HUB_PAUSE))
    assert handed_on == ["0.25", "0.375", "0.375", None, "0.25"]


@pytest.mark.usefixtures("starts_again")
@pytest.mark.parametrize("error", [AdmissionLapsed("its time ended"), NotAdmitted("never was")])
def test_whose_admission_is_over_waits_for_the_operator_and_who_has_none_ends(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: NotAdmitted,
) -> None:
    """Exit code 2 kept all peers of a run down for good, by one midnight."""

    def refused(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(peer, "join_run", refused)
    monkeypatch.setattr(peer, "RENEWED_LOOK_S", 0.0)
    lapsed = isinstance(error, AdmissionLapsed)
    with pytest.raises(StartedAgain if lapsed else NotAdmitted):
        peer.run_peer(PeerOptions(invite=INVITE, state=tmp_path))
    assert ("this peer looks again" in caplog.text) is lapsed


@pytest.mark.usefixtures("starts_again")
@pytest.mark.parametrize("signalled", [True, False])
def test_whose_admission_is_over_while_it_is_to_rest_goes_on_resting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signalled: bool
) -> None:
    """A new process rests; one that ended would not be there at the end of the rest."""
    stops = list[StopSignal]()

    class Stop(StopSignal):
        def __init__(self) -> None:
            super().__init__()
            stops.append(self)

    def refused(*_: Any, **__: Any) -> Any:
        stops[0].defer()
        stops[0].leave()
        if signalled:
            signal.raise_signal(signal.SIGTERM)
        raise AdmissionLapsed("its time ended")

    monkeypatch.setattr(peer, "StopSignal", Stop)
    monkeypatch.setattr(peer, "join_run", refused)
    with nullcontext() if signalled else pytest.raises(StartedAgain):
        assert peer.run_peer(PeerOptions(invite=INVITE, state=tmp_path)) == 0


def test_a_peer_goes_back_before_it_looks_whether_its_disk_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The snapshot that a rollback leaves behind left no room for the next one, for ever."""
    own = tmp_path / f"{RUN}-stage0"
    (own / "snapshots" / "00000000").mkdir(parents=True)
    (own / "snapshots" / "00000000" / "anchor.safetensors").write_bytes(b"x" * 100_000)
    manifest = back_to(MANIFEST, -1, [MANIFEST.root] * MANIFEST.stages)
    swarm = SimpleNamespace(admission=None, publish=lambda *_: True)
    joined = local_peer(manifest=manifest, swarm=swarm)
    left = list[int]()

    def full(folder: Path, _: Any) -> None:
        left.append(bytes_below(folder))
        raise EnvironmentFault("no snapshot fits on the disk")

    monkeypatch.setattr(peer, "wait_for_entry", lambda *_: NO_FALLBACK)
    monkeypatch.setattr(peer, "join_run", lambda *_, **__: nullcontext(joined))
    monkeypatch.setattr(peer, "check_disk", full)
    with pytest.raises(EnvironmentFault, match="no snapshot fits"):
        peer.run_peer(PeerOptions(invite=INVITE, state=tmp_path, stage="0"))
    assert left[0] < 1000

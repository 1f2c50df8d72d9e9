"""How a peer's process begins, where nothing of it can be shown by a part alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dilocox.dht.addresses import NO_FALLBACK
from dilocox.dht.errors import BootstrapsSilent
from dilocox.peer.options import PeerOptions
from dilocox.peer.process import peer
from tests.peer.local_peers import INVITE, RUN


class StartedAgain(BaseException):
    """The process would become another one here."""


@pytest.mark.parametrize("has_been_in_it", [True, False])
def test_who_has_been_in_a_run_is_not_lost_where_its_bootstraps_go_away_meanwhile(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    has_been_in_it: bool,
) -> None:
    def silent(*_: Any, **__: Any) -> Any:
        raise BootstrapsSilent("no answer from the bootstraps")

    def again() -> None:
        raise StartedAgain

    monkeypatch.setattr(peer, "wait_for_entry", lambda *_: NO_FALLBACK)
    monkeypatch.setattr(peer, "join_run", silent)
    monkeypatch.setattr(peer, "start_again", again)
    monkeypatch.setattr(peer, "BETWEEN_TRIES_S", 0.0)
    options = PeerOptions(invite=INVITE, state=tmp_path)
    if has_been_in_it:
        (tmp_path / f"{RUN}-stage1").mkdir()
    with pytest.raises(StartedAgain if has_been_in_it else BootstrapsSilent):
        peer.run_peer(options)
    assert ("trying again" in caplog.text) is has_been_in_it

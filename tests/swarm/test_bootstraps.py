"""A run has two bootstraps, the operator's and a copy of it, and either may die."""

from __future__ import annotations

import urllib.request
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tests.peer.real_commands import Command
from tests.ports import free_ports
from tests.swarm.conftest import StartSwarm
from tests.swarm.monitors import series_of

pytestmark = pytest.mark.swarm

STEP_S = 0.05
ROUND_LIMIT_S = 180.0
SEEN_LIMIT_S = 60.0
MEASURED_LIMIT_S = 150.0  # disk and memory are measured once a minute
MAX_MEMORY = 1e9  # bytes, of all processes of a bootstrap


class Figures:
    """What a bootstrap shows at a port."""

    def __init__(self, port: int):
        self.url = f"http://127.0.0.1:{port}"

    def fetch(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=10.0) as answer:
            return answer.read().decode()

    @property
    def series(self) -> dict[str, float]:
        """By name and labels; empty while nobody answers."""
        try:
            text = self.fetch("/metrics")
        except OSError:
            return {}
        return series_of(text, "dilocox_bootstrap_")

    def keeps(self, number: int) -> bool:
        """Whether it is ready and its archive has this round."""
        series = self.series
        return series.get("ready") == 1 and series.get('archive_round{stage="0"}', -1) >= number

    def has_measured(self) -> bool:
        """Whether it shows how large its archive is."""
        return self.series.get('archive_bytes{stage="0"}', 0) > 0


@pytest.mark.timeout(600)
def test_either_of_two_bootstraps_may_die(
    start_swarm: StartSwarm, ended: ExitStack, tmp_path: Path
) -> None:
    own_port, copy_port = free_ports(2)
    own, copys = Figures(own_port), Figures(copy_port)
    swarm = start_swarm(rounds={"inner_steps": 20})
    peers = [swarm.add_peer(step_s=STEP_S) for _ in range(2)]
    place = ["--state", str(tmp_path / "copy"), "--host", "127.0.0.1", "--port", "0"]
    place += ["--metrics-port", str(copy_port)]
    copy = ended.enter_context(closing(Command("bootstrap", swarm.invite, *place, folder=tmp_path)))
    copy.wait_for("dilocox peer dilocox:")
    swarm.wait_for_rounds(2, ROUND_LIMIT_S)
    swarm.wait(lambda: copys.keeps(peers[0].rounds[0]["round"]), SEEN_LIMIT_S, "the copy keeps it")
    both = (tmp_path / "copy" / "invite").read_text().strip()
    assert both.count("/p2p/") == 2
    assert swarm.invite.partition("@")[2] in both

    swarm.kill_bootstrap()
    swarm.invite = both
    third = swarm.add_peer(step_s=STEP_S)
    swarm.wait_for_counted(third, limit_s=ROUND_LIMIT_S)
    swarm.wait_for_rounds(1, ROUND_LIMIT_S)
    assert copys.fetch("/healthz") == "ok\n"
    assert copys.fetch("/readyz") == "ready\n"

    swarm.restart_bootstrap("--metrics-port", str(own_port), "--join", both)
    newest = third.rounds[-1]["round"]
    swarm.wait(lambda: own.keeps(newest), SEEN_LIMIT_S, "the operator's has caught up")
    for name, figures in (("the operator's", own), ("the copy", copys)):
        swarm.wait(figures.has_measured, MEASURED_LIMIT_S, f"{name} has measured its archive")
        series = figures.series
        print(f"{name}: {series}")
        assert series["dht_peers"] >= 3
        assert series['archive_bytes{stage="0"}'] > 1000
        assert 1e7 < series["memory_bytes"] < MAX_MEMORY
        assert series["manifest_expiry_timestamp_seconds"] > 86400

    copy.process.kill()
    copy.clean_within(10)
    assert (swarm.folder / "bootstrap" / "invite").read_text().count("/p2p/") == 2
    swarm.wait_for_rounds(1, ROUND_LIMIT_S)
    assert swarm.terminate(third) == 0
    swarm.restart(third)
    swarm.wait_for_counted(third, after_round=third.rounds[-1]["round"], limit_s=ROUND_LIMIT_S)
    swarm.assert_equal_chains()


@pytest.mark.timeout(400)
def test_who_was_in_the_run_joins_it_again_by_the_others_while_no_bootstrap_is_up(
    start_swarm: StartSwarm,
) -> None:
    swarm = start_swarm(rounds={"inner_steps": 20})
    peers = [swarm.add_peer(step_s=STEP_S) for _ in range(3)]
    swarm.wait_for_rounds(2, ROUND_LIMIT_S)
    state = peers[2].state
    swarm.wait(
        lambda: any(state.glob("*.peers")), SEEN_LIMIT_S, "it has noted by whom to come back"
    )
    swarm.kill_bootstrap()
    swarm.kill(peers[2])
    swarm.wait_until_gone(peers[2])
    swarm.restart(peers[2])
    after = peers[0].rounds[-1]["round"]
    swarm.wait_for_counted(peers[2], after_round=after, limit_s=ROUND_LIMIT_S)
    assert "joining by peers that were there before" in peers[2].log_text()
    swarm.wait_for_rounds(2, ROUND_LIMIT_S)
    swarm.restart_bootstrap()
    newest = max(swarm.chain())
    swarm.wait(lambda: newest in swarm.archived(0), SEEN_LIMIT_S, "the archive has what it missed")
    swarm.assert_equal_chains()


@pytest.mark.timeout(300)
def test_a_peer_that_starts_again_waits_until_a_bootstrap_is_up(start_swarm: StartSwarm) -> None:
    swarm = start_swarm(rounds={"inner_steps": 20})
    peer = swarm.add_peer(step_s=STEP_S)
    swarm.wait_for_rounds(1, ROUND_LIMIT_S)
    swarm.kill_bootstrap()
    assert swarm.terminate(peer) == 0
    last = peer.rounds[-1]["round"]
    swarm.restart(peer)
    said = "trying again until one answers"
    swarm.wait(lambda: said in peer.log_text(), SEEN_LIMIT_S, "the peer says so")
    swarm.restart_bootstrap()
    swarm.wait_for_counted(peer, after_round=last, limit_s=ROUND_LIMIT_S)

"""`dilocox monitor` and its status page: true numbers of a running swarm, in a real browser."""

from __future__ import annotations

from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tests.dht.processes import wait_until
from tests.peer.fabricated import losses_of
from tests.swarm.browser import DARK, chromium, screenshot, show
from tests.swarm.conftest import StartSwarm
from tests.swarm.harness import Peer, ProcessSwarm
from tests.swarm.monitors import WatchingMonitor, start_bootstrap

STAGES = 2
STEP_S = 0.1
LOOK_LIMIT_S = 30.0  # three heartbeats until a record expires, and two looks
ROUND_LIMIT_S = 120.0
SAMPLE_LIMIT_S = 240.0  # two children at the lowest priority, one after the other

needs_browser = pytest.mark.skipif(
    chromium() is None, reason="chromium is not installed (Debian's package is called chromium)"
)

pytestmark = pytest.mark.swarm


# ---- a bootstrap alone ---------------------------------------------------------------------------
@pytest.mark.timeout(240)
def test_a_monitor_lives_through_the_restart_of_its_bootstrap(
    tmp_path: Path, ended: ExitStack
) -> None:
    bootstrap, invite = start_bootstrap(tmp_path)
    ended.callback(bootstrap.close)
    port = int(invite.partition("/tcp/")[2].partition("/")[0])
    monitor = ended.enter_context(closing(WatchingMonitor(invite, tmp_path)))
    wait_until(lambda: monitor.ready, LOOK_LIMIT_S)
    assert monitor.wait_for("waiting", LOOK_LIMIT_S) == "waiting for the first peers"
    assert monitor.series['bootstrap_up{bootstrap="0"}'] == 1
    assert monitor.fetch("healthz") == b"ok\n"

    bootstrap.process.kill()
    bootstrap.clean_within(20)
    assert monitor.wait_for("unreachable", 60).startswith("unreachable: nobody answers since ")
    assert monitor.series['bootstrap_up{bootstrap="0"}'] == 0
    assert monitor.series["healthy"] == 0

    again, _ = start_bootstrap(tmp_path, port)
    ended.callback(again.close)
    assert monitor.wait_for("waiting", 90) == "waiting for the first peers"
    assert monitor.series['bootstrap_up{bootstrap="0"}'] == 1
    monitor.leave()


# ---- a running swarm -----------------------------------------------------------------------------
@pytest.mark.watch
@pytest.mark.timeout(900)
@needs_browser
def test_the_page_shows_the_true_numbers_and_changes_when_a_peer_dies(
    start_swarm: StartSwarm, ended: ExitStack
) -> None:
    samples = {"prompt": "def ", "every": 1000, "tokens": 8}
    swarm = start_swarm(stages=STAGES, about="A run for a test.", samples=samples)
    heads = [swarm.add_peer(stage=0, step_s=STEP_S) for _ in range(2)]
    others = [swarm.add_peer(stage=1) for _ in range(3)]
    monitor = ended.enter_context(closing(WatchingMonitor(swarm.invite, swarm.folder)))
    swarm.wait_for_rounds(3, ROUND_LIMIT_S, of=heads)
    swarm.wait(lambda: _settled(monitor, peers=5, replicas=2), LOOK_LIMIT_S, "all are shown")

    shown = show(monitor.url)
    status = monitor.status
    assert shown.console == ()
    assert shown.text("health") == "Training" and status["health"]["sentence"] == "training"
    assert shown.text("tile-peers") == "5"
    assert shown.text("note-peers") == "peers, 2 replicas, 1 spare"
    assert shown.count('class="replica"') == 2 and shown.count('class="peer ') == 5
    assert all(f">{peer.peer_id[-6:]}<" in shown.dom for peer in swarm.peers)
    assert shown.text("join").split() == ["dilocox", "peer", swarm.invite]
    assert float(shown.text("tile-validation")) in _losses(heads)
    _check_figures(monitor, swarm)

    victim = next(peer for peer in others if peer.head == heads[0].peer_id)
    swarm.kill(victim)
    swarm.wait(lambda: _settled(monitor, peers=4, replicas=2), LOOK_LIMIT_S, "the spare took over")
    gone = f"peer {victim.peer_id[-6:]} of stage 1 went silent"
    swarm.wait(lambda: gone in _faults(monitor), LOOK_LIMIT_S, gone)
    shown = show(monitor.url, width=390)
    assert shown.console == ()
    assert shown.text("tile-peers") == "4" and shown.text("note-peers") == "peers, 2 replicas"
    assert gone in shown.text("events")
    for name, flags in (("light", ()), ("dark", (DARK,))):
        for width, height in ((1280, 1300), (390, 2300)):
            file = swarm.folder / f"status-{width}-{name}.png"
            assert screenshot(monitor.url, file, *flags, width=width, height=height) == ()
            assert file.stat().st_size > 10_000

    for peer in others:
        if peer.expected:
            swarm.kill(peer)
    swarm.wait(lambda: _health(monitor) == "blocked: stage 1 has no peer", 60, "it is blocked")
    shown = show(monitor.url, DARK)
    assert shown.text("health") == "Blocked: stage 1 has no peer"
    assert monitor.series['blocked{stage="1"}'] == 1 and monitor.series["healthy"] == 0

    # the bootstrap asks, which has the weights of the stage that lost its peers, too
    swarm.wait(lambda: bool(monitor.status["samples"]), SAMPLE_LIMIT_S, "the model was asked")
    shown = show(monitor.url)
    assert shown.console == () and shown.text("prompt") == "def"
    (sample,) = monitor.status["samples"]
    assert sample["round"] >= 0 and sample["tokens"] > 0
    trained = monitor.status["trained"]
    assert trained["parameters"] > 100_000 and shown.text("about") == trained["about"]
    assert shown.text("call-1").split()[-2:] == ["--stage", "1"]

    # who leaves says what the model writes, and who comes late sees it
    leaver = heads[1]
    assert swarm.terminate(leaver) == 0
    swarm.look()
    gave = leaver.of_kind("gave")[-1]
    assert gave["sample"].startswith('"def" with "') and gave["sample"] in leaver.log_text()
    late_folder = swarm.folder / "late"
    late_folder.mkdir()
    late = ended.enter_context(closing(WatchingMonitor(swarm.invite, late_folder)))
    wait_until(lambda: late.ready and late.status["samples"] == [sample], LOOK_LIMIT_S)
    assert late.status["trained"]["parameters"] == trained["parameters"]
    late.leave()

    before = monitor.status
    monitor.leave()
    again = ended.enter_context(closing(WatchingMonitor(swarm.invite, swarm.folder)))
    wait_until(lambda: again.ready, LOOK_LIMIT_S)
    after = again.status
    told = losses_of(before)[:-1]  # the round under way may end, and a bootstrap tell of it
    assert losses_of(after)[: len(told)] == told
    assert after["contributions"] == before["contributions"]
    assert [each["rounds"] for each in after["stages"]] == [
        each["rounds"] for each in before["stages"]
    ]
    again.leave()


def _health(monitor: WatchingMonitor) -> str:
    return monitor.status.get("health", {}).get("sentence", "")


def _faults(monitor: WatchingMonitor) -> list[str]:
    return [event["text"] for event in monitor.status["events"]]


def _settled(monitor: WatchingMonitor, *, peers: int, replicas: int) -> bool:
    totals = monitor.status.get("totals", {})
    return (totals.get("peers"), totals.get("replicas")) == (peers, replicas) and bool(
        totals["validation"] and totals["tokens"]
    )


def _losses(heads: list[Peer]) -> set[float]:
    """Validation losses that heads reported, as the page writes them."""
    for head in heads:
        head.look()
    return {round(loss, 4) for head in heads for loss in head.losses.values()}


def _check_figures(monitor: WatchingMonitor, swarm: ProcessSwarm) -> None:
    """What the monitor has of the chains is what the peers reported, to the token."""

    def true() -> bool:
        """A peer reports a record when it has merged it, which may be after it is shown."""
        status = monitor.status
        swarm.look()
        told = {line["id"]: line["tokens"] for line in status["contributions"]}
        rounds = [stage["rounds"] for stage in status["stages"]]
        return (told, rounds) == _reported(swarm, [stage["round"] for stage in status["stages"]])

    swarm.wait(true, LOOK_LIMIT_S, "rounds and tokens are those that peers reported")
    series, totals = monitor.series, monitor.status["totals"]
    for stage in range(STAGES):
        assert series[f'peers{{stage="{stage}",state="training"}}'] == 2
    assert series['spares{stage="1"}'] == 1
    assert series["replicas"] == 2 and series["healthy"] == 1
    ranked = [series[f'contribution_tokens{{rank="{rank}"}}'] for rank in (1, 2)]
    assert 0 < sum(ranked) <= totals["tokens"]
    waits = [line["waiting_share"] for peer in swarm.of_stage(0) for line in peer.rounds]
    assert min(waits) <= series["waiting_ratio"] <= max(waits)
    assert series["tokens_per_second"] > 0


def _reported(swarm: ProcessSwarm, last: list[int]) -> tuple[dict[str, int], list[int]]:
    """Tokens by peer, over the number of stages, and number of rounds by stage, up to these."""
    tokens: dict[str, int] = {}
    rounds: list[set[int]] = [set() for _ in last]
    for peer in swarm.peers:
        for line in peer.rounds:
            if line["round"] <= last[peer.stage]:
                rounds[peer.stage].add(line["round"])
                tokens[peer.peer_id] = tokens.get(peer.peer_id, 0) + line["tokens"]
    counted = {peer: count // len(last) for peer, count in tokens.items() if count}
    return counted, [len(numbers) for numbers in rounds]

"""Run time follows the bootstraps, is shared with forked children, and is hivemind's time."""

import asyncio
import multiprocessing
import time

import pytest

from dilocox.dht.clock import MAX_ROUND_TRIP_S, OffsetSample, RunClock, agreed_offset, median_offset
from dilocox.dht.identity import Identity
from dilocox.dht.p2p_daemon import DaemonOptions, DaemonOwner


@pytest.fixture
def hivemind_time(monkeypatch: pytest.MonkeyPatch):
    """Puts hivemind's own time back after the test."""
    import hivemind
    from hivemind.averaging import matchmaking
    from hivemind.dht import node, protocol, routing
    from hivemind.utils import timed_storage

    assert hivemind
    modules = [timed_storage, matchmaking, node, protocol, routing]
    for module in modules:
        monkeypatch.setattr(module, "get_dht_time", time.time)
    return modules


def test_run_time_is_the_time_of_day_and_an_offset():
    clock = RunClock()
    assert abs(clock.time() - time.time()) < 0.5
    clock.measured(100.0)
    assert clock.offset == 100.0
    assert abs(clock.time() - clock.own_time() - 100.0) < 0.1


def test_run_time_does_not_follow_the_time_of_day(monkeypatch: pytest.MonkeyPatch):
    clock = RunClock()
    before = clock.time()
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert before <= clock.time() < before + 60.0


@pytest.mark.parametrize(
    ("told", "expected"), [(0.5, 0.5), (-0.5, -0.5), (3600.0, 1.0), (-3600.0, -1.0)]
)
def test_a_bootstrap_that_lies_about_the_time_moves_it_by_a_second_a_minute(
    monkeypatch: pytest.MonkeyPatch, told: float, expected: float
) -> None:
    ticks = [1000.0]
    monkeypatch.setattr("dilocox.dht.clock.ticks", lambda: ticks[0])
    clock = RunClock()
    clock.measured(0.0)
    for minutes in (1, 2):
        ticks[0] += 60.0
        clock.measured_again(told)
        bound = expected * (minutes if abs(expected) == 1.0 else 1)
        assert clock.offset == pytest.approx(bound)


def test_forked_child_sees_an_offset_that_is_set_later():
    clock = RunClock()
    context = multiprocessing.get_context("fork")
    may_look, result = context.Event(), context.SimpleQueue()

    def child() -> None:
        may_look.wait(10.0)
        result.put(clock.offset)

    process = context.Process(target=child)
    process.start()
    clock.measured(7.0)
    may_look.set()
    assert result.get() == 7.0
    process.join(10.0)


def test_half_the_round_trip_is_taken_off():
    assert OffsetSample.from_ping(10.0, 111.0, 12.0) == OffsetSample(100.0, 2.0)


@pytest.mark.parametrize(
    ("told", "before", "expected"),
    [
        ([0.4], 0.0, 0.4),
        ([600.0], 0.0, 600.0),  # the only one
        ([0.2, 0.4], 0.0, 0.3),
        ([600.0, 0.4], 0.0, 0.4),
        ([-600.0, 0.4], 0.0, 0.4),
        ([0.0, 700.0], 699.0, 700.0),  # this machine's own clock is off
        ([0.1, 0.2, 600.0], 0.0, 0.2),
        ([], 0.0, None),
    ],
)
def test_of_two_clocks_that_differ_the_one_counts_that_the_run_went_by(
    told: list[float], before: float, expected: float | None
) -> None:
    samples = [[OffsetSample(each, 0.1)] * 3 for each in told]
    silent = [OffsetSample(0.0, MAX_ROUND_TRIP_S + 1.0)]
    assert agreed_offset([*samples, silent], before) == pytest.approx(expected)


def test_median_ignores_a_liar_and_slow_answers():
    samples = [OffsetSample(offset, 0.1) for offset in (1.0, 1.1, 0.9, 5000.0)]
    slow = OffsetSample(-300.0, MAX_ROUND_TRIP_S + 0.1)
    backwards = OffsetSample(-300.0, -0.1)
    broken = OffsetSample(float("nan"), 0.1)
    assert median_offset([*samples, slow, backwards, broken]) == pytest.approx(1.05)
    assert median_offset([slow]) is median_offset([]) is None


def test_installed_clock_is_the_time_of_every_hivemind_module(hivemind_time: list):
    clock = RunClock()
    clock.measured(1000.0)
    clock.install()
    for module in hivemind_time:
        assert abs(module.get_dht_time() - time.time() - 1000.0) < 1.0, module.__name__


def test_who_leads_the_time_takes_it_from_others_at_its_start_only(
    volunteer: Identity, monkeypatch: pytest.MonkeyPatch
):
    told = [5.0]

    async def asked(*_: object) -> list[OffsetSample]:
        return [OffsetSample(offset_s=told[0], round_trip_s=0.01)]

    monkeypatch.setattr(DaemonOwner, "samples_of", asked)
    other = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWEXWcUQWJ6amCxHKtPFrcNxgepcmy7YXo7tirWjgiJ9Fr"
    for leads in (True, False):
        clock, told[0] = RunClock(), 5.0
        options = DaemonOptions(
            identity=volunteer,
            bootstraps=(other,),
            reachable=(other,),
            listen=(),
            announce=(),
            client_mode=False,
            startup_s=1.0,
            leads_time=leads,
        )
        owner = DaemonOwner(options, clock, on_death=lambda: None)
        assert asyncio.run(owner.measure((other,)))
        assert clock.offset == 5.0
        told[0] = 7.0
        assert asyncio.run(owner.measure((other,), again=True))
        assert (clock.offset > 5.0) is not leads

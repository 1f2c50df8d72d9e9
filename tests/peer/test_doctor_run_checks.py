"""What the doctor says of the network and the run: each line where all is well, and where not."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest

from dilocox.dht.errors import EnvironmentFault
from dilocox.peer.commands.doctor_checks import (
    ExchangeFacts,
    ReachFacts,
    RunFacts,
    SpeedFacts,
    bandwidth_check,
    bootstrap_checks,
    clock_check,
    port_check,
    reach_check,
    run_check,
    speed_check,
    stage_check,
    tokens_per_s,
    version_check,
)

PEER = "12D3KooWEXWcUQWJ6amCxHKtPFrcNxgepcmy7YXo7tirWjgiJ9Fr"
FIRST = f"/ip4/203.0.113.7/tcp/31337/p2p/{PEER}"
SECOND = f"/dns4/run.example/tcp/443/p2p/{PEER}"
RUN = RunFacts(name="words", stages=3, model="llama", values=1_200_000_000, trained=0.25)
LINK = ExchangeFacts(stage=1, payload_bytes=60_000_000, down=8e6, link_up=2e6, up=2e6, limit_s=60.0)


# ---- the way to the run --------------------------------------------------------------------------
def test_bootstraps_that_answer_are_fine() -> None:
    checks = bootstrap_checks({FIRST: None, SECOND: None})
    assert [check.status for check in checks] == ["ok", "ok"]
    assert "203.0.113.7 port 31337" in checks[0].text


def test_one_of_two_bootstraps_is_enough() -> None:
    checks = bootstrap_checks({FIRST: "Connection refused", SECOND: None})
    assert [check.status for check in checks] == ["warning", "ok"]
    assert "tell the operator" in checks[0].remedy


@pytest.mark.parametrize(
    ("why", "remedy"),
    [
        ("Connection refused", "ask the operator whether the bootstrap runs"),
        ("timed out", "may dial out to TCP port 31337"),
        ("Network is unreachable", "check that this machine is online"),
        ("Name or service not known", "the name in the invite"),
        ("No address associated with hostname", "the name in the invite"),
        ("Temporary failure in name resolution", "check that this machine is online"),
    ],
)
def test_without_any_bootstrap_the_reason_decides_the_mend(why: str, remedy: str) -> None:
    (check,) = bootstrap_checks({FIRST: why})
    assert check.status == "failed"
    assert why in check.text and remedy in check.remedy


def test_the_run_is_described() -> None:
    check = run_check(RUN)
    assert check.status == "ok"
    assert check.text == "words: 3 stages, llama, 1.2 billion parameters, 25 % done"


@pytest.mark.parametrize("run", [replace(RUN, trained=1.0), replace(RUN, state="ended")])
def test_nobody_can_take_part_in_a_run_that_has_ended(run: RunFacts) -> None:
    check = run_check(run)
    assert check.status == "failed"
    assert "it has ended" in check.text and check.remedy


def test_a_run_may_be_paused() -> None:
    assert run_check(replace(RUN, state="paused")).status == "warning"


def test_the_version_that_all_have_is_fine() -> None:
    assert version_check("0.2.0", 2, {}).status == "ok"
    assert version_check("0.2.0", 2, {"0.2.0": 3}).status == "ok"
    assert version_check("0.2.0", 2, {"0.2.0": 3, "0.1.0": 1}).status == "ok"


def test_the_version_that_most_have_is_named() -> None:
    check = version_check("0.1.0", 2, {"0.2.0": 3, "0.1.0": 1})
    assert check.status == "warning"
    assert "3 of 0.2.0, 1 of 0.1.0" in check.text and "install 0.2.0" in check.remedy


def test_of_many_versions_the_most_frequent_are_listed() -> None:
    check = version_check("1.0", 2, {f"0.{number}": 9 - number for number in range(9)})
    assert "9 of 0.0, 8 of 0.1" in check.text and "0.8" not in check.text and "..." in check.text


@pytest.mark.parametrize("offset_s", [0.0, 1.5, -1.5])
def test_a_clock_that_is_nearly_right_is_fine(offset_s: float) -> None:
    assert clock_check(offset_s, 0.2).status == "ok"
    assert clock_check(offset_s, None).status == "ok"


def test_a_clock_that_is_wrong_is_corrected_and_said() -> None:
    behind, ahead = clock_check(300.0, 0.1), clock_check(-300.0, None)
    assert (behind.status, ahead.status) == ("warning", "warning")
    assert "300.0 s behind" in behind.text and "300.0 s ahead of" in ahead.text
    assert "timedatectl" in behind.remedy


def test_peers_whose_time_differs_are_for_the_operator() -> None:
    check = clock_check(0.0, -4.0)
    assert check.status == "warning"
    assert "4.0 s apart" in check.text and "operator" in check.remedy


# ---- the way to this peer ------------------------------------------------------------------------
def _reach(
    kind: Literal["public", "mapped", "dial_out", "unknown"],
    *addresses: str,
    port: int = 31338,
    announced: bool = False,
) -> ReachFacts:
    return ReachFacts(
        kind=kind,
        addresses=addresses,
        seen=("198.51.100.5",),
        port=port,
        announced=announced,
    )


def test_an_address_that_works_is_named() -> None:
    check = reach_check(_reach("mapped", "/ip4/198.51.100.5/tcp/31338"))
    assert check.status == "ok"
    assert "/ip4/198.51.100.5/tcp/31338" in check.text


@pytest.mark.parametrize(
    ("reach", "remedy"),
    [
        (_reach("dial_out"), "let TCP port 31338 through firewall and router"),
        (_reach("dial_out", port=0), "--port 31337 --announce /ip4/198.51.100.5/tcp/31337"),
        (
            _reach("dial_out", "/dns4/a.example/tcp/9", announced=True),
            "see that /dns4/a.example/tcp/9 leads to port 31338",
        ),
    ],
)
def test_a_machine_that_only_dials_out_takes_part_and_is_told_how_to_be_reached(
    reach: ReachFacts, remedy: str
) -> None:
    check = reach_check(reach)
    assert check.status == "warning"  # it takes part all the same
    assert remedy in check.remedy


def test_it_may_not_be_known_whether_others_reach_this_machine() -> None:
    check = reach_check(_reach("unknown"))
    assert check.status == "warning" and "not known" in check.text and check.remedy


def test_a_port_that_is_free_is_fine_and_one_that_is_not_is_a_failure() -> None:
    taken = EnvironmentFault("port 7 of 0.0.0.0 is in use by another program: choose another one")
    assert port_check("0.0.0.0", 0, None, own_peer=False).status == "ok"
    assert port_check("0.0.0.0", 7, None, own_peer=False).status == "ok"
    check = port_check("0.0.0.0", 7, taken, own_peer=False)
    assert (check.status, check.remedy) == ("failed", "choose another one")
    own = port_check("0.0.0.0", 7, taken, own_peer=True)
    assert own.status == "ok" and "this folder's peer" in own.text


def test_a_link_must_move_an_exchange_in_its_time() -> None:
    assert bandwidth_check(LINK).status == "ok"  # 30 s at 2 MB/s
    check = bandwidth_check(replace(LINK, up=0.5e6))
    assert check.status == "failed"
    assert "120 s" in check.text and "60 s" in check.text and "--max-upload" in check.remedy


# ---- the part it would play ----------------------------------------------------------------------
def test_the_stage_is_named_with_who_is_there() -> None:
    check = stage_check("auto", 1, {0: 2, 1: 1, 2: 2}, 3, None)
    assert check.status == "ok"
    assert "stage 1, which has 1 other peer" in check.text and "2, 1, 2" in check.text
    assert "peers by stage" not in stage_check("1", 1, {0: 2, 1: 1, 2: 2}, 3, None).text
    assert "it had it before" in stage_check("auto", 1, {0: 2, 1: 3, 2: 2}, 3, 1).text


def test_stages_that_still_have_nobody_are_a_warning() -> None:
    check = stage_check("auto", 1, {0: 2, 1: 0, 2: 0, 3: 0}, 4, None)
    assert check.status == "warning" and "stage 1, which has nobody else" in check.text
    assert "stage 2, 3 would still have nobody" in check.text and "volunteers" in check.remedy


def test_of_stages_that_did_not_answer_nothing_is_claimed() -> None:
    check = stage_check("auto", 1, {0: 2}, 3, None)
    assert check.status == "ok"
    assert "2, ?, ?" in check.text and "nobody else" not in check.text


def test_a_measured_speed_is_what_it_would_contribute() -> None:
    check = speed_check(1, SpeedFacts(tokens_per_s=3_234.0), 4.04)
    assert check.status == "ok"
    assert check.text == "about 3,200 tokens/s in stage 1; 4.0 s an exchange"
    assert "estimated" in speed_check(1, SpeedFacts(tokens_per_s=9.0, measured=False), None).text


def test_a_slow_link_bounds_what_a_fast_machine_contributes() -> None:
    slow = SpeedFacts(tokens_per_s=50_000.0, link_tokens_per_s=800.0)
    assert tokens_per_s(slow) == 800.0
    assert "about 800 tokens/s in stage 0, bound by the link" in speed_check(0, slow, None).text
    fast = SpeedFacts(tokens_per_s=500.0, link_tokens_per_s=800.0)
    assert tokens_per_s(fast) == 500.0 and "link" not in speed_check(0, fast, None).text


def test_a_speed_that_is_not_known_stops_nobody() -> None:
    check = speed_check(0, SpeedFacts(fault="out of memory"), None)
    assert check.status == "warning" and "out of memory" in check.text and check.remedy

"""A peer's figures: the fixed names, types and labels, and values that follow what happens."""

from __future__ import annotations

import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from dilocox.peer.http_pages import Page
from dilocox.peer.rounds.record import rank_span
from dilocox.peer.training.unsent_progress import CHUNK_VALUES, norm
from tests.peer.local_peers import RUN
from tests.peer.shown_metrics import NUMEL, Shown
from tests.peer.told_reports import REPORT, STATUS

# The names are fixed: the monitor, the rules and the dashboard use them.
LABELS = {
    "counter": {
        (): "tokens inner_steps inner_steps_skipped computing_seconds started_over "
        "state_download_bytes",
        ("outcome",): "rounds",
        ("direction", "kind"): "bytes",
        ("reason",): "waiting_seconds refused",
        ("role", "kind"): "faults",
    },
    "gauge": {
        (): "group_size compression_ratio compression_error_ratio residual_norm round "
        "round_inner_steps train_loss validation_loss replica_epoch last_round_timestamp_seconds "
        "in_replica computing_ratio spare_ratio "
        "ready manifest_revision spares month_traffic_bytes month_traffic_limit_bytes",
        ("version", "protocol", "run"): "build_info",
        ("state",): "peer_state",
        ("statistic",): "rank",
        ("direction",): "hop_round_trip_seconds",
        ("kind",): "reachable",
    },
    "histogram": {
        (): "exchange_duration_seconds matchmaking_duration_seconds heal_duration_seconds"
    },
}
EXPECTED = {
    f"dilocox_{name}": (kind, {"stage", *labels})
    for kind, families in LABELS.items()
    for labels, names in families.items()
    for name in names.split()
}


@pytest.fixture
def shown() -> Shown:
    return Shown()


# ---- names ---------------------------------------------------------------------------------------
def test_names_types_and_labels_are_the_fixed_ones(shown: Shown) -> None:
    shown.everything()
    families = list(text_string_to_metric_families(shown.text))
    assert all(family.documentation for family in families)
    assert {
        family.name: (family.type, {label for each in family.samples for label in each.labels})
        for family in families
    } == {
        name: (kind, labels | {"le"} if kind == "histogram" else labels)
        for name, (kind, labels) in EXPECTED.items()
    }


def test_every_label_has_few_values_and_none_names_a_peer(shown: Shown) -> None:
    shown.everything()
    values: dict[str, set[str]] = {}
    for name, labels, _ in shown.samples():
        assert not name.endswith("_created")
        for label, value in labels.items():
            values.setdefault(label, set()).add(value)
    assert values.pop("run") == {RUN[:12]}
    assert values["stage"] == {"1"}
    assert max(map(len, values.values())) <= 20
    assert all(len(value) <= 20 for each in values.values() for value in each)


def test_counters_stand_at_zero_from_the_start_and_what_is_not_known_is_left_out(
    shown: Shown,
) -> None:
    for outcome in ("counted", "followed", "undone", "reset", "repeated", "void"):
        assert shown("rounds_total", outcome=outcome) == 0
    for histogram in ("exchange_duration", "matchmaking_duration", "heal_duration"):
        assert shown(f"{histogram}_seconds_count") == 0
    unknown = ("train_loss", "group_size", "residual_norm", "replica_epoch", "compression_ratio")
    assert all(shown(name) is None for name in unknown)
    assert shown("peer_state", state="joining") == 1


# ---- values --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "labels", "value"),
    [
        ("tokens_total", {}, 640),
        ("inner_steps_total", {}, 10),
        ("inner_steps_skipped_total", {}, 1),
        ("computing_seconds_total", {}, 12.5),
        ("waiting_seconds_total", {"reason": "merge"}, 0.25),
        ("waiting_seconds_total", {"reason": "neighbours"}, 3.0),
        ("waiting_seconds_total", {"reason": "join"}, 0.0),
        ("bytes_total", {"direction": "sent", "kind": "activations"}, 3),
        ("bytes_total", {"direction": "received", "kind": "dht"}, 8),
        ("state_download_bytes_total", {}, 6),
        ("refused_total", {"reason": "pipeline_header"}, 2),
        ("refused_total", {"reason": "dht_often"}, 3),
        ("refused_total", {"reason": "probe_often"}, 5),
        ("hop_round_trip_seconds", {"direction": "upper"}, 0.05),
        ("hop_round_trip_seconds", {"direction": "lower"}, None),
        ("spares", {}, 2),
        ("manifest_revision", {}, 4),
        ("month_traffic_bytes", {}, 7_000_000),
        ("month_traffic_limit_bytes", {}, 5e9),
        ("reachable", {"kind": "public"}, 1),
        ("reachable", {"kind": "dial_out"}, 0),
    ],
)
def test_what_is_counted_elsewhere_is_shown(
    shown: Shown, name: str, labels: dict[str, str], value: float | None
) -> None:
    assert shown(name, **labels) == value


def test_it_is_shown_as_it_is_at_that_moment(shown: Shown) -> None:
    shown.allowance.limit_bytes = None
    assert shown("month_traffic_limit_bytes") is None
    shown.meter.tokens = 704
    assert shown("tokens_total") == 704


def test_the_status_says_state_round_and_losses(shown: Shown) -> None:
    shown.metrics.on_status(replace(STATUS, train_loss=2.75, state="spare", head=""))
    states = {state: shown("peer_state", state=state) for state in ("spare", "training", "joining")}
    assert states == {"spare": 1, "training": 0, "joining": 0}
    assert (shown("round"), shown("round_inner_steps"), shown("in_replica")) == (2, 8, 0)
    assert (shown("train_loss"), shown("validation_loss")) == (2.75, 2.5)
    shown.metrics.on_status(replace(STATUS, val_loss=math.nan))
    assert math.isnan(shown("validation_loss") or 0.0), "DilocoxLossNotFinite is on NaN"
    shown.metrics.on_status(STATUS)
    assert (shown("train_loss"), shown("in_replica")) == (None, 1)


def test_a_committed_round_shows_its_group_ranks_and_compression(shown: Shown) -> None:
    shown.round()
    assert shown("rounds_total", outcome="counted") == 1
    assert shown("group_size") == 2
    ranks = [shown("rank", statistic=name) for name in ("min", "median", "max")]
    assert ranks == [4, 8, 32]
    assert shown("compression_ratio") == 4 * NUMEL / 500
    assert (shown("compression_error_ratio"), shown("residual_norm")) == (0.2, 1.5)
    assert shown("last_round_timestamp_seconds") == pytest.approx(time.time(), abs=10)
    assert shown("exchange_duration_seconds_sum") == 0.3
    assert shown("exchange_duration_seconds_bucket", le="0.25") == 0
    assert shown("exchange_duration_seconds_bucket", le="0.5") == 1
    assert shown("matchmaking_duration_seconds_sum") == 4.0


def test_a_round_without_this_peer_is_counted_apart(shown: Shown) -> None:
    shown.round()
    other = replace(REPORT, outcome="followed", members=5, residual_norm=0.5)
    shown.round(other)
    assert shown("rounds_total", outcome="followed") == 1
    assert (shown("group_size"), shown("residual_norm")) == (5, 0.5)
    assert shown("exchange_duration_seconds_count") == 1  # of the first one
    assert shown("rank", statistic="min") is None  # its record has no factors
    assert shown("compression_ratio") is None


def test_voids_faults_and_healing_are_counted_as_they_come(shown: Shown) -> None:
    shown.metrics.on_event("void", {"round": 4, "reason": "no group: 12D3KooW"})
    assert shown("rounds_total", outcome="void") == 1
    shown.metrics.on_event("replica", {"epoch": 3, "members": []})
    assert shown("replica_epoch") == 3
    shown.metrics.on_event("fault", {"stage": 1, "peer": "x", "reason": "silent", "after_s": 3.0})
    shown.metrics.on_event("lost", {"stage": 2, "reason": "closed", "after_s": 0.1})
    shown.metrics.on_event("lost", {"stage": 0, "reason": "closed", "after_s": 0.1})
    shown.metrics.on_event("healed", {"stage": 1, "epoch": 4, "seconds": 3.5, "members": []})
    assert shown("faults_total", role="member", kind="silent") == 1
    assert shown("faults_total", role="member", kind="closed") == 1
    assert shown("faults_total", role="head", kind="closed") == 1
    assert (shown("heal_duration_seconds_sum"), shown("replica_epoch")) == (3.5, 4)
    assert shown("started_over_total") == 0
    shown.metrics.on_event("started_over", {"tokens": 64})
    assert shown("started_over_total") == 1
    for told in ("training", "validated", "resynced", "dissolved", "never heard of"):
        shown.metrics.on_event(told, {})  # nothing to count


def test_many_can_look_while_the_loop_reports(shown: Shown) -> None:
    with ThreadPoolExecutor(8) as lookers:
        looks = [lookers.submit(shown.metrics.pages()["/metrics"]) for _ in range(40)]
        for _ in range(300):
            shown.everything()
        assert all(look.result(20.0).body for look in looks)
    assert shown("rounds_total", outcome="counted") == 300


# ---- health and readiness ------------------------------------------------------------------------
def test_a_peer_is_ready_between_joining_and_leaving(shown: Shown) -> None:
    pages = shown.metrics.pages()
    for state, status in (("joining", 503), ("training", 200), ("leaving", 503)):
        shown.meter.state = state
        assert (pages["/readyz"]().status, shown("ready")) == (status, status == 200)


def test_health_names_the_parts_of_the_process_that_are_gone(shown: Shown) -> None:
    training = ThreadPoolExecutor(1)
    page = training.submit(shown.metrics.pages).result(5.0)["/healthz"]
    assert page() == Page.text("ok")
    training.shutdown()
    shown.lives = shown.network.running = False
    vars(shown.local.dht)["running"] = False
    assert (page().status, page().body) == (
        503,
        b"dead: training, coordinator, replica network, averaging process, DHT process\n",
    )


# ---- the figures behind them ---------------------------------------------------------------------
def test_norms_are_those_of_the_whole_vector_whatever_the_chunks() -> None:
    message = torch.randn(2 * CHUNK_VALUES + 17, generator=torch.Generator().manual_seed(1))
    assert norm(message) == pytest.approx(float(message.double().norm()), rel=1e-6)


@pytest.mark.parametrize(
    ("ranks", "span"), [((), None), ((0, 0), None), ((8, 0, 2), (2, 2, 8)), ((5,), (5, 5, 5))]
)
def test_the_span_of_ranks_is_of_factored_tensors_only(
    ranks: tuple[int, ...], span: tuple[int, int, int] | None
) -> None:
    assert rank_span(ranks) == span

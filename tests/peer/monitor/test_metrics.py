"""The swarm's figures for Prometheus: valid text, the agreed names, labels of a few values."""

from __future__ import annotations

from dataclasses import replace

from prometheus_client.parser import text_string_to_metric_families

from dilocox import __version__
from dilocox.dht.manifest_revisions import back_to
from dilocox.peer.monitor.health import STATES
from dilocox.peer.monitor.status import MAX_RANKS, MAX_VERSIONS
from tests.peer.fabricated import RUN, ToldSwarm, digest, peer_id, stage_record, trained
from tests.peer.shown_metrics import monitor_text

# The names are fixed: the rules and the dashboard use them.
LABELS = {
    (): "replicas manifest_revision end_tokens tokens_total tokens_per_second validation_loss "
    "train_loss losses_not_finite waiting_ratio faults_total contributors healthy joined_total "
    "left_total",
    ("stage",): "spares rounds_total rounds_per_hour round round_bytes inner_steps voids blocked "
    "sitting_out "
    "last_round_timestamp_seconds stage_unreachable compression_error_ratio",
    ("stage", "state"): "peers",
    ("stage", "statistic"): "rank",
    ("version",): "peer_versions",
    ("name", "version", "model"): "info",
    ("rank",): "contribution_tokens",
    ("bootstrap",): "bootstrap_up",
    ("state",): "state",
}
NAMES = {name: {"run", *labels} for labels, names in LABELS.items() for name in names.split()}

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def series(swarm: ToldSwarm) -> Series:
    """By name without prefix, and labels without the run."""
    found: Series = {}
    for family in text_string_to_metric_families(monitor_text(swarm)):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("run") == RUN[:12]
            found[sample.name.removeprefix("dilocox_swarm_"), frozenset(labels.items())] = (
                sample.value
            )
    return found


def value(swarm: ToldSwarm, name: str, **labels: object) -> float | None:
    told = {key: str(each) for key, each in labels.items()}
    return series(swarm).get((name, frozenset(told.items())))


def test_it_has_the_agreed_names_and_labels_and_no_others() -> None:
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(monitor_text(trained())):
        assert family.documentation and family.documentation.endswith(".")
        assert family.type == ("counter" if family.samples[0].name.endswith("_total") else "gauge")
        for sample in family.samples:
            found.setdefault(sample.name.removeprefix("dilocox_swarm_"), set()).update(
                sample.labels
            )
    assert found == NAMES


def test_the_run_is_named_with_its_model_and_its_end() -> None:
    swarm = trained()
    manifest = swarm.manifest
    model = manifest.preset or manifest.model["model_type"]
    told = {"name": manifest.name, "version": __version__, "model": model}
    assert series(swarm)["info", frozenset(told.items())] == 1
    assert value(swarm, "end_tokens") == manifest.end_tokens
    strange = {**manifest.model, "model_type": 'a"b' + "x" * 99}
    swarm.manifest = replace(manifest, preset=None, model=strange)
    ((_, labels),) = [key for key in series(swarm) if key[0] == "info"]
    assert dict(labels)["model"].startswith('a"b') and len(dict(labels)["model"]) <= 25


def test_peers_are_counted_by_stage_and_state() -> None:
    swarm = trained(stages=2, replicas=3, spares=2)
    swarm.stages[1][peer_id(900)] = stage_record(state="joining")
    swarm.stages[1][peer_id(901)] = stage_record(state="left")
    assert value(swarm, "peers", stage=0, state="training") == 3
    assert value(swarm, "peers", stage=1, state="joining") == 1
    assert value(swarm, "peers", stage=0, state="joining") == 0
    assert value(swarm, "spares", stage=1) == 2 and value(swarm, "replicas") == 3
    assert value(swarm, "joined_total") == 11  # who has left was never there
    assert value(swarm, "healthy") == 1 and value(swarm, "blocked", stage=1) == 0


def test_the_state_is_one_of_all_and_the_others_are_zero() -> None:
    swarm = trained(stages=2)
    states = {state: value(swarm, "state", state=state) for state in STATES}
    assert states == dict.fromkeys(STATES, 0) | {"training": 1}
    swarm.stages[1].clear()
    assert value(swarm, "state", state="blocked") == 1 and value(swarm, "healthy") == 0
    assert value(swarm, "blocked", stage=1) == 1 and value(swarm, "blocked", stage=0) == 0
    assert value(swarm, "peers", stage=1, state="training") == 0


def test_a_stage_whose_peers_all_only_dial_out_is_unreachable() -> None:
    swarm = trained(stages=2, replicas=2, spares=0)
    for peer, told in list(swarm.stages[1].items()):
        assert value(swarm, "stage_unreachable", stage=1) == 0
        swarm.stages[1][peer] = replace(told, client_mode=True)
    assert value(swarm, "stage_unreachable", stage=1) == 1
    assert value(swarm, "stage_unreachable", stage=0) == 0
    swarm.stages[1].clear()
    assert value(swarm, "stage_unreachable", stage=1) == 0  # that is another trouble


def test_the_compression_error_of_a_stage_is_what_most_of_its_peers_say() -> None:
    swarm = trained(stages=2, replicas=3, spares=0)
    liar, silent, *_ = swarm.stages[1]
    swarm.stages[1][liar] = replace(swarm.stages[1][liar], compression_error=1e30)
    assert value(swarm, "compression_error_ratio", stage=1) == 0.25
    swarm.stages[1] = {silent: replace(swarm.stages[1][silent], compression_error=None)}
    assert value(swarm, "compression_error_ratio", stage=1) is None
    assert value(swarm, "compression_error_ratio", stage=0) == 0.25


def test_chains_give_rounds_tokens_ranks_and_contributions() -> None:
    swarm = trained(stages=2, replicas=2, spares=0)
    assert value(swarm, "rounds_total", stage=1) == 4 and value(swarm, "round", stage=1) == 3
    assert value(swarm, "tokens_total") == 4 * 2 * 1000
    assert value(swarm, "rank", stage=0, statistic="median") == 8
    assert value(swarm, "inner_steps", stage=0) == 20
    assert value(swarm, "round_bytes", stage=0) == 1003
    assert value(swarm, "waiting_ratio") == 0.02
    # a replica's tokens count once, on stage 0
    assert value(swarm, "contribution_tokens", rank=1) == 4000
    assert value(swarm, "contribution_tokens", rank=2) == 4000
    assert value(swarm, "contribution_tokens", rank=3) is None
    assert value(swarm, "contributors") == 4


def test_who_sits_out_is_counted() -> None:
    swarm = trained(stages=1, replicas=2)
    assert value(swarm, "sitting_out", stage=0) == 0
    swarm.commit(4, sits_out=[next(iter(swarm.stages[0]))])
    assert value(swarm, "sitting_out", stage=0) == 1


def test_after_a_rollback_the_tokens_are_those_that_the_page_has() -> None:
    swarm = trained(stages=1, replicas=2, spares=0)
    swarm.manifest = back_to(swarm.manifest, 1, [digest(0, 1)])
    assert value(swarm, "tokens_total") == 2 * 2 * 1000
    swarm.commit(4, branch="x", before=1)
    shown = swarm.status(swarm.look())["totals"]["tokens"]
    assert value(swarm, "tokens_total") == shown == 3 * 2 * 1000
    assert value(swarm, "rounds_total", stage=0) == 5  # what a counter shows never falls


def test_what_is_not_known_is_left_out() -> None:
    swarm = ToldSwarm(replicas=0, spares=0)
    told = {name for name, _ in series(swarm)}
    assert told >= {"peers", "healthy", "tokens_total", "bootstrap_up"}
    assert not told & {"validation_loss", "waiting_ratio", "round", "rank", "rounds_per_hour"}


def test_labels_stay_few_whatever_peers_say() -> None:
    swarm = trained(replicas=60, spares=0)
    for number, (peer, told) in enumerate(list(swarm.stages[0].items())):
        version = f'1.{number}"}}\n' if number % 2 else f"1.{number % 30}"
        swarm.stages[0][peer] = replace(told, version=version)
    found = series(swarm)
    versions = {dict(labels)["version"] for name, labels in found if name == "peer_versions"}
    assert len(versions) <= MAX_VERSIONS + 1 and "other" in versions
    assert not any('"' in version for version in versions)  # what is none is no label
    assert sum(count for (name, _), count in found.items() if name == "peer_versions") == 180
    ranks = [labels for name, labels in found if name == "contribution_tokens"]
    assert len(ranks) == MAX_RANKS


def test_no_peer_id_is_told() -> None:
    told = monitor_text(trained())
    assert not any(peer_id(number) in told for number in (0, 1, 100, 101, 200, 201))

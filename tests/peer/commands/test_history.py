"""`dilocox log` and `dilocox verify` on state folders: what they print, and how they end."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from dilocox.dht.errors import DilocoxError
from dilocox.dht.identity import Identity
from dilocox.peer import cli
from dilocox.peer.chain.round_history import HistoryRow, RoundHistory, ToldHistory
from dilocox.peer.chain.store import KeptRun, archive_folder, keep_manifest, kept_run
from dilocox.peer.chain.summary import ChainRound
from dilocox.peer.commands import history
from dilocox.peer.commands.history import show, show_contributions
from dilocox.peer.rounds.record import Contribution, RoundRecord
from tests.clocks import TestClock
from tests.peer.fabricated import INVITE, stage_record
from tests.peer.kept_chains import RUN, ChainMaker, manifest_of
from tests.peer.memory_swarm import MemorySwarm

SHA = "ab" * 32


@pytest.fixture
def maker(identities: list[Identity], tmp_path: Path) -> ChainMaker:
    made = ChainMaker(identities[0], tmp_path / "state", manifest_of())
    made.train(0, 2)
    return made


def round_of(number: int, sha: str = SHA) -> ChainRound:
    return ChainRound(
        round=number,
        tokens=4096,
        members=2,
        ranks=None,
        next_inner_steps=20,
        record_bytes=12345,
        digest=sha,
        previous=SHA,
        chain_tokens=5000,
        contributors=(),
    )


def run(*arguments: object) -> tuple[int, list[str]]:
    """The exit code and the lines; an error is one line, as the command line prints it."""
    result = CliRunner().invoke(cli.app, [str(each) for each in arguments])
    if isinstance(result.exception, DilocoxError):
        return result.exception.exit_code, [f"error: {result.exception}"]
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    return result.exit_code, result.stdout.splitlines()


# ---- log -----------------------------------------------------------------------------------------
def test_rounds_are_listed_one_a_line_with_totals(maker: ChainMaker) -> None:
    code, lines = run("log", maker.own.parent)
    sizes = [maker.record_file(number).stat().st_size for number in (0, 2)]
    header = maker.log.header(2)
    assert header is not None
    ranks = sorted(rank for rank in header.ranks if rank)
    assert code == 0
    assert lines == [
        f"stage 0 round 0: 10 tokens, 1 member, ranks 6/6/6, next H 30, {sizes[0]:,} bytes, "
        f"digest {maker.digests[1][:12]}",
        f"stage 0 round 2: 10 tokens, 1 member, ranks {ranks[0]}/{ranks[len(ranks) // 2]}/"
        f"{ranks[-1]}, next H 30, {sizes[1]:,} bytes, digest {maker.digests[2][:12]}",
        f"stage 0: 2 rounds, 20 tokens, {sum(sizes):,} bytes",
    ]


def test_the_same_as_json_in_a_file_or_on_the_terminal(maker: ChainMaker, tmp_path: Path) -> None:
    assert run("log", maker.own, "--json", tmp_path / "log.json") == (0, [])
    found = json.loads((tmp_path / "log.json").read_text())
    code, lines = run("log", maker.own, "--json", "-")
    assert (code, json.loads("\n".join(lines))) == (0, found)
    (stage,) = found["stages"]
    assert (found["run"], stage["stage"], stage["tokens"]) == (RUN, 0, 20)
    assert [each["digest"] for each in stage["rounds"]] == maker.digests[1:]
    assert stage["rounds"][0]["ranks"] == [6, 6, 6]
    assert stage["rounds"][1]["previous"] == maker.digests[1]


def test_a_terminal_gets_a_table() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    made = replace(round_of(3), contributors=(("QmA", 4000), ("QmB", 96)))
    show({0: [made], 1: []}, console)
    text = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    for word in ("stage 0", "stage 1", "4,096", "12,345", SHA[:12], "1 round"):
        assert word in text
    assert SHA[:13] not in text
    row = {
        "id": 46 * "x" + "abcdef",
        "name": "[red]Ada[/red]",
        "team": "Fo[b]xes",
        "stages": [0, 1],
    }
    row |= {"tokens": 4000, "share": 0.977, "hours": 1.5}
    show_contributions({0: [made], 1: []}, [row, row], console)
    text = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    for word in ("[red]Ada[/red] (abcdef), Fo[b]xes", "4,000", "97.7%", "1.50", "stage 0, 1"):
        assert word in text
    for word in ("2 peers", "8,000", "904 tokens of earlier rounds", "stage 1: 0 peers"):
        assert word in text


def test_what_peers_call_themselves_is_one_line_each_beside_their_whole_id() -> None:
    console = Console(file=io.StringIO(), width=40)
    row = {"id": "QmA", "name": "[red]Ada[/red]", "team": "", "stages": [0], "tokens": 4000}
    show_contributions({}, [row | {"share": 1.0, "hours": 0.25}], console)
    lines = console.file.getvalue().splitlines()  # pyright: ignore[reportAttributeAccessIssue]
    assert lines == [
        "peer QmA (name [red]Ada[/red]): 4,000 tokens (100.0%), 0.25 hours, stage 0",
        "name [red]Ada[/red]: 4,000 tokens (100.0%), 0.25 hours, 1 peer",
    ]


def test_contributions_are_the_tokens_of_those_whose_values_are_in_a_mean(
    maker: ChainMaker,
) -> None:
    """A member that was cut off before any of its values came sends them again: not counted."""

    def with_one_cut_off(record: RoundRecord) -> RoundRecord:
        lost = Contribution(peer="QmZ", tokens=7, exchange_s=1.0, step_s=1.0)
        return replace(record, members=(*record.members, lost))

    maker.train(3, change=with_one_cut_off)
    code, lines = run("log", maker.own, "--contributions")
    assert (code, lines) == (
        0,
        [
            f"peer {maker.peer}: 30 tokens (100.0%), 0.00 hours, stage 0",
            "stage 0: 1 peer, 30 tokens in rounds 0 to 3",
        ],
    )
    _, lines = run("log", maker.own, "--json", "-")
    told = json.loads("\n".join(lines))
    (row,), (stage,) = told["contributions"], told["stages"]
    assert (row["id"], row["tokens"], row["name"], told["teams"]) == (maker.peer, 30, "", [])
    assert stage["contributions"] == [{"peer": maker.peer, "tokens": 30, "rounds": 3}]
    assert (stage["tokens"], stage["tokens_before"]) == (30, 0)


def test_a_log_that_does_not_reach_back_says_what_it_lacks(maker: ChainMaker) -> None:
    maker.record_file(0).unlink()
    _, lines = run("log", maker.own, "--contributions")
    assert lines[-1] == (
        "stage 0: 1 peer, 10 tokens in rounds 2 to 2; 10 tokens of earlier rounds, whose records "
        "are not here"
    )


def test_all_stages_of_a_folder_are_listed_or_the_one_that_is_named(
    maker: ChainMaker, identities: list[Identity], tmp_path: Path
) -> None:
    two = replace(maker.manifest, stages=2)
    for stage in range(2):
        ChainMaker(identities[0], tmp_path / "two", two, stage=stage).train(0)
    _, lines = run("log", tmp_path / "two")
    assert [line.split(":")[0] for line in lines] == [
        "stage 0 round 0",
        "stage 0",
        "stage 1 round 0",
        "stage 1",
    ]
    _, lines = run("log", tmp_path / "two", "--stage", 1)
    assert [line.split(":")[0] for line in lines] == ["stage 1 round 0", "stage 1"]
    code, lines = run("log", tmp_path / "two", "--stage", 2)
    said = "error: --stage 2: the stages that are kept are 0, 1; name one of them, or all"
    assert (code, lines) == (2, [said])


def test_a_folder_without_a_log_is_an_error_that_says_what_to_name(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        code, lines = run("log", folder)
        assert code == 2
        assert lines[0].startswith(f"error: {folder}: there is no round log; name the folder")


def test_a_folder_of_several_runs_is_an_error_that_names_them(
    maker: ChainMaker, identities: list[Identity]
) -> None:
    state = maker.own.parent
    other = ChainMaker(identities[0], state, maker.manifest, run="f" * 32)
    code, lines = run("log", state)
    assert code == 2
    assert str(maker.own) in lines[0] and str(other.own) in lines[0]
    assert run("log", other.own) == (0, ["stage 0: 0 rounds, 0 tokens, 0 bytes"])


def test_a_damaged_header_is_an_error_and_no_traceback(maker: ChainMaker) -> None:
    maker.record_file(0).write_bytes(b"\xff" * 100)
    code, lines = run("log", maker.own)
    assert code == 1
    assert "damaged on disk" in lines[0]


def test_an_invite_that_is_none_is_said_at_once() -> None:
    code, lines = run("log", "dilocox:nonsense")
    assert code == 2
    assert "has no '@'" in lines[0]


# ---- verify --------------------------------------------------------------------------------------
def test_a_replay_is_told_when_it_begins(maker: ChainMaker) -> None:
    result = CliRunner().invoke(cli.app, ["verify", str(maker.own.parent)])
    assert result.stderr.splitlines() == ["stage 0: replaying 2 rounds ..."]


def test_a_sound_chain_gives_its_anchor_and_exit_code_0(maker: ChainMaker) -> None:
    maker.snapshot()
    code, lines = run("verify", maker.own.parent)
    assert (code, lines) == (
        0,
        [
            f"stage 0: 2 rounds replayed (0 to 2), anchor sha256 {maker.anchors[-1]}, equal to "
            "the state of round 2"
        ],
    )


def test_a_flaw_gives_a_line_and_exit_code_1(maker: ChainMaker) -> None:
    maker.train(3, change=lambda record: replace(record, anchor_before="f" * 64))
    code, lines = run("verify", maker.own.parent)
    assert code == 1
    assert lines[0].startswith("stage 0: round 3: applies to the anchor ffffffffffff")
    assert len(lines) == 2


def test_a_folder_without_its_manifest_says_what_to_do(maker: ChainMaker) -> None:
    (maker.own / "manifest.json").unlink()
    code, lines = run("verify", maker.own.parent)
    assert code == 2
    assert "manifest.json" in lines[0] and "give the invite" in lines[0]
    (maker.own / "manifest.json").write_text("{}")
    code, lines = run("verify", maker.own.parent)
    assert code == 2
    assert lines[0].startswith("error: ") and "manifest.json: manifest: " in lines[0]


# ---- the bootstrap's folder ----------------------------------------------------------------------
def archive_of(maker: ChainMaker, tmp_path: Path) -> tuple[Path, Path]:
    """The bootstrap's folder of the run, and in it that of stage 0."""
    kept = tmp_path / "bootstrap" / f"{RUN}-archive-{maker.manifest.digest[:16]}"
    (kept / "stage0").mkdir(parents=True)
    return kept, kept / "stage0"


def test_an_archive_is_read_across_its_generations(maker: ChainMaker, tmp_path: Path) -> None:
    kept, stage = archive_of(maker, tmp_path)
    maker.snapshot(stage / "00000004" / "state")
    maker.train(3, 4)
    maker.snapshot(stage / "00000005" / "state")
    maker.train(5)
    spread(maker, stage, {"older": [0, 2], "00000004/log": [2, 3, 4, 5], "00000005/log": [4, 5]})
    keep_manifest(kept, maker.manifest)
    code, lines = run("verify", tmp_path / "bootstrap")
    assert (code, lines) == (
        0,
        [
            f"stage 0: 5 rounds replayed (0 to 5), anchor sha256 {maker.anchors[-1]}, equal to "
            "the state of round 4, after which there is none to compare with"
        ],
    )
    code, lines = run("log", kept, "--stage", 0)
    assert len(lines) == 6


def test_records_that_a_running_bootstrap_moves_meanwhile_are_found_again(
    maker: ChainMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, stage = archive_of(maker, tmp_path)
    maker.snapshot(stage / "00000002" / "state")
    spread(maker, stage, {"older": [0], "00000002/log": [2]})
    keep_manifest(kept, maker.manifest)
    listings: list[KeptRun] = []

    def listed_and_then_moved(folder: Path) -> KeptRun:
        listings.append(kept_run(folder))
        if len(listings) == 1:
            for path in (stage / "00000002" / "log").iterdir():
                path.rename(stage / "older" / path.name)
        return listings[-1]

    monkeypatch.setattr(history, "kept_run", listed_and_then_moved)
    code, lines = run("verify", tmp_path / "bootstrap")
    assert code == 0
    assert lines[0].startswith("stage 0: 2 rounds replayed (0 to 2), anchor")
    assert len(listings) == 2


def spread(maker: ChainMaker, stage: Path, places: dict[str, list[int]]) -> None:
    from dilocox.peer.chain.store import Store

    for name, rounds in places.items():
        Store(stage / name).share(maker.log, rounds)


def test_what_two_generations_disagree_on_is_the_older_ones(
    maker: ChainMaker, identities: list[Identity], tmp_path: Path
) -> None:
    other = ChainMaker(identities[1], tmp_path / "other", maker.manifest)
    other.train(0)
    stage = tmp_path / f"{RUN}-archive-{'a' * 16}" / "stage0"
    spread(maker, stage, {"00000000/log": [0, 2]})
    spread(other, stage, {"00000001/log": [0]})
    chain: Any = kept_run(tmp_path / f"{RUN}-archive-{'a' * 16}").stages[0]
    assert [entry.digest for entry in chain.records] == maker.digests[1:]


# ---- time and losses -----------------------------------------------------------------------------
AT = 1_763_640_000.0
TOLD = HistoryRow(3, 0, SHA[:16], AT, 5000, 2.5, 2.25, 100.0, 4, 2, 12345, 1)


def test_time_and_losses_stand_beside_the_rounds_of_which_they_are_known() -> None:
    stages = {0: [round_of(3), round_of(4)], 1: [round_of(3, "cd" * 32)]}
    for terminal in (True, False):
        console = Console(file=io.StringIO(), force_terminal=terminal, width=160)
        show(stages, console, {3: TOLD})
        text = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
        assert text.count("2025-11-20 12:00:00 UTC") == 2 and text.count("2.2500") == 2
    third, fourth, *_ = text.splitlines()
    assert third.endswith(", at 2025-11-20 12:00:00 UTC, train loss 2.5000, validation loss 2.2500")
    assert fourth.endswith("digest " + SHA[:12])
    found = history.as_json(RUN, stages, history={3: TOLD})
    first, second = found["stages"][0]["rounds"]
    assert (first["at"], first["train"], first["validation"]) == (AT, 2.5, 2.25)
    assert (second["at"], second["train"], second["validation"]) == (None, None, None)
    assert found["history"] == [TOLD._asdict()]


def test_what_is_told_of_another_record_of_that_number_is_not_shown() -> None:
    found = history.as_json(RUN, {0: [round_of(3, "cd" * 32)]}, history={3: TOLD})
    assert found["stages"][0]["rounds"][0]["validation"] is None


def test_the_csv_has_a_line_a_round_with_what_is_known() -> None:
    late = TOLD._replace(round=1, at=None, train=None)
    told = TOLD._replace(train_low=2.25, train_high=2.75)
    lines = history.as_csv([round_of(3), round_of(4)], {3: told, 1: late}).splitlines()
    assert lines == [
        "round,rules,digest,at,tokens,train,validation,tokens_per_s,peers,replicas,record_bytes,"
        "voids,train_low,train_high",
        f"1,0,{SHA[:16]},,5000,,2.25,100.0,4,2,12345,1,,",
        f"3,0,{SHA[:16]},2025-11-20T12:00:00Z,5000,2.5,2.25,100.0,4,2,12345,1,2.25,2.75",
        f"4,0,{SHA[:16]},,5000,,,,,,12345,,,",
    ]


def test_a_peers_folder_tells_what_the_peer_saw(maker: ChainMaker, tmp_path: Path) -> None:
    seen = {"time": AT, "round": 2, "digest": maker.digests[2], "chain_tokens": 20}
    events: list[dict[str, Any]] = [
        {"event": "training", "time": AT},
        {"event": "round", "train_loss": 3.5} | seen,
        {"event": "validated", "time": AT, "round": 2, "loss": 3.25},
        {"event": "round", "train_loss": "NaN", "round": "x"},
        {"event": "validated", "time": AT, "round": 2, "loss": None},
    ]
    lines = [*(json.dumps(event) for event in events[:3]), "[1", *map(json.dumps, events[3:4])]
    (maker.own / "events.jsonl").write_text("\n".join([*lines, '{"event": "rou']))
    assert run("log", maker.own.parent, "--csv", tmp_path / "rounds.csv") == (0, [])
    first, second = (tmp_path / "rounds.csv").read_text().splitlines()[1:]
    assert first.partition(",,")[2].startswith("10,,,")
    assert second.endswith(",2025-11-20T12:00:00Z,20,3.5,3.25,,,,,,,")
    _, listed = run("log", maker.own)
    assert "train loss 3.5000, validation loss 3.2500" in listed[1]


def test_a_bootstraps_folder_tells_what_it_keeps(
    identities: list[Identity], tmp_path: Path
) -> None:
    manifest = manifest_of()
    folder = archive_folder(tmp_path, RUN, manifest)
    maker = ChainMaker(identities[0], tmp_path / "peer", manifest)
    maker.train(0)
    generation = folder / "stage0" / "00000000"
    generation.mkdir(parents=True)
    shutil.copytree(maker.own / "log", generation / "log")
    keep_manifest(folder, manifest)
    kept = RoundHistory(folder / "history.jsonl", manifest)
    kept.add(TOLD._replace(round=0, digest=maker.digests[1][:16], tokens=10))
    code, lines = run("log", tmp_path, "--csv", "-")
    assert code == 0 and ",2025-11-20T12:00:00Z,10,2.5,2.25,100.0,4,2," in lines[1]
    kept.credit([maker.peer])
    kept.hear({maker.peer: stage_record(name="Ada", team="Foxes")})
    _, lines = run("log", tmp_path, "--contributions")
    assert lines[:3] == [
        f"peer {maker.peer} (name Ada, team Foxes): 10 tokens (100.0%), 0.00 hours, stage 0",
        "name Ada: 10 tokens (100.0%), 0.00 hours, 1 peer",
        "team Foxes: 10 tokens (100.0%), 0.00 hours, 1 peer",
    ]


def test_each_stage_of_a_live_run_has_its_part_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, given = TestClock(), list[float]()
    manifest = replace(manifest_of(), stages=2)
    place: Any = MemorySwarm().place(manifest, lambda _: {})
    place.swarm.read_many = lambda _: {}

    @contextmanager
    def visiting(*_: Any) -> Generator[Any]:
        yield place

    async def claimed(_place: Any, _stage: int, deadline: float) -> Any:
        given.append(deadline - clock.now)
        return SimpleNamespace(claims={"a": 1})

    async def listed(_: Any) -> list[ChainRound]:
        clock.now += given[-1]  # it takes all that it gets
        return [round_of(len(given))]

    async def no_history(*_: Any, **__: Any) -> ToldHistory:
        return ToldHistory([], {})

    for name, fake in (
        ("time", clock),
        ("visiting", visiting),
        ("claimed_chain", claimed),
        ("list_chain", listed),
        ("ask_history", no_history),
    ):
        monkeypatch.setattr(history, name, fake)
    code, lines = run("log", INVITE, "--timeout", 90)
    assert code == 0 and sum(line.startswith("stage") for line in lines) == 4
    assert given == pytest.approx([30.0, 30.0])

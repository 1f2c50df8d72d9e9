"""The commands `dilocox log` and `dilocox verify`: what a run's rounds were, and whether the anchor
is what they make. Both read a state folder, or ask the swarm.

What a round was stands in its record. When it came and what the model's losses were does not: that
is in the history that bootstraps keep, and as far as it took part in a peer's own events.
"""

from __future__ import annotations

import asyncio
import csv
import io
import json
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dilocox.dht.errors import EnvironmentFault, InvalidInput
from dilocox.dht.invite import Invite
from dilocox.dht.join import Joined, visiting
from dilocox.dht.manifest import Manifest
from dilocox.dht.names import shown_peer
from dilocox.dht.records import StageRecord, averaging_prefix, stage_key
from dilocox.dht.rpc import Client
from dilocox.peer.chain import summary as of_chains
from dilocox.peer.chain.replay import Replayed, replay
from dilocox.peer.chain.round_history import (
    FILE,
    SHORT_DIGEST,
    HistoryRow,
    NamedPeer,
    RoundHistory,
    ToldHistory,
    ask_history,
    parsed_row,
)
from dilocox.peer.chain.store import KeptChain, KeptRun, kept_run
from dilocox.peer.chain.summary import ChainRound, grouped, tokens_by_peer
from dilocox.peer.chain.visitor_download import (
    ClaimedChain,
    claimed_chain,
    download_chain,
    list_chain,
)
from dilocox.peer.options import LogOptions, VerifyOptions
from dilocox.peer.os_process import STOPPED, StopSignal, counted, write_json, write_text
from dilocox.peer.state_folder import EVENTS_FILE, StateFolder

T = TypeVar("T")


TOLD = ("at", "train loss", "validation loss")
Chains = Mapping[int, Sequence[ChainRound]]
Given = Sequence[Mapping[str, Any]]
"""Of `summary.contributions`."""
Rows = Mapping[int, HistoryRow]
"""What is known of rounds beside their records, by number."""


def as_json(
    run: str, stages: Chains, given: Given = (), history: Rows | None = None
) -> dict[str, Any]:
    """Everything, with totals, by stage, and by contributor."""
    rows = history or {}
    return {
        "run": run,
        "history": [row._asdict() for _, row in sorted(rows.items())],
        "stages": [
            {
                "stage": stage,
                "rounds": [_listed_round(stage, each, rows) for each in rounds],
                "tokens": sum(each.tokens for each in rounds),
                "record_bytes": sum(each.record_bytes for each in rounds),
                "contributions": _contributions(rounds),
                "tokens_before": _tokens_before(rounds),
            }
            for stage, rounds in sorted(stages.items())
        ],
        "contributions": given,
        "names": grouped(given, "name"),
        "teams": grouped(given, "team"),
    }


def _listed_round(stage: int, each: ChainRound, rows: Rows) -> dict[str, Any]:
    facts, row = asdict(each), _row(stage, each, rows)
    known = {name: row and getattr(row, name) for name in ("at", "train", "validation")}
    listed = {name: facts[name] for name in facts if name not in ("chain_tokens", "contributors")}
    return listed | known


def _row(stage: int, each: ChainRound, rows: Rows) -> HistoryRow | None:
    """What is known of a round; a row names the record of stage 0."""
    row = rows.get(each.round)
    other = row is not None and stage == 0 and not each.digest.startswith(row.digest)
    return None if other else row


def as_csv(chain: Sequence[ChainRound], history: Rows) -> str:
    """A line a round, of the history and of this chain, after one of names."""
    rows: dict[int, HistoryRow] = {}
    for each in chain:
        row = HistoryRow(each.round, 0, each.digest[:SHORT_DIGEST], None, each.chain_tokens)
        rows[each.round] = row._replace(record_bytes=each.record_bytes)
    text = io.StringIO()
    table = csv.DictWriter(text, HistoryRow._fields, lineterminator="\n")
    table.writeheader()
    for _, row in sorted((rows | dict(history)).items()):
        at = None if row.at is None else f"{datetime.fromtimestamp(row.at, timezone.utc):%FT%TZ}"
        table.writerow(row._asdict() | {"at": at})
    return text.getvalue()


def show(stages: Chains, console: Console, history: Rows | None = None) -> None:
    rows = history or {}
    for stage, rounds in sorted(stages.items()):
        tokens = f"{sum(each.tokens for each in rounds):,}"
        size = f"{sum(each.record_bytes for each in rounds):,}"
        count = counted(len(rounds), "round")
        more = TOLD if rows else ()
        columns = ("round", "tokens", "members", "ranks", "next H", "bytes", "digest", *more)
        table = _table(f"stage {stage}", columns)
        table.show_footer = bool(rounds)
        for column, footer in zip(table.columns, (count, tokens, "", "", "", size), strict=False):
            column.footer = footer
        lines: list[str] = []
        for each in rounds:
            ranks = "-" if each.ranks is None else "/".join(map(str, each.ranks))
            digest, next_h = each.digest[:12], str(each.next_inner_steps)
            cells = (f"{each.tokens:,}", str(each.members), ranks, next_h, f"{each.record_bytes:,}")
            told = _beside(_row(stage, each, rows))
            table.add_row(str(each.round), *cells, digest, *(told if more else ()))
            lines.append(
                f"stage {stage} round {each.round}: {each.tokens:,} tokens, "
                f"{counted(each.members, 'member')}, ranks {ranks}, next H {next_h}, "
                f"{each.record_bytes:,} bytes, digest {digest}"
                + "".join(f", {name} {text}" for name, text in zip(TOLD, told, strict=True) if text)
            )
        lines.append(f"stage {stage}: {count}, {tokens} tokens, {size} bytes")
        _print(console, table, lines)


def _beside(row: HistoryRow | None) -> tuple[str, str, str]:
    """Time, train and validation loss; empty where unknown."""
    if row is None:
        return "", "", ""
    at = "" if row.at is None else f"{datetime.fromtimestamp(row.at, timezone.utc):%F %T} UTC"
    train, validation = ("" if x is None else f"{x:.4f}" for x in (row.train, row.validation))
    return at, train, validation


def show_contributions(stages: Chains, given: Given, console: Console) -> None:
    """Print what each peer, name and team contributed, the most first, and of which rounds."""
    for what in ("peer", "name", "team"):
        table, lines = _table(f"by {what}", (what, "of", "tokens", "share", "hours")), list[str]()
        for row in given if what == "peer" else grouped(given, what):
            if what == "peer":
                stated = ", ".join(f"{key} {row[key]}" for key in ("name", "team") if row[key])
                label = f"{row['id']} ({stated})" if stated else row["id"]
                shown = shown_peer(row["id"], row["name"]) + (row["team"] and f", {row['team']}")
                of = f"stage {', '.join(map(str, row['stages']))}"
            else:
                shown, label, of = row[what], row[what], counted(row["peers"], "peer")
            cells = (f"{row['tokens']:,}", f"{row['share']:.1%}", f"{row['hours']:,.2f}")
            table.add_row(escape(shown), of, *cells)
            lines.append(f"{what} {label}: {cells[0]} tokens ({cells[1]}), {cells[2]} hours, {of}")
        if lines:
            _print(console, table, lines)
    for stage, chain in sorted(stages.items()):
        counts = tokens_by_peer(chain)
        summary = f"stage {stage}: {counted(len(counts), 'peer')}, {counts.total():,} tokens"
        if chain:
            summary += f" in rounds {chain[0].round} to {chain[-1].round}"
        if before := _tokens_before(chain):
            summary += f"; {before:,} tokens of earlier rounds, whose records are not here"
        console.print(summary, highlight=False, soft_wrap=True)


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in columns:
        left = name in ("peer", "name", "team", "of", "digest")
        table.add_column(name, justify="left" if left else "right")
    return table


def _print(console: Console, table: Table, lines: Sequence[str]) -> None:
    """The table on a terminal; elsewhere the lines, each one line however long."""
    if console.is_terminal:
        console.print(table)
        return
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True, markup=False)


LISTINGS = 3  # of a folder whose owner moves records while they are read


def run_log_command(options: LogOptions) -> int:
    """List the rounds of one stage or all, or what its peers contributed; the exit code."""
    with StopSignal():
        run, stages, given, history = _listed(options)
        if options.csv_file is not None:
            chain = next(iter(stages.values()), ())
            write_text(options.csv_file, as_csv(chain, history))
        elif options.json_file is not None:
            write_json(options.json_file, as_json(run, stages, given, history))
        elif options.contributions:
            show_contributions(stages, given, Console())
        else:
            show(stages, Console(), history)
        return 0
    return STOPPED


def run_verify_command(options: VerifyOptions) -> int:
    """Replay the chain of one stage or all; the exit code, 1 where there is a flaw."""
    with StopSignal():
        if isinstance(options.source, Path):
            sound = _verify_folder(options.source, options)
        else:
            sound = _verify_swarm(options.source, options)
        return 0 if sound else 1
    return STOPPED


# ---- listing -------------------------------------------------------------------------------------
def _listed(options: LogOptions) -> tuple[str, Chains, Given, Rows]:
    source = options.source
    stages: dict[int, Sequence[ChainRound]] = {}
    if isinstance(source, Path):
        kept = kept_run(source)
        for stage in _wanted(options.stage, sorted(kept.stages)):
            stages[stage] = _rounds(kept.stages[stage])
        told = _kept_history(kept)
        if not options.contributions and options.json_file is None:
            return kept.run, stages, (), {row.round: row for row in told.rows}
        run, manifest = kept.run, kept.manifest()
    else:
        with visiting(source, options.host) as joined:
            run, manifest = joined.run, joined.manifest
            deadline = time.monotonic() + options.timeout_s
            whole = options.csv_file is not None and options.stage in ("all", "auto")
            wanted = _wanted("0" if whole else options.stage, range(manifest.stages))
            for parts, stage in zip(range(len(wanted) + 1, 1, -1), wanted, strict=True):
                now = time.monotonic()  # each has its part of the time left, the history the last
                until = now + (deadline - now) / parts
                stages[stage] = asyncio.run(_claimed(joined, stage, until, list_chain))
            told = asyncio.run(_told_history(joined, source, deadline))
            keys = dict.fromkeys((stage_key(run, n) for n in range(manifest.stages)), StageRecord)
            for found in joined.swarm.read_many(keys).values():
                for peer, record in (found or {}).items():
                    told.names[peer] = NamedPeer.of(peer, record)
    stated = {peer: (name, team, None) for peer, name, team in told.names.values()}
    took = of_chains.token_seconds_by_peer
    sums = {stage: (tokens_by_peer(chain), took(chain)) for stage, chain in stages.items()}
    given = of_chains.contributions(sums, manifest.batch.tokens_per_step, stated)
    return run, stages, given, {row.round: row for row in told.rows}


async def _told_history(joined: Joined, invite: Invite, deadline: float) -> ToldHistory:
    """What the bootstraps of the invite keep, the operator's first; empty where none answers."""
    client = Client(
        p2p=await joined.dht.replicate_p2p(),
        namespace=averaging_prefix(joined.run, 0),
        record_bytes=0,
    )
    asked = ask_history(
        client, invite.peer_ids, joined.run, joined.manifest, witness=joined.witness
    )
    try:
        return await asyncio.wait_for(asked, max(1.0, deadline - time.monotonic()))
    except asyncio.TimeoutError:
        return ToldHistory([], {})


def _kept_history(kept: KeptRun) -> ToldHistory:
    """Of a bootstrap's folder what it keeps of the run, of a peer's what it has seen itself."""
    if (kept.folder / FILE).exists():
        history = RoundHistory(kept.folder / FILE, kept.manifest())
        return ToldHistory(history.rows(), {each.peer: each for each in history.names()})
    found: dict[int, HistoryRow] = {}
    for path in StateFolder(kept.folder.parent).of_stages(EVENTS_FILE, kept.run):
        for line in path.read_bytes().splitlines():
            with suppress(ValueError, LookupError, TypeError):  # a line may be cut
                event = json.loads(line)
                number = event["round"]
                if event["event"] == "validated" and number in found:
                    found[number] = found[number]._replace(validation=float(event["loss"]))
                elif event["event"] == "round":
                    seen = (number, 0, event["digest"][:SHORT_DIGEST], event["time"])
                    row = parsed_row([*seen, event["chain_tokens"], event["train_loss"]])
                    found[row.round] = row
    return ToldHistory(list(found.values()), {})


def _rounds(chain: KeptChain) -> list[ChainRound]:
    found: list[ChainRound] = []
    for entry in chain.records:
        try:
            header = entry.header()
            if header is not None:  # else its owner removed it meanwhile
                found.append(ChainRound.of(header, entry.digest, entry.record_bytes))
        except ValueError as error:
            raise EnvironmentFault(str(error)) from error
    return found


# ---- verifying -----------------------------------------------------------------------------------
def _verify_folder(folder: Path, options: VerifyOptions) -> bool:
    kept = kept_run(folder)
    manifest = kept.manifest()
    sound = True
    for stage in _wanted(options.stage, sorted(kept.stages)):
        found = _replayed(manifest, kept.run, stage, kept.stages[stage])
        for _ in range(LISTINGS):
            if found.gone:  # a running peer or bootstrap has moved records meanwhile
                found = _replayed(manifest, kept.run, stage, kept_run(folder).stages[stage])
        sound &= _told(stage, found, [])
    return sound


def _replayed(manifest: Manifest, run: str, stage: int, chain: KeptChain) -> Replayed:
    rounds = counted(len(chain.records), "round")
    typer.echo(f"stage {stage}: replaying {rounds} ...", err=True)
    return replay(manifest, run, stage, chain.records, chain.states)


def _verify_swarm(invite: Invite, options: VerifyOptions) -> bool:
    sound = True
    with visiting(invite, options.host) as joined:
        deadline = time.monotonic() + options.timeout_s
        for stage in _wanted(options.stage, range(joined.manifest.stages)):
            with tempfile.TemporaryDirectory() as folder:
                typer.echo(f"stage {stage}: fetching its rounds ...", err=True)
                downloaded = partial(download_chain, folder=Path(folder))
                chain, flaws = asyncio.run(_claimed(joined, stage, deadline, downloaded))
                found = _replayed(joined.manifest, joined.run, stage, chain)
                sound &= _told(stage, found, flaws)
    return sound


def _told(stage: int, found: Replayed, flaws: Sequence[str]) -> bool:
    """Say what a replay found; whether there was no flaw, `flaws` of the download included."""
    flaws = [*flaws, *found.flaws]
    for flaw in flaws:
        typer.echo(f"stage {stage}: {flaw}")
    typer.echo(f"stage {stage}: {summary(found)}")
    return not flaws


def summary(found: Replayed) -> str:
    """What a replay found, in one line."""
    if not found.checked:
        return "no rounds yet"
    if not found.anchor_sha256:
        return (
            f"{len(found.checked)} rounds checked, none replayed to the end: there is no state "
            "before the last of them, and they do not begin at the initial weights"
        )
    words = f"{len(found.replayed)} rounds replayed"
    if found.replayed:
        words += f" ({found.replayed[0]} to {found.replayed[-1]})"
    others = len(found.checked) - len(found.replayed)
    if others:
        words += f", {others} only checked for want of the anchor before them"
    words += f", anchor sha256 {found.anchor_sha256}"
    if not found.confirmed:
        return words + ", compared with nothing: there is no state of these rounds"
    words += f", equal to the state of round {found.confirmed[-1]}"
    if found.replayed and found.confirmed[-1] < found.replayed[-1]:
        words += ", after which there is none to compare with"
    return words


# ---- both ----------------------------------------------------------------------------------------
def _wanted(stage: str, there: Sequence[int]) -> list[int]:
    if stage in ("all", "auto"):  # a peer's environment may name the latter
        return list(there)
    if not stage.isdecimal() or int(stage) not in there:
        shown = ", ".join(map(str, there)) or "none"
        raise InvalidInput(
            f"--stage {stage}: the stages that are kept are {shown}; name one of them, or all"
        )
    return [int(stage)]


async def _claimed(
    joined: Joined, stage: int, deadline: float, ask: Callable[[ClaimedChain], Awaitable[T]]
) -> T:
    """What is told when the newest chain that somebody claims to have is asked for."""
    claimed = await claimed_chain(joined, stage, deadline)
    if not claimed.claims:
        raise EnvironmentFault(
            f"stage {stage}: nobody in view has committed a round; check that the run trains, or "
            "wait for its first round"
        )
    return await ask(claimed)


def _contributions(rounds: Sequence[ChainRound]) -> list[dict[str, Any]]:
    taken_part = Counter(peer for each in rounds for peer, _ in each.contributors)
    tokens = tokens_by_peer(rounds)
    return [
        {"peer": peer, "tokens": tokens[peer], "rounds": taken_part[peer]}
        for peer in sorted(tokens, key=lambda peer: (-tokens[peer], peer))
    ]


def _tokens_before(rounds: Sequence[ChainRound]) -> int:
    """Tokens behind the part of the chain that is not here."""
    return rounds[0].chain_tokens - rounds[0].tokens if rounds else 0

"""Beside a plain loop, AllReduce, OpenDiLoCo and DiLoCoX: tokens/s, bytes and loss on slow links.

    python benchmarks/baselines.py [--links 100 10 1 lossy far] [--peers 2] [--runs 2] [--seed 0]
                                   [--keep FILE]

Every contestant trains the same Llama of 3.4 million parameters on the same text with AdamW, 4
windows of 128 bytes a peer and step, one torch thread a peer. Each peer is a process (ours: the
five of `dilocox peer`) behind a link of its own, so it needs Linux and root. baseline_runs.py and
baseline_peer.py say what each contestant is; a link is 100, 10 or 1 Mbit/s each way, `lossy` 10
Mbit/s with 50 ms one way and 1 % of the packets lost, `far` 10 Mbit/s with 250 ms one way; `none`
is loopback, where the synchronous ones reach as many tokens as ours, for their loss.

A row is one contestant on one link, the mean of its runs and half of their spread:

    H          inner steps of the measured rounds
    tokens/s   of all peers, in whole rounds, after all have begun
    of plain   the share of what as many plain loops did without network, in the same turn
    computing  the share of the time in inner steps; for rivals, steps times what one takes alone
    B/token    bytes of IP packets that peers' links sent, for each token
    at tokens  loss on held-out windows of the newest joined weights after --tokens of all peers
    at time    the same --seconds after all began. A plain loop is one of them, alone, for both

A synchronous contestant has the same loss after as many tokens on any link: where its run on this
one did not get so far, the loss is that of another link after so many tokens. Runs take turns:
`--keep` adds to the results in a file and tables all that it holds, so that a long measurement can
be cut into many calls. Contestants of one call are run one after the other, then all once more, of
the next seed (initial weights and order of the data).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

import torch

# a script has only its own folder on the path
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.baseline_runs import (
    ALL_REDUCE,
    ALONE,
    AVERAGER,
    CONTESTANTS,
    LINES,
    OPEN_DILOCO,
    OURS,
    PLAIN,
    PUBLISHED,
    ROUND_STEPS,
    SYNCHRONOUS,
    Length,
    Line,
    Result,
    run,
)
from benchmarks.report import SPREAD, Column, Report, parser
from tests.swarm.links import available

WITHOUT_NETWORK = (PLAIN, ALONE)  # what they do does not depend on the link
ON_LOOPBACK = (ALL_REDUCE, AVERAGER)
QUICK_WINDOWS = 2
AT_TOKENS, AT_S = 330_000, 60.0
LIMIT_S = 420.0
WORDS = {"lossy": "10 Mbit/s with delay and loss", "far": "10 Mbit/s, round trips of 500 ms"}
PEERS = 2
# tokens/s of ours over a rival's on a link, at least
EXPECTED = (
    (OURS, OPEN_DILOCO, "10", 4.5),
    (OURS, OPEN_DILOCO, "lossy", 4.5),
    (OURS, AVERAGER, "10", 4.5),
    (OURS, ALL_REDUCE, "10", 65.0),
    (OURS, ALL_REDUCE, "lossy", 65.0),
    (OURS, ALL_REDUCE, "1", 600.0),
)


def length(contestant: str, line: Line, *, quick: bool) -> Length:
    """How long a run is."""
    if quick:
        rounds = 0 if contestant in WITHOUT_NETWORK else 1
        return Length(
            seconds=4.0, rounds=rounds, limit_s=LIMIT_S, first=True, windows=QUICK_WINDOWS
        )
    if line.mbit is None:  # for the loss
        return Length(seconds=0.0, rounds=1, limit_s=10 * LIMIT_S, tokens=AT_TOKENS)
    if contestant in WITHOUT_NETWORK:
        return Length(seconds=20.0, rounds=0, limit_s=LIMIT_S)
    if contestant in (SYNCHRONOUS, PUBLISHED, OURS):
        return Length(seconds=5.0, rounds=2, limit_s=LIMIT_S)
    if line.mbit <= 1:  # there a join takes minutes
        return Length(seconds=5.0, rounds=1, limit_s=LIMIT_S, first=True)
    return Length(seconds=25.0, rounds=1, limit_s=LIMIT_S)


# ---- tables --------------------------------------------------------------------------------------
class Results:
    """All that was measured, with as many peers."""

    def __init__(self, results: Sequence[Result], peers: int):
        self._all = [each for each in results if each.peers == peers]

    def of(self, contestant: str, line: str | None = None) -> list[Result]:
        """The runs of a contestant that ended well, on a link; any for those without network."""
        return [each for each in self.every(contestant, line) if each.outcome == "ok"]

    def every(self, contestant: str, line: str | None) -> list[Result]:
        """Those that hung among them."""
        anywhere = line is None or contestant in WITHOUT_NETWORK
        found = [each for each in self._all if each.contestant == contestant]
        return [each for each in found if anywhere or each.line == line]

    def ratios(self, contestant: str, line: str, other: str) -> list[float]:
        """Its tokens/s over another's, by turn; where no turn has both, of the means."""
        mine, others = self.of(contestant, line), self.of(other, line)
        turns = {each.turn for each in mine} & {each.turn for each in others}
        groups = [(_in_turn(mine, turn), _in_turn(others, turn)) for turn in sorted(turns)]
        if not groups and mine and others:
            groups = [(mine, others)]
        return [_mean(some, _speed) / _mean(rest, _speed) for some, rest in groups]

    def loss_after(self, contestant: str, line: str, tokens: float) -> float | None:
        """Of the newest weights with no more tokens; of another link where this does not reach."""
        runs = self.of(contestant, line)
        reach = [each for each in runs if each.models and each.models[-1][1] >= 0.9 * tokens]
        if not reach and contestant in (PLAIN, ALL_REDUCE, OPEN_DILOCO, AVERAGER, SYNCHRONOUS):
            runs = [*self.of(contestant), *(self.of(AVERAGER) if contestant == OPEN_DILOCO else [])]
            reach = [each for each in runs if each.models and each.models[-1][1] >= 0.9 * tokens]
        losses = [_newest(each, tokens, column=1) for each in reach]
        return fmean(losses) if losses else None

    def loss_at(self, contestant: str, line: str, seconds: float) -> float | None:
        """Of the newest weights by then."""
        runs = self.of(contestant, line)
        reach = [each for each in runs if each.models and each.models[-1][0] >= 0.8 * seconds]
        if reach:
            return fmean(_newest(each, seconds, column=0) for each in reach)
        if not runs or contestant in (PUBLISHED, OURS, ALONE):
            return None
        alone = len({each.peers for each in runs}) and contestant == PLAIN
        speed = _mean(runs, _speed) / (runs[0].peers if alone else 1)
        return self.loss_after(contestant, line, speed * seconds)


def _newest(result: Result, at: float, *, column: int) -> float:
    return [each[2] for each in result.models if each[column] <= at][-1]


def _in_turn(results: Sequence[Result], turn: str) -> list[Result]:
    return [each for each in results if each.turn == turn]


def _speed(result: Result) -> float:
    assert result.tokens_per_s is not None
    return result.tokens_per_s


def _mean(results: Sequence[Result], value: Callable[[Result], float | None]) -> float:
    return fmean(found for each in results if (found := value(each)) is not None)


def spread(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Their mean, and half the distance from the least to the most; None where there is none."""
    if not values:
        return None, None
    return fmean(values), (max(values) - min(values)) / 2 if len(values) > 1 else None


def table(report: Report, results: Results, lines: Sequence[str], at: tuple[float, float]) -> None:
    """Print everything."""
    columns = [
        Column("link"), Column("contestant"), Column("runs"), Column("H"),
        Column("tokens/s", ",.0f"), Column(SPREAD, ",.0f"),
        Column("of plain", ".1%"), Column(SPREAD, ".1%"),
        Column("computing", ".1%"), Column("B/token", ",.2f"),
        Column(f"at {at[0] / 1e3:g}k tokens", ".3f"), Column(f"at {at[1]:g} s", ".3f"),
    ]  # fmt: skip
    rows: list[list[object]] = []
    for line in lines:
        for contestant in CONTESTANTS:
            every = results.every(contestant, line)
            if not every or (contestant in WITHOUT_NETWORK and line != lines[0]):
                continue
            good = results.of(contestant, line)
            failed = [each.outcome for each in every if each.outcome != "ok"]
            rows.append(
                [
                    "-" if contestant in WITHOUT_NETWORK else line,
                    contestant,
                    f"{len(good)}" + "".join(f", {text.split(':')[0]}" for text in failed),
                    _steps(good),
                    *spread([_speed(each) for each in good]),
                    *spread(results.ratios(contestant, line, PLAIN)),
                    _mean(good, lambda each: each.computing) if good else None,
                    fmean(sent)
                    if (sent := [each.bytes_per_token for each in good if each.bytes_per_token])
                    else None,
                    results.loss_after(contestant, line, at[0]),
                    results.loss_at(contestant, line, at[1]),
                ]
            )
    report.table(columns, rows)


def _steps(results: Sequence[Result]) -> str:
    found = [each.steps for each in results if each.steps]
    if not found:
        return "-"
    least, most = min(each[0] for each in found), max(each[1] for each in found)
    return f"{least}" if least == most else f"{least} to {most}"


def processors(report: Report, results: Results, lines: Sequence[str]) -> None:
    """Print what kept the cores busy while ours trained."""
    rows: list[list[object]] = []
    kinds = ("training", "averaging", "DHT", "p2pd", "bootstrap", "links", "this script")
    for contestant in (SYNCHRONOUS, PUBLISHED, OURS, ALONE):
        for line in lines:
            good = [each for each in results.of(contestant, line) if each.cores]
            if good and not (contestant == ALONE and line != lines[0]):
                means = [fmean(each.cores.get(kind, 0.0) for each in good) for kind in kinds]
                rows.append([line, contestant, *means])
    if rows:
        columns = [Column("link"), Column("cores kept busy by"), *(Column(k, ".3f") for k in kinds)]
        report.table(columns, rows, part="cores")


def claimed(
    results: Results, lines: Sequence[str], peers: int
) -> list[tuple[str, float, float | None, float | None, int, str]]:
    """Of each claim that both contestants of it ran for: what it says, the least that is expected,
    what was measured and half its spread, in how many turns, the verdict.
    """
    wanted = (
        *EXPECTED,
        *((OURS, PLAIN, line, 0.95) for line in lines),
        (ALONE, PLAIN, lines[0], 0.98),
    )
    rows: list[tuple[str, float, float | None, float | None, int, str]] = []
    for contestant, other, line, least in wanted:
        ratios = results.ratios(contestant, line, other)
        if not ratios:
            continue
        where = "" if contestant in WITHOUT_NETWORK else f", {_words(line)}"
        what = f"{contestant} over {other}{where}" + f", {peers} peers" * (peers != PEERS)
        verdict = "reached" if fmean(ratios) >= least else "MISSED"
        rows.append((what, least, *spread(ratios), len(ratios), verdict))
    return rows


def _words(line: str) -> str:
    return WORDS.get(line, f"{line} Mbit/s")


def claims(report: Report, results: Sequence[Result], lines: Sequence[str]) -> None:
    """Print what was expected beside what was measured, with any number of peers."""
    rows = [
        row
        for peers in sorted({each.peers for each in results})
        for row in claimed(Results(results, peers), lines, peers)
    ]
    report.table(
        [
            Column("claim"),
            Column("expected, at least", "g"),
            Column("measured", ",.3f"),
            Column(SPREAD, ",.3f"),
            Column("turns"),
            Column("verdict"),
        ],
        rows,
        part="claims",
    )


def plots(report: Report, results: Results, lines: Sequence[str]) -> None:
    """Tokens/s over the links' rate, and the loss over time."""
    speeds: dict[str, list[tuple[float, float]]] = {}
    losses: dict[str, list[tuple[float, float]]] = {}
    rates = sorted(
        (mbit, name) for name in lines if name not in WORDS and (mbit := LINES[name].mbit)
    )
    for contestant in CONTESTANTS:
        for mbit, name in rates:
            if good := results.of(contestant, name):
                speeds.setdefault(contestant, []).append((mbit, _mean(good, _speed)))
        middle = "10" if "10" in lines else lines[0]
        if (good := results.of(contestant, middle)) and good[-1].models:
            losses[contestant] = [(each[0], each[2]) for each in good[-1].models]
    if speeds:
        report.plot("Mbit/s", "tokens/s", speeds, log_x=True, log_y=True, part="speed")
    if losses:
        report.plot("seconds", "loss, nats a byte", losses, part="loss")


def main() -> None:
    """Measure and print."""
    made = parser(__doc__)
    shaped = [name for name in LINES if name != "none"]
    made.add_argument("--links", nargs="+", choices=list(LINES), default=[*shaped, "none"])
    made.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    made.add_argument("--peers", type=int, default=PEERS, help="2 or more")
    made.add_argument("--runs", type=int, default=2, help="of each contestant; 0: only the tables")
    made.add_argument("--seed", type=int, default=0, help="of the first of them")
    made.add_argument("--inner-steps", type=int, default=ROUND_STEPS, help="H of ours at first")
    made.add_argument("--tokens", type=float, default=AT_TOKENS, help="for the loss at tokens")
    made.add_argument("--seconds", type=float, default=AT_S, help="for the loss at a time")
    made.add_argument("--keep", type=Path, help="file of results to add to")
    report, arguments = Report.parse(made, "baselines")
    if arguments.peers < 2 or arguments.runs < 0:
        made.error("--peers must be 2 or more, --runs 0 or more")
    if reason := available():
        made.error(f"no links here: {reason}")
    torch.set_num_threads(2)
    wanted: list[tuple[str, str]] = []
    if arguments.quick:
        arguments.links, arguments.runs, arguments.inner_steps = ["100"], 1, 20
        arguments.contestants = [ALL_REDUCE, OURS]
    for line in arguments.links:
        for contestant in arguments.contestants:
            lonely = contestant in WITHOUT_NETWORK
            fits = contestant in ON_LOOPBACK if line == "none" else True
            if fits and not (lonely and line != arguments.links[0]):
                wanted.append((contestant, line))
    results = Result.read(arguments.keep) if arguments.keep else []
    for seed in range(arguments.seed, arguments.seed + arguments.runs):
        turn = time.strftime("%Y-%m-%d %H:%M:%S")
        for contestant, name in wanted:
            line = LINES[name]
            took = length(contestant, line, quick=arguments.quick)
            told = Result(
                turn=turn, contestant=contestant, line=name, peers=arguments.peers, seed=seed
            )
            result = run(told, line, took, arguments.inner_steps)
            results.append(result)
            if arguments.keep:
                with arguments.keep.open("a") as file:
                    file.write(result.text() + "\n")
            speed = result.tokens_per_s
            told = result.outcome if speed is None else f"{speed:,.0f} tokens/s"
            report.say(f"{name:>6} {contestant}: {told}")
    measured = {each.line for each in results}
    lines = [name for name in LINES if name in measured and name != "none"]
    found = Results(results, arguments.peers)
    if lines:
        table(report, found, lines, (arguments.tokens, arguments.seconds))
        processors(report, found, lines)
        plots(report, found, lines)
        if not arguments.quick:
            claims(report, results, lines)
    report.close()
    if arguments.quick and any(each.outcome != "ok" for each in results):
        raise SystemExit(1)


if __name__ == "__main__":
    main()

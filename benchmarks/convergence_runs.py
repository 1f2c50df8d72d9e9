"""Runs the trials of benchmarks/convergence.py in bunches, on one process or several, and tunes."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from types import TracebackType

from benchmarks.convergence_rules import candidates, rules, setting
from benchmarks.pool import pool
from benchmarks.report import Column, Report
from benchmarks.simulated_swarm import Outcome, Rule, Trial, World, run_trials

BUNCH = 6  # trials side by side: more save little more time, and their weights leave the cache
REPLICAS = 24  # the same, of trials with other numbers of workers
LIMIT_S = 3600.0  # for one bunch
TUNING_SEEDS = (7, 8, 9)  # the first for all settings, the others for the best
FINALISTS = 3


class Runner:
    """Runs trials; use it as a context. Results do not depend on the number of processes."""

    def __init__(self, processes: int, points: int):
        """points: evaluations of each trial, evenly over its rounds."""
        self._points = points
        self._pool = pool(processes) if processes > 1 else None

    def __enter__(self) -> Runner:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def compare(
        self, world: World, rows: Mapping[str, Rule], seeds: Sequence[int]
    ) -> dict[str, list[Outcome]]:
        """The outcomes of every rule, one a seed."""
        return dict(zip(rows, self.run(world, list(rows.values()), seeds), strict=True))

    def run(self, world: World, rules: Sequence[Rule], seeds: Sequence[int]) -> list[list[Outcome]]:
        """The outcomes of every rule, one a seed, in the order of both."""
        trials = [Trial(rule=rule, seed=seed) for rule in rules for seed in seeds]
        done = self._run([(world, bunch) for bunch in _bunches(trials)])
        outcomes = iter([outcome for bunch in done for outcome in bunch])
        return [[next(outcomes) for _ in seeds] for _ in rules]

    def run_worlds(
        self, rows: Mapping[str, tuple[World, Rule]], seeds: Sequence[int]
    ) -> dict[str, list[Outcome]]:
        """The outcomes of every row, one a seed: neighbours of one world side by side, and no more
        replicas in a bunch than a processor's cache holds.
        """
        bunches: list[tuple[World, list[Trial]]] = []
        for world, alike in groupby(rows.values(), key=lambda row: row[0]):
            trials = [Trial(rule=rule, seed=seed) for _, rule in alike for seed in seeds]
            size = max(1, REPLICAS // world.workers)
            bunches += [(world, bunch) for bunch in _bunches(trials, size)]
        outcomes = iter([outcome for bunch in self._run(bunches) for outcome in bunch])
        return {name: [next(outcomes) for _ in seeds] for name in rows}

    def _run(self, bunches: Sequence[tuple[World, list[Trial]]]) -> list[list[Outcome]]:
        if self._pool is None:
            return [run_trials(world, bunch, self._points) for world, bunch in bunches]
        futures = [
            self._pool.submit(run_trials, world, bunch, self._points) for world, bunch in bunches
        ]
        return [future.result(LIMIT_S) for future in futures]


def tune(runner: Runner, world: World, report: Report) -> dict[str, Rule]:
    """Every rule with the best of its settings; the best three of each are printed."""
    first, others = TUNING_SEEDS[0], TUNING_SEEDS[1:]
    report.say(f"tuned: all settings on seed {first}, the best {FINALISTS} on {others} too")
    rows: list[tuple[str | int, ...]] = []
    best: dict[str, Rule] = {}
    for name, rule in rules(world).items():
        tried = candidates(rule)
        found = dict(enumerate(runner.run(world, tried, [first])))
        leading = sorted(found, key=lambda index: found[index][0].loss)[:FINALISTS]
        again = runner.run(world, [tried[index] for index in leading], others)
        losses = {
            index: mean([outcome.loss for outcome in (*found[index], *more)])
            for index, more in zip(leading, again, strict=True)
        }
        ranked = sorted(losses, key=lambda index: losses[index])
        best[name] = tried[ranked[0]]
        shown = [f"{setting(tried[index])}: {losses[index]:.4f}" for index in ranked]
        rows.append((name, len(tried), *shown))
    columns = [Column(name) for name in ("rule", "settings", *["setting: mean loss"] * FINALISTS)]
    report.table(columns, rows, part="tuned")
    return best


def mean(numbers: Sequence[float]) -> float:
    """The mean over the seeds."""
    return statistics.fmean(numbers)


def halfwidth(numbers: Sequence[float]) -> float:
    """Half the distance from the smallest to the largest."""
    return (max(numbers) - min(numbers)) / 2


def gaps(outcomes: Sequence[Outcome], references: Sequence[Outcome]) -> list[float]:
    """By how much the loss of each seed is above the reference's of the same seed, as a share."""
    pairs = zip(outcomes, references, strict=True)
    return [outcome.loss / reference.loss - 1 for outcome, reference in pairs]


def _bunches(trials: Iterable[Trial], size: int = BUNCH) -> Iterator[list[Trial]]:
    """Cut trials, in their order, into bunches that make inner steps in one way."""
    for _, alike in groupby(trials, key=lambda trial: trial.rule.inner):
        same = list(alike)
        for start in range(0, len(same), size):
            yield same[start : start + size]

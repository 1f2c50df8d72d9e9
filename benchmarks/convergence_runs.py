"""Runs the trials of benchmarks/convergence.py in bunches, on one process or several."""

from __future__ import annotations

import multiprocessing
import statistics
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import groupby
from types import TracebackType

import torch

from benchmarks.simulated_swarm import Outcome, Rule, Trial, World, run_trials

BUNCH = 6  # trials side by side: more save little more time, and their weights leave the cache
LIMIT_S = 3600.0  # for one bunch


class Runner:
    """Runs trials; use it as a context. Results do not depend on the number of processes."""

    def __init__(self, processes: int, points: int):
        """points: evaluations of each trial, evenly over its rounds."""
        self._points = points
        self._pool: ProcessPoolExecutor | None = None
        if processes > 1:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(
                processes, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)
            )

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

    def run(self, world: World, rules: Sequence[Rule], seeds: Sequence[int]) -> list[list[Outcome]]:
        """The outcomes of every rule, one a seed, in the order of both."""
        bunches = list(_bunches([Trial(rule=rule, seed=seed) for rule in rules for seed in seeds]))
        if self._pool is None:
            done = [run_trials(world, bunch, self._points) for bunch in bunches]
        else:
            futures = [
                self._pool.submit(run_trials, world, bunch, self._points) for bunch in bunches
            ]
            done = [future.result(LIMIT_S) for future in futures]
        outcomes = iter([outcome for bunch in done for outcome in bunch])
        return [[next(outcomes) for _ in seeds] for _ in rules]


def _bunches(trials: Iterable[Trial]) -> Iterator[list[Trial]]:
    """Cut trials, in their order, into bunches that make inner steps in one way."""
    for _, alike in groupby(trials, key=lambda trial: trial.rule.inner):
        same = list(alike)
        for start in range(0, len(same), BUNCH):
            yield same[start : start + BUNCH]


def mean(numbers: Sequence[float]) -> float:
    """The mean of the seeds."""
    return statistics.fmean(numbers)


def spread(numbers: Sequence[float]) -> float:
    """The largest minus the smallest."""
    return max(numbers) - min(numbers)


def gaps(outcomes: Sequence[Outcome], references: Sequence[Outcome]) -> list[float]:
    """By how much the loss of each seed is above the reference's of the same seed, as a share."""
    pairs = zip(outcomes, references, strict=True)
    return [outcome.loss / reference.loss - 1 for outcome, reference in pairs]

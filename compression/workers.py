"""Independent pieces of arithmetic on several threads, in each of which torch has one.

Why: a round's codec takes up to a minute of one core for a billion values. torch's own threads
would change the order of a sum with their number; a piece is computed as by one thread alone.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cached_property
from typing import Final, TypeVar

import torch

PIECE: Final = 1 << 20  # values, whole blocks of the group codec: tasks cost little beside it

P = TypeVar("P")
T = TypeVar("T")


class Workers:
    """So many threads, started when they are first needed: a fork before that loses none."""

    def __init__(self, threads: int = 1) -> None:
        self.threads = threads

    def map(self, work: Callable[[P], T], pieces: Sequence[P]) -> list[T]:
        """The results of `work`, in the order of the pieces; raises the first one's error.

        All have ended then. Not to be called from `work`.
        """
        if self.threads == 1:
            return [work(piece) for piece in pieces]
        futures = [self._pool.submit(work, piece) for piece in pieces]
        wait(futures)
        return [future.result() for future in futures]

    def over(self, numel: int, work: Callable[[slice], T]) -> list[T]:
        """The results of `work` on slices of [0, numel): on the whole with one thread."""
        piece = PIECE if self.threads > 1 else max(1, numel)
        starts = range(0, max(1, numel), piece)
        return self.map(work, [slice(start, min(start + piece, numel)) for start in starts])

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self.threads, "arithmetic", torch.set_num_threads, (1,))


ALONE: Final = Workers()

"""Independent pieces of arithmetic on several threads, in each of which torch has one.

Why: a round's codec and sums take a minute of one core where a stage has a billion values. torch's
own threads would change the order of a reduction with their number; here every piece is computed
as one thread alone would do it, and no piece knows of another one. So neither the number of threads
nor the order in which they come to an end changes a bit.
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
    """Some threads, started when they are first needed: a fork before that loses none."""

    def __init__(self, threads: int = 1) -> None:
        """threads: 1 or more (ValueError); with one the caller's own does the work."""
        if threads < 1:
            raise ValueError(f"{threads} threads: choose 1 or more")
        self.threads = threads

    def map(self, work: Callable[[P], T], pieces: Sequence[P]) -> list[T]:
        """The results of `work`, in the order of the pieces, which are begun in this order.

        Raises the first piece's error that has one; alone after it, with several threads once all
        pieces have ended. Not to be called from `work`, which would wait for its own thread.
        """
        if self.threads == 1 or len(pieces) < 2:
            return [work(piece) for piece in pieces]
        futures = [self._pool.submit(work, piece) for piece in pieces]
        wait(futures)
        return [future.result() for future in futures]

    def over(self, numel: int, work: Callable[[slice], T]) -> list[T]:
        """The results of `work` on slices of [0, numel): on the whole with one thread."""
        piece = PIECE if self.threads > 1 else max(1, numel)
        starts = range(0, numel, piece)
        return self.map(work, [slice(start, min(start + piece, numel)) for start in starts])

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self.threads, "arithmetic", _begin)


def _begin() -> None:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)  # both are the thread's own


ALONE: Final = Workers()

"""Processes of a benchmark, which end with it however that ends."""

from __future__ import annotations

import multiprocessing
import os
import signal
from concurrent.futures import ProcessPoolExecutor

import torch

from dilocox.dht.parent_death import die_with


def pool(processes: int | None = None, *, threads: int | None = 1) -> ProcessPoolExecutor:
    """Fresh processes, one for each core if no number is given.

    threads: of torch in each; as many as it likes if None.
    """
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(
        processes, mp_context=context, initializer=_begin, initargs=(os.getpid(), threads)
    )


def _begin(parent: int, threads: int | None) -> None:
    die_with(parent, signal.SIGKILL)
    if threads is not None:
        torch.set_num_threads(threads)

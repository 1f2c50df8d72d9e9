"""How fast this machine computes a stage: a few microbatches of it, in a process of its own.

A process of its own, because it may have to be ended in the middle (the stage is large, the machine
slow, the memory short), and because nobody may fork after CUDA was touched. It is forked before
anything else and waits for its orders. Orders and answers are lines of JSON over a pipe.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import signal
import statistics
import time
from collections.abc import Generator
from multiprocessing.connection import Connection
from typing import Any

import torch

from dilocox.dht.errors import DilocoxError
from dilocox.dht.manifest import Manifest
from dilocox.peer.commands.doctor_checks import DeviceFacts, SpeedFacts
from dilocox.peer.training.inner_optimizer import InnerOptimizer
from dilocox.pipeline.partition import hidden_size
from dilocox.pipeline.stage import build_stage, chosen_device
from dilocox.pipeline.stage_worker import StageWorker

DEVICE_LIMIT_S = 15.0  # CUDA takes seconds to be loaded
MICROBATCHES = 8
MEASURED_S = 4.0
MULTIPLIED_S = 0.5
MATRIX = 1024
EFFICIENCY = 0.4  # of what multiplications alone reach, a model's steps do; on the low side
FLOPS_PER_PARAMETER = 6  # a token: forward twice, backward four times
MAX_LIFE_S = 120


class Bench:
    """The process. `closed` ends it, whatever it does."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_live, args=(theirs, self._pipe), daemon=True)
        self._process.start()
        theirs.close()

    @classmethod
    @contextlib.contextmanager
    def opened(cls) -> Generator[Bench]:
        """Start it; ended with the context. To be called before any thread is started."""
        bench = cls()
        try:
            yield bench
        finally:
            bench.close()

    def device(self, option: str, threads: int) -> DeviceFacts:
        """What `--device` and `--threads` lead to."""
        self._order({"do": "device", "option": option, "threads": threads})
        answer = self._answer(DEVICE_LIMIT_S)
        if answer is None:
            return DeviceFacts(fault="the device did not answer")
        return DeviceFacts(**answer)

    def speed(self, manifest: Manifest, stage: int, values: int, limit_s: float) -> SpeedFacts:
        """Tokens a second of a stage, as good as it can be known in this time.

        values: parameters of the stage. It is asked for after `device`, and only once.
        """
        told = manifest.to_bytes().decode()
        self._order({"do": "speed", "manifest": told, "stage": stage, "values": values})
        deadline = time.monotonic() + limit_s
        best = SpeedFacts(fault=f"this machine needs more than {limit_s:.0f} s to tell")
        while (answer := self._answer(deadline - time.monotonic())) is not None:
            best = SpeedFacts(**answer)
            if best.fault or best.measured:
                break
        return best

    def close(self) -> None:
        """End it; twice does no harm."""
        self._process.kill()
        self._process.join(5.0)
        self._pipe.close()

    def _order(self, order: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # it has ended: no answer comes either
            self._pipe.send_bytes(json.dumps(order).encode())

    def _answer(self, limit_s: float) -> dict[str, Any] | None:
        with contextlib.suppress(OSError, EOFError):
            if self._pipe.poll(max(0.0, limit_s)):
                return json.loads(self._pipe.recv_bytes())
        return None


# ---- in the process ------------------------------------------------------------------------------
def _live(pipe: Connection, theirs: Connection) -> None:
    """Do as told until the pipe ends, or for as long as any doctor lives."""
    theirs.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(MAX_LIFE_S)
    option = "auto"
    with contextlib.suppress(OSError, EOFError):
        while True:
            order = json.loads(pipe.recv_bytes())
            if order["do"] == "device":
                option = order["option"]
                answers = iter([_device(option, order["threads"])])
            else:
                answers = _speeds(option, order)
            for answer in answers:
                pipe.send_bytes(json.dumps(answer).encode())


def _device(option: str, threads: int) -> dict[str, Any]:
    if threads:
        torch.set_num_threads(threads)
    try:
        device = chosen_device(option)
        if device.type == "cuda":
            name, free = torch.cuda.get_device_name(device), torch.cuda.mem_get_info(device)[0]
            return {"kind": "cuda", "name": name, "free_bytes": free}
    except (DilocoxError, RuntimeError) as error:
        reason = str(error).splitlines()[0].removeprefix(f"--device {option}: ")
        return {"fault": reason.partition("; choose")[0]}
    return {"kind": "cpu", "threads": torch.get_num_threads()}


def _speeds(option: str, order: dict[str, Any]) -> Generator[dict[str, Any]]:
    """An estimate, then what was measured."""
    try:
        device = chosen_device(option)
        manifest = Manifest.from_bytes(order["manifest"].encode())
        per_token = FLOPS_PER_PARAMETER * max(1, order["values"])
        flops = _multiplied(device, manifest.inner.precision) * EFFICIENCY
        yield {"tokens_per_s": flops / per_token, "measured": False}
        yield {"tokens_per_s": _measured(manifest, order["stage"], device)}
    except (DilocoxError, RuntimeError, MemoryError, ValueError) as error:
        yield {"fault": (str(error) or type(error).__name__).splitlines()[0]}


def _multiplied(device: torch.device, precision: str) -> float:
    """Floating point operations a second of plain matrix products."""
    gpu = device.type == "cuda"
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision if gpu else "")
    a = torch.rand(MATRIX, MATRIX, device=device, dtype=dtype or torch.float32)
    _ = a @ a  # libraries are loaded
    _wait_for(device)
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < MULTIPLIED_S:
        for _ in range(1 if not gpu else 20):
            _ = a @ a
            count += 1
        _wait_for(device)
    return 2 * MATRIX**3 * count / (time.perf_counter() - began)


def _measured(manifest: Manifest, stage: int, device: torch.device) -> float:
    """Tokens a second of the stage: microbatches, and the optimizer's step that ends them."""
    batch, last = manifest.batch, stage == manifest.stages - 1
    module = build_stage(manifest.model, stage, manifest.stages, manifest.seed, device)
    worker = StageWorker(
        module,
        InnerOptimizer(module.named_parameters(), manifest.inner),
        microbatches=1,
        stage_index=stage,
        num_stages=manifest.stages,
        recompute=manifest.pipeline.recompute,
    )
    shape = (batch.microbatch_size, batch.sequence_length)
    windows = torch.randint(int(manifest.model["vocab_size"]), (shape[0], shape[1] + 1))
    hidden = torch.randn(*shape, hidden_size(manifest.model))
    passes: list[float] = []
    steps: list[float] = []
    end = time.perf_counter() + MEASURED_S
    while len(passes) < 2 or (len(passes) <= MICROBATCHES and time.perf_counter() < end):
        began = time.perf_counter()
        worker.feed(0, None if stage == 0 else hidden, windows)
        worker.run_one()
        if not last:
            worker.feed_gradient(0, hidden)
            worker.run_one()
        _wait_for(device)
        passed = time.perf_counter()
        worker.go(1.0, 0.0)
        _wait_for(device)
        passes.append(passed - began)
        steps.append(time.perf_counter() - passed)
    # the first ones load libraries and make the moments
    step_s = statistics.median(steps[1:]) + batch.microbatches * statistics.median(passes[1:])
    return batch.tokens_per_step / step_s


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

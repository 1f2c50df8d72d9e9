"""How fast this machine computes a stage: a few microbatches of it. Apart from doctor.py: this
imports torch, which that does only once it is known that the libraries can be loaded.

The questions are answered in daemon threads with a deadline: where the stage is large or the
machine slow, the doctor goes on without an answer, and the thread ends with the command. Both may
load CUDA, so nothing may be forked behind them.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable

import torch

from dilocox.dht.errors import DilocoxError, reason_of
from dilocox.peer.commands.doctor_checks import DeviceFacts, SpeedFacts
from dilocox.peer.process.prepare import StageNeeds
from dilocox.peer.training.inner_optimizer import InnerOptimizer
from dilocox.pipeline.partition import hidden_size
from dilocox.pipeline.stage import NVIDIA_DRIVER, build_stage, chosen_device
from dilocox.pipeline.stage_worker import StageWorker

DEVICE_LIMIT_S = 15.0  # CUDA takes seconds to be loaded
MICROBATCHES = 8
MEASURED_S = 4.0
MULTIPLIED_S = 0.5
MATRIX = 1024
EFFICIENCY = 0.4  # of what multiplications alone reach, a model's steps do; on the low side
FLOPS_PER_PARAMETER = 6  # a token: forward twice, backward four times


def look_at_device(option: str, threads: int) -> DeviceFacts:
    """What `--device` and `--threads` lead to."""
    found = [DeviceFacts(fault="the device did not answer")]
    _within(DEVICE_LIMIT_S, lambda: found.append(_device(option, threads)))
    return found[-1]


def measure_speed(option: str, needs: StageNeeds, *, limit_s: float) -> SpeedFacts:
    """Tokens a second of a stage, as good as it can be known in this time. option: the device's."""
    # an estimate takes its place, then what was measured
    found = [SpeedFacts(fault=f"this machine needs more than {limit_s:.0f} s to tell")]

    def measure() -> None:
        try:
            device = chosen_device(option)
            per_token = FLOPS_PER_PARAMETER * max(1, needs.values)
            flops = _multiplied(device, needs.manifest.inner.precision) * EFFICIENCY
            found.append(SpeedFacts(tokens_per_s=flops / per_token, measured=False))
            found.append(SpeedFacts(tokens_per_s=measured_speed(needs, device)))
        except (DilocoxError, RuntimeError, MemoryError, ValueError) as error:
            reason = reason_of(error)
            found.append(SpeedFacts(fault=reason))

    _within(limit_s, measure)
    return found[-1]


def _within(limit_s: float, work: Callable[[], None]) -> None:
    """Work in a daemon thread, and wait for its end or for the limit."""
    thread = threading.Thread(target=work, name="doctor-bench", daemon=True)
    thread.start()
    thread.join(limit_s)


def _device(option: str, threads: int) -> DeviceFacts:
    if threads:
        torch.set_num_threads(threads)
    try:
        device = chosen_device(option)
        if device.type == "cuda":
            name = torch.cuda.get_device_name(device)
            free, total = torch.cuda.mem_get_info(device)
            return DeviceFacts(kind="cuda", name=name, free_bytes=free, total_bytes=total)
    except (DilocoxError, RuntimeError) as error:
        reason = str(error).splitlines()[0].removeprefix(f"--device {option}: ")
        return DeviceFacts(fault=reason.partition("; choose")[0])
    return DeviceFacts(kind="cpu", threads=torch.get_num_threads(), driver=NVIDIA_DRIVER.exists())


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


def measured_speed(needs: StageNeeds, device: torch.device) -> float:
    """Tokens a second of the stage: microbatches, and the optimizer's step that ends them."""
    manifest, stage = needs.manifest, needs.stage
    batch, last = manifest.batch, stage == manifest.stages - 1
    module = build_stage(manifest.model, stage, manifest.stages, manifest.seed, device)
    worker = StageWorker(
        module,
        InnerOptimizer(module.named_parameters(), manifest.inner),
        microbatches=1,
        recompute=manifest.pipeline.recompute or needs.recompute,
        document_end=manifest.document_end,
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

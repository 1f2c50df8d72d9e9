"""What two papers report of runs on slow links, beside what the plan says of them.

DiLoCoX (arXiv 2506.21263): its abstract has 107 billion parameters, 1 Gbit/s and 357 times the
speed of AllReduce; the tokens/s, the 20 nodes of 8 A800 each and the run of OPT-1.3B on 2 of them
are of its experiments as we read them, and were not to be had when this was written. It does not
say how many tokens a step has. So these are derived from what AllReduce is reported to reach, and
the rate of the GPUs from what DiLoCoX reaches; then the plan must find an exchange that hides.

OpenDiLoCo (arXiv 2407.07852): its abstract has 90 to 95 % of the time computing, over two
continents and three countries; links of 127 to 935 Mbit/s, workers of 8 H100 each and 2,048
windows a step (512 of 150 M) are of its experiments as we read them. The rate of an H100 is our
assumption.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from dilocox.dht.manifest import Manifest
from dilocox.peer.process.run_plan import Machines, Method, RunPlan

H100_FLOPS = 400e12  # of 989e12 in bf16, as good training code reaches them
NODE_FLOPS = 8 * 312e12  # 8 A800, all that their vendor says of bf16
WINDOW = 2048
LLAMA = {"model_type": "llama", "bos_token_id": 1, "eos_token_id": 2}
# as Qwen1.5-110B is built, with layers for 107 billion parameters
QWEN_107B = LLAMA | {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 49152,
    "num_hidden_layers": 77,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 2048,
}
OPT = {"model_type": "opt", "hidden_size": 2048, "ffn_dim": 8192, "num_hidden_layers": 24}
OPT |= {"num_attention_heads": 32, "vocab_size": 50272, "max_position_embeddings": 2048}
OPT |= {"word_embed_proj_dim": 2048, "bos_token_id": 2, "eos_token_id": 2}


def paper_rows() -> Iterator[tuple[str, str, str, str, str]]:
    """Run, what is compared, the paper's figure, the plan's, and what it was given."""
    yield from _dilocox("OPT-1.3B", OPT, nodes=2, stages=1, allreduce=745.0, dilocox=23_880.0)
    yield from _dilocox("107 B", QWEN_107B, nodes=20, stages=10, allreduce=10.4, dilocox=3_728.0)
    for name, preset, workers, windows, steps in (
        ("150 M", "llama-150m", 8, 64, 500),
        ("1.1 B", "llama-1b", 4, 512, 125),
    ):
        yield from _opendiloco(name, preset, workers, windows, steps)


def _dilocox(
    name: str, model: dict[str, Any], *, nodes: int, stages: int, allreduce: float, dilocox: float
) -> Iterator[tuple[str, str, str, str, str]]:
    replicas = nodes // stages
    # without computing, so that it is the ring alone; of one stage, as if a node held all of it
    ring_s = _way(_plan(_manifest(name, model, 1, 1), nodes, flops=1e21), "AllReduce").round_s
    tokens = allreduce * ring_s
    windows = max(1, round(tokens / replicas / WINDOW))
    manifest = _manifest(name, model, stages, windows)
    found = _reaching(manifest, nodes, dilocox)
    assert found.machines.flops is not None
    ours = _way(found, "DiLoCoX")
    ring = (
        f"16 bits in a ring of {nodes} nodes: {ring_s:,.0f} s; so a step has {tokens:,.0f} tokens"
    )
    yield name, "AllReduce, tokens/s", f"{allreduce:,}", "derived", ring
    if stages > 1:
        cut_s = _way(_plan(manifest, nodes, flops=1e21), "AllReduce").round_s
        rate = replicas * windows * WINDOW / cut_s
        given = f"the same of {replicas} replicas of {stages} stages, with activations"
        yield name, "AllReduce, tokens/s", f"{allreduce:,}", f"{rate:,.1f}", given
    given = f"{replicas} replicas of {stages}, {windows} windows each, H = 125, 10 ms, "
    given += f"{found.machines.flops / 8e12:.3g} TFLOPS a GPU; bottleneck: {found.limit}"
    yield name, "DiLoCoX, tokens/s", f"{dilocox:,.0f}", f"{ours.tokens_per_s:,.0f}", given
    times = ours.tokens_per_s / allreduce
    yield name, "times AllReduce", f"{dilocox / allreduce:,.0f}", f"{times:,.0f}", "as above"
    hidden = f"{found.exchange.seconds:,.0f} of {ours.round_s:,.0f} s"
    yield name, "exchange, of a round", "hidden", hidden, "rank 64, 4 bits, a core for the codec"
    synchronous = _way(found, "OpenDiLoCo")
    yield name, "OpenDiLoCo, tokens/s", "-", f"{synchronous.tokens_per_s:,.0f}", "fp16, as above"


def _opendiloco(
    name: str, preset: str, workers: int, windows: int, steps: int
) -> Iterator[tuple[str, str, str, str, str]]:
    described = {"name": "paper", "model": preset, "end_tokens": 10**12}
    manifest = Manifest.from_dict(described)
    batch = replace(manifest.batch, sequence_length=1024, microbatch_size=8)
    batch = replace(batch, microbatches=windows // batch.microbatch_size)
    rounds = replace(manifest.rounds, inner_steps=steps, max_inner_steps=4 * steps)
    manifest = replace(manifest, batch=batch, rounds=rounds)
    for mbit in (127, 500, 935):
        found = _plan(manifest, workers, flops=8 * H100_FLOPS, mbit=mbit, rtt_s=0.15)
        theirs, ours = _way(found, "OpenDiLoCo"), found.ours
        given = f"{workers} workers of 8 H100, H = {steps}, {windows} windows each, {mbit} Mbit/s"
        # nine tenths computing: a step is nine times its part of an all-reduce
        step_s = 9 * (theirs.round_s / steps - found.step.total_s)
        slower = H100_FLOPS * found.step.total_s / step_s
        given += f"; 90 % at {slower / 1e12:.0f} TFLOPS a GPU"
        yield name, "OpenDiLoCo computing", "90 to 95 %", f"{theirs.computing:.0%}", given
        yield name, "ours computing", "-", f"{ours.computing:.1%}", "the same, rank 64 and 4 bits"


def _manifest(name: str, model: dict[str, Any], stages: int, microbatches: int) -> Manifest:
    described = {
        "name": name.replace(" ", "-"),
        "model": model,
        "stages": stages,
        "end_tokens": 10**12,
        "batch": {"sequence_length": WINDOW, "microbatch_size": 1, "microbatches": microbatches},
        "rounds": {"inner_steps": 125},
        "codec": {"scheme": "low_rank", "bits": 4, "rank": 64},
    }
    return Manifest.from_dict(described)


def _reaching(manifest: Manifest, nodes: int, tokens_per_s: float) -> RunPlan:
    """With the GPUs with which DiLoCoX reaches this speed, or the fastest where none do."""
    flops = 1e14
    found = _plan(manifest, nodes, flops=flops)
    for _ in range(5):
        flops = min(flops * tokens_per_s / _way(found, "DiLoCoX").tokens_per_s, NODE_FLOPS)
        found = _plan(manifest, nodes, flops=flops)
    return found


def _plan(
    manifest: Manifest, peers: int, *, flops: float, mbit: float = 1000.0, rtt_s: float = 0.01
) -> RunPlan:
    rate = mbit * 1e6 / 8
    machines = Machines(peers=peers, up_bytes_s=rate, down_bytes_s=rate, rtt_s=rtt_s, flops=flops)
    return RunPlan(manifest, machines, memory=False)


def _way(found: RunPlan, name: str) -> Method:
    return next(method for method in found.methods if method.name == name)

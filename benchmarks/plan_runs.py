"""Small swarms on shaped links whose figures a plan is to foretell (plan.py prints both).

Peers are real (`dilocox peer`), each behind a link of its own (tests/swarm/links.py: Linux, root).
Their forwards and backwards take a time that is told, mostly asleep (paced_passes.py): so more
peers than cores do not slow each other, and what a peer computes is known beforehand. It is
measured beforehand by the doctor's own bench, in a process that is paced likewise.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.paced_passes import logged_steps, pace, paced_program
from dilocox.compression.stage_codec import StageCodec
from dilocox.dht.manifest import Manifest
from tests.swarm.exchange_costs import DEADLINES, WIDE_MODEL, Payload
from tests.swarm.harness import ProcessSwarm, memory_folder
from tests.swarm.links import Links
from tests.swarm.small_run import fixed_steps, run_manifest

ROOT = Path(__file__).resolve().parents[1]
START_LIMIT_S = 120.0
DENSE4: dict[str, Any] = {"scheme": "dense", "bits": 4}
DENSE2: dict[str, Any] = {"scheme": "dense", "bits": 2}
LOW_RANK: dict[str, Any] = {"scheme": "low_rank", "rank": 16, "adaptive": False}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One swarm: so many replicas of so many stages, links of Mbit/s and ms one way.

    pass_s: a forward and a backward of a microbatch in a stage. limit_s: of an exchange.
    """

    name: str
    mbit: float
    delay_ms: float
    replicas: int = 2
    stages: int = 1
    codec: dict[str, Any] = field(default_factory=lambda: DENSE4)
    inner_steps: int = 40
    pass_s: float = 0.25
    microbatches: int = 1
    microbatch_size: int = 1
    sequence_length: int = 32
    links_codec: str = "auto"
    group_size: int = 32
    limit_s: float = 60.0
    merge: str = "rebase"
    rounds: int = 2

    @property
    def description(self) -> dict[str, Any]:
        """Its run.yaml; H and ranks stay as they are."""
        return run_manifest(
            model=WIDE_MODEL,
            stages=self.stages,
            codec=self.codec,
            data={"source": "stdlib", "parts": 8, "validation_share": 0.005},
            batch={
                "sequence_length": self.sequence_length,
                "microbatch_size": self.microbatch_size,
                "microbatches": self.microbatches,
            },
            pipeline={"codec": self.links_codec},
            outer={"merge": self.merge},
            rounds=fixed_steps(self.inner_steps) | {"group_size": self.group_size},
            deadlines=DEADLINES | {"exchange_s": self.limit_s},
        )

    @property
    def manifest(self) -> Manifest:
        return Manifest.from_dict(self.description)

    @property
    def computed(self) -> tuple[float, ...]:
        """What the seconds of its inner steps depend on; links and exchanges are not in it."""
        batch = self.microbatches, self.microbatch_size, self.sequence_length
        return self.stages, self.pass_s, *batch


def _pipeline(name: str, **given: Any) -> Setting:
    batch = {"microbatches": 8, "microbatch_size": 2, "sequence_length": 64}
    return Setting(name=name, stages=2, pass_s=0.2, inner_steps=10, **batch, **given)


def _four(name: str, **given: Any) -> Setting:
    return Setting(name=name, delay_ms=20, replicas=4, **given)


SETTINGS: dict[str, Setting] = {
    each.name: each
    for each in (
        Setting(name="dense 4 bit, 10 Mbit/s", mbit=10, delay_ms=20, inner_steps=80),
        Setting(
            name="low rank, 10 Mbit/s, 50 ms", mbit=10, delay_ms=50, inner_steps=80, codec=LOW_RANK
        ),
        Setting(name="dense 4 bit, 100 Mbit/s", mbit=100, delay_ms=10),
        Setting(name="2 bit, 2 Mbit/s, H = 10", mbit=2, delay_ms=20, codec=DENSE2, inner_steps=10),
        Setting(
            name="16 bit, all wait, 10 Mbit/s",
            mbit=10,
            delay_ms=20,
            codec={"scheme": "dense", "bits": 16},
            merge="none",
        ),
        _four("4 peers, 4 bit, 30 Mbit/s", mbit=30),
        _four("4 peers, 2 bit, 3 Mbit/s", mbit=3, codec=DENSE2),
        _four("4 peers, low rank, 1 Mbit/s", mbit=1, codec=LOW_RANK),
        _pipeline("2 stages, int8, 5 Mbit/s", mbit=5, delay_ms=20, replicas=1, links_codec="int8"),
        _pipeline("2 x 2 stages, int8, 10 Mbit/s", mbit=10, delay_ms=20, links_codec="int8"),
        _pipeline("2 x 2 stages, bf16, 2 Mbit/s", mbit=2, delay_ms=20, links_codec="bf16"),
    )
}


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a swarm did, over whole rounds; medians over peers and rounds, or means of shares.

    round_s, inner_steps: of a round. payload_bytes: of the busiest stage's member, as the records
    say. exchange_s: from the group to the commit.
    """

    tokens_per_s: float
    exchange_s: float
    longest_s: float
    payload_bytes: float
    computing: float
    waiting: float
    round_s: float
    inner_steps: float
    voids: int


def measured_steps(setting: Setting) -> list[tuple[float, float]]:
    """Seconds of an inner step by stage, as the doctor measures them on this machine, and the share
    of a core that it takes of that time."""
    asked = json.dumps(asdict(setting))
    command = [sys.executable, "-m", "benchmarks.plan_runs", asked]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def _measure_steps(setting: Setting) -> list[tuple[float, float]]:
    from dilocox.peer.commands import doctor_bench
    from dilocox.peer.process.prepare import StageNeeds

    pace(setting.pass_s)
    torch.set_num_threads(1)
    manifest, found = setting.manifest, list[tuple[float, float]]()
    for stage in range(manifest.stages):
        needs = StageNeeds(manifest, stage)
        measure_stage = partial(doctor_bench.measured_speed, needs, torch.device("cpu"))
        measure_stage()  # loads libraries
        began, computed = time.perf_counter(), time.process_time()
        seconds = manifest.batch.tokens_per_step / measure_stage()
        busy = (time.process_time() - computed) / (time.perf_counter() - began)
        found.append((seconds, busy))
    return found


def measure(setting: Setting) -> Measured:
    """Run the swarm, and measure the rounds that begin after all train."""
    with (
        memory_folder() as folder,
        Links(
            setting.replicas * setting.stages + 1, mbit=setting.mbit, delay_ms=setting.delay_ms
        ) as links,
    ):
        _favour(links)
        with ProcessSwarm(folder, setting.description, links=links) as swarm:
            return _watched(swarm, setting)


def _favour(links: Links) -> None:
    """Peers that sleep most of the time go first (paced_passes.py), and their lines before them: on
    a machine with fewer cores than peers a packet must not wait for whom it is to slow down."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{links.relay}/autogroup").write_text("-15")


def _steps_file(swarm: ProcessSwarm, number: int) -> Path:
    return swarm.folder / f"steps-{number}"


def _watched(swarm: ProcessSwarm, setting: Setting) -> Measured:
    for number in range(setting.replicas * setting.stages):
        program = paced_program(setting.pass_s, _steps_file(swarm, number))
        swarm.add_peer(stage=number % setting.stages, program=program)
    first = swarm.wait_until_all_train(START_LIMIT_S)
    last = first + setting.rounds

    def ended() -> bool:
        return all(peer.record(last) for peer in swarm.peers)

    usual_s = max(setting.inner_steps * setting.microbatches * setting.pass_s, 10.0)
    swarm.wait(ended, START_LIMIT_S + 4 * setting.rounds * usual_s, f"round {last} of all")
    swarm.assert_equal_chains()
    return _measured(swarm, range(first, last + 1))


def _measured(swarm: ProcessSwarm, numbers: range) -> Measured:
    heads = swarm.of_stage(0)
    offset = time.time() - time.monotonic()
    speeds, shares, lengths, steps = list[float](), list[float](), list[float](), list[float]()
    for number, peer in enumerate(swarm.peers):
        sent = {event["round"]: event for event in peer.of_kind("sent")}
        known = [number for number in numbers if number in sent]
        began, end = (sent[number]["time"] for number in (known[0], known[-1]))
        log = [s for s in logged_steps(_steps_file(swarm, number)) if s.at_s + offset <= end]
        before = [s for s in log if s.at_s + offset <= began][-1]
        shares.append((log[-1].computing_s - before.computing_s) / (end - began))
        if peer in heads:
            tokens = sum(sent[number]["tokens"] for number in known[1:])
            speeds.append(tokens / (end - began))
            lengths.append((end - began) / (numbers[-1] - numbers[0]))
            steps.append(tokens / swarm.manifest.batch.tokens_per_step / len(known[1:]))
    lines = [line for peer in swarm.peers for n in numbers[1:] if (line := peer.record(n))]
    seconds = [line["exchange_s"] for line in lines if line["exchange_s"] is not None]
    return Measured(
        tokens_per_s=sum(speeds),
        exchange_s=statistics.median(seconds),
        longest_s=max(seconds),
        payload_bytes=max(_payload(swarm, stage, numbers) for stage in _stages(swarm)),
        computing=statistics.fmean(shares),
        waiting=statistics.fmean(line["waiting_share"] for line in lines),
        round_s=statistics.median(lengths),
        inner_steps=statistics.median(steps),
        voids=sum(len(peer.of_kind("void")) for peer in swarm.peers),
    )


def _stages(swarm: ProcessSwarm) -> range:
    return range(swarm.manifest.stages)


def _payload(swarm: ProcessSwarm, stage: int, numbers: range) -> float:
    peers, codec = swarm.of_stage(stage), swarm.stage_codec(stage)
    log = swarm.round_log(peers[0])
    records = [record for number in numbers[1:] if (record := log.read(number)) is not None]
    sent = [sent_bytes(record, codec, peer.peer_id) for record in records for peer in peers]
    return statistics.median(sent)


def sent_bytes(record: Any, codec: StageCodec, peer: str) -> int:
    """What a member's averaging streams carried away from it, by a record of one row."""
    return Payload.of(record, codec, peer).up


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_measure_steps(Setting(**json.loads(sys.argv[1])))))

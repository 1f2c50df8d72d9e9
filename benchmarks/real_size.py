"""What a peer of a large stage takes: memory, writes to its disk, and time that it does not train.

    python benchmarks/real_size.py [--parameters 1e8] [--rank 16 64] [--quick] [--json] [--out DIR]

A bootstrap and two peers of one stage train on this machine, as `dilocox bootstrap` and `dilocox
peer` start them. Their inner steps are paced, so that a round lasts as long as `--round` says, and
snapshots are as many rounds apart as in rounds of five minutes. What is watched are the rounds from
the start of training to the end of the first snapshot.

memory: what all processes of a peer share in the memory (proportional set size), at most, in bytes
of a parameter, over that of a peer whose model is tiny: in inner steps, while a send is in flight,
and while a snapshot is written, by what its status and folder say at the moment. A short peak
between two looks is missed; peaks of the arithmetic alone are in benchmarks/memory.py, which also
says what stays in the host's memory beside a GPU (`host_bytes_beside_gpu`, counted tensor by tensor
in a process that trains on the CPU).

written: what the kernel wrote to the disk for a peer's processes, a parameter and round.
stopped: seconds of a round that training stood still, by the peer's own account.
codec: seconds of one core for an exchange and its record (benchmarks/codec_times.py).
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

# the swarms of the tests; a script has only its own folder on the path
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.codec_times import steps
from benchmarks.memory import in_fresh_process
from benchmarks.report import Column, Report, parser
from dilocox.peer.memory_and_disk import proportional_bytes
from tests.ports import free_ports
from tests.swarm.harness import Peer, ProcessSwarm
from tests.swarm.small_run import USUAL_DEADLINES, fixed_steps, run_manifest

SNAPSHOT_ROUNDS = 5  # between two snapshots: 25 minutes of five each
STEPS = 10  # of a round
ROUND_LIMIT_S = 600.0
LOOK_S = 0.25
STOPPED = ("merge", "send", "snapshot", "record")
HIDDEN = 64  # values of an attention head


@dataclass(frozen=True, kw_only=True)
class Found:
    """Of one peer; bytes are of a parameter."""

    parameters: int
    rank: int
    peaks: dict[str, float]
    host_bytes_beside_gpu: float
    written_bytes: float
    stopped_s: dict[str, float]
    codec_s: float

    def line(self) -> dict[str, float]:
        """What `--json` prints."""
        return {
            "parameters": self.parameters,
            "rank": self.rank,
            "peak_bytes_per_parameter": round(max(self.peaks.values()), 1),
            "host_bytes_beside_gpu": round(self.host_bytes_beside_gpu, 1),
            "written_bytes_per_parameter_round": round(self.written_bytes, 2),
            "stopped_s": round(sum(self.stopped_s.values()), 2),
            "codec_s": round(self.codec_s, 2),
        }


def model_of(parameters: float) -> dict[str, Any]:
    """A Llama over bytes with about so many."""
    layers = 4 if parameters < 5e7 else 12
    width = 64 * max(1, round(math.sqrt(parameters / layers / 12.25) / 64))
    heads = width // HIDDEN
    return {
        "model_type": "llama",
        "vocab_size": 384,
        "hidden_size": width,
        "intermediate_size": 11 * width // 4,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }


def manifest_of(model: dict[str, Any], rank: int) -> dict[str, Any]:
    """The run.yaml; deadlines are those of a run that names none."""
    return run_manifest(
        model=model,
        batch={"sequence_length": 32, "microbatch_size": 1},
        codec={"scheme": "low_rank", "bits": 4, "rank": rank, "adaptive": False},
        rounds=fixed_steps(STEPS),
        data={"held_out_windows": 1},
        deadlines=USUAL_DEADLINES,
    )


def measure(parameters: float, rank: int, round_s: float) -> Found:
    """Let two peers train, and watch the first."""
    tiny_bytes = _tiny_peer_bytes()
    model = model_of(parameters)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        swarm = ProcessSwarm(Path(folder), manifest_of(model, rank))
        with swarm:
            (port,), numel = free_ports(1), swarm.stage_codec(0).layout.numel
            options = "--threads", "1", "--snapshot-minutes", str(SNAPSHOT_ROUNDS * round_s / 60)
            watched = swarm.add_peer(*options, "--metrics-port", str(port), step_s=round_s / STEPS)
            swarm.add_peer(*options, step_s=round_s / STEPS)
            swarm.wait(lambda: watched.of_kind("training"), ROUND_LIMIT_S, "it trains")
            watch = _Watch(swarm, watched, port, round_s)
            watch.until_a_snapshot()
    layout = swarm.stage_codec(0).layout
    alone = in_fresh_process(manifest_of(model, rank), 0, recompute=False)
    codec = steps(layout, rank, 1)
    return Found(
        parameters=numel,
        rank=rank,
        peaks={name: (peak - tiny_bytes) / numel for name, peak in watch.peaks.items()},
        host_bytes_beside_gpu=alone.host_bytes_beside_gpu,
        written_bytes=watch.written_bytes / watch.rounds / numel,
        stopped_s={reason: s / watch.rounds for reason, s in watch.stopped_s.items()},
        codec_s=codec.before + codec.inside + codec.apply,
    )


def _tiny_peer_bytes() -> int:
    """What the processes of a peer take for themselves."""
    manifest = run_manifest(rounds=fixed_steps(STEPS))
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessSwarm(Path(folder), manifest) as swarm,
    ):
        peer = swarm.add_peer("--threads", "1", step_s=0.5)
        swarm.wait_for_rounds(2, ROUND_LIMIT_S)
        return _taken_bytes(peer)


def _taken_bytes(peer: Peer) -> int:
    return sum(proportional_bytes(each.pid) for each in peer.processes())


def _disk_bytes(pid: int) -> int:
    """What a process has written to the disk so far."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return 0
    return next(int(line.split()[1]) for line in lines if line.startswith("write_bytes:"))


class _Watch:
    """What a peer takes from now on.

    rounds: how many have passed, by the clock; the record of the last one may be yet to come.
    """

    def __init__(self, swarm: ProcessSwarm, peer: Peer, port: int, round_s: float):
        self._swarm, self._peer, self._port = swarm, peer, port
        self.peaks: dict[str, float] = defaultdict(float)
        self.rounds = 0.0
        self._round_s, self._began = round_s, time.monotonic()
        self._stopped_before, self._written_before = self._stopped(), self._written()

    @property
    def stopped_s(self) -> dict[str, float]:
        now, before = self._stopped_now, self._stopped_before
        return {reason: now[reason] - before[reason] for reason in STOPPED}

    @property
    def written_bytes(self) -> int:
        return self._written_now - self._written_before

    def until_a_snapshot(self) -> None:
        """Look again and again."""
        deadline = time.monotonic() + 2 * SNAPSHOT_ROUNDS * ROUND_LIMIT_S
        while not list(self._peer.state.glob("*-stage0/snapshots/0*[0-9]")):
            self._swarm.look()
            phase = self._phase()
            self.peaks[phase] = max(self.peaks[phase], _taken_bytes(self._peer))
            if time.monotonic() > deadline:
                raise TimeoutError("no snapshot came")
            time.sleep(LOOK_S)
        self.rounds = (time.monotonic() - self._began) / self._round_s
        self._stopped_now, self._written_now = self._stopped(), self._written()

    def _phase(self) -> str:
        if list(self._peer.state.glob("*-stage0/snapshots/*.partial")):
            return "snapshot"
        return "inner steps" if self._peer.in_flight is None else "exchange"

    def _stopped(self) -> dict[str, float]:
        url = f"http://127.0.0.1:{self._port}/metrics"
        with urllib.request.urlopen(url, timeout=10) as answer:
            text = answer.read().decode()
        return {
            sample.labels["reason"]: sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "dilocox_waiting_seconds_total"
        }

    def _written(self) -> int:
        return sum(_disk_bytes(each.pid) for each in self._peer.processes())


def table(report: Report, found: list[Found]) -> None:
    """A column for each rank."""
    rows = {
        f"bytes a parameter, {phase}": [each.peaks.get(phase, 0.0) for each in found]
        for phase in sorted({phase for each in found for phase in each.peaks})
    }
    rows["bytes on the host beside a GPU"] = [e.host_bytes_beside_gpu for e in found]
    rows["bytes written a round"] = [e.written_bytes for e in found]
    for reason in STOPPED:
        rows[f"s of a round without training: {reason}"] = [
            each.stopped_s[reason] for each in found
        ]
    rows["s of a core for the codec"] = [each.codec_s for each in found]
    columns = [Column("figure"), *(Column(f"rank {each.rank}", ".2f") for each in found)]
    lines = [(name, *cells) for name, cells in rows.items()]
    report.table(columns, lines, title=f"a peer of {found[0].parameters:,} parameters")


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--parameters", type=float, default=1e8)
    made.add_argument("--rank", type=int, nargs="+", default=[16, 64])
    made.add_argument("--round", type=float, default=60.0, help="seconds of a round")
    made.add_argument("--json", action="store_true", help="a line for each rank, nothing else")
    arguments = made.parse_args()
    report = None if arguments.json else Report("real-size", arguments.out)
    if arguments.quick:
        arguments.parameters, arguments.rank, arguments.round = 2e7, [16], 8.0
    found = [measure(arguments.parameters, rank, arguments.round) for rank in arguments.rank]
    if report is None:
        for each in found:
            sys.stdout.write(json.dumps(each.line()) + "\n")
        return
    table(report, found)
    report.close()


if __name__ == "__main__":
    main()

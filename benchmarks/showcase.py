"""A run worth showing: the largest model that an hour on two cores affords, on slow links, hurt.

    python benchmarks/showcase.py [--minutes 60] [--quick] [--out showcase-run]

A bootstrap, a monitor and peers as people start them, each behind a link of its own of 20 Mbit/s
and 20 ms (tests/swarm/links.py: Linux, root): two replicas of two stages train a Llama of 10.9
million parameters over bytes on the source of Python's standard library. In shares of the time
(`SCHEDULE`) a peer is killed and started again, a new one joins, and one is paused by its volunteer
and resumed; then the operator ends the run. Every peer computes in one thread.

What is left in the folder of --out:

    history.csv            a line a round, of `dilocox log --csv`
    showcase-*             plots of losses, speed, peers; tables of what happened, the promises
    samples.txt            what the model wrote when, by `dilocox generate`
    model/                 the model at the end, by `dilocox export`: a Hugging Face folder
    page.png               the monitor's page shortly before the end, where Chromium is installed
    logs/                  of all commands, and the events of each peer

At the end it prints what it promises and what it saw (showcase_figures.py); the exit code is 1
where one does not hold. All that it starts ends with it.
"""

from __future__ import annotations

import shutil
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

# the swarms of the tests; a script has only its own folder on the path
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.report import Report, parser
from benchmarks.showcase_figures import Act, Ended, Sample, figures
from dilocox.dht.errors import EnvironmentFault, InvalidInput
from dilocox.peer.commands.demo import exported_round
from dilocox.peer.commands.export import evaluate_checkpoint
from dilocox.peer.os_process import Child, StopSignal
from dilocox.peer.training.data import held_out_windows
from tests.swarm.browser import chromium, cropped, screenshot
from tests.swarm.harness import Peer, ProcessSwarm, memory_folder
from tests.swarm.links import Links, available
from tests.swarm.small_run import MODEL, fixed_steps

STAGES, REPLICAS = 2, 2
NAMES = ("ada", "ben", "cleo", "dan", "eve")  # of the volunteers; the last one comes later
MBIT, DELAY_MS = 20.0, 20.0
WATCHER = 1 + len(NAMES)  # the host behind those of the bootstrap and of the peers
PAGE_PORT = 9470
MARK = ".dilocox-showcase"  # a file in the folder of a run, which the next one may replace
PROMPT = "def "
SAMPLE_TOKENS = 160

SCHEDULE = {
    "killed": 0.20,
    "started again": 0.26,
    "joins": 0.40,
    "paused": 0.55,
    "resumed": 0.70,
    "picture": 0.97,
    "ended": 1.00,
}
SAMPLES = (0.05, 0.15, 0.35, 0.65, 0.90)  # and one at the end

STATUS_S = 2.0  # no status is older
TRAIN_LIMIT_S = 240.0
GENERATE_LIMIT_S = 240.0
COMMAND_LIMIT_S = 180.0
END_LIMIT_S = 240.0


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model, and rounds that fit the time. inner_steps: H, which stays."""

    minutes: float
    model: dict[str, Any]
    batch: dict[str, int]
    learning_rate: float
    inner_steps: int
    sections: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def manifest(self) -> dict[str, Any]:
        """The run.yaml."""
        tokens = self.batch["sequence_length"] * self.batch["microbatch_size"]
        round_tokens = REPLICAS * self.inner_steps * tokens * self.batch["microbatches"]
        return {
            "name": "showcase",
            "model": self.model,
            "stages": STAGES,
            # more than fits, with one thread a peer: the operator ends the run
            "end_tokens": round(20_000_000 * max(1.0, self.minutes / 60)),
            "about": "Two replicas of two stages on two cores, behind links of 20 Mbit/s.",
            "data": {"source": "stdlib", "held_out_windows": 32, "validation_share": 0.05},
            "batch": self.batch,
            "inner": {
                "learning_rate": self.learning_rate,
                "schedule": "constant",
                "warmup_tokens": 2 * round_tokens,
            },
            "rounds": fixed_steps(self.inner_steps),
            **self.sections,
        }


WHOLE = Size(
    minutes=60.0,
    # 10.9 million parameters over bytes
    model=MODEL
    | {
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "max_position_embeddings": 512,
    },
    batch={"sequence_length": 256, "microbatch_size": 1, "microbatches": 4},
    learning_rate=1e-3,
    inner_steps=40,
)
QUICK = Size(
    minutes=2.0,
    model=MODEL
    | {
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 512,
    },
    batch={"sequence_length": 128, "microbatch_size": 2, "microbatches": 4},
    learning_rate=3e-3,
    inner_steps=20,
    # short rounds hear of changes sooner; peers that start take the cores from those that exchange
    sections={"deadlines": {"heartbeat_s": 4.0, "matchmaking_s": 5.0}},
)


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """A `dilocox generate` that runs; round: the newest record when it was started."""

    child: Child
    at_s: float
    round: int


class Showcase:
    """One run; `play` makes it, and says what it did."""

    def __init__(self, size: Size, swarm: ProcessSwarm, links: Links, out: Path, report: Report):
        self._size, self._swarm, self._links = size, swarm, links
        self._out, self._report = out, report
        self._seconds = 60 * size.minutes
        self._began = 0.0
        self._acts: list[Act] = []
        self._samples: list[Sample] = []
        self._due = list(SAMPLES)
        self._asked: _Asked | None = None

    def play(self) -> Ended:
        """From the first peer to the exported model."""
        swarm = self._swarm
        for number in range(STAGES * REPLICAS):
            self._add(stage=number % STAGES)
        self._monitor()
        swarm.wait(self._all_replicas, TRAIN_LIMIT_S, f"{REPLICAS} replicas")
        self._began = time.monotonic()
        self._act("trains", f"{REPLICAS} replicas of {STAGES} stages train")
        sent = self._sent_bytes()
        _, killed, _, paused = swarm.peers
        died_with = self._kill(killed)
        newcomer = self._join()
        self._pause(paused)
        self._until("picture")
        self._page()
        self._until("ended")
        self._due.clear()
        self._finish_sample()
        swarm.look()
        computing = {
            peer.name: (peer.status["computing_share"], peer.status["waiting_share"])
            for replica in swarm.replicas()
            for peer in replica.members
        }
        self._end()
        sent = self._sent_bytes() - sent
        model, history = self._out / "model", self._out / "history.csv"
        self._run("log", swarm.invite, "--csv", str(history))
        self._run("export", swarm.invite, str(model))
        self._ask("end")
        self._finish_sample()
        return Ended(
            swarm=swarm,
            minutes=self._size.minutes,
            history=history,
            acts=self._acts,
            samples=self._samples,
            killed=killed,
            newcomer=newcomer,
            died_with_tokens=died_with,
            shares=computing,
            sent_bytes=sent,
            exported_round=exported_round(model),
            export_loss=self._export_loss(model),
        )

    # ---- what happens to the peers ---------------------------------------------------------------
    def _add(self, *, stage: int) -> Peer:
        """A volunteer comes."""
        name = NAMES[len(self._swarm.peers)]
        rare = str(self._size.minutes / 4)  # snapshots are what a kill does not cost
        return self._swarm.add_peer("--name", name, "--snapshot-minutes", rare, stage=stage)

    def _kill(self, peer: Peer) -> int:
        """Its processes are gone at once, and it is started again; tokens that no record had."""
        swarm = self._swarm
        self._until("killed")
        unsent = round(peer.status["unsent_tokens"] + STATUS_S * peer.status["tokens_per_s"])
        swarm.kill(peer)
        swarm.wait_until_gone(peer)
        self._act("killed", f"{_who(peer)} is killed (SIGKILL)")
        self._until("started again")
        starts = len(peer.of_kind("training"))
        swarm.restart(peer)
        self._act("started again", f"{_who(peer)} is started again")
        self._wait(lambda: len(peer.of_kind("training")) > starts, f"{peer.name} is back")
        self._wait(self._all_replicas, "all replicas train again")
        self._act("back", f"{_who(peer)} trains again")
        return unsent

    def _join(self) -> Peer:
        self._until("joins")
        newcomer = self._add(stage=STAGES - 1)
        self._act("joins", f"{_who(newcomer)} is new, and types the invite")
        self._wait(lambda: newcomer.of_kind("training"), f"{newcomer.name} has joined")
        self._act("joined", f"{_who(newcomer)} has what the others know, and is ready")
        return newcomer

    def _pause(self, peer: Peer) -> None:
        """As its volunteer does it, who needs the machine for a while."""
        self._until("paused")
        self._act("paused", f"{_who(peer)} is paused by its volunteer (dilocox pause)")
        self._run("pause", "--state", str(peer.state))
        self._wait(lambda: peer.doing == "resting", f"{peer.name} rests")
        self._wait(self._all_replicas, "a spare takes its place")
        self._act("replaced", f"{_who(peer)} rests, a spare trains in its place")
        self._until("resumed")
        starts = len(peer.of_kind("training"))
        self._run("resume", "--state", str(peer.state))
        self._act("resumed", f"{_who(peer)} is resumed")
        self._wait(lambda: len(peer.of_kind("training")) > starts, f"{peer.name} is back")
        self._act("back", f"{_who(peer)} is back")

    def _end(self) -> None:
        """The operator ends the run: peers send what they have learnt, and leave."""
        swarm = self._swarm
        for peer in swarm.peers:
            peer.expected = False
        self._run("operate", "end", "--yes", "--state", str(swarm.folder / "bootstrap"))
        self._act("ended", "the operator ends the run")
        self._wait(
            lambda: all(peer.child.returncode is not None for peer in swarm.peers),
            "all peers have left",
            END_LIMIT_S,
        )
        codes = {peer.name: peer.child.returncode for peer in swarm.peers}
        if any(codes.values()):
            raise EnvironmentFault(f"not all peers left in good order: {codes}")
        self._act("left", "all peers have left")

    def _all_replicas(self) -> bool:
        return len(self._swarm.replicas()) == REPLICAS

    # ---- commands and time -----------------------------------------------------------------------
    def _run(self, *arguments: str) -> str:
        """What a command printed that must end well; the operator's machine."""
        return self._swarm.run_command(*arguments, limit_s=COMMAND_LIMIT_S, host=0)

    def _monitor(self) -> None:
        state = self._swarm.folder / "monitor"
        arguments = ("--port", str(PAGE_PORT), "--state", str(state))
        self._watching = self._swarm.start_command(
            "monitor", self._swarm.invite, *arguments, host=WATCHER
        )

    def _page(self) -> None:
        """Draw what the monitor shows."""
        self._watching.check()
        if chromium() is None:
            self._report.say("no page.png: chromium is not installed")
            return
        url, file = f"http://127.0.0.1:{PAGE_PORT}/", self._out / "page.png"
        said = screenshot(
            url,
            file,
            width=1280,
            height=3200,
            within=self._links.command(WATCHER, []),
        )
        if said:
            raise EnvironmentFault(f"the status page complains: {said}")
        cropped(file)

    def _until(self, what: str) -> None:
        """Watch the swarm until its time has come, and ask the model now and then."""
        end = self._began + SCHEDULE[what] * self._seconds
        self._wait(lambda: time.monotonic() >= end, what, self._seconds)

    def _wait(self, condition: Any, what: str, limit_s: float = TRAIN_LIMIT_S) -> None:
        def met() -> bool:
            self._sample()
            return bool(condition())

        self._swarm.wait(met, limit_s, what)

    def _act(self, kind: str, what: str) -> None:
        at_s = time.monotonic() - self._began
        rounds = max(self._swarm.chain(), default=-1)
        self._acts.append(Act(kind=kind, at_s=at_s, round=rounds, what=what))
        self._report.say(f"{at_s / 60:5.1f} min, round {rounds:3d}: {what}")

    def _sent_bytes(self) -> int:
        """What the peers' links have sent, in IP packets."""
        return sum(self._links.counters(1 + number).sent_bytes for number in range(len(NAMES)))

    # ---- what the model writes -------------------------------------------------------------------
    def _sample(self) -> None:
        """Ask when it is time, and note the answer when it is there."""
        if self._asked is not None:
            if self._asked.child.returncode is not None:
                self._finish_sample()
        elif self._due and time.monotonic() >= self._began + self._due[0] * self._seconds:
            self._ask(f"{self._due.pop(0):.0%}")

    def _ask(self, when: str) -> None:
        tokens = ("--tokens", str(SAMPLE_TOKENS), "--temperature", "0.5", "--seed", "0")
        child = self._swarm.start_command(
            *("generate", *tokens, self._swarm.invite, PROMPT),
            log=f"generate-{when.removesuffix('%')}",
            host=WATCHER,
        )
        newest = max(self._swarm.chain(), default=-1)
        self._asked = _Asked(child=child, at_s=time.monotonic() - self._began, round=newest)

    def _finish_sample(self) -> None:
        if self._asked is None:
            return
        asked, self._asked = self._asked, None
        asked.child.wait(GENERATE_LIMIT_S)
        said = asked.child.log.read_text(errors="replace")
        if asked.child.returncode:
            raise EnvironmentFault(f"dilocox generate failed: {asked.child.last_line()}")
        # behind what it says of its way to the weights
        text = PROMPT + ("\n" + said).partition("\n" + PROMPT)[2].rstrip("\n")
        self._samples.append(Sample(at_s=asked.at_s, round=asked.round, text=text))

    def _export_loss(self, model: Path) -> float:
        """Of the exported model by plain transformers, on the run's held-out windows."""
        manifest = self._swarm.manifest
        length, count = manifest.batch.sequence_length, manifest.data.held_out_windows
        windows = held_out_windows(manifest.data, length, count)
        return evaluate_checkpoint(model, windows)


def _who(peer: Peer) -> str:
    return f"{peer.options[peer.options.index('--name') + 1]} (stage {peer.stage})"


def prepare(out: Path) -> None:
    """Make room; only an earlier run is removed."""
    if out.exists() and any(out.iterdir()):
        if not (out / MARK).exists():
            raise InvalidInput(f"{out} is not an earlier showcase's: choose another --out")
        shutil.rmtree(out)
    out.mkdir(parents=True, exist_ok=True)
    (out / MARK).touch()


def keep_logs(folder: Path, out: Path) -> None:
    """Logs, the run.yaml and the events of each peer, out of a folder that goes away."""
    logs = out / "logs"
    logs.mkdir(exist_ok=True)
    for path in (*folder.glob("*.log"), folder / "run.yaml"):
        shutil.copy(path, logs)
    for path in folder.glob("peer-*/*-stage*/events.jsonl"):
        shutil.copy(path, logs / f"{path.parents[1].name}-events.jsonl")


def main() -> None:
    """Play it, and see whether it kept its promises."""
    made = parser(__doc__)
    made.add_argument("--minutes", type=float, help="of training; 60, with --quick 2")
    made.set_defaults(out=Path("showcase-run"))
    arguments = made.parse_args()
    if reason := available():
        made.error(f"no links here: {reason}")
    size = QUICK if arguments.quick else WHOLE
    if arguments.minutes is not None:
        size = replace(size, minutes=arguments.minutes)
    try:
        prepare(arguments.out)
        sys.exit(0 if run(size, arguments.out) else 1)
    except (EnvironmentFault, InvalidInput) as error:
        sys.exit(f"error: {error}")


def run(size: Size, out: Path) -> bool:
    """One run; whether all promises held."""
    report = Report("showcase", out)
    with StopSignal(), ExitStack() as stack:
        folder = stack.enter_context(memory_folder())
        stack.callback(keep_logs, folder, out)
        links = stack.enter_context(Links(WATCHER + 1, mbit=MBIT, delay_ms=DELAY_MS))
        swarm = stack.enter_context(ProcessSwarm(folder, size.manifest, links=links))
        showcase = Showcase(size, swarm, links, out, report)
        held = figures(showcase.play(), out, report)
        swarm.close()
        report.close()
        return held
    return False


if __name__ == "__main__":
    main()

"""A made-up run in each state that its status page must be good in: told round by round, as a
monitor would see it, so that its figures agree with each other.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from dilocox.dht.manifest_revisions import back_to, in_state
from dilocox.dht.records import StageRecord
from dilocox.peer.chain.round_history import ModelSample
from tests.peer.fabricated import NOW, ToldSwarm, digest, peer_id, stage_record

ABOUT = (
    "A storyteller of 52 million parameters for the Tuesday reading group, trained on the machines "
    "of its members. All of it stays open: the text, the weights, and how they came about."
)
PROMPT = "Once upon a time, a small robot"
TEXTS = (
    " tteh  ae osn ria, hed ,tos enr i  ahtl dseo u  nrat e",
    " was a the and the the little to the was a he was the said, and and the day day he the to",
    " was in the park. He saw a big tree and he was happy. The tree was very big. He said, I want "
    "to play with you. The tree said the tree was the big and happy.",
    " lived in a house with a big garden. He liked to look at the birds. One day the birds were "
    "gone, and the robot was sad. He asked the old cat where they went.",
    " named Bolt lived at the edge of a quiet town. Every morning he swept the leaves from the "
    "path, and every evening the children came to hear what he had found under them.",
)
NAMES = ("ann", "lab-3", "", "Kim & Co", "", "nightowl", "basement-gpu", "")
TEAMS = {"ann": "Reading group", "lab-3": "Kim & Co", "Kim & Co": "Kim & Co"}
END = 1_000_000_000
SPEED = 21_400.0  # tokens a second of all replicas together
ROUND_S = 190.0
LOOK_S = 5.0

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "docs/pictures"
DRAWN = "drawn-from.sha256"  # beside them
WIDTHS = {1280: 3200, 390: 7000}  # and how high a page may be


class Story(ToldSwarm):
    """A run that grows from a third of its replicas, and what happens in it.

    waiting: replicas that have not joined yet, by head, with their members' records.
    """

    def __init__(self, *, stages: int = 3, replicas: int = 3, spares: int = 1):
        facts = {
            "name": "stories",
            "about": ABOUT,
            "licence": "apache-2.0",
            "end_tokens": END,
            "data": {"source": "roneneldan/TinyStories", "format": "hub"},
            "samples": {"prompt": PROMPT},
            "batch": {"sequence_length": 512, "microbatch_size": 8, "microbatches": 4},
        }
        super().__init__(stages=stages, replicas=replicas, spares=spares, **facts)
        self.history.parameters = 51_790_336
        self.draw = random.Random(7)
        each = SPEED / max(1, replicas)
        self.speeds = {head: each * self.draw.uniform(0.6, 1.4) for head in self.replicas}
        for number, stage in self.stages.items():
            for n, peer in enumerate(stage):
                name = NAMES[(n + 3 * number) % len(NAMES)]
                facts = {"name": name, "team": TEAMS.get(name, ""), "round": 0, "version": "0.1.0"}
                stage[peer] = replace(stage[peer], **facts)
        self.facts = {
            "ranks": (8, 16, 41),
            "next_inner_steps": 96,
            "record_bytes": 1_480_000,
            "token_seconds": int(ROUND_S * self.manifest.batch.tokens_per_step),
        }
        self.whole = replicas
        for head, speed in self.speeds.items():
            self.replicas[head] = replace(self.replicas[head], tokens_per_s=speed)
        self.waiting = [*self.replicas.items()][math.ceil(replicas / 3) :]
        self.away: dict[str, StageRecord] = {}
        for _, replica in self.waiting:
            for stage, peer in enumerate(replica.members):
                self.away[peer] = self.stages[stage].pop(peer)
        self.replicas = dict([*self.replicas.items()][: math.ceil(replicas / 3)])
        self.look()

    def round(self, number: int, **more: Any) -> None:
        """One more: some join, all train, all commit. more: what the records say."""
        while self.waiting and len(self.replicas) < self.whole * (0.34 + number / 40):
            head, replica = self.waiting.pop(0)
            for stage, peer in enumerate(replica.members):
                self.stages[stage][peer] = self.away.pop(peer)
            self.replicas[head] = replica
        here, tokens = len(self.replicas), dict[str, int]()
        for head, replica in self.replicas.items():
            gave = int(self.speeds[head] * ROUND_S * self.draw.uniform(0.93, 1.05))
            tokens |= dict.fromkeys(replica.members, gave)
        seen = self.history.stages[0].chain_tokens + sum(tokens[head] for head in self.replicas)
        seen = seen / 1e6 + 1.3
        loss = 1.28 + 4.6 * seen**-0.42
        for n, head in enumerate(self.replicas):
            told = {
                "round": number,
                "inner_step": 41,
                "tokens_per_s": self.speeds[head] * self.draw.uniform(0.94, 1.05),
                "waiting_share": 0.012,
                "train_loss": loss + 0.03 + self.draw.gauss(0, 0.02),
            }
            if n == number % here:  # one head, another one each round, validates
                validation = loss + self.draw.gauss(0, 0.006)
                told |= {"val_loss": validation, "val_round": number - 1}
            self.replicas[head] = replace(self.replicas[head], **told)
        for stage in self.stages.values():
            for peer, record in stage.items():
                share = None
                if record.state == "training":
                    share = self.draw.uniform(0.8, 0.95)
                stage[peer] = replace(record, round=number, computing_share=share)
        self.look()
        self.commit(number, tokens, ROUND_S - 2 * LOOK_S, **self.facts, **more)
        self.look()

    def rounds(self, first: int, end: int) -> None:
        """From the first one to the one before the end."""
        for number in range(first, end):
            self.round(number)

    def void(self, stage: int) -> None:
        """A round of a stage that nobody committed."""
        for peer, record in self.stages[stage].items():
            self.stages[stage][peer] = replace(record, voids=record.voids + 1)
        self.look()

    def heal(self, stage: int) -> None:
        """A peer of the newest replica goes silent, and the stage's spare takes its place."""
        head, replica = [*self.replicas.items()][-1]
        gone, peers = replica.members[stage], self.stages[stage]
        spare = next(peer for peer, record in peers.items() if record.state == "spare")
        del peers[gone]
        members = (*replica.members[:stage], spare, *replica.members[stage + 1 :])
        peers[spare] = replace(peers[spare], state="training", replica=head)
        told = {"members": members, "epoch": 2, "last_fault": f"stage {stage} silent"}
        self.replicas[head] = replace(replica, **told)
        self.look()

    def leave(self, *stages: int) -> None:
        """All peers of these stages say that they leave: no replica is whole any more."""
        for stage in stages:
            for peer, record in self.stages[stage].items():
                self.stages[stage][peer] = replace(record, state="left")
        self.replicas.clear()
        self.look()
        for stage in stages:
            self.stages[stage].clear()

    def told(self, after_s: float = 74.0) -> dict[str, Any]:
        """What the page says some time later, at noon; with what the model wrote meanwhile."""
        points = [each for each in self.history.curve.points.values() if each.tokens]
        for part, text in zip((0.0, 0.06, 0.25, 0.6, 1.0), TEXTS, strict=True):
            point = points[int((len(points) - 1) * part)]
            tokens = point.tokens or 0
            sample = ModelSample(point.round, 0, tokens, point.at or NOW, PROMPT, text)
            self.history.samples_told[point.round] = sample
        for _ in range(int(after_s // LOOK_S) - 1):
            self.look(LOOK_S)
        return self.status(self.look(LOOK_S))


def empty() -> dict[str, Any]:
    """Nobody has joined yet."""
    story = Story(replicas=0, spares=0)
    return story.status(story.look(600.0))


def training() -> dict[str, Any]:
    """Three replicas of three stages, with spares; one peer was replaced."""
    story = Story(stages=3, replicas=3, spares=2)
    story.rounds(0, 60)
    for _ in range(3):
        story.void(1)
    story.rounds(60, 104)
    story.heal(1)
    story.rounds(104, 118)
    return story.told()


def blocked() -> dict[str, Any]:
    """Six stages, of which one has nobody."""
    story = Story(stages=6, replicas=2, spares=1)
    story.rounds(0, 64)
    story.leave(4)
    return story.told(600.0)


def paused() -> dict[str, Any]:
    """By the operator; she went back once before."""
    story = Story(stages=2, replicas=2, spares=0)
    story.rounds(0, 48)
    base = [digest(stage, 31) for stage in story.stages]
    story.manifest = back_to(story.manifest, 31, base)
    story.look()
    story.rounds(32, 90)
    story.manifest = in_state(story.manifest, "paused")
    story.replicas = {
        head: replace(each, tokens_per_s=0.0) for head, each in story.replicas.items()
    }
    return story.told(300.0)


def ended() -> dict[str, Any]:
    """All tokens are trained; the peers have left."""
    story = Story(stages=3, replicas=3, spares=1)
    story.rounds(0, 120)
    story.heal(1)
    number = 120
    while story.history.stages[0].chain_tokens < END:
        story.round(number)
        number += 1
    story.told()
    story.leave(*story.stages)
    return story.told(600.0)


def large() -> dict[str, Any]:
    """64 replicas of 8 stages."""
    story = Story(stages=8, replicas=64, spares=0)
    told = stage_record(state="spare", version="0.1.0")
    story.stages[2] |= {peer_id(7000 + n): told for n in range(3)}
    story.rounds(0, 117)
    story.round(117, sits_out=[story.peer(2, 5)])
    return story.told()


def drawn_from() -> str:
    """The sha256 of all files that docs/pictures.py draws, and of that script."""
    page = sorted((ROOT / "peer/monitor/page").iterdir())
    files = [Path(__file__), ROOT / "docs/pictures.py", *page]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


STATES: dict[str, Callable[[], dict[str, Any]]] = {
    "empty": empty,
    "training": training,
    "blocked": blocked,
    "paused": paused,
    "ended": ended,
    "large": large,
}

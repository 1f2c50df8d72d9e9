"""Made-up figures of a run in each state that its status page must be good in."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

from tests.peer.fabricated import NOW, ToldSwarm, peer_id, trained

ABOUT = (
    "A storyteller of 52 million parameters for the Tuesday reading group, trained on the machines "
    "of its members. All of it stays open: the text, the weights, and how they came about."
)
PROMPT = "Once upon a time, a small robot"
TEXTS = (
    " named Bolt lived at the edge of a quiet town. Every morning he swept the leaves from the "
    "path, and every evening the children came to hear what he had found under them.",
    " lived in a house with a big garden. He liked to look at the birds. One day the birds were "
    "gone, and the robot was sad. He asked the old cat where they went.",
    " was in the park. He saw a big tree and he was happy. The tree was very big. He said, I want "
    "to play with you. The tree said the tree was the big and happy.",
    " was a the and the the little to the was a he was the said, and and the day day he the to",
    " tteh  ae osn ria, hed ,tos enr i  ahtl dseo u  nrat e",
)
NAMES = ("ann", "lab-3", "", "Kim & Co", "", "nightowl", "basement-gpu", "")
END = 1_000_000_000
SPEED = 21_400.0
ROUND_S = 190.0


def _curve(rounds: int, end_at: float, peers: int, draw: random.Random) -> list[list[Any]]:
    rows: list[list[Any]] = []
    tokens, per_round = 0, SPEED * ROUND_S
    for number in range(-1, rounds):
        at = end_at - (rounds - 1 - number) * ROUND_S
        ramp = min(1.0, 0.25 + number / 40)
        tokens += 0 if number < 0 else int(per_round * ramp * draw.uniform(0.93, 1.05))
        seen = tokens / 1e6 + 1.3
        validation = 1.28 + 4.6 * seen**-0.42 + draw.gauss(0, 0.006)
        if number < 0:
            rows.append([-1, 0, None, None, 5.95, 5.94, 5.96, None, None])
            continue
        spread = 0.03 + 0.1 / math.sqrt(number + 1)
        speed = SPEED * ramp * draw.uniform(0.9, 1.06)
        has = number % 2 == 0 or number == rounds - 1
        rows.append(
            [
                number,
                tokens,
                at,
                validation + 0.03 + draw.gauss(0, 0.02),
                validation if has else None,
                validation - spread if has else None,
                validation + spread * 1.3 if has else None,
                speed,
                max(2, round(peers * ramp)),
            ]
        )
    return rows


def _filled(
    swarm: ToldSwarm, rounds: int, *, share: float | None = None, named: bool = True
) -> dict[str, Any]:
    """The figures of a told swarm after so many rounds, with a history as bootstraps keep it."""
    draw = random.Random(7)
    status = swarm.status(swarm.look())
    curve = _curve(rounds, swarm.at - 74.0, status["totals"]["peers"], draw)
    tokens = curve[-1][1] if share is None else int(END * share)
    scale = tokens / curve[-1][1]
    for row in curve:
        row[1] = int(row[1] * scale)
    validations = [row for row in curve if row[4] is not None]
    status["name"] = "stories"
    status["curve"] = curve
    status["totals"] |= {
        "tokens": tokens,
        "end_tokens": END,
        "tokens_per_s": SPEED,
        "rounds_per_hour": 3600 / ROUND_S,
        "waiting": 0.012,
        "validation": validations[-1][4],
        "validation_round": validations[-1][0],
        "train": curve[-1][3],
        "joined": status["totals"]["peers"] + 5,
        "left": 5,
    }
    began = swarm.at - 900.0
    status["since"] = began
    status["throughput"] = [
        [began + 5 * n, SPEED * draw.uniform(0.94, 1.05), status["totals"]["peers"]]
        for n in range(180)
    ]
    for number, stage in enumerate(status["stages"]):
        stage["rounds"], stage["round"] = rounds, rounds - 1
        stage["record_bytes"] = 1_480_000 + 61_000 * number
        stage["ranks"], stage["inner_steps"] = [8, 16 + number, 41], 96
        stage["last_round_at"] = swarm.at - 74.0
        for each in stage["peers"]:
            each["round"] = rounds
            each["figures"] = {"computing": draw.uniform(0.8, 0.95)}
    names = {
        each["id"]: NAMES[n % len(NAMES)] if named else ""
        for n, each in enumerate(each for stage in status["stages"] for each in stage["peers"])
    }
    for stage in status["stages"]:
        for each in stage["peers"]:
            each["name"] = names[each["id"]]
    for replica in status["replicas"]:
        replica |= {"round": rounds, "inner_step": 41, "tokens_per_s": SPEED / 3}
    status["contributions"] = _contributions(status, names, tokens, draw)
    status["totals"]["contributors"] = len(status["contributions"])
    status["teams"] = [
        {"team": "Reading group", "peers": 4, "tokens": tokens * 1.3, "share": 0.43, "hours": 61},
        {"team": "Kim & Co", "peers": 3, "tokens": tokens * 0.8, "share": 0.27, "hours": 40},
    ]
    status["trained"] |= {
        "about": ABOUT,
        "licence": "apache-2.0",
        "parameters": 51_790_336,
        "data": ["roneneldan/TinyStories"],
    }
    status["samples"] = [
        {
            "round": int((rounds - 1) * part),
            "tokens": int(tokens * part) or 4_000_000,
            "at": swarm.at,
            "prompt": PROMPT,
            "text": text,
        }
        for part, text in zip((1.0, 0.6, 0.25, 0.06, 0.0), TEXTS, strict=True)
    ]
    status["events"] = _events(status, swarm.at)
    return status


def _contributions(
    status: dict[str, Any], names: dict[str, str], tokens: int, draw: random.Random
) -> list[dict[str, Any]]:
    present = [
        (peer["id"], stage["stage"])
        for stage in status["stages"]
        for peer in stage["peers"]
        if peer["state"] == "training"
    ]
    rows = [
        {
            "id": peer,
            "name": names[peer],
            "team": ("Reading group", "Kim & Co", "")[n % 3] if names[peer] else "",
            "tokens": int(tokens * draw.uniform(0.05, 0.5)),
            "hours": draw.uniform(3, 40),
            "stages": [stage],
            "here": True,
        }
        for n, (peer, stage) in enumerate(present)
    ]
    gone = {"name": "café", "team": "", "hours": 2.5, "stages": [0, 1], "here": False}
    rows.append({"id": peer_id(9999), "tokens": tokens // 30, **gone})
    rows = sorted(rows, key=lambda row: -int(row["tokens"]))[:50]
    total = sum(int(row["tokens"]) for row in rows)
    return [row | {"share": row["tokens"] / total} for row in rows]


def _events(status: dict[str, Any], now: float) -> list[dict[str, Any]]:
    peers = [peer["id"][-6:] for stage in status["stages"] for peer in stage["peers"]] or ["abcdef"]
    a, b = peers[-1], peers[len(peers) // 2]
    told = [
        (410, "healed", f"peer {a} took over stage 1 from {b}", 1),
        (415, "fault", f"peer {b} of stage 1 went silent", 1),
        (1900, "fault", "a round of stage 1 was void", 3),
        (4000, "milestone", "validation loss 1.871 after round 92, the best so far", 1),
        (9200, "joined", f"peer {a} joined stage 2", 1),
        (9900, "moved", f"peer {peers[0]} moved from stage 2 to stage 0", 1),
        (15400, "revision", "the operator revised the run (revision 2)", 1),
        (21000, "milestone", "10 % of the tokens are trained", 1),
        (52000, "left", f"peer {b} left stage 0", 1),
        (61000, "joined", "7 peers joined", 1),
    ]
    return [
        {"at": now - before, "kind": kind, "text": text, "count": count}
        for before, kind, text, count in told
    ]


def _in_state(status: dict[str, Any], state: str, sentence: str) -> dict[str, Any]:
    status["health"] = {"state": state, "sentence": sentence, "warns": False}
    return status


def empty() -> dict[str, Any]:
    """Nobody has joined yet."""
    swarm = ToldSwarm(stages=3, replicas=0, spares=0)
    status = swarm.status(swarm.look())
    status["name"] = "stories"
    status["totals"]["end_tokens"] = END
    status["trained"] |= {
        "about": ABOUT,
        "licence": "apache-2.0",
        "parameters": 51_790_336,
        "data": ["roneneldan/TinyStories"],
    }
    status["throughput"] = [[NOW - 600 + 5 * n, 0.0, 0] for n in range(120)]
    return status


def training() -> dict[str, Any]:
    """Three replicas of three stages, with spares."""
    return _filled(trained(stages=3, replicas=3, spares=1), 118)


def blocked() -> dict[str, Any]:
    """Six stages, of which one has nobody."""
    swarm = trained(stages=6, replicas=2, spares=1)
    swarm.stages[4].clear()
    swarm.replicas.clear()
    status = _filled(swarm, 64)
    status["throughput"] = [[row[0], 0.0, row[2]] for row in status["throughput"]]
    status["totals"] |= {"tokens_per_s": 0.0, "waiting": None}
    return status


def paused() -> dict[str, Any]:
    """By the operator; she went back once before."""
    swarm = trained(stages=2, replicas=2, spares=0)
    status = _in_state(_filled(swarm, 90), "paused", "paused")
    status["rollbacks"] = [31]
    curve = status["curve"]
    lost = curve[48][1] - curve[32][1]  # of the rounds from 32 to 47; the first row is the start
    later = [
        [row[0], row[1] - lost, row[2], *before[3:7], *row[7:]]
        for row, before in zip(curve[49:], curve[33:], strict=False)
    ]
    status["curve"] = [*curve[:33], *later]
    newest = [row for row in later if row[4] is not None][-1]
    status["totals"] |= {"validation": newest[4], "validation_round": newest[0]}
    status["totals"] |= {"tokens_per_s": 0.0}
    status["throughput"] = [[row[0], 0.0, row[2]] for row in status["throughput"]]
    text = "the operator paused the run (revision 3)"
    event = {"at": swarm.at - 300, "kind": "revision", "text": text, "count": 1}
    status["events"] = [event, *status["events"]]
    return status


def ended() -> dict[str, Any]:
    """All tokens are trained; most peers have left."""
    swarm = trained(stages=3, replicas=2, spares=1)
    status = _in_state(_filled(swarm, 260, share=1.0), "ended", "ended")
    for stage in status["stages"]:
        stage["peers"] = []
        stage["more"] = 0
    status["replicas"] = []
    status["totals"] |= {"peers": 0, "replicas": 0, "tokens_per_s": 0.0, "waiting": None}
    text = "100 % of the tokens are trained"
    event = {"at": swarm.at - 60, "kind": "milestone", "text": text, "count": 1}
    status["events"] = [event, *status["events"]]
    return status


def large() -> dict[str, Any]:
    """64 replicas of 8 stages."""
    swarm = trained(stages=8, replicas=64, spares=0)
    for stage in (2, 5):
        spare = next(iter(trained(stages=1, replicas=0, spares=1).stages[0].values()))
        swarm.stages[stage] |= {peer_id(7000 + 10 * stage + n): spare for n in range(3)}
    status = _filled(swarm, 118)
    status["stages"][2]["sits_out"] = [status["stages"][2]["peers"][5]["id"]]
    return status


STATES: dict[str, Callable[[], dict[str, Any]]] = {
    "empty": empty,
    "training": training,
    "blocked": blocked,
    "paused": paused,
    "ended": ended,
    "large": large,
}

"""OpenDiLoCo's experiments (arXiv 2407.07852, and those of DiLoCo, 2311.08105, that it repeats)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.convergence_rules import ALL_REDUCE, DENSE, FOUR_BIT, MODEL, SYNCHRONOUS
from benchmarks.papers_study import CHANCE, Rows, Study, gap, loss, sent
from benchmarks.report import Column
from benchmarks.simulated_swarm import Rule, World
from dilocox.compression.layout import FlatLayout, split
from dilocox.compression.stage_codec import Compression, StageCodec
from dilocox.dht.manifest import CodecSpec
from dilocox.peer.rounds.record import compression
from dilocox.pipeline.stage import parameter_shapes

SOURCE, DILOCO = "OpenDiLoCo", "DiLoCo"
STEPS, QUICK_STEPS = 1000, 40
LENGTHS, QUICK_LENGTHS = (10, 50, 100, 500, 1000), (10, 20)
SHORT = (2, 32)  # windows of an inner step: so many steps see as many tokens as the main table's

IDS = {name: MODEL[name] for name in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": MODEL,
    "opt": IDS
    | {
        "model_type": "opt",
        "hidden_size": 64,
        "word_embed_proj_dim": 64,
        "ffn_dim": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "dropout": 0.0,
    },
    "gpt_neox": IDS
    | {
        "model_type": "gpt_neox",
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
    },
}


def inner_steps(study: Study) -> None:
    """Rounds of 10 to 1000 inner steps, at equal tokens."""
    steps = QUICK_STEPS if study.quick else STEPS
    rows: dict[str, tuple[World, Rule]] = {}
    over: dict[str, str] = {}
    for length in QUICK_LENGTHS if study.quick else LENGTHS:
        world = replace(
            study.world,
            batch=SHORT,
            inner_steps=length,
            rounds=steps // length,
            arrival=max(1, length // 4),
        )
        rules = study.rules(world)
        if not rows:
            rows[ALL_REDUCE] = world, rules[ALL_REDUCE]
        for name in (SYNCHRONOUS, FOUR_BIT):
            rows[f"H {length}, {name}"] = world, rules[name]
        over[f"H {length}, {SYNCHRONOUS}"] = ALL_REDUCE
        over[f"H {length}, {FOUR_BIT}"] = f"H {length}, {SYNCHRONOUS}"
    found = study.compare(
        "inner-steps",
        f"{steps} inner steps of 4 workers in rounds of H; DiLoCo over AllReduce, ours over DiLoCo",
        rows,
        over,
    )
    if found is None:
        return
    study.report.plot(
        "H",
        "loss",
        {
            name: [(length, loss(found, f"H {length}, {name}")) for length in LENGTHS]
            for name in (SYNCHRONOUS, FOUR_BIT)
        }
        | {ALL_REDUCE: [(length, loss(found, ALL_REDUCE)) for length in LENGTHS]},
        log_x=True,
        part="inner-steps",
    )
    long, short = f"H 500, {SYNCHRONOUS}", f"H 10, {SYNCHRONOUS}"
    ratio = sent(found, ALL_REDUCE) / sent(found, long)
    ours = sent(found, ALL_REDUCE) / sent(found, f"H 500, {FOUR_BIT}")
    study.claim(
        DILOCO,
        "500 times less communication than data parallel (H = 500)",
        f"{ratio:.0f} times less, ours {ours:.0f} times",
        ratio >= 0.95 * 500,
    )
    apart = gap(found, long, ALL_REDUCE)
    study.claim(
        DILOCO,
        "as good as fully synchronous training (H = 500)",
        f"loss {apart:+.1%} after {STEPS} steps, with H = 10 {gap(found, short, ALL_REDUCE):+.1%} "
        "(the papers train tens of thousands)",
        apart <= CHANCE,
    )
    apart = max(
        gap(found, f"H {length}, {FOUR_BIT}", f"H {length}, {SYNCHRONOUS}")
        for length in LENGTHS[:-1]
    )
    study.claim(
        "ours",
        "overlapped and with 4 bits within 5 % of DiLoCo at every H but the last",
        f"{apart:+.1%} at most",
        apart <= 0.05,
    )


def families(study: Study) -> None:
    """Several architectures."""
    rows: dict[str, tuple[World, Rule]] = {}
    over: dict[str, str] = {}
    for family, model in FAMILIES.items():
        world = replace(study.world, model=model, rounds=study.world.rounds * 3 // 4)
        for name in (SYNCHRONOUS, FOUR_BIT):
            rows[f"{family}, {name}"] = world, study.rules(world)[name]
            over[f"{family}, {name}"] = f"{family}, {SYNCHRONOUS}"
    found = study.compare("families", "architectures; ours over DiLoCo of the family", rows, over)
    if found is not None:
        apart = {
            name: gap(found, f"{name}, {FOUR_BIT}", f"{name}, {SYNCHRONOUS}") for name in FAMILIES
        }
        study.claim(
            "ours",
            "the method does not depend on the architecture: 4 bits, overlapped, within 3 %",
            ", ".join(f"{name} {value:+.1%}" for name, value in apart.items()),
            max(apart.values()) <= 0.03,
        )


def precision(study: Study) -> None:
    """Pseudo-gradients in fp32 and fp16."""
    world, base = study.world, study.rules()[SYNCHRONOUS]
    raw = replace(base, compression=replace(DENSE, bits=32))
    rows: Rows = {
        "fp32": (world, raw),
        "fp16": (world, replace(raw, half=True)),
        "16 bit, ours": (world, base),
    }
    found = study.compare(
        "precision", "synchronous DiLoCo, how pseudo-gradients travel", rows, "fp32"
    )
    study.report.say(
        "A loss scaler acts on inner steps alone: a send is a difference of weights, which are the "
        "same to the last bit with it and without (tests/peer/training/test_inner_optimizer.py, "
        "tests/pipeline/test_stage_worker.py). Training in fp16 itself needs a GPU."
    )
    if found is not None:
        apart = gap(found, "fp16", "fp32")
        study.claim(
            SOURCE,
            "pseudo-gradients in fp16 cost nothing",
            f"{apart:+.2%}, our 16 bit {gap(found, '16 bit, ours', 'fp32'):+.2%}",
            abs(apart) <= CHANCE,
        )
        study.claim(SOURCE, "the loss scaler on inner steps only", "by unit tests", None)


def replicas(study: Study) -> None:
    """2 to 16 replicas at equal tokens of all together."""
    rows: dict[str, tuple[World, Rule]] = {}
    over: dict[str, str] = {}
    for workers in (2, 4, 8, 16):
        rounds = max(1, study.world.rounds * study.world.workers // workers)
        world = replace(study.world, workers=workers, rounds=rounds)
        for name in (SYNCHRONOUS, FOUR_BIT):
            rows[f"{workers}, {name}"] = world, study.rules(world)[name]
        over[f"{workers}, {SYNCHRONOUS}"] = f"2, {SYNCHRONOUS}"
        over[f"{workers}, {FOUR_BIT}"] = f"{workers}, {SYNCHRONOUS}"
    found = study.compare(
        "replicas",
        "replicas at equal tokens of all; DiLoCo over that of 2, ours over DiLoCo",
        rows,
        over,
    )
    if found is not None:
        apart = {n: gap(found, f"{n}, {SYNCHRONOUS}", f"2, {SYNCHRONOUS}") for n in (4, 8, 16)}
        study.claim(
            SOURCE,
            "more replicas learn less from the same tokens, in less time",
            ", ".join(f"{n} replicas {value:+.1%}" for n, value in apart.items()),
            apart[16] > apart[8] > apart[4] > 0,
        )


def uneven(study: Study) -> None:
    """Each its own files, unequal shares of the tokens, a slow worker, one absent in turn."""
    even, length = study.world, study.world.inner_steps

    def paced(*paces: int) -> World:
        rounds = round(even.rounds * even.workers * length / sum(paces))
        return replace(even, paces=paces, rounds=max(1, rounds))

    worlds = {
        "own files": even,
        "all files": replace(even, mixed=True),
        "tokens 1:2:4:4": paced(length // 4, length // 2, length, length),
        "one at 3/8 of H": paced(3, *[length] * 3),
        "one of 4 absent": replace(even, absent=True),
    }
    rows: dict[str, tuple[World, Rule]] = {}
    over: dict[str, str] = {}
    for label, world in worlds.items():
        for name in (SYNCHRONOUS, FOUR_BIT):
            rows[f"{label}, {name}"] = world, study.rules(world)[name]
            over[f"{label}, {name}"] = f"own files, {name}"
    found = study.compare(
        "uneven", "uneven workers, at equal tokens; over equal ones with own files", rows, over
    )
    if found is not None:
        for name in (SYNCHRONOUS, FOUR_BIT):
            apart = {
                label: gap(found, f"{label}, {name}", f"own files, {name}")
                for label in list(worlds)[1:]
            }
            study.claim(
                DILOCO if name == SYNCHRONOUS else "ours",
                "robust to whose data is whose, to speeds, to absence: within 2 %",
                ", ".join(f"{label} {value:+.1%}" for label, value in apart.items()),
                max(map(abs, apart.values())) <= 0.02,
            )


# ---- links ---------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Size:
    """A model of OpenDiLoCo's, and H of its runs."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_value_heads: int
    inner_steps: int

    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Of all parameters."""
        model = {
            "model_type": "llama",
            "vocab_size": 32000,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_value_heads,
            "tie_word_embeddings": False,
        }
        return parameter_shapes(model, 1, 0)


SIZES = {
    "150 M": Size(
        hidden=1024, intermediate=2688, layers=12, heads=16, key_value_heads=16, inner_steps=500
    ),
    "1.1 B": Size(
        hidden=2048, intermediate=5632, layers=22, heads=32, key_value_heads=4, inner_steps=125
    ),
}
MEMBERS = 4
STEP_TOKENS = 512 * 1024  # of a worker in an inner step, as OpenDiLoCo trained
TFLOPS = 100  # that a worker really computes
LINKS = tuple((mbit, ms) for mbit in (10, 50, 100, 500) for ms in (100, 500))  # both ways each
LEGS = 2  # of a phase: parts to the reducers, means back
BESIDE = 4  # trips more: the group, the votes
RAW_FP16 = "fp16"


def exchange_s(
    layout: FlatLayout, scheme: Compression | None, mbit: float, one_way_ms: float
) -> float:
    """Seconds of an exchange of MEMBERS, each behind such a link; scheme None: an all-reduce of
    fp16. TCP's own beginnings and headers are left out.
    """
    if scheme is None:
        payload, phases = 2.0 * layout.numel, 1
    else:
        codec = StageCodec(layout, scheme)
        found = codec.phases(codec.first_ranks)
        phases = len(found)
        parts = [(phase.codec, split(phase.numel, MEMBERS)[0]) for phase in found]
        payload = float(
            sum(MEMBERS * part_codec.encoded_bytes(part.stop) for part_codec, part in parts)
        )
    moved = 2 * (MEMBERS - 1) / MEMBERS * payload
    return moved * 8 / (mbit * 1e6) + (LEGS * phases + BESIDE) * one_way_ms / 1e3


def links(study: Study) -> None:
    """Which share of a round an exchange is, for OpenDiLoCo's models: arithmetic."""
    defaults = compression(CodecSpec())
    schemes = {RAW_FP16: None, "4 bit": replace(DENSE, bits=4), "rank 16": defaults}
    lines: list[tuple[Any, ...]] = []
    shares: dict[tuple[str, int, int], float] = {}
    values: list[str] = []
    for name, size in SIZES.items():
        layout = FlatLayout.of(size.shapes())
        values.append(f"{name}: {layout.numel / 1e6:,.0f} million values")
        round_s = size.inner_steps * 6 * layout.numel * STEP_TOKENS / (TFLOPS * 1e12)
        for mbit, ms in LINKS:
            exchange = {
                label: exchange_s(layout, scheme, mbit, ms) for label, scheme in schemes.items()
            }
            computing = round_s / (round_s + exchange[RAW_FP16])
            shares[name, mbit, ms] = computing
            lines.append(
                (
                    f"{name}, {mbit} Mbit/s, {ms} ms",
                    round_s,
                    exchange[RAW_FP16],
                    computing,
                    *(exchange[label] / round_s for label in schemes),
                )
            )
    study.report.say(
        f"links, reckoned: {MEMBERS} workers of {TFLOPS} TFLOP/s, {STEP_TOKENS:,} tokens an inner "
        f"step, H of 500 and 125 ({', '.join(values)}); computing: OpenDiLoCo's share, which waits "
        "for its fp16; then the arrival as a share of the round"
    )
    study.report.table(
        (
            Column("", str),
            Column("round s", ",.0f"),
            Column("fp16 s", ",.0f"),
            Column("computing", ".1%"),
            *(Column(f"{label}", ".1%") for label in schemes),
        ),
        lines,
        part="links",
    )
    slow, fast = shares["1.1 B", 100, 100], shares["1.1 B", 500, 100]
    study.claim(
        SOURCE,
        "90 to 95 % of the time computing at 1.1 B, H = 125, over the internet",
        f"reckoned {slow:.1%} at 100, {fast:.1%} at 500 Mbit/s, for {TFLOPS} TFLOP/s a worker",
        None,
    )


def arrival(study: Study) -> None:
    """The loss by when in the round its record arrives."""
    length = study.world.inner_steps
    names: Sequence[tuple[str, int]] = [
        ("at once", 0),
        *((f"1/{length // late} of a round", late) for late in (1, 2, 4)),
        ("a whole round", length),
    ]
    rule = study.rules()[FOUR_BIT]
    rows = {label: (replace(study.world, arrival=late), rule) for label, late in names}
    found = study.compare("arrival", "ours, 4 bit, by arrival of the record", rows, "at once")
    if found is not None:
        study.report.plot(
            "arrival, inner steps of 8",
            "loss",
            {FOUR_BIT: [(late, loss(found, label)) for label, late in names]},
            part="arrival",
        )
        apart = [gap(found, label, "at once") for label, _ in names]
        study.claim(
            "ours",
            "an exchange of half a round costs under 5 %",
            f"{apart[3]:+.1%}, of a quarter {apart[2]:+.1%}, of a whole one {apart[4]:+.1%}",
            apart[3] <= 0.05,
        )


PARTS = {
    "inner-steps": inner_steps,
    "families": families,
    "precision": precision,
    "replicas": replicas,
    "uneven": uneven,
    "links": links,
    "arrival": arrival,
}

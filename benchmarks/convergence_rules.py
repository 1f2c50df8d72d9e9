"""What benchmarks/convergence.py compares: worlds, rules, and the settings tuned for them."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from benchmarks.simulated_swarm import Rule, World
from dilocox.compression.stage_codec import Compression
from dilocox.dht.manifest import CodecSpec, InnerSpec

MODEL = {
    "model_type": "llama",
    "vocab_size": 264,  # no id that never occurs: its rows would compress too well
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
LARGER = MODEL | {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
WORLD = World(
    model=MODEL, workers=4, inner_steps=8, rounds=60, arrival=2, batch=(4, 32), held_out=128
)
SCALED = {
    "as above": WORLD,
    "rounds x 2": replace(WORLD, rounds=120),
    "H x 2": replace(WORLD, inner_steps=16, arrival=4),
    "width x 2": replace(WORLD, model=LARGER | {"num_key_value_heads": 4}),
}

ALL_REDUCE = "AllReduce"  # of gradients, each inner step
SYNCHRONOUS = "DiLoCo"
PUBLISHED = "DiLoCoX"
SIXTEEN_BIT = "ours, 16 bit"
FOUR_BIT = "ours, 4 bit"
TWO_BIT = "ours, 2 bit"
ADAPTIVE = "ours, adaptive"
DEFAULTS = "ours, defaults"
MUON = "DiLoCo, Muon"
MUON_FOUR_BIT = "ours, Muon"
MUON_TWO_BIT = "ours, Muon 2 bit"
MUON_SIXTEEN_BIT = "ours, Muon 16 bit"
MUON_ADAPTIVE = "ours, Muon adaptive"

INNER_RATE = 1.5e-3  # the best of three for synchronous DiLoCo
MUON_RATE = 1.6e-2  # the same
WARMUP = 1 / 20  # of the tokens

GRID = tuple(product((0.5, 0.7, 1.0), (0.0, 0.3, 0.5, 0.7)))  # outer learning rate and momentum
RATES = (0.5e-3, 0.7e-3, 1e-3, 1.2e-3, 1.5e-3, 1.8e-3, 2e-3, 2.5e-3, 3e-3, 4e-3, 5e-3, 7e-3)
TUNED = {
    SYNCHRONOUS: (1.0, 0.0),
    PUBLISHED: (0.5, 0.0),
    SIXTEEN_BIT: (1.0, 0.0),
    FOUR_BIT: (1.0, 0.0),
    TWO_BIT: (1.0, 0.0),
    ADAPTIVE: (1.0, 0.0),
    DEFAULTS: (1.0, 0.0),
    MUON: (0.7, 0.5),
    MUON_FOUR_BIT: (0.7, 0.5),
    MUON_TWO_BIT: (0.7, 0.5),
}
ALL_REDUCE_RATE = 2e-3  # its inner learning rate, tuned in place of an outer step

CODEC = CodecSpec()
DENSE = Compression(scheme="dense", bits=16, max_factor=1e4, rank=1, min_rank=1, max_rank=64)
# Ranks for a model 64 wide; they grow with the width. Those of DiLoCoX send about as many bytes.
# The defaults of the manifest are for matrices of a thousand rows and more: here they save less.
FIXED_RANK = 7
START_RANK, MIN_RANK, MAX_RANK = 14, 7, 14
ENERGY = 0.85
DECAY = {"dense": 0.95, "low_rank": 1.0}  # the better of these two for each scheme


def rules(world: World) -> dict[str, Rule]:
    """The rows of the table, with the settings of TUNED."""
    adamw = InnerSpec(learning_rate=INNER_RATE, warmup_tokens=int(world.tokens * WARMUP))
    muon = replace(adamw, optimizer="muon", muon_learning_rate=MUON_RATE)
    fast = replace(adamw, learning_rate=ALL_REDUCE_RATE)
    wider = world.model["hidden_size"] // 64
    four_bit, two_bit = replace(DENSE, bits=4), replace(DENSE, bits=2)
    fixed = replace(four_bit, scheme="low_rank", rank=wider * FIXED_RANK)
    adaptive = replace(
        fixed, rank=wider * START_RANK, min_rank=wider * MIN_RANK, max_rank=wider * MAX_RANK
    )
    default = replace(fixed, rank=CODEC.rank, min_rank=CODEC.min_rank, max_rank=CODEC.max_rank)
    found = {
        ALL_REDUCE: Rule(merge="gradients", compression=DENSE, inner=fast),
        SYNCHRONOUS: Rule(merge="none", compression=DENSE, inner=adamw),
        PUBLISHED: Rule(merge="reset", compression=fixed, inner=adamw),
        SIXTEEN_BIT: Rule(merge="rebase", compression=DENSE, inner=adamw),
        FOUR_BIT: Rule(merge="rebase", compression=four_bit, inner=adamw),
        TWO_BIT: Rule(merge="rebase", compression=two_bit, inner=adamw),
        ADAPTIVE: Rule(merge="rebase", compression=adaptive, energy=ENERGY, inner=adamw),
        DEFAULTS: Rule(merge="rebase", compression=default, energy=CODEC.energy, inner=adamw),
        MUON: Rule(merge="none", compression=DENSE, inner=muon),
        MUON_FOUR_BIT: Rule(merge="rebase", compression=four_bit, inner=muon),
        MUON_TWO_BIT: Rule(merge="rebase", compression=two_bit, inner=muon),
    }
    return {name: _tuned(name, rule) for name, rule in found.items()}


def muon_rules(world: World) -> dict[str, Rule]:
    """Muon under every codec, the synchronous one first; all but two of them are not in `rules`."""
    found = rules(world)
    four_bit = found[MUON_FOUR_BIT]
    adaptive = replace(
        four_bit, compression=found[ADAPTIVE].compression, energy=ENERGY, decay=DECAY["low_rank"]
    )
    return {
        MUON: found[MUON],
        MUON_SIXTEEN_BIT: replace(four_bit, compression=DENSE),
        MUON_FOUR_BIT: four_bit,
        MUON_TWO_BIT: found[MUON_TWO_BIT],
        MUON_ADAPTIVE: adaptive,
    }


def candidates(rule: Rule) -> list[Rule]:
    """The settings to choose from: as many for every rule."""
    if rule.merge == "gradients":
        return [replace(rule, inner=replace(rule.inner, learning_rate=rate)) for rate in RATES]
    return [replace(rule, learning_rate=rate, momentum=momentum) for rate, momentum in GRID]


def setting(rule: Rule) -> str:
    """What was tuned of a rule, for tables: outer learning rate / momentum, or the inner rate."""
    if rule.merge == "gradients":
        return f"{rule.inner.learning_rate:g}"
    return f"{rule.learning_rate:g}/{rule.momentum:g}"


def codec(rule: Rule, rank: float) -> str:
    """How a rule's messages are compressed, for tables; rank: mean of the last exchange's."""
    compression = rule.compression
    if rule.merge == "gradients":
        return "fp16"
    ranks = f"rank {rank:.1f}, " if compression.scheme == "low_rank" else ""
    return f"{ranks}{compression.bits} bit"


def _tuned(name: str, rule: Rule) -> Rule:
    decay = CODEC.residual_decay if name == DEFAULTS else DECAY[rule.compression.scheme]
    rule = replace(rule, decay=decay)
    if name not in TUNED:
        return rule
    learning_rate, momentum = TUNED[name]
    return replace(rule, learning_rate=learning_rate, momentum=momentum)

"""Tiny models of many families, each with what its family does differently switched on; and nodes
with real p2pd processes.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from tests.pipeline.neighbours import Node, Peer, opened_nodes, running
from tests.sweeps import sweep

_SMALL: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": None,
}
_GROUPED: dict[str, Any] = {**_SMALL, "num_key_value_heads": 2, "head_dim": 8}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**_GROUPED, "attention_bias": True},
    "qwen2": {**_GROUPED, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2},
    "qwen3": _GROUPED,
    "mistral": {**_GROUPED, "sliding_window": 4},
    "mixtral": {**_GROUPED, "num_local_experts": 4},
    "gpt_neox": {**_SMALL, "use_parallel_residual": False, "rotary_pct": 0.5},
    "gpt_oss": {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4},
    "olmo2": _GROUPED,
    "phi3": {**_GROUPED, "sliding_window": 4},
    # Scales the embedding inside the decoder's forward: a later stage must not do it again.
    "granite": {**_GROUPED, "embedding_multiplier": 3.0, "logits_scaling": 2.0},
    "gemma2": {**_GROUPED, "sliding_window": 4, "final_logit_softcapping": 3.0},
    "glm": _GROUPED,
    "cohere": {**_GROUPED, "logit_scale": 0.25},
    "starcoder2": {**_GROUPED, "residual_dropout": 0.0, "embedding_dropout": 0.0},
    # These three declare no plan. opt's embedding may be narrower than its layers.
    "gpt2": {**_SMALL, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    "opt": {**_SMALL, "word_embed_proj_dim": 24, "ffn_dim": 48, "dropout": 0.0},
    "falcon": {**_SMALL, "new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False},
    # Has a dense layer before the mixtures.
    "deepseek_v2": {
        **_SMALL,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
    },
    # Has buffers that belong to a checkpoint.
    "minimax": {**_GROUPED, "num_local_experts": 4, "block_size": 8},
}


@pytest.fixture(params=sweep(FAMILIES, {"llama", "gpt2", "opt", "gemma2", "deepseek_v2"}))
def family_config(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The configuration of one family after the other."""
    return {"model_type": request.param, **FAMILIES[request.param]}


# By the names of all families that run as one stage; each takes those that it knows.
ONE_STAGE: dict[str, Any] = {
    "vocab_size": 67,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 32),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "shared_intermediate_size"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("num_local_experts", "num_experts", "attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 64),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
    **dict.fromkeys(("head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop", "resid_dropout"), 0.0),
    **dict.fromkeys(("embed_dropout", "hidden_dropout", "attention_dropout", "dropout"), 0.0),
    **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "layerdrop"), 0.0),
    **dict.fromkeys(("activation_dropout", "router_jitter_noise", "input_jitter_noise"), 0.0),
    "attention_types": [[["global", "local"], 2]],
    "full_attn_idxs": [0, 2],  # of lfm2, whose other layers are convolutions
}


def one_stage_config(family: str) -> dict[str, Any]:
    """The configuration of a family that runs as one stage."""
    default = CONFIG_MAPPING[family]()
    known = {*default.to_dict(), *default.attribute_map}
    own = {name: value for name, value in ONE_STAGE.items() if name in known}
    native = {n: v for n, v in own.items() if default.attribute_map.get(n) not in own}
    return {"model_type": family, **native}


# Families whose routers have an auxiliary loss; of the last one only two layers of four do.
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": FAMILIES["mixtral"],
    "gpt_oss": FAMILIES["gpt_oss"],
    "minimax": FAMILIES["minimax"],
    "qwen3_moe": {**_GROUPED, "num_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {
        **_GROUPED,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "mlp_only_layers": [0, 2],
    },
}


@pytest.fixture(params=sweep(MIXTURES, {"mixtral", "qwen2_moe"}))
def mixture_config(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The configuration of one mixture of experts after the other, its loss large enough to see."""
    asked = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    return {"model_type": request.param, **MIXTURES[request.param], **asked}


@pytest.fixture
def llama_config() -> dict[str, Any]:
    """A Llama with wide embedding and head, which the split has to weigh."""
    return {"model_type": "llama", **FAMILIES["llama"], "vocab_size": 384}


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Node]]:
    """Three that know each other; ended with the module, for tests of node_process.py want none."""
    with opened_nodes(tmp_path_factory.mktemp("keys"), 3) as opened:
        yield opened


@pytest.fixture
def pair(nodes: list[Node]) -> Iterator[tuple[Peer, Peer]]:
    """The first two, their networks up."""
    upper, lower = Peer(nodes[0]), Peer(nodes[1])
    with running(upper, lower):
        yield upper, lower

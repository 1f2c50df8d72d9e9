"""Cut a Hugging Face causal language model into stages of about equal cost, from its configuration.

What: `plan_stages` says which layers each stage holds; `build_skeleton` gives the whole model on
the meta device (shapes without memory) with its parts named.
Why: the operator, every peer and the exporter must agree on the cut while none of them holds more
than a stage.
How: a configuration class that declares `base_model_pp_plan` names its embedding, layers and final
norm in order of execution, and `OWN_PLANS` does so for a few that declare none, or names only the
layers of a model that runs as one stage; what lies outside the decoder is the head. Parameters are
counted on the meta device and the layers are split so that the most expensive stage is as cheap as
possible.

Cost of a stage: a parameter of a layer, the final norm or the head counts 1, since it takes memory,
bytes to exchange and compute alike. A parameter of the embedding counts 1 / EMBEDDING_DISCOUNT: a
lookup computes nothing, but the table is stored and exchanged like the rest.
"""

import copy
import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from dilocox.dht.errors import InvalidInput

EMBEDDING_DISCOUNT = 2

# What to do where a model family is refused.
ADVICE = "choose another family, for example llama, qwen3, mistral or olmo2"

# Families in which no token sees another document where positions begin anew with each: those whose
# decoders let transformers make their masks of the positions, as a test tries one by one. Not so
# where the mask is made without them (gpt_oss, falcon, opt, bloom, mpt, biogpt, xglm), nor where a
# layer carries a state along (minimax, lfm2).
DOCUMENT_MASKS = frozenset(
    {
        *("bitnet", "codegen", "cohere", "cohere2", "deepseek_v2", "diffllama", "gemma2"),
        *("gemma3_text", "glm", "glm4", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj"),
        *("granite", "granitemoe", "granitemoe_swa", "granitemoeshared", "hunyuan_v1_dense"),
        *("llama", "mistral", "mixtral", "nanochat", "nemotron", "olmo", "olmo2", "olmo3"),
        *("olmoe", "persimmon", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
        *("smollm3", "stablelm", "starcoder2"),
    }
)

# Families that run as one stage: what stands here is their list of layers alone, and the rest of a
# plan, which would say where to cut, nobody has proven.
UNCUT = {
    **dict.fromkeys(("bloom", "codegen", "gpt_bigcode", "gpt_neo", "gptj"), ("h",)),
    **dict.fromkeys(("biogpt", "bitnet", "diffllama", "hunyuan_v1_dense", "lfm2"), ("layers",)),
    **dict.fromkeys(("granitemoe", "granitemoe_swa", "granitemoeshared", "nanochat"), ("layers",)),
    **dict.fromkeys(("nemotron", "olmoe", "persimmon", "phimoe", "stablelm", "xglm"), ("layers",)),
    "mpt": ("blocks",),
}

# Pipeline plans of families whose configuration declares none, in order of execution.
OWN_PLANS: Mapping[str, tuple[str, ...]] = {
    **UNCUT,
    "falcon": ("word_embeddings", "h", "ln_f"),
    "gpt2": ("wte", "wpe", "h", "ln_f"),
    "opt": (
        "decoder.embed_tokens",
        "decoder.embed_positions",
        "decoder.project_in",
        "decoder.layers",
        "decoder.final_layer_norm",
        "decoder.project_out",
    ),
}

# Families whose layers return a tuple that begins with the hidden states.
_TUPLES = ("falcon",)

# What a checkpoint's config.json says of its files and not of the model.
_OF_FILES = (
    "_name_or_path",
    "architectures",
    "auto_map",  # code that is never fetched: transformers has the family itself, or it is refused
    "dtype",
    "torch_dtype",
    "transformers_version",
)

# A manifest comes from the network: it describes a model, but may not name code to fetch and run,
# nor another format of the weights.
_REFUSED_FIELDS = re.compile("_?(attn|experts)_implementation.*|auto_map|quantization_config")

# What chooses experts evenly where no auxiliary loss does: no gradient moves it, and transformers
# leaves to the training code to do so.
_BALANCING_BIAS = re.compile(r"(.*\.)?(e_score_correction_bias|expert_bias)")

# What transformers raises, besides TypeError and ValueError, for values that describe no model.
_MISFITS = (StrictDataclassError, ArithmeticError, AttributeError, LookupError, RuntimeError)


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """The layers from `start` up to, not including, `stop` are stage `stage` of `num_stages`.

    num_parameters: of the stage, embedding or norm and head included. cost: what the split balances
    (see the module's docstring).
    """

    stage: int
    num_stages: int
    start: int
    stop: int
    num_parameters: int
    cost: int

    @property
    def is_first(self) -> bool:
        """Whether the stage holds the embedding."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage holds the final norm and the head."""
        return self.stage == self.num_stages - 1


@dataclass(frozen=True, kw_only=True)
class Skeleton:
    """A whole causal language model on the meta device, and the module names of its parts.

    base: the decoder, which turns `input_ids` or `inputs_embeds` into hidden states. opening: what
    its plan runs before the layers (the embedding). layers: the list of them. closing: what runs
    after them: the final norm, and all outside the decoder (the head). tuples: whether a layer
    returns its hidden states in a tuple. entangled: why the layers cannot be on different stages;
    empty if they can. tied: whether the head's weight is the embedding's. auxiliary_coefficient: of
    the loss that keeps experts evenly used; 0 where the configuration asks for none.
    """

    model: nn.Module
    base: str
    opening: tuple[str, ...]
    layers: str
    closing: tuple[str, ...]
    tuples: bool
    entangled: str
    tied: bool
    auxiliary_coefficient: float

    @property
    def head_and_embedding(self) -> tuple[str, str]:
        """The names of the two weights that many checkpoints tie."""
        model = cast(Any, self.model)
        names = {id(module): name for name, module in model.named_modules()}
        ends = model.get_output_embeddings(), model.get_input_embeddings()
        head, embedding = (f"{names.get(id(each), '')}.weight" for each in ends)
        return head, embedding


def load_config(config: Mapping[str, Any]) -> PreTrainedConfig:
    """The checked Hugging Face configuration of a manifest's `model` field; embeddings are untied
    where it says nothing of them, though many families tie by default.

    Raises InvalidInput where the mapping describes no model that can be cut.
    """
    if not isinstance(config, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidInput(
            f"model: expected a mapping of Hugging Face configuration fields, got {config!r}; "
            "write for example {model_type: llama, hidden_size: 256, ...}"
        )
    fields = copy.deepcopy(dict(config))  # transformers rewrites nested fields in place
    config_class = _config_class(fields.pop("model_type", None))
    for name in fields:
        if _REFUSED_FIELDS.fullmatch(str(name)):
            raise InvalidInput(
                f"model.{name}: {fields[name]!r} names code or a weight format, not a model; "
                "remove the field"
            )
    _refuse_misspelt(fields, config_class)
    fields.setdefault("tie_word_embeddings", False)
    try:
        return config_class(**fields)
    except (*_MISFITS, TypeError, ValueError) as error:
        raise _bad_values(config_class.model_type, error) from error


def checkpoint_config(fields: Mapping[str, Any], num_stages: int) -> tuple[dict[str, Any], bool]:
    """The `model` field of a run that goes on from a checkpoint with this config.json, and whether
    its head is tied to its embedding.

    They stay tied in one stage; in several ones each goes on from the same values by itself. Raises
    InvalidInput: see `load_config`.
    """
    model = {name: value for name, value in fields.items() if name not in _OF_FILES}
    default = getattr(_config_class(model.get("model_type"))(), "tie_word_embeddings", False)
    tied = bool(model.get("tie_word_embeddings", default))
    model["tie_word_embeddings"] = tied and num_stages == 1
    model.setdefault("vocab_size", cast(Any, load_config(model)).vocab_size)
    return model, tied


def build_skeleton(config: Mapping[str, Any]) -> Skeleton:
    """The whole model of a manifest's `model` field on the meta device, in fp32.

    Raises InvalidInput where the mapping describes no model that can be cut.
    """
    loaded = load_config(config)
    try:
        with torch.device("meta"):
            model: nn.Module = cast(Any, AutoModelForCausalLM).from_config(
                loaded, dtype=torch.float32, trust_remote_code=False
            )
    except (*_MISFITS, TypeError, ValueError) as error:
        raise _bad_values(loaded.model_type, error) from error
    every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    skeleton = _with_parts(loaded, model)
    tied = every - {name for name, _ in model.named_parameters()}
    if skeleton.tied:
        tied -= {*skeleton.head_and_embedding}
    if tied:
        raise InvalidInput(
            f"model.model_type: {loaded.model_type!r} leaves {_some(sorted(tied))} tied to other "
            f"tensors even with tie_word_embeddings: false; {ADVICE}"
        )
    return skeleton


def check_document_masks(config: Mapping[str, Any]) -> None:
    """Raise InvalidInput where `data.document_masks` would keep no documents apart."""
    family = config.get("model_type")
    if family not in DOCUMENT_MASKS:
        raise InvalidInput(
            f"data.document_masks: nobody has shown that {family} keeps documents apart; leave it "
            f"false, or use one of {', '.join(sorted(DOCUMENT_MASKS))}"
        )


def plan_stages(config: Mapping[str, Any], num_stages: int) -> tuple[StagePlan, ...]:
    """Split the model of `config` into `num_stages` stages of at least one layer each.

    The most expensive stage is as cheap as any split allows; among such splits the stages are as
    even as possible. Raises InvalidInput: see `load_config`; too few layers.
    """
    return plan_skeleton(build_skeleton(config), num_stages)


def plan_skeleton(skeleton: Skeleton, num_stages: int) -> tuple[StagePlan, ...]:
    """`plan_stages` for a model that is already built."""
    layers = skeleton.model.get_submodule(skeleton.layers)
    sizes = [_num_parameters(layer) for layer in layers.children()]
    if not 1 <= num_stages <= len(sizes):
        raise InvalidInput(
            f"stages: {num_stages} stages of at least one layer each do not fit a model with "
            f"{len(sizes)} layers; choose 1 to {len(sizes)} stages or change the model"
        )
    if skeleton.tied and num_stages > 1:
        raise InvalidInput(
            f"model.tie_word_embeddings: true is not possible with {num_stages} stages, because "
            "the embedding is on the first and the head on the last; set it to false or remove it"
        )
    if skeleton.entangled and num_stages > 1:
        raise InvalidInput(f"stages: {skeleton.entangled}; set stages to 1, or {ADVICE}")
    tail = sum(_num_parameters(skeleton.model.get_submodule(name)) for name in skeleton.closing)
    head = _num_parameters(skeleton.model) - sum(sizes) - tail  # the embedding; S=1: all the rest
    costs = [*sizes]
    costs[0] += head // EMBEDDING_DISCOUNT
    costs[-1] += tail
    sizes[0] += head
    sizes[-1] += tail
    bounds = split_layers(costs, num_stages)
    return tuple(
        StagePlan(
            stage=stage,
            num_stages=num_stages,
            start=start,
            stop=stop,
            num_parameters=sum(sizes[start:stop]),
            cost=sum(costs[start:stop]),
        )
        for stage, (start, stop) in enumerate(pairwise(bounds))
    )


def split_layers(costs: Sequence[int], num_stages: int) -> list[int]:
    """Bounds 0, ..., len(costs) of the split into non-empty runs whose dearest is cheapest.

    Ties go to the smallest sum of squared costs, then to the earliest bounds, so that all machines
    find the same split. O(num_stages * layers^2).
    """
    count = len(costs)
    totals = [sum(costs[:stop]) for stop in range(count + 1)]
    # dearest[stop]: how cheap the dearest of the runs so far can be if they end before `stop`
    dearest = totals
    for run in range(1, num_stages):
        shorter, dearest = dearest, [0] * (count + 1)
        for stop in range(run + 1, count + 1):
            dearest[stop] = min(
                max(shorter[start], totals[stop] - totals[start]) for start in range(run, stop)
            )
    cap = dearest[count]
    # evenest[stop]: sum of squares and bounds of the most even runs that end there, none above cap
    evenest: dict[int, tuple[int, list[int]]] = {0: (0, [0])}
    for _ in range(num_stages):
        shorter_runs, evenest = evenest, {}
        for start, (squares, bounds) in shorter_runs.items():
            for stop in range(start + 1, count + 1):
                cost = totals[stop] - totals[start]
                if cost <= cap:
                    candidate = (squares + cost * cost, [*bounds, stop])
                    evenest[stop] = min(evenest.get(stop, candidate), candidate)
    return evenest[count][1]


def _config_class(model_type: object) -> type[PreTrainedConfig]:
    """The configuration class of a model family that can be cut."""
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        near = difflib.get_close_matches(str(model_type), list(CONFIG_MAPPING), n=1)
        remedy = f"did you mean {near[0]!r}?" if near else ADVICE
        raise InvalidInput(
            f"model.model_type: transformers knows no model family {model_type!r}; {remedy}"
        )
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise InvalidInput(
            f"model.model_type: {model_type!r} has no causal language model; {ADVICE}"
        )
    config_class = CONFIG_MAPPING[model_type]
    if not _plan_of(config_class):
        raise InvalidInput(
            f"model.model_type: {model_type!r} declares no pipeline plan (base_model_pp_plan), so "
            f"nothing says where it can be cut; {ADVICE}"
        )
    return config_class


def _plan_of(config: PreTrainedConfig | type[PreTrainedConfig]) -> tuple[str, ...]:
    """The names of the decoder's parts in order of execution; empty where nobody knows them."""
    return OWN_PLANS.get(config.model_type) or tuple(config.base_model_pp_plan or ())


def _refuse_misspelt(fields: Mapping[str, Any], config_class: type[PreTrainedConfig]) -> None:
    """Refuse a field that is nearly a known one, for which the default would be used in silence."""
    known = {*config_class().to_dict(), *config_class.attribute_map}
    for name in set(map(str, fields)) - known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.85)
        if near:
            raise InvalidInput(
                f"model.{name}: {config_class.model_type} has no such field; did you mean "
                f"{near[0]!r}? Otherwise remove it"
            )


def _with_parts(config: PreTrainedConfig, model: nn.Module) -> Skeleton:
    """Find in the built model what its pipeline plan names, in order of execution."""
    base = cast(str, model.base_model_prefix)
    decoder = model.get_submodule(base)
    parts = dict(cast(Iterator[tuple[str, nn.Module]], decoder.named_modules()))
    plan = [name for name in _plan_of(config) if name in parts]
    lists = [name for name in plan if isinstance(parts[name], nn.ModuleList)]
    if len(lists) != 1:
        raise InvalidInput(
            f"model.model_type: the pipeline plan of {config.model_type!r} names {len(lists)} "
            f"lists of layers instead of one; {ADVICE}"
        )
    middle = plan.index(lists[0])
    outside = tuple(name for name, _ in model.named_children() if name != base)
    planned = tuple(f"{base}.{name}." for name in plan) + tuple(f"{name}." for name in outside)
    unplanned = [name for name, _ in model.named_parameters() if not name.startswith(planned)]
    return Skeleton(
        model=model,
        base=base,
        opening=tuple(f"{base}.{name}" for name in plan[:middle]),
        layers=f"{base}.{lists[0]}",
        closing=tuple(f"{base}.{name}" for name in plan[middle + 1 :]) + outside,
        tuples=config.model_type in _TUPLES,
        entangled=_entangled(config, unplanned),
        tied=bool(config.tie_word_embeddings),
        auxiliary_coefficient=_auxiliary_coefficient(config, model),
    )


def _auxiliary_coefficient(config: PreTrainedConfig, model: nn.Module) -> float:
    """Of the loss that keeps experts evenly used, which `output_router_logits` asks for."""
    family = config.model_type
    if any(_BALANCING_BIAS.fullmatch(name) for name in model.state_dict()):
        raise InvalidInput(
            f"model.model_type: {family!r} keeps its experts evenly used by a bias that no "
            "gradient moves, and dilocox does not update it, so a few experts would do all the "
            "work; choose a family with an auxiliary loss, for example mixtral or qwen3_moe"
        )
    if not getattr(config, "output_router_logits", False):
        return 0.0
    coefficient = getattr(model, "router_aux_loss_coef", None)
    if coefficient is None:
        raise InvalidInput(
            f"model.output_router_logits: {family!r} has no auxiliary loss for its routers; remove "
            "the field, or choose a family that has one, for example mixtral or qwen3_moe"
        )
    return float(coefficient)


def _entangled(config: PreTrainedConfig, unplanned: list[str]) -> str:
    """What layers share besides the hidden state that the plan hands on, in words; usually none."""
    if unplanned:
        shared = f"keeps {_some(unplanned)} outside its pipeline plan"
    elif getattr(config, "num_kv_shared_layers", None):
        shared = "lets layers share keys and values (num_kv_shared_layers)"
    else:
        return ""
    return f"the layers of a {config.model_type!r} model cannot be parted, because it {shared}"


def _bad_values(model_type: str, error: Exception) -> InvalidInput:
    reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return InvalidInput(
        f"model: these fields make no {model_type!r} model ({reason}); correct what it names"
    )


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def hidden_size(config: Mapping[str, Any]) -> int:
    """Values per token of what travels between stages. Raises InvalidInput: see `load_config`."""
    size = getattr(load_config(config), "hidden_size", None)
    if not isinstance(size, int):
        raise InvalidInput(f"model.hidden_size is missing; {ADVICE}")
    return size

"""Documents of one window are kept apart: none of them sees another one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import cast

import pytest
import torch
from torch import Tensor

from dilocox.dht.errors import InvalidInput
from dilocox.pipeline.partition import DOCUMENT_MASKS, UNCUT, check_document_masks
from dilocox.pipeline.stage import StageModule, build_stage
from dilocox.pipeline.stage_worker import summed_loss
from tests.pipeline.chains import (
    SEED,
    Chain,
    Config,
    batches,
    chain,
    gradients,
    rate,
    same,
    weights,
)
from tests.pipeline.conftest import FAMILIES, MIXTURES, one_stage_config
from tests.sweeps import sweep

END = 1


FIRST, SECOND = 7, 9  # tokens of two documents, both longer than a sliding window of 4

# Besides those of other tests.
MORE: dict[str, Config] = {
    **dict.fromkeys(("glm4", "olmo", "smollm3"), FAMILIES["olmo2"]),
    "cohere2": FAMILIES["cohere"] | {"sliding_window": 4},
    "gemma3_text": FAMILIES["gemma2"],
    "olmo3": FAMILIES["olmo2"] | {"sliding_window": 4},
}
CUT = {name: {"model_type": name, **own} for name, own in (FAMILIES | MIXTURES | MORE).items()}


# ---- which families ------------------------------------------------------------------------------
def logits_of(stages: Sequence[StageModule], ids: Tensor, positions: Tensor | None) -> Tensor:
    """Of ids [b, t] at these places in their documents, [b, t, v]."""
    carried = ids
    for stage in stages:
        carried, _ = stage.hidden_states(carried, positions)
    return stages[-1].logits(carried)


@torch.no_grad()
def keeps_apart(config: Config, num_stages: int) -> bool:
    """Whether nothing of a document is in the logits of the next, which are those of it alone."""
    stages = [build_stage(config, stage, num_stages, SEED).eval() for stage in range(num_stages)]
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, 67, (2, FIRST + SECOND), generator=generator)
    other = ids.clone()
    other[:, :FIRST] = (ids[:, :FIRST] + 5) % 65 + 2
    positions = torch.tensor([[*range(FIRST), *range(SECOND)]] * 2)
    seen, unseen = (logits_of(stages, each, positions)[:, FIRST:] for each in (ids, other))
    alone = logits_of(stages, ids[:, FIRST:], None)
    plain = logits_of(stages, other, None)[:, FIRST:]
    assert float((plain - alone).abs().max()) > 1e-3, "documents hardly matter: a weak test"
    return torch.allclose(seen, unseen, atol=1e-5) and torch.allclose(seen, alone, atol=1e-5)


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("family", sweep(CUT, 3))
def test_families_that_keep_documents_apart_are_those_that_are_named(
    family: str, num_stages: int
) -> None:
    assert keeps_apart(CUT[family], num_stages) == (family in DOCUMENT_MASKS)


@pytest.mark.parametrize("family", sweep(UNCUT, list(UNCUT)[::5]))
def test_so_are_those_that_run_as_one_stage(family: str) -> None:
    assert keeps_apart(one_stage_config(family), 1) == (family in DOCUMENT_MASKS)


def test_every_family_that_is_named_is_tried() -> None:
    assert CUT.keys() | UNCUT.keys() >= DOCUMENT_MASKS


# ---- a replica -----------------------------------------------------------------------------------
def ended_at(windows: Tensor, *places: int) -> Tensor:
    """The windows, none of whose tokens ends a document but those at these places of each row."""
    ended = windows.clamp_min(END + 1)
    ended[:, list(places)] = END
    return ended


def evaluated(chained: Chain, windows: Tensor) -> float:
    """The summed loss of windows [b, t + 1], down the chain."""
    *others, last = chained.workers
    carried: Tensor | None = None
    for worker in others:
        carried = cast(Tensor, worker.evaluate(carried, windows))
    return float(last.evaluate(carried, windows))


# an end first, last and twice running: documents of one token, and one that the window's edge cuts
@pytest.mark.parametrize("ends", [(3,), (2, 5), (0, 4), (3, 4), (7,), (8,), (0, 1, 2, 6, 7, 8)])
@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_windows_loss_is_that_of_its_documents_each_alone(
    llama_config: Config, num_stages: int, ends: tuple[int, ...]
) -> None:
    chained = chain(llama_config, num_stages, document_end=END)
    plain = build_stage(llama_config, 0, 1, SEED)
    [[windows, *_]] = batches(llama_config, 1)
    windows = ended_at(windows, *ends)
    last = windows.shape[1] - 1
    expected = 0.0
    for begin, stop in pairwise(sorted({0, last, *(end + 1 for end in ends if end < last)})):
        with torch.no_grad():
            logits = plain(windows[:, begin:stop])
        expected += float(summed_loss(logits, windows[:, begin + 1 : stop + 1].reshape(-1)))
    assert evaluated(chained, windows) == pytest.approx(expected, rel=1e-6)
    chained.run([windows] * 3)
    assert chained.workers[-1].loss == pytest.approx(expected / windows[:, 1:].numel(), rel=1e-5)


def test_rows_with_ends_at_different_places_are_masked_each_by_itself(llama_config: Config) -> None:
    chained = chain(llama_config, 2, document_end=END)
    [[windows, *_]] = batches(llama_config, 1)
    rows = [ended_at(windows[:1], 2), ended_at(windows[1:], 4, 5)]
    together = evaluated(chained, torch.cat(rows))
    assert together == pytest.approx(sum(evaluated(chained, row) for row in rows), rel=1e-6)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2", "gemma2"])
def test_two_stages_have_the_loss_and_gradients_of_one(family: str, recompute: bool) -> None:
    whole, plain = chain(CUT[family], 1, document_end=END), chain(CUT[family], 1)
    cut = chain(CUT[family], 2, document_end=END, recompute=recompute)
    batch = [ended_at(windows, 2, 5) for windows in batches(CUT[family], 1)[0]]
    for each in (whole, cut, plain):
        each.run(batch)
    assert cut.workers[-1].loss == whole.workers[-1].loss
    assert same(gradients(cut), gradients(whole))
    assert not same(gradients(plain), gradients(whole))


@pytest.mark.parametrize("recompute", [False, True])
def test_two_stages_learn_what_one_does(llama_config: Config, recompute: bool) -> None:
    whole = chain(llama_config, 1, document_end=END)
    cut = chain(llama_config, 2, document_end=END, recompute=recompute)
    plain = chain(llama_config, 1)
    for step, batch in enumerate(batches(llama_config, 3)):
        for windows in batch:
            windows[:, 4] = END
        losses = [each.step(batch, rate(step))[0] for each in (whole, cut)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-6)
        plain.step(batch, rate(step))
    learnt = weights(whole)
    for name, values in weights(cut).items():
        torch.testing.assert_close(values, learnt[name], rtol=0.0, atol=2e-5)
    assert not same(weights(plain), learnt)


def test_windows_of_one_document_are_as_without_masks(llama_config: Config) -> None:
    batch = batches(llama_config, 1)[0]
    batch = [windows.clamp_min(END + 1) for windows in batch]
    masked, plain = chain(llama_config, 2, document_end=END), chain(llama_config, 2)
    assert masked.step(batch, 1e-2) == plain.step(batch, 1e-2)
    assert same(weights(masked), weights(plain))


def test_what_cannot_be_kept_apart_is_refused() -> None:
    with pytest.raises(InvalidInput, match="that falcon keeps documents apart; leave it false"):
        check_document_masks({"model_type": "falcon"})
    check_document_masks({"model_type": "llama"})

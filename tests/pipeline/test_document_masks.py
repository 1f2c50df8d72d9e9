"""Documents of one window are kept apart: none of them sees another one."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import Tensor

from dilocox.dht.errors import InvalidInput
from dilocox.pipeline.partition import DOCUMENT_MASKS, check_document_masks
from tests.pipeline.chains import Chain, Config, batches, chain, rate, same, weights
from tests.pipeline.conftest import FAMILIES

END = 1


def documents(*lengths: int, seed: int = 0) -> Tensor:
    """Ids int64 [sum of lengths], each document with its end, all others different from that."""
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randint(2, 60, (length,), generator=generator) for length in lengths]
    for document in made:
        document[-1] = END
    return torch.cat(made)


def summed_loss(chained: Chain, windows: Tensor) -> float:
    """Of windows [b, t + 1], down the chain."""
    *others, last = chained.workers
    carried: Tensor | None = None
    for worker in others:
        carried = cast(Tensor, worker.evaluate(carried, windows))
    return float(last.evaluate(carried, windows))


def keeps_apart(config: Config, num_stages: int) -> bool:
    """Whether a window's loss is the sum of those of its documents, each in a window of its own."""
    chained = chain(config, num_stages, document_end=END)
    first, second = documents(5, seed=1), documents(9, seed=2)
    joined = summed_loss(chained, torch.cat([first, second])[None])
    # the first one's end is followed by the second one's beginning, which only the whole can say
    alone = summed_loss(chained, torch.cat([first, second[:1]])[None])
    return joined == pytest.approx(alone + summed_loss(chained, second[None]), abs=1e-4)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_families_that_keep_documents_apart_are_those_that_are_named(
    family_config: Config, num_stages: int
) -> None:
    family = family_config["model_type"]
    assert keeps_apart(family_config, num_stages) == (family in DOCUMENT_MASKS)


def test_every_family_that_is_named_is_tried() -> None:
    assert FAMILIES.keys() >= DOCUMENT_MASKS


def test_a_window_narrower_than_a_document_stays(llama_config: Config) -> None:
    """Sliding attention, in documents that are longer than it reaches."""
    sliding = {"model_type": "mistral", **FAMILIES["mistral"], "sliding_window": 3}
    assert keeps_apart(sliding, 2)


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
    with pytest.raises(InvalidInput, match="falcon does not keep documents apart; leave it false"):
        check_document_masks({"model_type": "falcon", "eos_token_id": END}, END)
    with pytest.raises(InvalidInput, match=r"set model\.eos_token_id"):
        check_document_masks({"model_type": "llama", "eos_token_id": 2}, END)
    check_document_masks({"model_type": "llama", "eos_token_id": END}, END)

"""The vectors under the merge: views, chunks, devices, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dilocox.peer.training import unsent_progress
from dilocox.peer.training.merge import Merge, MergeConfig, RecordFacts
from tests.peer.training.merging import unsent

CONFIG = MergeConfig(weight=0.75, decay=1.0)


def test_parameters_that_are_views_of_the_live_vector_move_with_it() -> None:
    live = torch.zeros(6)
    parameter = torch.nn.Parameter(torch.empty(0))
    parameter.data = live[2:6].view(2, 2)
    merge = Merge(CONFIG, live, torch.arange(6.0), torch.zeros(6), round_number=-1, digest="m")
    assert parameter.tolist() == [[2, 3], [4, 5]]
    facts = RecordFacts(round=0, digest="d0", previous="m", contributor=False)
    merge.commit(facts, torch.full((6,), 9.0), torch.zeros(6))
    assert parameter.tolist() == [[9, 9], [9, 9]]


def test_chunks_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> Tensor:
        generator = torch.Generator().manual_seed(3)
        live = torch.zeros(1000)
        anchor = torch.randn(1000, generator=generator)
        merge = Merge(CONFIG, live, anchor.clone(), torch.zeros(1000), round_number=-1, digest="m")
        live -= 1e-3 * torch.randn(1000, generator=generator)
        merge.trained(1)
        merge.send(1)
        live -= 1e-3 * torch.randn(1000, generator=generator)
        merge.trained(1)
        facts = RecordFacts(round=0, digest="d0", previous="m", contributor=False)
        merge.commit(facts, anchor * 0.9, torch.zeros(1000))
        return torch.cat([live, merge.progress.start, merge.in_flight[1].message])

    whole = run()
    monkeypatch.setattr(unsent_progress, "CHUNK_VALUES", 7)
    assert torch.equal(run(), whole)


def test_refuses_vectors_that_do_not_fit_and_live_weights_as_anchor() -> None:
    live = torch.zeros(4)
    with pytest.raises(ValueError, match="pass a copy"):
        Merge(CONFIG, live, live, torch.zeros(4), round_number=-1, digest="m")
    merge = Merge(CONFIG, live, torch.zeros(4), torch.zeros(4), round_number=-1, digest="m")
    facts = RecordFacts(round=0, digest="d0", previous="m", contributor=False)
    with pytest.raises(ValueError, match="this stage has"):
        merge.commit(facts, torch.zeros(5), torch.zeros(4))
    assert merge.round == -1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_live_weights_on_a_gpu_end_as_on_the_cpu() -> None:
    ends = list[Tensor]()
    for device in ("cpu", "cuda"):
        live = torch.zeros(1000, device=device)
        merge = Merge(CONFIG, live, torch.ones(1000), torch.zeros(1000), round_number=-1, digest="")
        live -= 0.25
        merge.trained(1)
        merge.send(1)
        live -= 0.25
        merge.trained(1)
        facts = RecordFacts(round=0, digest="d0", previous="", contributor=False)
        merge.commit(facts, torch.full((1000,), 3.0), torch.zeros(1000))
        merge.void(1)
        ends.append(torch.cat([merge.state()[0]["live"].cpu(), unsent(merge)]))
    assert torch.equal(ends[0], ends[1])

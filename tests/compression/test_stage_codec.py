"""Every scheme, as the members of a group go through it: phases, means, own contributions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from dilocox.compression.layout import FlatLayout, split
from dilocox.compression.low_rank import LowRank
from dilocox.compression.stage_codec import Compression, StageCodec, StageMeans

LAYOUT = FlatLayout.of([("wide", (96, 160)), ("bias", (70,)), ("square", (64, 64))])
SCHEMES = ("dense", "low_rank")
SHARES = (0.5, 0.3, 0.2)


def codec_of(scheme: Any, **fields: Any) -> StageCodec:
    facts: dict[str, Any] = {
        "bits": 8,
        "max_factor": 1e4,
        "rank": 8,
        "min_rank": 2,
        "max_rank": 16,
    }
    return StageCodec(LAYOUT, Compression(scheme=scheme, **facts | fields))


def message(seed: int, rank: int = 8) -> Tensor:
    """Of low rank, so that every scheme can carry most of it; small values, as updates are."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.Generator().manual_seed(99)
    flat = torch.zeros(LAYOUT.numel)
    for tensor in LAYOUT.view(flat).values():
        if tensor.dim() == 1:
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
        else:
            rows = torch.randn(tensor.shape[0], rank, generator=common)
            tensor.copy_(rows @ torch.randn(rank, tensor.shape[1], generator=generator))
    return flat * 1e-3


class Exchange:
    """One exchange of three members; `left_out[i]`: parts of the last phase that lack member i."""

    def __init__(
        self,
        codec: StageCodec,
        messages: list[Tensor],
        basis: Tensor | None,
        left_out: dict[int, set[int]] | None = None,
    ):
        self.codec, self.ranks = codec, codec.first_ranks
        phases = codec.phases(self.ranks)
        encoders = [codec.encoder(each, self.ranks, lambda: basis) for each in messages]
        vectors: list[Tensor] = []
        out = left_out or {}
        for number, phase in enumerate(phases):
            sent = [encoder.vector(number, vectors) for encoder in encoders]
            assert all(each.shape == (phase.numel,) for each in sent)
            self.parts = split(phase.numel, len(messages))
            mean = torch.zeros(phase.numel)
            for index, part in enumerate(self.parts):
                size = part.stop - part.start
                last = number == len(phases) - 1
                members = [n for n in range(3) if not (last and index in out.get(n, ()))]
                total = sum(SHARES[n] for n in members)
                for n in members:
                    payload = phase.codec.encode(sent[n][part])
                    assert payload.numel() <= phase.codec.encoded_bytes(size)
                    mean[part] += phase.codec.decode(payload, size) * (SHARES[n] / total)
                payload = phase.codec.encode(mean[part])
                assert payload.numel() <= phase.codec.encoded_bytes(size)
                mean[part] = phase.codec.decode(payload, size)
            vectors.append(mean)
        self.vectors = vectors
        self.means: StageMeans = codec.means(self.ranks, vectors)
        self.average = self.means.average()
        self.counted = [
            [part for index, part in enumerate(self.parts) if index not in out.get(n, ())]
            for n in range(3)
        ]
        self.own = [own(self.means, messages[n], self.counted[n]) for n in range(3)]


def own(means: StageMeans, message: Tensor, counted: Sequence[slice]) -> Tensor:
    """What a member's message put in, [n]."""
    left = message.clone()
    means.take_out(left, counted)
    return message - left


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_average_is_the_weighted_sum_of_own_contributions(scheme: str) -> None:
    codec = codec_of(scheme)
    messages = [message(seed) for seed in range(3)]
    exchange = Exchange(codec, messages, codec.first_basis("run/0/-1"))
    summed = sum(share * own for share, own in zip(SHARES, exchange.own, strict=True))
    assert isinstance(summed, Tensor)
    # but for the coding of the mean, which is no one's residual
    assert error(exchange.average, summed) < 0.01


@pytest.mark.parametrize(("scheme", "limit"), [("dense", 0.01), ("low_rank", 0.02)])
def test_what_the_scheme_carries_of_a_message_it_was_made_for(scheme: str, limit: float) -> None:
    codec = codec_of(scheme)
    messages = [message(seed) for seed in range(3)]
    basis = codec.first_basis("run/0/-1")
    exchange = Exchange(codec, messages, basis)
    wanted = sum(share * each for share, each in zip(SHARES, messages, strict=True))
    assert isinstance(wanted, Tensor)
    if scheme == "low_rank":  # subspace iteration: a second round looks where the first one pointed
        basis = exchange.means.next_basis(codec.low_rank(codec.first_ranks), "run/0/0")
        exchange = Exchange(codec, messages, basis)
    assert error(exchange.average, wanted) < limit


@pytest.mark.parametrize("scheme", SCHEMES)
def test_pieces_of_the_average_are_the_average(scheme: str) -> None:
    codec = codec_of(scheme)
    exchange = Exchange(codec, [message(seed) for seed in range(3)], codec.first_basis("seed"))
    found = torch.zeros(LAYOUT.numel)
    exchange.means.average_pieces(lambda part, values: found[part].copy_(values))
    assert torch.equal(found, exchange.average)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_where_a_member_is_left_out_its_own_is_zero_and_nothing_decays(scheme: str) -> None:
    codec = codec_of(scheme)
    messages = [message(seed) for seed in range(3)]
    exchange = Exchange(codec, messages, codec.first_basis("seed"), {2: {0}})
    left_out = [exchange.parts[0]]
    undecayed = torch.zeros(LAYOUT.numel, dtype=torch.bool)
    for part in codec.undecayed(exchange.ranks, left_out):
        undecayed[part] = True
    whole = own(exchange.means, messages[2], exchange.parts)
    changed = exchange.own[2] != whole
    assert changed.any()
    assert not (changed & ~undecayed).any(), "a value that lacks something would decay"
    if scheme != "low_rank":
        assert not exchange.own[2][exchange.parts[0]].any()
    summed = sum(share * own for share, own in zip(SHARES, exchange.own, strict=True))
    assert isinstance(summed, Tensor)
    assert error(exchange.average, summed) > 0.01  # the others' weights grew in that part


def test_ranks_outside_the_runs_bounds_are_refused() -> None:
    codec = codec_of("low_rank")
    assert codec.first_ranks == (8, 0, 8)
    codec.check((2, 0, 16))
    for ranks in [(), (8, 0), (8, 1, 8), (1, 0, 8), (17, 0, 8), (0, 0, 8), (8, 0, 8, 0)]:
        with pytest.raises(ValueError, match="bounds"):
            codec.check(ranks)
        with pytest.raises(ValueError, match="bounds"):
            codec.phases(ranks)
    dense = codec_of("dense")
    dense.check(())
    with pytest.raises(ValueError, match="bounds"):
        dense.check((8, 0, 8))


def test_a_matrix_that_gains_too_little_travels_dense() -> None:
    """Under the smallest rank of the run, factors of a small matrix would be no smaller."""
    codec = codec_of("low_rank", min_rank=16, rank=16, max_rank=64)
    limits = codec.limits
    assert limits[1] == 0
    assert all(limit == 0 or limit >= 16 for limit in limits)
    assert limits[0] >= 16


def test_low_rank_moves_fewer_values_than_dense() -> None:
    codec = codec_of("low_rank", rank=4)
    moved = sum(phase.numel for phase in codec.phases(codec.first_ranks))
    assert moved < LAYOUT.numel / 5


# ---- the device of own products ------------------------------------------------------------------
FAST = torch.device("meta")  # stands for a GPU: nothing is computed on it here


@pytest.mark.parametrize(("fast_s", "slow_s", "chosen"), [(0.0, 0.02, FAST), (0.02, 0.0, None)])
def test_own_products_are_made_where_that_is_faster(
    monkeypatch: pytest.MonkeyPatch, fast_s: float, slow_s: float, chosen: torch.device | None
) -> None:
    def project(_: LowRank, message: Tensor, __: Tensor, device: torch.device | None) -> None:
        assert message.numel() == 96 * 160  # one matrix: a whole stage would not fit twice
        time.sleep(slow_s if device is None else fast_s)

    monkeypatch.setattr(LowRank, "project", project)
    monkeypatch.setattr(LowRank, "contract", lambda *_: None)
    codec = codec_of("low_rank")
    codec.choose_device(FAST)
    assert codec.device == chosen


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
    ids=["torch's", "CUDA's", "cuBLAS's"],
)
def test_a_device_without_room_leaves_the_products_to_the_cpu(
    monkeypatch: pytest.MonkeyPatch, error: RuntimeError
) -> None:
    codec = codec_of("low_rank")
    basis = codec.first_basis("seed")
    low_rank = codec.low_rank(codec.first_ranks)
    assert low_rank is not None and basis is not None
    p = low_rank.project(message(1), basis)
    q = low_rank.contract(message(1), p)

    def fails(*_: Any) -> Tensor:
        raise error

    monkeypatch.setattr(Tensor, "to", fails)
    assert torch.equal(low_rank.project(message(1), basis, FAST), p)
    assert torch.equal(low_rank.contract(message(1), p, FAST), q)
    error.args = ("CUDA error: an illegal memory access was encountered",)
    if type(error) is RuntimeError:  # no reason to go on
        with pytest.raises(RuntimeError, match="illegal"):
            low_rank.contract(message(1), p, FAST)

"""The arithmetic of an exchange on several threads: the bytes of one thread, as they ever were."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cache
from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from dilocox.compression.group_quantization import GroupCodec, PayloadRefused
from dilocox.compression.layout import FlatLayout
from dilocox.compression.stage_codec import Compression, StageCodec
from dilocox.compression.workers import PIECE, Workers
from dilocox.peer.rounds.shares import Reduction
from tests.sweeps import sweep

THREADS = (1, 2, 3, 8)
SIZES = (0, 1, 63, 65, PIECE - 1, PIECE + 1, 3 * PIECE + 777)
LAYOUT = FlatLayout.of(
    [
        ("wide", (193, 160)),
        ("bias", (70,)),
        ("stack", (3, 1, 50, 97)),
        ("one", (1,)),
        ("tall", (700, 33)),
        ("square", (64, 64)),
        ("embedding", (5003, 96)),
    ]
)
# sha256 of the results, made by the arithmetic of one thread before it had several
KNOWN_CODES = {
    4: "de6efcc0d86b3d01dce84b4a8abdbfe4fbb0e519c4f4c89408b88d94851f034b",
    8: "fd8eb967d531fa5f9dc39297e332590bf96cded4bc3dd15b73271b66541c5c7c",
    16: "e5fcf15e2c40247d8059dbca918e07698ca2a85beb60942ccbfec0986b07c731",
    32: "b56d3e1790c4c27cb6a4afad9f6ebb3b7413618de9a9af9974b427391a1680bf",
}
KNOWN_MEANS = {
    8: "0af6975586fd7d2c5c5fd78d99f98ca039d8f1be69c577800bbfcadd12e6b18b",
    64: "b505f192b3eb2b501ed3ea10e8c4fdc79db131225ef7ccd79963279a3510698e",
}


@pytest.fixture(autouse=True)
def torch_has_one_thread() -> Iterator[None]:
    """As in a peer's averaging process: the products of a peer's own parts are torch's."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def values(name: str, numel: int) -> Tensor:
    """fp32 values of many magnitudes, made of a hash: equal on every machine."""
    return _values(name, numel).clone()


@cache
def _values(name: str, numel: int) -> Tensor:
    raw = np.frombuffer(hashlib.shake_256(name.encode()).digest(3 * numel), "<u1").reshape(3, -1)
    numbers = raw[0].astype(np.float64) - 127.5 + raw[1] / 256
    return torch.tensor(np.ldexp(numbers, -(raw[2] % 12).astype(np.int64) - 14).astype(np.float32))


def sha256(*tensors: Tensor) -> str:
    whole = hashlib.sha256()
    for tensor in tensors:
        whole.update(tensor.numpy().tobytes())
    return whole.hexdigest()


def codec_of(rank: int, threads: int, scheme: Literal["low_rank", "dense"]) -> StageCodec:
    return StageCodec(
        LAYOUT,
        Compression(scheme=scheme, bits=4, max_factor=1e4, rank=rank, min_rank=2, max_rank=64),
        Workers(threads),
    )


@pytest.mark.parametrize("bits", KNOWN_CODES)
@pytest.mark.parametrize("threads", sweep(THREADS, {1, 3}))
def test_codes_and_sums_have_the_bytes_of_one_thread(bits: int, threads: int) -> None:
    codec, found = GroupCodec(bits, workers=Workers(threads)), list[Tensor]()
    for numel in SIZES:
        sent = [values(f"{member} of {numel}", numel) for member in "ab"]
        payloads = [codec.encode(each) for each in sent]
        found += payloads
        if numel:
            row = Reduction(codec, {"a": 3, "b": 7}, numel, "none")
            for member, payload in zip("ab", payloads, strict=True):
                row.add(member, payload.numpy().tobytes())
            mean = row.finish()
            assert mean is not None
            found.append(mean.values)
    assert sha256(*found) == KNOWN_CODES[bits]


@pytest.mark.parametrize("rank", KNOWN_MEANS)
@pytest.mark.parametrize("threads", sweep(THREADS, {1, 3}))
def test_what_follows_from_means_has_the_bytes_of_one_thread(rank: int, threads: int) -> None:
    codec = codec_of(rank, threads, "low_rank")
    phases = codec.phases(codec.first_ranks)
    vectors = [values(f"mean {n}", phase.numel) for n, phase in enumerate(phases)]
    means = codec.means(codec.first_ranks, vectors)
    first, following = codec.first_basis("seed"), codec.low_rank(codec.first_ranks)
    basis = means.next_basis(following, "seed")
    assert first is not None and basis is not None
    needed = torch.tensor(means.needed(0.9))
    pieces = torch.zeros(LAYOUT.numel)
    means.average_pieces(lambda part, values: pieces[part].copy_(values))
    found = sha256(first, basis, needed, means.average(), pieces)
    assert found == KNOWN_MEANS[rank]


@pytest.mark.parametrize("scheme", ["low_rank", "dense"])
def test_a_members_own_parts_do_not_depend_on_its_threads(
    scheme: Literal["low_rank", "dense"],
) -> None:
    def own(threads: int) -> str:
        codec = codec_of(16, threads, scheme)
        ranks, message = codec.first_ranks, values("message", LAYOUT.numel)
        encoder = codec.encoder(message, ranks, lambda: codec.first_basis("seed"))
        vectors = list[Tensor]()
        for number in range(len(codec.phases(ranks))):
            vectors.append(encoder.vector(number, tuple(vectors)))
        counted = [slice(0, 640), slice(1280, vectors[-1].numel())]
        codec.means(ranks, vectors).take_out(message, counted)
        return sha256(*vectors, message)

    assert len({own(threads) for threads in THREADS}) == 1


def test_a_part_is_refused_for_its_first_fault_once_nothing_is_written_any_more() -> None:
    codec, numel = GroupCodec(4, workers=Workers(3)), 4 * PIECE
    payload = codec.encode(values("part", numel))
    payload[-1] = 0x88  # code -8, which is not in use, in the last piece
    with pytest.raises(PayloadRefused, match="code"):
        codec.decode(payload, numel)


def test_the_first_error_of_the_pieces_is_raised_after_all_have_ended() -> None:
    ended = list[int]()

    def work(piece: int) -> None:
        ended.append(piece)
        raise ValueError(f"piece {piece}")

    with pytest.raises(ValueError, match="piece 0"):
        Workers(3).map(work, range(20))
    assert sorted(ended) == list(range(20))

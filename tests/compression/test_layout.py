"""Tensors keep their place, and parts cover the flat vector once."""

import hashlib
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dilocox.compression.group_quantization import GROUP_SIZE
from dilocox.compression.layout import FlatLayout, split

shapes = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), max_size=8)


def layout_of(sizes: list[tuple[int, ...]]) -> FlatLayout:
    return FlatLayout.of((f"layer.{index}", shape) for index, shape in enumerate(sizes))


@given(shapes)
@settings(deadline=None)
def test_every_tensor_starts_at_a_group_and_none_overlap(sizes: list[tuple[int, ...]]):
    layout = layout_of(sizes)
    end = 0
    for piece, shape in zip(layout.slices, sizes, strict=True):
        assert piece.shape == shape
        assert piece.start % 64 == 0
        assert end <= piece.start < end + 64
        end = piece.start + piece.numel
    assert layout.numel % 64 == 0
    assert end <= layout.numel < end + 64


@given(shapes)
@settings(deadline=None)
def test_views_share_the_flat_vectors_memory(sizes: list[tuple[int, ...]]):
    layout = layout_of(sizes)
    flat = torch.zeros(layout.numel)
    views = layout.view(flat)
    assert [tuple(tensor.shape) for tensor in views.values()] == sizes
    for tensor in views.values():
        tensor.add_(1)
    assert set(flat.tolist()) <= {0.0, 1.0}
    assert flat.sum() == sum(tensor.numel() for tensor in views.values())


@given(numel=st.integers(0, 20_000), count=st.integers(1, 40))
@settings(deadline=None)
def test_parts_cover_everything_once_in_whole_groups_evenly(numel: int, count: int):
    parts = split(numel, count)
    assert len(parts) == count
    assert parts[0].start == 0
    assert parts[-1].stop == numel
    assert all(before.stop == after.start for before, after in pairwise(parts))
    assert all(part.start % GROUP_SIZE == 0 or part.start == numel for part in parts)
    lengths = [part.stop - part.start for part in parts]
    assert max(lengths) - min(lengths) < 2 * GROUP_SIZE


def test_the_digest_is_the_documented_one():
    layout = FlatLayout.of([("wé", (2, 3)), ("bias", ()), ("last", torch.Size([70]))])
    text = '[["wé",[2,3]],["bias",[]],["last",[70]]]'
    assert layout.digest == hashlib.sha256(text.encode()).hexdigest()
    assert [piece.start for piece in layout.slices] == [0, 64, 128]
    assert layout.numel == 256


def test_the_digest_tells_names_shapes_and_order_apart():
    layouts = [
        [("a", (2, 3)), ("b", (4,))],
        [("a", (3, 2)), ("b", (4,))],
        [("a", (6,)), ("b", (4,))],
        [("a", (2, 3)), ("c", (4,))],
        [("b", (4,)), ("a", (2, 3))],
        [("a", (2, 3))],
        [],
    ]
    assert len({FlatLayout.of(tensors).digest for tensors in layouts}) == len(layouts)


def test_a_name_given_twice_is_refused():
    with pytest.raises(ValueError, match="'a' is given twice"):
        FlatLayout.of([("a", (1,)), ("a", (2,))])


def test_a_negative_size_is_refused():
    with pytest.raises(ValueError, match=r"'a' has shape \(2, -1\)"):
        FlatLayout.of([("a", (2, -1))])


def test_a_flat_vector_of_another_length_is_refused():
    with pytest.raises(ValueError, match=r"flat is \[63\]: this layout takes \[64\]"):
        FlatLayout.of([("a", (7,))]).view(torch.zeros(63))


def test_no_reducers_are_refused():
    with pytest.raises(ValueError, match="0 parts"):
        split(7, 0)

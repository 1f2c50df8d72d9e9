"""Which of a sorted list of names are meant, one bit each: records and tickets name members once.

A list of the names themselves, one for each part and each member, grows with the square of the
group: of 104 members a record had 1.2 MB of them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence


def bitmap_of(names: Sequence[str], chosen: Collection[str]) -> bytes:
    """The chosen ones among the names: the first name is the lowest bit of the first byte.

    ValueError where one is chosen that is not among them.
    """
    places = {name: place for place, name in enumerate(names)}
    bits = bytearray(-(-len(names) // 8))
    for name in chosen:
        if name not in places:
            raise ValueError(f"{name} is none of the {len(names)} names")
        place = places[name]
        bits[place // 8] |= 1 << place % 8
    return bytes(bits)


def chosen_in(names: Sequence[str], bits: bytes) -> tuple[str, ...]:
    """The names that a bitmap chooses, in their order; ValueError if it is not one of them."""
    beyond = len(names) % 8 and bits and bits[-1] >> len(names) % 8
    if len(bits) != -(-len(names) // 8) or beyond:
        raise ValueError(f"a bitmap of {len(bits)} bytes is none of {len(names)} names")
    return tuple(name for place, name in enumerate(names) if bits[place // 8] >> place % 8 & 1)

"""Bytes on the wire: msgpack with bounds, so that no input from the network can ask for memory it
did not send.

Only plain values pass (no extension types, no objects), text must be UTF-8, map keys must be text.
This is the one file that knows the msgpack package.
"""

from typing import Any, cast

import msgpack  # pyright: ignore[reportMissingTypeStubs]

MAX_ITEMS = 1024


class Malformed(ValueError):
    """Bytes that are not what they claim to be."""


def pack(value: object) -> bytes:
    """Encode None, bool, int, float, str, bytes, lists, tuples and dicts of them (`Malformed`)."""
    try:
        return cast(bytes, msgpack.packb(value, use_bin_type=True))  # pyright: ignore
    except (ValueError, TypeError, OverflowError) as error:
        raise Malformed(f"cannot be written as msgpack: {error}") from error


def unpack(data: bytes, max_bytes: int) -> object:
    """Decode `data`; raises `Malformed` if it is over `max_bytes` or not one plain value."""
    if len(data) > max_bytes:
        raise Malformed(f"{len(data)} bytes, at most {max_bytes} are allowed")
    try:
        return cast(
            object,
            msgpack.unpackb(  # pyright: ignore
                data,
                raw=False,
                strict_map_key=True,
                ext_hook=_no_extensions,
                max_array_len=MAX_ITEMS,
                max_map_len=MAX_ITEMS,
                max_str_len=max_bytes,
                max_bin_len=max_bytes,
            ),
        )
    except (ValueError, TypeError, RecursionError) as error:
        raise Malformed(f"no valid msgpack: {error}") from error


def _no_extensions(code: int, data: bytes) -> Any:
    raise Malformed(f"extension type {code} is not allowed")

"""The names that peers give themselves, as people see them. Nobody proves a name: two peers may
state the same, so the end of the id stands beside it. Nothing heavy is imported, for `--help`.
"""

MAX_NAME = 24  # characters of a peer's name, or of its team's
MAX_NAME_BYTES = 48  # in UTF-8, of the 1,024 that a record in the DHT may have
MAX_LINE = 120


def printable(text: str, kept: str = "") -> str:
    """A text of a stranger: what cannot be seen, and could steer a terminal, becomes spaces; but
    for the characters in `kept`."""
    return "".join(each if each.isprintable() or each in kept else " " for each in text)


def cut(text: str, limit: int = MAX_LINE) -> str:
    """A text of a stranger in one line: bounded, and of characters that can be seen."""
    seen = " ".join(printable(text).split())
    return seen if len(seen) <= limit else seen[: limit - 1] + "…"


def shown_peer(peer: str, name: str = "") -> str:
    """A peer as people see it: the end of its id, behind the name that it gives itself."""
    name = cut(name, MAX_NAME)
    return f"{name} ({peer[-6:]})" if name else peer[-6:]

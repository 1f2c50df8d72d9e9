"""The commands that docs/operator.md and docs/volunteer.md tell people to type.

A fenced block that opens with ```sh is a person's terminal; words after it say more: `stays` means
that the command goes on and keeps its terminal. The first ```text block after it is what the person
is told to see, a line each, where ... stands for anything; further ones before the next command are
what it prints sooner or later. Other fences are neither typed nor compared.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
GUIDES = ("operator", "volunteer")
STAYS = "stays"

_FENCE = re.compile(r"^( *)```(.*)$")
_HEADING = re.compile(r"^##+ (.*)$")
_ANYTHING = "..."


@dataclass
class Block:
    """One terminal: what to type into it and what to see."""

    guide: str
    section: str
    line: int
    words: tuple[str, ...]
    text: str
    expected: list[str] = field(default_factory=list[str])
    later: list[str] = field(default_factory=list[str])

    @property
    def stays(self) -> bool:
        """Whether its command goes on until it is stopped."""
        return STAYS in self.words

    @property
    def place(self) -> str:
        """Where it stands, for messages."""
        return f"docs/{self.guide}.md:{self.line}"

    def filled(self, values: Mapping[str, str]) -> Block:
        """The same with the words that a person replaces, such as INVITE, replaced."""

        def fill(text: str) -> str:
            return re.sub(r"\b[A-Z]+\b", lambda match: values.get(match[0], match[0]), text)

        return replace(
            self,
            text=fill(self.text),
            expected=[fill(line) for line in self.expected],
            later=[fill(line) for line in self.later],
        )


def unseen(lines: Iterable[str], output: str) -> list[str]:
    """Those of the lines of a guide that an output has not."""
    return [line for line in lines if not _shape(line).search(output)]


def blocks(guide: str) -> list[Block]:
    """All terminals of a guide, in its order."""
    found: list[Block] = []
    section, first = "", False
    for number, line, fenced in _parts(guide):
        if fenced is None:
            if heading := _HEADING.match(line):
                section = heading[1]
            continue
        words = line.split()
        if words[:1] == ["sh"]:
            found.append(Block(guide, section, number, tuple(words[1:]), "\n".join(fenced)))
            first = True
        elif words[:1] == ["text"] and found:
            lines = [each for each in fenced if each.strip()]
            (found[-1].expected if first else found[-1].later).extend(lines)
            first = False
    return found


def sections(guide: str) -> list[str]:
    """Its headings below the title."""
    lines = [(line, fenced) for _, line, fenced in _parts(guide)]
    return [
        match[1] for line, fenced in lines if fenced is None and (match := _HEADING.match(line))
    ]


def _parts(guide: str) -> Iterator[tuple[int, str, list[str] | None]]:
    """Lines outside fences, each with None; for a fence its words and the lines within."""
    fenced: list[str] | None = None
    began, words, indent = 0, "", ""
    for number, line in enumerate((DOCS / f"{guide}.md").read_text().splitlines(), 1):
        fence = _FENCE.match(line)
        if fence is None:
            if fenced is None:
                yield number, line, None
            else:
                fenced.append(line.removeprefix(indent))
        elif fenced is None:
            began, indent, words, fenced = number, fence[1], fence[2], []
        else:
            yield began, words, fenced
            fenced = None
    assert fenced is None, f"docs/{guide}.md:{began}: this fence is not closed"


def _shape(line: str) -> re.Pattern[str]:
    return re.compile(".*".join(re.escape(part) for part in line.strip().split(_ANYTHING)))

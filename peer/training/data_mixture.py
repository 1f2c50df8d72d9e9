"""A source of several, mixed by weight; apart from data_sources.py, which reads each of them.

A part of the mixture is that part of each source. The next document comes from the source that is
furthest behind its weight by the bytes read so far, so the mixture is the same on every machine and
a count of documents tells the place in it. A source that ends begins anew in another order, and the
epoch is over when each has ended at least once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from dilocox.dht.errors import InvalidInput
from dilocox.dht.manifest import DataSpec
from dilocox.dht.manifest_sections import SourceSpec
from dilocox.peer.training.data_sources import DataSource, DocumentStream, json_sha256, open_source


def open_mixture(spec: DataSpec) -> MixedSource:
    """Open `spec.source` and those of `spec.more`; raises as `open_source` does."""
    return MixedSource(spec=spec, sources=tuple(open_source(one) for one in each_source(spec)))


def each_source(spec: DataSpec) -> list[DataSpec]:
    """`spec.source` and those of `spec.more`, each as if it were the only one."""
    names = [field.name for field in fields(SourceSpec)]
    return [
        replace(spec, more=(), **{name: getattr(one, name) for name in names})
        for one in (spec, *spec.more)
    ]


@dataclass(frozen=True, kw_only=True)
class MixedSource:
    """Sources that were opened."""

    spec: DataSpec
    sources: tuple[DataSource, ...]

    @property
    def fingerprint(self) -> str:
        """A digest of the files of all and their weights."""
        return json_sha256(*((source.fingerprint, source.spec.weight) for source in self.sources))

    def part(self, part: int, order: str) -> DocumentStream | MixedStream:
        """Open a part; see `DataSource.part`."""
        if len(self.sources) == 1:
            return self.sources[0].part(part, order)
        return MixedStream(self.sources, part, order)

    def held_out_documents(self) -> Iterator[bytes]:
        """Yield the held-out documents of each."""
        for source in self.sources:
            yield from source.held_out_documents()


class MixedStream:
    """The documents of one part of several sources, with the face of a `DocumentStream`.

    `rows` counts the documents read so far.
    """

    def __init__(self, sources: tuple[DataSource, ...], part: int, order: str):
        self.rows = 0
        self._sources, self._part, self._order = sources, part, order
        self._epochs = [0] * len(sources)
        self._bytes = [0] * len(sources)
        self._streams = [self._open(index) for index in range(len(sources))]

    def read(self) -> bytes | None:
        """Return the next document, never an empty one, or None at the end."""
        while not all(self._epochs):
            index = min(range(len(self._sources)), key=self._amount)
            if (document := self._streams[index].read()) is not None:
                self._bytes[index] += len(document)
                self.rows += 1
                return document
            if not self._bytes[index]:
                raise InvalidInput(
                    f"data part {self._part} of {self._sources[index].spec.source!r} holds no "
                    "text; lower data.parts, or leave that source out"
                )
            self._epochs[index] += 1
            self._streams[index] = self._open(index)
        return None

    def skip(self, rows: int) -> None:
        """Pass over so many documents, or to the end."""
        for _ in range(rows):
            if self.read() is None:
                return

    def state_dict(self) -> dict[str, Any]:
        """Return the position: JSON-able, of no use for other files, weights or another order."""
        return {
            "rows": self.rows,
            "epochs": list(self._epochs),
            "bytes": list(self._bytes),
            "streams": [stream.state_dict() for stream in self._streams],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position that `state_dict` returned."""
        self.rows = state["rows"]
        self._epochs, self._bytes = list(state["epochs"]), list(state["bytes"])
        for index, position in enumerate(state["streams"]):
            self._streams[index] = self._open(index)
            self._streams[index].load_state_dict(position)

    def _amount(self, index: int) -> float:
        return self._bytes[index] / self._sources[index].spec.weight

    def _open(self, index: int) -> DocumentStream:
        order = f"{self._order}/{self._epochs[index]}"
        return self._sources[index].part(self._part, order)

"""A training loop's surroundings in a test: a small real stage, and a coordinator that is told what
to say. Nothing waits: what the loop waits for comes at once, or never.
"""

from __future__ import annotations

import errno
import json
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from dilocox.compression.group_quantization import GroupCodec
from dilocox.compression.layout import FlatLayout
from dilocox.dht.errors import UnreadableManifest
from dilocox.dht.manifest import Manifest
from dilocox.dht.swarm_view import SwarmView
from dilocox.peer.averaging.averager import StageBuffers
from dilocox.peer.averaging.coordinator import Coordinator
from dilocox.peer.averaging.events import Committed, Event, EventQueue
from dilocox.peer.averaging.loop_status import LoopStatus
from dilocox.peer.chain import snapshot_files
from dilocox.peer.process.prepare import local_model
from dilocox.peer.rounds.outer_step import OuterStep
from dilocox.peer.rounds.record import Contribution, ReducedShare, RoundRecord, SendFacts
from dilocox.peer.training.loop import Learner, LocalModel
from dilocox.peer.training.report import LoopMeter, Reporter
from dilocox.peer.training.snapshot_taking import BYTES_PER_S, Snapshots
from dilocox.pipeline.messages import Stepped
from dilocox.pipeline.stage import parameter_shapes
from tests.peer.members import template

ME = "me"
END_TOKENS = 10_000
STEP_TOKENS = 16  # of one inner step
MODEL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 384,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "tie_word_embeddings": False,
}


def fill_disk(patch: pytest.MonkeyPatch) -> list[int]:
    """From now on no snapshot can be written; an item for each that was tried."""
    tries = list[int]()

    def full(*_: Any, **__: Any) -> None:
        tries.append(1)
        raise OSError(errno.ENOSPC, "No space left on device")

    patch.setattr(snapshot_files, "save_tensors", full)
    return tries


def manifest(stages: int = 1, **sections: Any) -> Manifest:
    """A run whose sends lose nothing in the codec; inner steps of 2 * 8 tokens."""
    facts: dict[str, Any] = {
        "name": "test",
        "model": MODEL,
        "end_tokens": END_TOKENS,
        "stages": stages,
        "data": {"held_out_windows": 4},
        "batch": {"sequence_length": 8, "microbatch_size": 1, "microbatches": 2},
        "codec": {"bits": 32},
    }
    return Manifest.from_dict(facts | sections)


class Events(EventQueue):
    """Where the loop would wait, the next thing of `to_come` happens instead."""

    def __init__(self) -> None:
        super().__init__()
        self.to_come: deque[Callable[[], None]] = deque()
        self.waits = 0

    def get(self, wait_s: float = 0.0) -> Event | None:
        event = super().get()
        if event is None and wait_s > 0:
            self.waits += 1
            if self.to_come:
                self.to_come.popleft()()
                event = super().get()
        return event


class FakeCoordinator:
    """What the loop sees of the coordinator; what it is told by the loop is kept in `told`."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.due: tuple[int, float] | None = None
        self.alive = True
        self.events = Events()
        self.joined = threading.Event()
        self.status = LoopStatus()
        self.data_part: tuple[int, int] = (0, 0)
        self.heard_val_loss: tuple[int, float] | None = None
        self.revised = self.paused = self.ending = self.stopped = False
        self.cannot_follow: UnreadableManifest | None = None
        self.move_to: int | None = None
        self.moves_with_progress = False
        self.view = SwarmView(me=ME)
        self.undecided = False
        self.tokens_at_start = 0
        self.others_pace = 0.0
        self.applying = False
        self.newest_round = -1
        self.outcome_limit_s = self.end_limit_s = 60.0
        self.round = 0
        self.inner_steps = 10
        self.archived = True
        self.holds_alone = False
        self.on_submit: Callable[[], None] = lambda: None

    def is_alive(self) -> bool:
        return self.alive

    def send_due(self) -> tuple[int, float] | None:
        return self.due

    def submit(
        self, round_number: int, facts: SendFacts, *, scheduled_at: float, states_taken: int
    ) -> None:
        self.told.append(("submit", round_number, scheduled_at, facts.tokens, states_taken))
        self.due, self.round = None, round_number + 1
        self.on_submit()

    def skip(self, round_number: int) -> None:
        self.told.append(("skip", round_number))
        self.due, self.round = None, round_number + 1

    def stops(self, *, stages: int, has_text: bool) -> bool:
        self.told.append(("stops", stages, has_text))
        return self.stopped

    def announce(self) -> None:
        self.told.append(("announce",))

    def finish_part(self) -> None:
        self.told.append(("finish_part",))

    def leave(self) -> None:
        self.told.append(("leave",))

    def of_kind(self, kind: str) -> list[tuple[Any, ...]]:
        return [each for each in self.told if each[0] == kind]


class Loop:
    """A learner with a real merge, inner optimizer, snapshots and reports, and its coordinator."""

    def __init__(
        self,
        folder: Path,
        run: Manifest | None = None,
        *,
        stage: int = 0,
        bytes_per_s: float = BYTES_PER_S,
        offload: bool = False,
    ):
        """bytes_per_s: what snapshots in the background may write."""
        self.manifest = run or manifest()
        self.folder = folder
        self.stage = stage
        self.stop = threading.Event()
        self.layout = FlatLayout.of(
            parameter_shapes(self.manifest.model, self.manifest.stages, stage)
        )
        self.buffers = StageBuffers.allocate(self.layout.numel)
        self.snapshots = Snapshots(
            folder / "snapshots",
            layout=self.layout.digest,
            period_s=1500.0,
            bytes_per_s=bytes_per_s,
        )
        self.model: LocalModel = local_model(
            self.manifest,
            stage,
            self.layout,
            self.buffers,
            self.snapshots,
            torch.device("cpu"),
            offload=offload,
        )
        self.meter = LoopMeter(
            reporter=Reporter(folder),
            sent=self.buffers.sent.read,
            numel=self.layout.numel,
        )
        self.fake = FakeCoordinator()
        self.learner = Learner(
            me=ME,
            manifest=self.manifest,
            model=self.model,
            coordinator=self.coordinator,
            snapshots=self.snapshots,
            meter=self.meter,
            stop=self.stop,
        )

    @property
    def coordinator(self) -> Coordinator:
        return cast("Coordinator", self.fake)

    @property
    def live(self) -> Tensor:
        return self.model.merge.progress.live

    def train(self, steps: int = 1, *, skipped: bool = False) -> None:
        """Inner steps that move every weight by the same, and are counted."""
        for _ in range(steps):
            if not skipped:
                self.live.sub_(0.001)
            self.learner.stepped(Stepped(step=0, loss=3.0, skipped=skipped), 0.5)

    def send(self, number: int) -> None:
        """The moment for the send of this round has come."""
        self.fake.due = (number, 1.0)
        self.learner.between_steps()

    def end_round(self, steps: int, *, number: int = 0) -> None:
        """The inner steps of a round, and the send at its end."""
        self.train(steps)
        self.send(number)

    def own_record(self) -> None:
        """The record of the send in flight comes."""
        ((number, sent),) = self.model.merge.in_flight.items()
        self.fake.events.put(self.committed(number, sent.message, mine=True))

    def committed(self, number: int, average: Tensor | float, *, mine: bool = False) -> Committed:
        """The chain's next record, its outer step done, as the averaging process does it.

        `mine`: this peer's message is in it, and the codec lost nothing of it.
        """
        merge, outer = self.model.merge, self.manifest.outer
        if not isinstance(average, Tensor):
            average = torch.full_like(merge.anchor, average)
        OuterStep(outer.learning_rate, outer.momentum).apply(
            merge.anchor,
            merge.momentum,
            average,
            merge.anchor,
            merge.momentum,
        )
        if mine:
            self.buffers.message.zero_()
        return Committed(
            record=self._record(number, mine=mine),
            digest=f"{number:064x}",
            anchor_sha256="a" * 64,
            remainder=mine,
            exchange_s=None,
        )

    def _record(self, number: int, *, mine: bool) -> RoundRecord:
        members = (ME, "other") if mine else ("other", "third")
        part = ReducedShare(
            phase=0, reducer="other", start=0, stop=self.layout.numel, contributors=members
        )
        return template(
            round=number,
            previous=self.model.merge.digest,
            members=tuple(
                Contribution(peer=peer, tokens=100, exchange_s=0.0, step_s=0.0) for peer in members
            ),
            parts=(part,),
            chain_tokens=200 * (number + 1),
            means=(GroupCodec(32).encode(torch.zeros(self.layout.numel)).numpy().tobytes(),),
        )

    def save(self) -> None:
        """All of it is on the disk when this returns."""
        self.snapshots.write(self.model.merge, self.model.optimizer, self.learner.data_state())

    def again(self) -> Loop:
        """This peer after a restart: what it finds on its disk."""
        return Loop(self.folder, self.manifest, stage=self.stage)

    def events(self, kind: str) -> list[dict[str, Any]]:
        """What was reported, oldest first."""
        path = self.folder / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [event for event in map(json.loads, lines) if event["event"] == kind]

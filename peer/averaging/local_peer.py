"""Which peer this is: its run, its stage, what its volunteer wants, and where its files lie."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import cast

from dilocox.compression.layout import FlatLayout
from dilocox.dht.join import Joined
from dilocox.peer.chain.store import RoundLog
from dilocox.peer.options import PeerOptions
from dilocox.peer.rounds.record import stage_codec
from dilocox.peer.state_folder import LOG_FOLDER, SNAPSHOT_FOLDER


@dataclass(frozen=True, kw_only=True)
class LocalPeer(Joined):
    """A peer of one stage in the run that it joined: made once, before its processes are forked,
    and given to all that it consists of.

    addresses: at which others reach it. folder: of this stage, in the state folder.
    """

    stage: int
    layout: FlatLayout
    addresses: tuple[str, ...]
    options: PeerOptions
    folder: Path

    @cached_property
    def me(self) -> str:
        return self.identity.peer_id

    @cached_property
    def client_mode(self) -> bool:
        """Whether it only dials out."""
        return cast("bool", self.dht.client_mode)  # pyright: ignore[reportUnknownMemberType]

    @property
    def snapshots(self) -> Path:
        """The folder of its snapshots; the newest is served to joiners."""
        return self.folder / SNAPSHOT_FOLDER

    def open_log(self) -> RoundLog:
        """The log of its stage; the averaging process appends to it."""
        return RoundLog(
            self.folder / LOG_FOLDER,
            manifest_digest=self.manifest.root,
            codec=stage_codec(self.manifest, self.layout),
        )

"""One live table of a swarm on a terminal; plain lines, one a round, elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.live import Live
from rich.table import Table

from dilocox.peer.report import shown_loss
from dilocox.peer.watched import WatchedPeer


class SwarmTable:
    """A context; `update` shows the peers as they are."""

    def __init__(self, *, rounds: int):
        self._rounds = rounds
        self._console = Console()
        self._live = Live(console=self._console, auto_refresh=False, transient=False)
        self._printed: set[int] = set()

    def __enter__(self) -> SwarmTable:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def update(self, peers: Sequence[WatchedPeer]) -> None:
        """Show the newest figures."""
        if self._console.is_terminal:
            self._live.update(self._table(peers), refresh=True)
            return
        losses = {number: loss for peer in peers for number, loss in peer.losses.items()}
        for peer in peers:
            for line in peer.rounds:
                number = line["round"]
                if number not in self._printed and number in losses:
                    self._printed.add(number)
                    self._console.print(
                        f"round {number}: {line['members']} members, "
                        f"{line['chain_tokens']:,} tokens so far, train loss "
                        f"{shown_loss(line['train_loss'])}, validation loss {losses[number]:.4f}, "
                        f"digest {line['digest'][:12]}",
                        highlight=False,
                        soft_wrap=True,  # one line, however long
                    )

    def _table(self, peers: Sequence[WatchedPeer]) -> Table:
        table = Table(title=f"dilocox demo: {self._rounds} rounds", title_justify="left")
        for name in ("peer", "state", "round", "step", "train loss", "validation", "tokens/s"):
            table.add_column(name, justify="left" if name in ("peer", "state") else "right")
        for name in ("waiting", "committed", "digest"):
            table.add_column(name, justify="right")
        for peer in peers:
            status = peer.status
            last = peer.rounds[-1] if peer.rounds else None
            table.add_row(
                peer.name,
                status.get("state", "starting"),
                str(status.get("round", "-")),
                f"{status.get('inner_step', '-')}/{status.get('inner_steps', '-')}",
                shown_loss(status.get("train_loss")),
                shown_loss(status.get("val_loss")),
                f"{status.get('tokens_per_s', 0.0):,.0f}",
                f"{peer.waiting_share:.1%}",
                str(len(peer.rounds)),
                "-" if last is None else last["digest"][:12],
            )
        return table

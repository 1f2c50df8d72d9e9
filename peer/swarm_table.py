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
        newest_loss = max(losses, default=-1)  # of rounds before it none will be told any more
        lines = {line["round"]: line for peer in peers if peer.stage == 0 for line in peer.rounds}
        for number, line in sorted(lines.items()):
            if number <= newest_loss and number not in self._printed:
                self._printed.add(number)
                self._console.print(
                    f"round {number}: {line['members']} replicas, "
                    f"{line['chain_tokens']:,} tokens so far, train loss "
                    f"{shown_loss(line['train_loss'])}, validation loss "
                    f"{shown_loss(losses.get(number))}, digest of stage 0 {line['digest'][:12]}",
                    highlight=False,
                    soft_wrap=True,  # one line, however long
                )

    def _table(self, peers: Sequence[WatchedPeer]) -> Table:
        table = Table(title=f"dilocox demo: {self._rounds} rounds", title_justify="left")
        for name in ("stage", "peer", "state", "replica"):
            table.add_column(name, justify="left")
        for name in ("round", "step", "train loss", "validation", "tokens/s", "waiting"):
            table.add_column(name, justify="right")
        for name in ("committed", "digest"):
            table.add_column(name, justify="right")
        heads = {peer.head: peer.number for peer in peers if peer.stage == 0 and peer.head}
        for peer in peers:
            status = peer.status
            last = peer.rounds[-1] if peer.rounds else None
            table.add_row(
                str(peer.stage),
                peer.name,
                status.get("state", "starting"),
                _replica(peer, heads),
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


def _replica(peer: WatchedPeer, heads: dict[str, int]) -> str:
    """Of the replica that a peer is in: the number of its head; a dash for none."""
    if not peer.head:
        return "-"
    number = heads.get(peer.head)
    role = " (head)" if peer.stage == 0 else ""
    return f"{peer.head[-6:] if number is None else number}{role}"

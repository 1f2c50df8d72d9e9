"""Where a peer's training loop stands: one value, made by the loop after every inner step.

The coordinator announces it in the peer's DHT records (announcer.py), `/metrics` and status.json
show it, the log's progress line reads it. A new figure is a field here, the line that counts it
(training/report.py) and, to be announced, a field of the same name in dht/records.py.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class OwnContribution:
    """What a peer gave to its stage since it joined, restarts included.

    since: seconds since the epoch, 0 before it trained. rounds, tokens: of its own, committed ones.
    of_tokens: of all records since. val_loss: the first that it knew.
    """

    since: float = 0.0
    rounds: int = 0
    tokens: int = 0
    of_tokens: int = 0
    val_loss: float | None = None


@dataclass(frozen=True, kw_only=True)
class LoopStatus:
    """Tokens are this peer's own, losses are nats a token, shares are from 0 to 1.

    state: of state_folder.STATES; spare while it trains in no replica.
    head: peer id of the head of its replica, empty where it is in none.
    members: by stage, of the replica that it leads; empty where it leads none.
    epoch, codec, last_fault: of that replica.
    undecided: the send of another of its members was, at the last inner step.
    oldest_anchor: the round of the oldest anchor that these had then; None without others.
    blocked: why this peer does not train, or empty.
    started_over: it gave up all that it had learnt, and has taken no inner step since.
    data_part, data_position: what it reads of the data, and where; -1 before it does.
    inner_step, inner_steps: of the round, taken and planned (H).
    applied_round: of the last record in its anchor. in_flight: the one whose exchange runs.
    step_s: the longest inner step of the round; before its first one has ended, of the last round.
    caught_up_s: that the end of a round waits until records are in the anchor, at most.
    waiting_share, round_waiting_share: waited for averages, of all its time and of its last round.
    computing_share: of the time since it first was in a replica.
    spare_share: of its time since it began to train, in no replica.
    compression_error: |m - c| / |m| of its newest message in a round.
    gave: what this peer gave so far.
    unsent_tokens: those that no record holds as far as it knows. lost_tokens: none ever will.
    """

    state: str = "joining"
    head: str = ""
    members: tuple[str, ...] = ()
    epoch: int = 0
    codec: str = ""
    last_fault: str = ""
    undecided: bool = False
    oldest_anchor: int | None = None
    blocked: str = ""
    started_over: bool = False
    data_part: int = -1
    data_position: int = 0
    round: int = 0
    inner_step: int = 0
    inner_steps: int = 0
    applied_round: int = -1
    in_flight: int | None = None
    step_s: float = 0.0
    caught_up_s: float = 0.0
    tokens: int = 0
    tokens_per_s: float = 0.0
    train_loss: float | None = None
    val_loss: float | None = None
    val_round: int = -1
    waiting_share: float = 0.0
    round_waiting_share: float = 0.0
    computing_share: float = 0.0
    spare_share: float = 0.0
    compression_error: float | None = None
    gave: OwnContribution = OwnContribution()
    unsent_tokens: int = 0
    lost_tokens: int = 0

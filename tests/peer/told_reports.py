"""What a peer that trains says of itself, and of a round that counted."""

from __future__ import annotations

from dilocox.peer.averaging.loop_status import LoopStatus
from dilocox.peer.training.report import RoundReport

STATUS = LoopStatus(
    state="training",
    head="h",
    members=("h", "m"),
    epoch=1,
    codec="bf16",
    blocked="",
    round=2,
    inner_step=3,
    inner_steps=8,
    tokens=64,
    train_loss=None,
    val_loss=2.5,
    val_round=1,
    tokens_per_s=1234.0,
    waiting_share=0.01,
    applied_round=1,
    in_flight=1,
)
REPORT = RoundReport(
    round=1,
    inner_steps=8,
    tokens=512,
    record_tokens=1024,
    chain_tokens=2048,
    train_loss=3.0,
    val_loss=None,
    val_round=-1,
    tokens_per_s=100.0,
    waiting_share=0.025,
    sent_bytes=2500,
    averaging_bytes=1500,
    fp16_bytes=4000,
    exchange_s=None,
    members=2,
    outcome="counted",
    digest="d" * 64,
    anchor_sha256="a" * 64,
)

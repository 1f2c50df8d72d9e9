"""The command `dilocox plan`: what a run will do on given machines, before anybody starts it.

What: a table, or JSON. The machines are told as options; with `--from` a live run tells its own:
how many there are, how fast they compute, and how fast the link to one of them is.
How: peer/process/run_plan.py reckons; here its figures become words.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import asdict, replace
from statistics import median
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from dilocox.dht.errors import InvalidInput
from dilocox.dht.invite import Invite
from dilocox.dht.manifest import Manifest
from dilocox.peer.commands.operate import completed
from dilocox.peer.memory_and_disk import size
from dilocox.peer.options import GB, PlanOptions
from dilocox.peer.os_process import counted, wide_console, write_json
from dilocox.peer.process.prepare import stage_kinds
from dilocox.peer.process.run_plan import Machines, Method, RunPlan

MBIT = 1e6 / 8
STAGES_SHOWN = 16  # of more only those that differ
PLANNED_PEERS = 4  # where nobody says how many


def run_plan_command(options: PlanOptions) -> int:
    """Reckon and show; the exit code is 1 where a stage does not fit the memory that is told."""
    measured: dict[str, float] | None = None
    if options.invite is None:
        manifest = Manifest.load(options.file, completed)
        machines = _told(options)
    else:
        manifest, machines, measured = _of_run(options, options.invite)
    found = RunPlan(manifest, machines)
    changes = _changes(found)
    if options.json_file is None:
        _show(found, changes, measured)
    else:
        write_json(options.json_file, as_json(found, changes, measured))
    return 0 if found.fits else 1


def _told(options: PlanOptions, **measured: Any) -> Machines:
    """What the options say, in the place of what was measured."""
    down = options.mbit or measured.get("mbit")
    if down is None:
        raise InvalidInput("--mbit is missing: the link of the slowest peer, in Mbit/s")
    up = options.up_mbit or options.mbit or measured.get("up_mbit", down)
    rates = options.tokens_per_s or ()
    if not rates and options.tflops is None:
        rates = measured.get("tokens_per_s", ())
    return Machines(
        peers=options.peers or measured.get("peers", PLANNED_PEERS),
        up_bytes_s=up * MBIT,
        down_bytes_s=down * MBIT,
        rtt_s=options.rtt_ms / 1e3,
        flops=None if options.tflops is None else options.tflops * 1e12,
        stage_tokens_s=rates,
        memory_bytes=None if options.memory_gb is None else options.memory_gb * GB,
        gpu_memory_bytes=None if options.gpu_memory_gb is None else options.gpu_memory_gb * GB,
        threads=options.threads,
    )


def _of_run(options: PlanOptions, invite: Invite) -> tuple[Manifest, Machines, dict[str, float]]:
    """The manifest of a live run, its machines, and what it does, as its peers state it."""
    from dilocox.dht.join import visiting  # hivemind is heavy
    from dilocox.peer.commands.doctor_swarm import SwarmFacts

    with visiting(invite, options.host) as joined:
        manifest = joined.manifest
        with contextlib.closing(SwarmFacts(joined, invite, "")) as swarm:
            hosts = {
                stage: [r for r in here.values() if r.state == "training" and r.tokens_per_s > 0]
                for stage, here in swarm.records.items()
            }
            lacking = [str(s) for s in range(manifest.stages) if not hosts.get(s)]
            if lacking:
                raise InvalidInput(
                    f"nobody trains stage {', '.join(lacking)} of this run now: give its run.yaml, "
                    "and its machines as options"
                )
            link = None if options.mbit else swarm.bandwidth(0)
            peers = sum(swarm.peers.values())
    # a member states its replica's speed; for a share of the time its own stage computes
    rates = tuple(
        median(each.tokens_per_s / (each.computing_share or 1.0) for each in hosts[stage])
        for stage in range(manifest.stages)
    )
    steps = round(median(each.inner_steps for each in hosts[0]))
    known: dict[str, float] = {
        "peers": peers,
        "inner_steps": steps,
        "tokens_per_s": sum(each.tokens_per_s for each in hosts[0]),
        "computing": median(each.computing_share or 0.0 for each in hosts[0]),
    }
    told: dict[str, Any] = {"peers": peers, "tokens_per_s": rates}
    if link is not None:
        told |= {"mbit": link.down_bytes_per_s / MBIT, "up_mbit": link.up_bytes_per_s / MBIT}
    rounds = replace(manifest.rounds, inner_steps=steps)
    return replace(manifest, rounds=rounds), _told(options, **told), known


def _changes(found: RunPlan) -> dict[str, RunPlan]:
    """The same run with a little more of what might hold it up."""
    machines = found.machines
    peers, stages = machines.peers, found.manifest.stages
    more = {"one more peer": replace(machines, peers=peers + 1)}
    if stages > 1:  # which may be a spare
        more["one more replica"] = replace(machines, peers=peers + stages)
    more["twice the uplink"] = replace(machines, up_bytes_s=2 * machines.up_bytes_s)
    return {name: RunPlan(found.manifest, each, memory=False) for name, each in more.items()}


# ---- what scripts read ---------------------------------------------------------------------------
def as_json(
    found: RunPlan, changes: dict[str, RunPlan], measured: dict[str, float] | None
) -> dict[str, Any]:
    """The figures under stable names; seconds, bytes, shares from 0 to 1."""
    exchange = asdict(found.exchange)
    exchange |= {"codec_s": found.exchange.codec_s, "seconds": found.exchange.seconds}
    return {
        "run": found.manifest.name,
        "machines": asdict(found.machines),
        "replicas": found.replicas,
        "spares": found.spares,
        "fits": found.fits,
        "fewest_stages": found.fewest_stages,
        "stages": [asdict(each) for each in found.stages],
        "step": asdict(found.step),
        "exchange": exchange,
        "inner_steps_a_round": found.inner_steps,
        "days": found.days,
        "month_gb": found.month_gb,
        "hidden_inner_steps": found.hidden_steps,
        "hidden_rank": found.hidden_rank,
        "hidden_bits": found.hidden_bits,
        "bottleneck": found.limit,
        "methods": [asdict(each) for each in found.methods],
        "changes": {name: asdict(each.ours) for name, each in changes.items()},
        "measured": measured,
    }


# ---- what people read ----------------------------------------------------------------------------
def _show(found: RunPlan, changes: dict[str, RunPlan], measured: dict[str, float] | None) -> None:
    console = wide_console(highlight=False)
    run, ours, step, exchange = found.manifest, found.ours, found.step, found.exchange
    console.print(
        f"{run.name}: {sum(each.values for each in found.stages) / 1e6:,.1f} million parameters in "
        f"{counted(run.stages, 'stage')}; {counted(found.machines.peers, 'peer')} make "
        f"{counted(found.replicas, 'replica')} and {counted(found.spares, 'spare')}"
    )
    _show_stages(console, found)
    lines = [
        ("an inner step", f"{step.total_s:.3g} s, {step.computing_s:.3g} s of it computing"),
        ("a round", f"{found.inner_steps:,.0f} inner steps, {ours.round_s:,.1f} s"),
        (
            "an exchange",
            f"{exchange.seconds:.3g} s: {exchange.wire_s:.3g} s of bytes, {exchange.ways_s:.3g} s "
            f"of round trips, {exchange.codec_s:.3g} s of codec"
            + (f"; in {exchange.rows} rows" if exchange.rows > 1 else ""),
        ),
        (
            "a peer sends",
            f"{size(exchange.up_bytes)} a round and {size(step.sent_bytes)} an inner step"
            + (f" ({step.codec})" if step.sent_bytes else "")
            + f"; {found.month_gb:,.0f} GB a month",
        ),
        ("computing", f"{ours.computing:.1%} of the time"),
        ("tokens/s", f"{ours.tokens_per_s:,.0f}; {run.end_tokens:,} tokens in {_days(found)}"),
        ("bottleneck", found.limit),
        (
            "hidden",
            f"an exchange takes half a round from H = {found.hidden_steps:,} on; at H = "
            f"{run.rounds.inner_steps:,} with {_hidden_codecs(found)}",
        ),
    ]
    for name, each in changes.items():
        gain = each.ours.tokens_per_s / ours.tokens_per_s - 1
        lines.append((name, f"{gain:+.1%} tokens/s"))
    if measured is not None:
        speed = measured["tokens_per_s"]
        lines.append(("measured", f"{speed:,.0f} tokens/s of {measured['peers']:.0f} peers"))
    table = _table(("", ""), right=False)
    for line in lines:
        table.add_row(*line)
    console.print(table)
    _show_methods(console, found.methods)


def _hidden_codecs(found: RunPlan) -> str:
    """Whether the links carry a dense codec, which Muon takes; docs/operator.md has the rule."""
    rank = f"low rank up to {found.hidden_rank}" if found.hidden_rank else "no rank"
    dense = f"{found.hidden_bits} dense bits: for inner.optimizer muon"
    return f"{rank}, and {dense}" if found.hidden_bits else f"{rank}, and no dense codec"


def _show_stages(console: Console, found: RunPlan) -> None:
    gpu = found.machines.gpu_memory_bytes is not None
    table = _table(("stage", "layers", "parameters", "memory", "GPU", "fits", "microbatch"))
    stages = found.stages
    if len(stages) > STAGES_SHOWN:
        stages = [stages[stage] for stage in stage_kinds(found.manifest)]
    for each in stages:
        first, last = each.layers
        table.add_row(
            f"{each.stage} of {len(found.stages)}",
            f"{first}" if first == last else f"{first} to {last}",
            f"{each.values / 1e6:,.1f} M",
            size(each.memory_bytes),
            size(each.gpu_memory_bytes) if gpu else "-",
            "yes" if each.fits else "no",
            f"{each.pass_s:.3g} s",
        )
    console.print(table)
    if found.fewest_stages is not None and found.fewest_stages != len(found.stages):
        console.print(f"the fewest stages that fit: {found.fewest_stages}")
    elif not found.fits:
        console.print("no cut into as many stages as there are peers fits")


def _show_methods(console: Console, methods: Sequence[Method]) -> None:
    slowest = methods[-1].tokens_per_s
    table = _table(("", "sent a step", "a round", "tokens/s", "computing", "x AllReduce"))
    for method in methods:
        table.add_row(
            method.name,
            size(method.step_bytes),
            f"{method.round_s:,.1f} s",
            f"{method.tokens_per_s:,.1f}",
            f"{method.computing:.1%}",
            f"{method.tokens_per_s / slowest:,.1f}",
        )
    console.print(table)


def _table(heads: Sequence[str], *, right: bool = True) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, show_header=any(heads))
    for number, head in enumerate(heads):
        table.add_column(head, justify="right" if right and number else "left")
    return table


def _days(found: RunPlan) -> str:
    return f"{found.days:,.1f} days" if found.days >= 1 else f"{found.days * 24:.1f} hours"

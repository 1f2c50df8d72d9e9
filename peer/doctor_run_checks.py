"""What `dilocox doctor` concludes about the network and the run: rules like doctor_checks.py's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from dilocox.dht.errors import DilocoxError
from dilocox.dht.invite import bootstrap_address
from dilocox.dht.reach import Reachability
from dilocox.peer.doctor_checks import Check, counts_in_words, fault, size

CLOCK_WARNING_S = 2.0
SOME_PORT = 31337  # to name one, where `--port` does not
PEER_CLOCK_S = 1.0  # what two peers of a run may be apart


# ---- the way to the run --------------------------------------------------------------------------
def bootstrap_checks(faults: Mapping[str, str | None]) -> list[Check]:
    """One line for each address of the invite; None where somebody listens, else why not."""
    reached = any(why is None for why in faults.values())
    return [_bootstrap_check(address, why, reached) for address, why in faults.items()]


def _bootstrap_check(address: str, why: str | None, others: bool) -> Check:
    at = bootstrap_address(address)
    where = f"{at.host} port {at.port}"
    if why is None:
        return Check("bootstrap", "ok", f"{where} accepts connections")
    text = f"{where}: {why}"
    if others:
        return Check("bootstrap", "warning", text, "another one is enough; tell the operator")
    reason = why.lower()
    if "refused" in reason:
        mend = "ask the operator whether the bootstrap runs and whether the invite is current"
    elif "name" in reason or "resolution" in reason or "address associated" in reason:
        mend = "check that this machine is online, and the name in the invite"
    else:
        mend = (
            f"check that this machine is online and may dial out to TCP port {at.port}, and ask "
            "the operator whether the bootstrap runs"
        )
    return Check("bootstrap", "failed", text, mend)


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What the manifest and the chain say.

    model: its family. values: parameters of the whole model. trained: the share of the run's tokens
    that is in round records. state: as the operator set it.
    """

    name: str
    stages: int
    model: str
    values: int
    trained: float
    state: Literal["running", "paused", "ended"] = "running"


def run_check(run: RunFacts) -> Check:
    """What the invite leads to."""
    stages = f"{run.stages} stage{'s' if run.stages > 1 else ''}"
    text = f"{run.name}: {stages}, {run.model}, {_millions(run.values)}"
    if run.state == "ended" or run.trained >= 1:
        mend = "ask the operator for the invite of another run"
        return Check("run", "failed", f"{text}; it has ended", mend)
    if run.state == "paused":
        mend = "no need to do anything: a peer waits until the operator resumes it"
        return Check("run", "warning", f"{text}; its operator has paused it", mend)
    return Check("run", "ok", f"{text}, {100 * run.trained:.0f} % done")


def version_check(own: str, protocol: int, others: Mapping[str, int]) -> Check:
    """Whether this program speaks as the run's peers do. others: how many peers have a version."""
    text = f"{own} with protocol {protocol}, as the run"
    if not others:
        return Check("version", "ok", text)
    if set(others) == {own}:
        return Check("version", "ok", f"{text} and its peers")
    text += f"; its peers: {counts_in_words(others)}"
    newest = max(others, key=lambda version: (others[version], version))
    if others.get(own, 0) >= others[newest]:
        return Check("version", "ok", text)
    mend = f"it works, as the protocol is the same; to be like most, install {newest}"
    return Check("version", "warning", text, mend)


def clock_check(offset_s: float, peer_offset_s: float | None) -> Check:
    """Whether the clocks agree.

    offset_s: how far the bootstraps' clocks are ahead of this machine's. peer_offset_s: how far a
    peer's run time is ahead of ours, None where no peer told its own.
    """
    text = f"{abs(offset_s):.1f} s {'behind' if offset_s > 0 else 'ahead of'} the bootstraps"
    if abs(offset_s) < 0.05:
        text = "as the bootstraps'"
    if peer_offset_s is not None and abs(peer_offset_s) > PEER_CLOCK_S:
        return Check(
            "clock",
            "warning",
            f"the run's time here and at a peer are {abs(peer_offset_s):.1f} s apart",
            "tell the operator: the clocks of the bootstraps and of that peer differ",
        )
    if abs(offset_s) > CLOCK_WARNING_S:
        mend = "dilocox corrects it; for other programs: `sudo timedatectl set-ntp true`"
        return Check("clock", "warning", text, mend)
    return Check("clock", "ok", text)


# ---- the way to this peer ------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class ReachFacts:
    """What others found when they dialled back.

    addresses: that worked, or that were announced. seen: the IP addresses that they see it at.
    port: of `--port`.
    """

    kind: Reachability
    addresses: Sequence[str]
    seen: Sequence[str]
    port: int
    announced: bool


def reach_check(reach: ReachFacts) -> Check:
    """Whether others can dial this peer. One that only dials out takes part all the same."""
    if reach.kind in ("public", "mapped"):
        text = f"others reach this machine at {_shown(reach.addresses)}"
        return Check("reachable", "ok", text)
    if reach.kind == "unknown":
        return Check(
            "reachable",
            "warning",
            "not known: nobody answered who could dial back",
            "try again when the run has more peers",
        )
    text = "others cannot dial this machine: it would only dial out, and lead nobody"
    return Check("reachable", "warning", text, _opening(reach))


def _opening(reach: ReachFacts) -> str:
    """How to make a port reachable."""
    if reach.announced:
        return f"see that {_shown(reach.addresses)} leads to port {reach.port} of this machine"
    port = reach.port or SOME_PORT
    host = next((ip for ip in reach.seen if ":" not in ip), "ADDRESS")
    return (
        f"it works without; better: let TCP port {port} through firewall and router to this "
        f"machine (in a container -p {port}:{port}) and start with --port {port} --announce "
        f"/ip4/{host}/tcp/{port}"
    )


def _shown(addresses: Sequence[str]) -> str:
    """The first address, and how many more there are."""
    if not addresses:
        return "its own address"
    first = addresses[0].partition("/p2p/")[0]
    return first if len(addresses) == 1 else f"{first} and {len(addresses) - 1} more"


@dataclass(frozen=True, kw_only=True)
class ExchangeFacts:
    """What an exchange of the stage moves each way, and how fast it may.

    down, link_up: bytes a second, measured. up: as `--max-upload` bounds it. limit_s: of an
    exchange.
    """

    stage: int
    payload_bytes: int
    down: float
    link_up: float
    up: float
    limit_s: float

    @property
    def seconds(self) -> float:
        """How long an exchange takes at least."""
        return self.payload_bytes / max(1.0, min(self.down, self.up))


def bandwidth_check(exchange: ExchangeFacts) -> Check:
    """Whether the link moves an exchange within its deadline."""
    text = f"{size(exchange.down)}/s down, {size(exchange.up)}/s up"
    if exchange.seconds > exchange.limit_s:
        return Check(
            "bandwidth",
            "failed",
            f"{text}; an exchange of stage {exchange.stage} would take {exchange.seconds:.0f} s, "
            f"it may take {exchange.limit_s:.0f} s",
            "use a faster link, raise --max-upload if it is set, or host a smaller stage",
        )
    return Check("bandwidth", "ok", text)


def port_check(host: str, port: int, error: DilocoxError | None, *, own_peer: bool) -> Check:
    """Whether this peer can listen. own_peer: one runs in this state folder, and may have it."""
    if error is None:
        return Check("port", "ok", f"{port} of {host} is free" if port else "any free one")
    if own_peer:
        return Check("port", "ok", f"{port} of {host} is in use, by this folder's peer it seems")
    return fault("port", error)


# ---- the part it would play ----------------------------------------------------------------------
def stage_check(
    option: str, stage: int, peers: Mapping[int, int], stages: int, before: int | None
) -> Check:
    """Which stage this peer takes.

    peers: others by stage, without the stages of which nothing could be learnt. before: the stage
    that it had last.
    """
    here = peers.get(stage)
    others = "nobody else" if here == 0 else f"{here} other peer{'' if here == 1 else 's'}"
    has = "of which nobody knows who has it" if here is None else f"which has {others}"
    text = f"it would take stage {stage}, {has}"
    if option == "auto" and stages > 1:
        counts = ", ".join(str(peers.get(number, "?")) for number in range(min(stages, 16)))
        more = ", ..." if stages > 16 else ""
        text += "; it had it before" if before == stage else f"; peers by stage: {counts}{more}"
    empty = [number for number in range(stages) if peers.get(number) == 0 and number != stage]
    if empty:
        text += f"; stage {', '.join(map(str, empty[:4]))} would still have nobody"
        mend = "invite more volunteers: a run trains when every stage has a peer"
        return Check("stage", "warning", text, mend)
    return Check("stage", "ok", text)


@dataclass(frozen=True, kw_only=True)
class SpeedFacts:
    """How fast this machine computes a stage. measured: by inner steps, else from multiplications.

    link_tokens_per_s: what the links to its neighbours carry at most, None where it has none, or
    they are not known. shared: another peer computes here now. fault: why nothing is known.
    """

    tokens_per_s: float = 0.0
    measured: bool = True
    link_tokens_per_s: float | None = None
    shared: bool = False
    fault: str = ""


def speed_check(stage: int, speed: SpeedFacts, exchange_s: float | None) -> Check:
    """What this peer would contribute."""
    if speed.fault:
        mend = "see more with --log-level debug"
        return Check("speed", "warning", f"not known: {speed.fault}", mend)
    text = f"about {rounded(tokens_per_s(speed))} tokens/s in stage {stage}"
    if bound_by_link(speed):
        text += f", bound by the link (it computes {rounded(speed.tokens_per_s)})"
    elif not speed.measured:
        text += ", estimated from multiplications"
    if speed.shared:
        text += ", beside the peer that runs"
    if exchange_s is not None:
        text += f"; {max(0.1, exchange_s):.{0 if exchange_s > 9 else 1}f} s an exchange"
    return Check("speed", "ok", text)


def bound_by_link(speed: SpeedFacts) -> bool:
    """Whether the links to its neighbours carry less than it computes."""
    return speed.link_tokens_per_s is not None and speed.link_tokens_per_s < speed.tokens_per_s


def tokens_per_s(speed: SpeedFacts) -> float:
    """What comes through: computed, and carried to the neighbours."""
    limit = speed.link_tokens_per_s
    return speed.tokens_per_s if limit is None else min(limit, speed.tokens_per_s)


def rounded(value: float) -> str:
    """Two digits of it, and commas."""
    return f"{float(f'{value:.2g}'):,.0f}"


def _millions(values: int) -> str:
    if values >= 1e9:
        return f"{values / 1e9:.1f} billion parameters"
    return f"{values / 1e6:.{1 if values < 1e8 else 0}f} million parameters"

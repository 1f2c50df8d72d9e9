"""What `dilocox doctor` concludes about a machine and a run: rules, from facts to one line each.

failed   a peer could not take part
warning  it can, but worse than it could, or something here could not be found out
ok       nothing to do

Whatever is not ok names its remedy. Machine first, then the network and the run.

None of them asks a network, and nothing is written: a doctor leaves no trace in a state folder.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from dilocox.dht.errors import DilocoxError, reason_of
from dilocox.dht.identity import Identity
from dilocox.dht.invite import bootstrap_address
from dilocox.peer.memory_and_disk import Check, memory_remedy, memory_status, nearest, size
from dilocox.peer.os_process import counted
from dilocox.peer.state_folder import StateFolder

if TYPE_CHECKING:
    from dilocox.dht.addresses import Reachability
    from dilocox.dht.manifest import Manifest

PYTHONS = ((3, 10), (3, 13))
MAX_NAMED = 6
CLOCK_WARNING_S = 2.0
PEER_CLOCK_S = 1.0  # what two peers of a run may be apart
SOME_PORT = 31337  # to name one, where `--port` does not
# Those whose version matters or whose import can fail on a machine; the others come with them.
LIBRARIES = ("torch", "hivemind", "transformers", "datasets", "safetensors")
_REQUIREMENT = re.compile(r"([A-Za-z0-9_-]+)((?:[<>=!~]=?.*)?)")


def fault(name: str, error: DilocoxError) -> Check:
    """What an error for people says, which ends with its remedy."""
    text = str(error)
    cut = max(text.rfind(": "), text.rfind("; "))
    if cut < 0:
        return Check(name, "failed", text, "see more with --log-level debug")
    return Check(name, "failed", text[:cut], text[cut + 2 :])


# ---- programs ------------------------------------------------------------------------------------
def python_check(version: tuple[int, int, int], system: str, machine: str) -> Check:
    """Whether this Python and this system are ones that dilocox runs on."""
    text = f"{'.'.join(map(str, version))}, {system} on {machine}"
    low, high = PYTHONS
    if not low <= version[:2] <= high:
        wanted = f"{low[0]}.{low[1]} to {high[0]}.{high[1]}"
        return Check("python", "failed", text, f"install it for a Python from {wanted}")
    if (system, machine) != ("Linux", "x86_64"):
        remedy = "if it does not start, use Linux on x86-64, or WSL2"
        return Check("python", "warning", f"{text}, which nobody has tried", remedy)
    return Check("python", "ok", text)


@dataclass(frozen=True, kw_only=True)
class Library:
    """A library that dilocox needs. needed: as in `==1.1.12`. fault: why it cannot be used."""

    name: str
    version: str
    needed: str = ""
    fault: str = ""


def libraries() -> list[Library]:
    """The versions that are here, those that are needed, and whether they can be loaded."""
    needed = _needed()
    return [_library(name, needed.get(name, "")) for name in LIBRARIES]


def _needed() -> dict[str, str]:
    """What this program's own package asks for; nothing where it was not installed as one."""
    try:
        lines = importlib.metadata.requires("dilocox") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    found = (_REQUIREMENT.fullmatch(line) for line in lines if ";" not in line)
    return {match[1]: match[2].replace(" ", "") for match in found if match is not None}


def _library(name: str, needed: str) -> Library:
    version = why = ""
    try:
        version = importlib.metadata.version(name)
        importlib.import_module(name)
    except importlib.metadata.PackageNotFoundError:
        pass
    except Exception as error:  # noqa: BLE001 - a broken library raises what it likes
        why = reason_of(error)
    return Library(name=name, version=version, needed=needed, fault=why)


def libraries_check(libraries: Sequence[Library]) -> Check:
    """Whether the libraries are there, of the right versions, and can be loaded."""
    missing = [each for each in libraries if not each.version]
    wrong = [each for each in libraries if not _satisfied(each.version, each.needed)]
    if missing or wrong:
        text = ", ".join(f"{each.name} {each.version}, not {each.needed}" for each in wrong)
        if missing:
            text = f"missing: {', '.join(each.name for each in missing)}"
        wanted = " ".join(f"'{each.name}{each.needed}'" for each in missing or wrong)
        return Check("libraries", "failed", text, f"python -m pip install {wanted}")
    for each in libraries:
        if each.fault:
            text = f"{each.name} {each.version} cannot be loaded: {each.fault}"
            remedy = f"python -m pip install --force-reinstall '{each.name}=={each.version}'"
            return Check("libraries", "failed", text, remedy)
    return Check("libraries", "ok", ", ".join(f"{each.name} {each.version}" for each in libraries))


def _satisfied(version: str, needed: str) -> bool:
    """Whether a version is as `==1.2` or `>=1.2` asks; whatever else is asked for passes."""
    if needed.startswith("=="):
        return _numbers(version) == _numbers(needed[2:])
    if needed.startswith(">="):
        return _numbers(version) >= _numbers(needed[2:])
    return True


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.partition("+")[0].split(".")
    return tuple(int(part) for part in parts if part.isdecimal())


# ---- state folder --------------------------------------------------------------------------------
def folder_check(folder: StateFolder, *, in_use: bool) -> Check:
    """Whether a peer can use the state folder now. in_use: its peer runs."""
    path = folder.path
    if in_use:
        text = f"{path}: its peer runs now; the lines below say what it leaves"
        remedy = "give a second peer a folder and a port of its own with --state and --port"
        return Check("folder", "warning", text, remedy)
    if not os.access(nearest(path), os.W_OK | os.X_OK):
        remedy = "name a folder that this user can write to with --state"
        return Check("folder", "failed", f"{path}: this user cannot write to it", remedy)
    if folder.paused:
        remedy = f"`dilocox resume --state {path}` lets it take part"
        return Check("folder", "warning", f"{path}: its peer is paused", remedy)
    return Check("folder", "ok", str(path))


def key_check(folder: StateFolder) -> tuple[Check, str]:
    """Whether the key file, which is this peer's identity, can be used; the peer's id, empty where
    there is none yet.
    """
    if not folder.identity.exists():
        return Check("key", "ok", "none yet; the first start makes one"), ""
    try:
        peer_id = Identity.load_or_create(folder.identity).peer_id
    except DilocoxError as error:
        return fault("key", error), ""
    return Check("key", "ok", f"peer {peer_id}"), peer_id


# ---- room ----------------------------------------------------------------------------------------
def memory_check(
    name: str,
    free_bytes: int,
    total_bytes: int,
    limit_bytes: float | None,
    plans: Sequence[int] | None,
    stage: int | None,
) -> Check:
    """Whether the stage, and which others, fit into memory, by the rule of a peer's start.

    name: "memory", or the GPU's. limit_bytes: of `--memory-limit`. plans: bytes that a peer of each
    stage takes, None where the run is not known. stage: the one that this peer takes.
    """
    most = min(total_bytes, limit_bytes or total_bytes)
    room, limited = min(free_bytes, int(most)), most < total_bytes
    text = f"{size(room)} {'allowed by --memory-limit' if room < free_bytes else 'free'}"
    if plans is None or stage is None:
        return Check(name, "ok", text)
    fitting = [number for number, plan in enumerate(plans) if plan <= room]
    text += f", {size(plans[stage])} needed for stage {stage}"
    if len(plans) > 1:
        text += f"; {_stages(fitting, len(plans))}"
    status = memory_status(plans[stage], most, free_bytes)
    if status == "ok":
        return Check(name, status, text)
    text += f"; a peer here may take {size(most)}"
    remedy = memory_remedy(plans[stage], most, free_bytes, limited=limited, gpu=name == "gpu")
    if fitting and stage not in fitting:
        remedy += f", or host stage {fitting[0]} with `--stage {fitting[0]}`"
    return Check(name, status, text, remedy)


def _stages(fitting: Sequence[int], count: int) -> str:
    """Which stages of several this machine has room for."""
    if len(fitting) == count:
        return "all stages fit"
    if not fitting:
        return "no stage fits"
    shown = ", ".join(map(str, fitting[:MAX_NAMED]))
    more = f" and {len(fitting) - MAX_NAMED} more" if len(fitting) > MAX_NAMED else ""
    return f"of {count} stages {shown}{more} fit{'s' if len(fitting) == 1 else ''}"


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """Where a peer computes.

    name, free_bytes, total_bytes: of the GPU. threads: of the CPU. fault: why what `--device` names
    is not here.
    """

    kind: Literal["cpu", "cuda"] = "cpu"
    name: str = ""
    threads: int = 1
    free_bytes: int = 0
    total_bytes: int = 0
    fault: str = ""
    driver: bool = False  # of NVIDIA's, whether torch can use its GPU or not


def device_check(option: str, device: DeviceFacts) -> Check:
    """What a peer computes on."""
    if device.fault:
        return Check("device", "failed", f"--device {option}: {device.fault}", "choose cpu or auto")
    if device.kind == "cuda":
        return Check("device", "ok", f"{device.name}, {size(device.free_bytes)} free")
    text = f"CPU, {counted(device.threads, 'thread')}"
    if option == "cpu":
        return Check("device", "ok", text)
    text += "; no GPU that torch can use"
    if not device.driver:
        return Check("device", "ok", text)
    remedy = (
        "there is a driver of NVIDIA's: nvidia-smi must show the card, and a CUDA version that is "
        "at least torch's (in a container give it the GPU); or mean it, with --device cpu"
    )
    return Check("device", "warning", text, remedy)


def admission_check(peer_id: str, refusal: DilocoxError | None) -> Check:
    """Whether a run that takes only those whom its operator admits takes this folder's peer, which
    may have no id yet.
    """
    if refusal is not None:
        return fault("admission", refusal)
    if peer_id:
        return Check("admission", "ok", "the operator has admitted this peer")
    remedy = "start the peer once: it ends, and tells the id that the operator needs"
    return Check("admission", "warning", "the operator admits peers one by one", remedy)


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
    if others:
        remedy = "another one is enough; tell the operator"
        return Check("bootstrap", "warning", f"{where}: {why}", remedy)
    reason = why.lower()
    if "refused" in reason:
        remedy = "ask the operator whether the bootstrap runs and whether the invite is current"
    elif any(word in reason for word in ("name", "resolution", "address associated")):
        remedy = "check that this machine is online, and the name in the invite"
    else:
        remedy = (
            f"check that this machine is online and may dial out to TCP port {at.port}, and ask "
            "the operator whether the bootstrap runs"
        )
    return Check("bootstrap", "failed", f"{where}: {why}", remedy)


def run_check(manifest: Manifest, values: int, trained: int) -> Check:
    """What the invite leads to.

    values: parameters of the whole model. trained: so many of the run's tokens are in records.
    """
    model = manifest.model["model_type"]
    text = f"{manifest.name}: {counted(manifest.stages, 'stage')}, {model}, {_millions(values)}"
    if manifest.ended_at(trained):
        remedy = "ask the operator for the invite of another run"
        return Check("run", "failed", f"{text}; it has ended", remedy)
    if manifest.operation.state == "paused":
        remedy = "no need to do anything: a peer waits until the operator resumes it"
        return Check("run", "warning", f"{text}; its operator has paused it", remedy)
    return Check("run", "ok", f"{text}, {100 * trained / manifest.end_tokens:.0f} % done")


def version_check(own: str, protocol: int, others: Mapping[str, int]) -> Check:
    """Whether this program speaks as the run's peers do. others: how many peers have a version."""
    text = f"{own} with protocol {protocol}, as the run"
    if not others:
        return Check("version", "ok", text)
    if set(others) == {own}:
        return Check("version", "ok", f"{text} and its peers")
    ordered = sorted(others, key=lambda version: (others[version], version), reverse=True)
    told = [f"{others[version]} of {version}" for version in ordered[:MAX_NAMED]]
    text += f"; its peers: {', '.join(told)}{', ...' if len(ordered) > MAX_NAMED else ''}"
    if others.get(own, 0) >= others[ordered[0]]:
        return Check("version", "ok", text)
    remedy = f"it works, as the protocol is the same; to be like most, install {ordered[0]}"
    return Check("version", "warning", text, remedy)


def clock_check(offset_s: float, peer_offset_s: float | None) -> Check:
    """Whether the clocks agree.

    offset_s: how far the bootstraps' clocks are ahead of this machine's. peer_offset_s: how far a
    peer's run time is ahead of ours, None where no peer told its own.
    """
    text = f"{abs(offset_s):.1f} s {'behind' if offset_s > 0 else 'ahead of'} the bootstraps"
    if abs(offset_s) < 0.05:
        text = "as the bootstraps'"
    if peer_offset_s is not None and abs(peer_offset_s) > PEER_CLOCK_S:
        text = f"the run's time here and at a peer are {abs(peer_offset_s):.1f} s apart"
        remedy = "tell the operator: the clocks of the bootstraps and of that peer differ"
        return Check("clock", "warning", text, remedy)
    if abs(offset_s) > CLOCK_WARNING_S:
        remedy = "dilocox corrects it; for other programs: `sudo timedatectl set-ntp true`"
        return Check("clock", "warning", text, remedy)
    return Check("clock", "ok", text)


# ---- the way to this peer ------------------------------------------------------------------------
def reach_check(found: Reachability, announce: Sequence[str], port: int) -> Check:
    """Whether others can dial this peer. One that only dials out takes part all the same.

    announce, port: the options.
    """
    addresses = _shown(found.addresses or announce)
    if found.kind in ("public", "mapped"):
        return Check("reachable", "ok", f"others reach this machine at {addresses}")
    if found.kind == "unknown":
        text = "not known: nobody answered who could dial back"
        return Check("reachable", "warning", text, "try again when the run has more peers")
    if announce:
        remedy = f"see that {addresses} leads to port {port} of this machine"
    else:
        port = port or SOME_PORT
        host = next((ip for ip in found.seen if ":" not in ip), "ADDRESS")
        remedy = (
            f"it works without; better: let TCP port {port} through firewall and router to this "
            f"machine (in a container -p {port}:{port}) and start with --port {port} --announce "
            f"/ip4/{host}/tcp/{port}"
        )
    text = "others cannot dial this machine: it would only dial out, and lead nobody"
    return Check("reachable", "warning", text, remedy)


def _shown(addresses: Sequence[str]) -> str:
    """The first address, and how many more there are."""
    if not addresses:
        return "its own address"
    first = addresses[0].partition("/p2p/")[0]
    return first if len(addresses) == 1 else f"{first} and {len(addresses) - 1} more"


@dataclass(frozen=True, kw_only=True)
class BandwidthFacts:
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


def bandwidth_check(exchange: BandwidthFacts) -> Check:
    """Whether the link moves an exchange within its deadline."""
    text = f"{size(exchange.down)}/s down, {size(exchange.up)}/s up"
    if exchange.seconds > exchange.limit_s:
        text += f"; an exchange of stage {exchange.stage} would take {exchange.seconds:.0f} s, "
        text += f"it may take {exchange.limit_s:.0f} s"
        remedy = "use a faster link, raise --max-upload if it is set, or host a smaller stage"
        return Check("bandwidth", "failed", text, remedy)
    return Check("bandwidth", "ok", text)


def port_check(
    name: str, host: str, port: int, error: DilocoxError | None, *, own_peer: bool
) -> Check:
    """Whether this peer can listen. name: "port", or "metrics" for that of its figures. own_peer:
    one runs in this state folder, and may have it.
    """
    if error is None:
        return Check(name, "ok", f"{port} of {host} is free" if port else "any free one")
    if own_peer:
        return Check(name, "ok", f"{port} of {host} is in use, by this folder's peer it seems")
    return fault(name, error)


# ---- the part it would play ----------------------------------------------------------------------
def stage_check(
    option: str, stage: int, peers: Mapping[int, int], stages: int, before: int | None
) -> Check:
    """Which stage this peer takes.

    peers: others by stage, without the stages of which nothing could be learnt. before: the stage
    that it had last.
    """
    here = peers.get(stage)
    others = counted(here, "other peer") if here else "nobody else"
    has = "of which nobody knows who has it" if here is None else f"which has {others}"
    text = f"it would take stage {stage}, {has}"
    if option == "auto" and stages > 1:
        counts = ", ".join(str(peers.get(number, "?")) for number in range(min(stages, 16)))
        more = ", ..." if stages > 16 else ""
        text += "; it had it before" if before == stage else f"; peers by stage: {counts}{more}"
    empty = [number for number in range(stages) if peers.get(number) == 0 and number != stage]
    if empty:
        text += f"; stage {', '.join(map(str, empty[:4]))} would still have nobody"
        remedy = "invite more volunteers: a run trains when every stage has a peer"
        return Check("stage", "warning", text, remedy)
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

    @property
    def through_per_s(self) -> float:
        """Tokens a second that are computed, and carried to the neighbours."""
        limit = self.link_tokens_per_s
        return self.tokens_per_s if limit is None else min(limit, self.tokens_per_s)


def speed_check(stage: int, speed: SpeedFacts, exchange_s: float | None) -> Check:
    """What this peer would contribute."""
    if speed.fault:
        remedy = "see more with --log-level debug"
        return Check("speed", "warning", f"not known: {speed.fault}", remedy)
    text = f"about {rounded(speed.through_per_s)} tokens/s in stage {stage}"
    if speed.through_per_s < speed.tokens_per_s:
        text += f", bound by the link (it computes {rounded(speed.tokens_per_s)})"
    elif not speed.measured:
        text += ", estimated from multiplications"
    if speed.shared:
        text += ", beside the peer that runs"
    if exchange_s is not None:
        text += f"; {max(0.1, exchange_s):.{0 if exchange_s > 9 else 1}f} s an exchange"
    return Check("speed", "ok", text)


def rounded(value: float) -> str:
    """Two digits of it, and commas."""
    return f"{float(f'{value:.2g}'):,.0f}"


def _millions(values: int) -> str:
    if values >= 1e9:
        return f"{values / 1e9:.1f} billion parameters"
    return f"{values / 1e6:.{1 if values < 1e8 else 0}f} million parameters"

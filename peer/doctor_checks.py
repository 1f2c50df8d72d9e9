"""What `dilocox doctor` concludes about a machine: pure rules, from facts to one line each.

failed   a peer could not take part
warning  it can, but worse than it could, or something here could not be found out
ok       nothing to do

Whatever is not ok names its mend. What concerns the network and the run is in doctor_run_checks.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from dilocox.dht.errors import DilocoxError

Status = Literal["ok", "warning", "failed", "skipped"]

PYTHONS = ((3, 10), (3, 13))
SPARE_SHARE = 0.85  # of what is free: a plan above it leaves little for other programs
MAX_NAMED = 6


@dataclass(frozen=True)
class Check:
    """One line: `text` says what was found, `mend` what a person can do about it."""

    name: str
    status: Status
    text: str
    mend: str = ""


def fault(name: str, error: DilocoxError) -> Check:
    """What an error for people says, which ends with its mend."""
    text = str(error)
    cut = max(text.rfind(": "), text.rfind("; "))
    if cut < 0:
        return Check(name, "failed", text, "see more with --log-level debug")
    return Check(name, "failed", text[:cut], text[cut + 2 :])


def not_checked(name: str, first: str) -> Check:
    """What cannot be known before another line is mended."""
    return Check(name, "skipped", "not checked", f"mend {first} first")


# ---- programs ------------------------------------------------------------------------------------
def python_check(version: tuple[int, int, int], system: str, machine: str) -> Check:
    """Whether this Python and this system are ones that dilocox runs on."""
    text = f"{'.'.join(map(str, version))}, {system} on {machine}"
    low, high = PYTHONS
    if not low <= version[:2] <= high:
        wanted = f"{low[0]}.{low[1]} to {high[0]}.{high[1]}"
        return Check("python", "failed", text, f"install it for a Python from {wanted}")
    if (system, machine) != ("Linux", "x86_64"):
        mend = "if it does not start, use Linux on x86-64, or the container image there"
        return Check("python", "warning", f"{text}, which nobody has tried", mend)
    return Check("python", "ok", text)


@dataclass(frozen=True, kw_only=True)
class Library:
    """A library that dilocox needs. needed: as in `==1.1.12`. fault: why it cannot be used."""

    name: str
    version: str
    needed: str = ""
    fault: str = ""


def libraries_check(libraries: Sequence[Library]) -> Check:
    """Whether the libraries are there, of the right versions, and can be loaded."""
    missing = [each for each in libraries if not each.version]
    if missing:
        names = ", ".join(each.name for each in missing)
        wanted = " ".join(f"'{each.name}{each.needed}'" for each in missing)
        return Check("libraries", "failed", f"missing: {names}", f"python -m pip install {wanted}")
    wrong = [each for each in libraries if not _satisfied(each.version, each.needed)]
    if wrong:
        found = ", ".join(f"{each.name} {each.version}, not {each.needed}" for each in wrong)
        wanted = " ".join(f"'{each.name}{each.needed}'" for each in wrong)
        return Check("libraries", "failed", found, f"python -m pip install {wanted}")
    broken = next((each for each in libraries if each.fault), None)
    if broken is not None:
        text = f"{broken.name} {broken.version} cannot be loaded: {broken.fault}"
        mend = f"python -m pip install --force-reinstall '{broken.name}=={broken.version}'"
        return Check("libraries", "failed", text, mend)
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
@dataclass(frozen=True, kw_only=True)
class FolderFacts:
    """A state folder. writable: the folder, or where it would be made. fault: of its key file.

    paused: by `dilocox pause`. peer_id: of its key, empty where there is none yet.
    """

    path: str
    writable: bool
    in_use: bool
    paused: bool = False
    peer_id: str = ""
    key_fault: DilocoxError | None = None


def key_check(folder: FolderFacts) -> Check:
    """Whether the key file, which is who this peer is, can be used."""
    if folder.key_fault is not None:
        return fault("key", folder.key_fault)
    if not folder.peer_id:
        return Check("key", "ok", "none yet; the first start makes one")
    return Check("key", "ok", f"peer {folder.peer_id}")


def folder_check(folder: FolderFacts) -> Check:
    """Whether a peer can use the state folder now."""
    if folder.in_use:
        return Check(
            "folder",
            "warning",
            f"{folder.path}: its peer runs now; the lines below say what it leaves",
            "give a second peer a folder and a port of its own with --state and --port",
        )
    if not folder.writable:
        mend = "name a folder that this user can write to with --state"
        return Check("folder", "failed", f"{folder.path}: this user cannot write to it", mend)
    if folder.paused:
        mend = f"`dilocox resume --state {folder.path}` lets it take part"
        return Check("folder", "warning", f"{folder.path}: its peer is paused", mend)
    return Check("folder", "ok", folder.path)


# ---- room ----------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class DiskNeeds:
    """What a stage is still to take of a disk: more of it in all, and for its next snapshot."""

    more_bytes: int
    snapshot_bytes: int


def disk_check(path: str, free_bytes: int, needs: DiskNeeds | None) -> Check:
    """Whether snapshots and log of the stage fit; None where nothing is known of it, or nothing is
    to come.

    With room for one snapshot a peer trains until the disk is full, and its person may free some.
    """
    text = f"{size(free_bytes)} free for {path}"
    if needs is None:
        return Check("disk", "ok", text)
    mend = "free some, or choose a folder on another disk with --state"
    if free_bytes < needs.snapshot_bytes:
        text += f", a snapshot takes {size(needs.snapshot_bytes)}, all that is to come "
        text += size(needs.more_bytes)
        return Check("disk", "failed", f"no snapshot fits on the disk: {text}", mend)
    text += f", {size(needs.more_bytes)} needed"
    if free_bytes < needs.more_bytes:
        return Check("disk", "warning", f"the disk will be full: {text}", mend)
    return Check("disk", "ok", text)


def memory_check(
    name: str,
    free_bytes: int,
    limit_bytes: float | None,
    plans: Sequence[int] | None,
    stage: int | None,
) -> Check:
    """Whether the stage, and which others, fit into memory.

    name: "memory", or the GPU's. limit_bytes: of `--memory-limit`. plans: bytes that a peer of each
    stage takes, None where the run is not known. stage: the one that this peer takes.
    """
    limited = limit_bytes is not None and limit_bytes < free_bytes
    room = int(limit_bytes) if limited and limit_bytes is not None else free_bytes
    text = f"{size(room)} {'allowed by --memory-limit' if limited else 'free'}"
    if plans is None or stage is None:
        return Check(name, "ok", text)
    fitting = [number for number, plan in enumerate(plans) if plan <= room]
    text += f", {size(plans[stage])} needed for stage {stage}"
    if len(plans) > 1:
        text += f"; {_stages(fitting, len(plans))}"
    if plans[stage] > room:
        smaller = f", or host stage {fitting[0]} with `--stage {fitting[0]}`" if fitting else ""
        raise_it = "raise --memory-limit" if limited else "close other programs"
        return Check(name, "failed", text, f"{raise_it}{smaller or ', or use a larger machine'}")
    if plans[stage] > SPARE_SHARE * room and not limited:
        return Check(name, "warning", text, "close other programs, or the system may end the peer")
    return Check(name, "ok", text)


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

    name, free_bytes: of the GPU. threads: of the CPU. fault: why what `--device` names is not here.
    """

    kind: Literal["cpu", "cuda"] = "cpu"
    name: str = ""
    threads: int = 1
    free_bytes: int = 0
    fault: str = ""


def device_check(option: str, device: DeviceFacts) -> Check:
    """What a peer computes on."""
    if device.fault:
        return Check("device", "failed", f"--device {option}: {device.fault}", "choose cpu or auto")
    if device.kind == "cuda":
        return Check("device", "ok", f"{device.name}, {size(device.free_bytes)} free")
    threads = f"{device.threads} thread{'s' if device.threads > 1 else ''}"
    found = "" if option == "cpu" else "; no GPU that torch can use"
    return Check("device", "ok", f"CPU, {threads}{found}")


# ---- words ---------------------------------------------------------------------------------------
def size(count: float) -> str:
    """Bytes as people read them."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            value = count / factor
            return f"{value:.0f} {unit}" if value >= 100 else f"{value:.1f} {unit}"
    return f"{count:.0f} bytes"


def counts_in_words(counts: Mapping[str, int]) -> str:
    """How often each, the most frequent first, as in `3 of 0.1.0, 1 of 0.2.0`."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    told = [f"{count} of {what}" for what, count in ordered[:MAX_NAMED]]
    return ", ".join(told) + (", ..." if len(ordered) > MAX_NAMED else "")

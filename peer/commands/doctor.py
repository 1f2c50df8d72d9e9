"""The command `dilocox doctor`: what of this machine fits a run, what does not, and what to do.

An `Examination` goes through everything that a peer needs: programs, folder, ports, the way to the
run, the run, this machine's room and speed. What stands behind a mishap is not checked: without a
way to the run nothing can be said of it. The rules
are in doctor_checks.py.
"""

from __future__ import annotations

import contextlib
import platform
import sys
import tempfile
import textwrap
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console
from rich.text import Text

from dilocox import __version__
from dilocox.dht.errors import DilocoxError, InvalidInput, UnreadableManifest
from dilocox.dht.files import no_temporary_folder
from dilocox.dht.identity import Identity
from dilocox.dht.invite import Invite
from dilocox.dht.names import printable
from dilocox.peer import memory_and_disk
from dilocox.peer.commands import doctor_checks
from dilocox.peer.commands.doctor_checks import BandwidthFacts, fault, libraries, rounded
from dilocox.peer.memory_and_disk import Check, Status, available_bytes, disk_free, total_bytes
from dilocox.peer.options import DoctorOptions
from dilocox.peer.os_process import CLEAR_LINE, STOPPED, StopSignal, wide_console, write_json
from dilocox.peer.state_folder import StateFolder

if TYPE_CHECKING:  # imported when it is known that the libraries can be loaded
    from dilocox.dht.join import Joined
    from dilocox.dht.manifest import DataSpec, Manifest
    from dilocox.peer.commands.doctor_swarm import SwarmFacts
    from dilocox.peer.process.prepare import StageNeeds

SPEED_LIMIT_S = 10.0
T = TypeVar("T")
Lines = Generator[Check, None, T]
OF_THE_RUN = ("run", "version", "clock", "stage", "reachable", "bandwidth", "speed")


@dataclass(frozen=True, kw_only=True)
class ContributionEstimate:
    """What this machine would contribute. exchange_s: None where it is not known."""

    stage: int
    tokens_per_s: float
    exchange_s: float | None


class Examination:
    """One of them. `contribution` is known when it is over, None where it was not found out."""

    def __init__(self, options: DoctorOptions, busy: Callable[[str], None]):
        """busy: told what takes a while now."""
        self.contribution: ContributionEstimate | None = None
        self._options = options
        self._busy = busy
        self._folder = StateFolder(options.state)
        self._in_use = self._folder.in_use  # by its peer
        self._peer_id = ""
        self._loaded = False  # the libraries

    def checks(self) -> Iterator[Check]:
        """The lines, each as soon as it is known; those of the run are skipped behind a mishap."""
        told: set[str] = set()
        cause = ""

        def examined() -> Iterator[Check]:
            nonlocal cause
            cause = yield from self._examined()

        for check in examined():
            told.add(check.name)
            yield check
        if not cause:
            return
        if "memory" not in told:
            yield from self.room(None, None)
        for name in OF_THE_RUN:
            if name not in told:
                yield Check(name, "skipped", "not checked", f"fix {cause} first")

    def _examined(self) -> Lines[str]:
        """As far as it comes; the name of the line that stopped it, empty for none."""
        yield doctor_checks.python_check(
            sys.version_info[:3], platform.system(), platform.machine()
        )
        unwritable = no_temporary_folder()
        if unwritable is not None:  # libraries cannot be loaded without
            yield fault("tmp", unwritable)
        else:
            self._busy("loading libraries")
            found = doctor_checks.libraries_check(libraries())
            yield found
            self._loaded = found.status == "ok"
        yield doctor_checks.folder_check(self._folder, in_use=self._in_use)
        key, self._peer_id = doctor_checks.key_check(self._folder)
        yield key
        if not self._loaded:
            return "tmp" if unwritable is not None else "libraries"
        port = yield from self._ports()
        from dilocox.dht.addresses import dial_faults

        self._busy("dialling the bootstraps")
        faults = dial_faults(self._options.invite.bootstraps)
        dialled = doctor_checks.bootstrap_checks(faults)
        yield from dialled
        if all(check.status == "failed" for check in dialled):
            return "bootstrap"
        self._busy("joining the run")
        with contextlib.ExitStack() as stack:
            try:
                joined = stack.enter_context(self._joined(port))
            except DilocoxError as error:
                name = "version" if isinstance(error, UnreadableManifest) else "run"
                yield fault(name, error)
                return name
            try:
                return (yield from self._in_the_run(joined))
            except DilocoxError as error:  # this machine's own node has ended in the middle
                yield fault("run", error)
                return ""

    # ---- the way to the run ----------------------------------------------------------------------
    def _ports(self) -> Lines[int]:
        """Whether they are free; the one that the doctor listens on, another where it is not."""
        from dilocox.dht.addresses import check_ports
        from dilocox.peer.http_pages import check_port

        options, own = self._options, self._in_use
        error = _raised(lambda: check_ports([f"/ip4/{options.host}/tcp/{options.port}"]))
        yield doctor_checks.port_check("port", options.host, options.port, error, own_peer=own)
        if options.metrics_port:  # a peer goes on without the one that nobody asked for
            at = options.metrics_host, options.metrics_port
            taken = _raised(lambda: check_port(*at))
            yield doctor_checks.port_check("metrics", *at, taken, own_peer=own)
        return options.port if error is None else 0

    @contextlib.contextmanager
    def _joined(self, port: int) -> Generator[Joined]:
        """A place in the DHT under an identity of its own, for a peer may use this folder's."""
        from dilocox.dht.join import join_run

        options = self._options
        with tempfile.TemporaryDirectory() as name:
            identity = Identity.load_or_create(Path(name) / "identity.key")
            listen = [f"/ip4/{options.host}/tcp/{port}"]
            announce = options.announce
            with join_run(
                options.invite, identity, listen=listen, announce=announce, client_mode=True
            ) as joined:
                yield joined

    # ---- in the run ------------------------------------------------------------------------------
    def _in_the_run(self, joined: Joined) -> Lines[str]:
        from dilocox.peer.commands.doctor_swarm import SwarmFacts
        from dilocox.peer.process.prepare import StageNeeds
        from dilocox.peer.process.starting_stage import stage_of_before

        options, manifest = self._options, joined.manifest
        with contextlib.closing(SwarmFacts(joined, options.invite, self._peer_id)) as swarm:
            yield doctor_checks.run_check(manifest, sum(swarm.sizes), swarm.trained)
            if manifest.admission == "listed" and not self._in_use:
                admission, me = joined.swarm.admission, self._peer_id
                refusal = admission.refusal(me) if admission is not None and me else None
                yield doctor_checks.admission_check(me, refusal)
            self._busy("looking who is there")
            yield doctor_checks.version_check(__version__, manifest.protocol, swarm.versions)
            before = stage_of_before(self._folder, joined.run, manifest.stages)
            try:
                stage = swarm.stage(options.stage, before)
            except InvalidInput as error:
                yield fault("stage", error)
                yield from self.room(None, manifest)
                yield from self._network(joined, swarm, 0)
                return "stage"
            needs = StageNeeds(
                manifest, stage, recompute=options.recompute, offload=options.offload
            )
            yield doctor_checks.stage_check(
                options.stage, stage, swarm.peers, manifest.stages, before
            )
            short = yield from self.room(needs, manifest)
            if stage == 0:
                yield data_check(manifest.data, options.data)
            yield from self._network(joined, swarm, stage)
            exchange = yield from self._exchange(swarm, needs)
            if not short:
                yield self._speed(needs, exchange)
            return short

    def room(self, needs: StageNeeds | None, manifest: Manifest | None) -> Lines[str]:
        """Device, memory and disk, as the stage asks; the names of those that do not suffice, also
        where it is only now that too little is free. A peer that runs has its share, and so is
        asked for nothing.

        CUDA is loaded here, so what forks (the DHT's process) is started before: a forked child
        cannot use it, and may hang.
        """
        options, found, full = self._options, list[Check](), set[str]()
        known = None if self._in_use else needs
        stage = None if known is None else known.stage
        plans: list[int] | None = None

        def memory(
            name: str, free: int, total: int, limit: float | None, plans: list[int] | None
        ) -> None:
            found.append(doctor_checks.memory_check(name, free, total, limit, plans, stage))
            if plans is not None and stage is not None and plans[stage] > free:
                full.add(name)

        if self._loaded:
            from dilocox.peer.commands.doctor_bench import look_at_device

            device = look_at_device(options.device, options.threads)
            found.append(doctor_checks.device_check(options.device, device))
            if manifest is not None:
                from dilocox.peer.process.prepare import memory_of_stages

                needed = memory_of_stages(
                    manifest, recompute=options.recompute, offload=options.offload
                )
                plans = [each.on_cpu for each in needed]
                if device.kind == "cuda":
                    plans = [each.beside_gpu for each in needed]
                    on_gpu = [each.on_gpu for each in needed]
                    memory("gpu", device.free_bytes, device.total_bytes, None, on_gpu)
        memory("memory", available_bytes(), total_bytes(), options.memory_limit_bytes, plans)
        found.append(self._disk(known))
        yield from found
        short = [each.name for each in found if each.status == "failed" or each.name in full]
        return ", ".join(short)

    def _disk(self, needs: StageNeeds | None) -> Check:
        options = self._options
        if needs is None:
            return memory_and_disk.disk_check(str(options.state), disk_free(options.state), None)
        from dilocox.peer.process.prepare import disk_room

        return disk_room(self._folder.run(options.invite.run_id, needs.stage), needs)

    def _network(self, joined: Joined, swarm: SwarmFacts, stage: int) -> Iterator[Check]:
        options = self._options
        yield doctor_checks.clock_check(joined.clock.offset, swarm.peer_clock(stage))
        self._busy("asking others to dial this machine")
        # where this folder's peer runs, its own port is the one that matters
        found = swarm.reach(options.announce, options.port if self._in_use else 0)
        yield doctor_checks.reach_check(found, options.announce, options.port)

    def _exchange(self, swarm: SwarmFacts, needs: StageNeeds) -> Lines[BandwidthFacts | None]:
        """How fast the link is, and what that means for an exchange with the others of the stage,
        or with one that is still to come.
        """
        self._busy("measuring the link, 8 s")
        link = swarm.bandwidth(needs.stage)
        if link is None:
            remedy = "try again: a peer in the middle of an exchange has no time for this"
            yield Check("bandwidth", "warning", "not known: no peer had time to measure it", remedy)
            return None
        up = link.up_bytes_per_s
        facts = BandwidthFacts(
            stage=needs.stage,
            payload_bytes=needs.exchange_bytes(max(2, swarm.peers.get(needs.stage, 0) + 1)),
            down=link.down_bytes_per_s,
            up=min(up, self._options.max_upload_mb_s * 1e6 or up),
            link_up=up,
            limit_s=needs.manifest.deadlines.exchange_s,
        )
        yield doctor_checks.bandwidth_check(facts)
        return facts

    def _speed(self, needs: StageNeeds, exchange: BandwidthFacts | None) -> Check:
        from dilocox.peer.commands.doctor_bench import measure_speed

        self._busy("training a few steps, up to 10 s")
        stage, device = needs.stage, self._options.device
        found = measure_speed(device, needs, limit_s=SPEED_LIMIT_S)
        per_token = needs.link_bytes_per_token()
        carried = None
        if exchange is not None and per_token:
            carried = min(exchange.down, exchange.link_up) / per_token
        speed = replace(found, link_tokens_per_s=carried, shared=self._in_use)
        exchange_s = None if exchange is None else exchange.seconds
        if not speed.fault:
            self.contribution = ContributionEstimate(
                stage=stage, tokens_per_s=speed.through_per_s, exchange_s=exchange_s
            )
        return doctor_checks.speed_check(stage, speed, exchange_s)


def data_check(data: DataSpec, option: str) -> Check:
    """Whether a head finds the text: the run's for the validation, and its own, which `--data`
    names.
    """
    from dilocox.peer.process.prepare import check_text

    try:
        check_text(data, option)
    except InvalidInput as error:
        return fault("data", error)
    return Check("data", "ok", option or data.source)


def _raised(check: Callable[[], None]) -> DilocoxError | None:
    try:
        check()
    except DilocoxError as error:
        return error
    return None


COLOURS: dict[Status, str] = {
    "ok": "green",
    "warning": "yellow",
    "failed": "bold red",
    "skipped": "dim",
}
MARK_WIDTH, NAME_WIDTH = 9, 11
MAX_WIDTH = 120


def run_doctor(options: DoctorOptions) -> int:
    """Examine, show, and say whether this machine could take part; the exit code."""
    with StopSignal():
        if options.json_file is None:
            printout = Printout(wide_console(highlight=False))
            examination = Examination(options, printout.busy)
            checks = printout.show(examination.checks())
            printout.say("")
            printout.say(verdict(checks, examination.contribution))
        else:
            examination = Examination(options, lambda _: None)
            checks = list(examination.checks())
            write_json(options.json_file, as_json(checks, examination.contribution, options.invite))
        return 1 if any(check.status == "failed" for check in checks) else 0
    return STOPPED


def as_json(
    checks: Sequence[Check], contribution: ContributionEstimate | None, invite: Invite
) -> dict[str, Any]:
    """What scripts read: the lines, and what this machine would contribute."""
    return {
        "run": invite.run_id,
        "version": __version__,
        "can_take_part": all(check.status != "failed" for check in checks),
        "verdict": verdict(checks, contribution),
        "contribution": None if contribution is None else asdict(contribution),
        "checks": [asdict(check) for check in checks],
    }


def verdict(checks: Sequence[Check], contribution: ContributionEstimate | None) -> str:
    """What it comes to, in one sentence."""
    failed = [check.name for check in checks if check.status == "failed"]
    if failed:
        return f"This machine cannot take part yet: fix {', '.join(dict.fromkeys(failed))}."
    text = "This machine can take part"
    if contribution is not None:
        text += f": stage {contribution.stage}, about {rounded(contribution.tokens_per_s)} tokens/s"
    warned = list(dict.fromkeys(check.name for check in checks if check.status == "warning"))
    return f"{text}; see the warnings: {', '.join(warned)}." if warned else f"{text}."


class Printout:
    """The lines on a terminal or in a file: mark, name, text, and the remedy below it."""

    def __init__(self, console: Console):
        self._console = console
        self._width = min(console.width, MAX_WIDTH)

    def show(self, checks: Iterable[Check]) -> list[Check]:
        """Print them as they come; all of them."""
        shown: list[Check] = []
        try:
            for check in checks:
                self.busy("")
                self._line(check)
                shown.append(check)
        finally:
            self.busy("")
        return shown

    def say(self, text: str) -> None:
        for line in _wrapped(text, self._width):
            self._console.print(Text(line), soft_wrap=True)

    def busy(self, doing: str) -> None:
        """Show what takes a while, on a terminal; the next line takes its place.

        No thread draws it: what is forked meanwhile would inherit its locks.
        """
        if self._console.is_terminal:
            sys.stdout.write(f"{CLEAR_LINE}{doing + ' ...' if doing else ''}")
            sys.stdout.flush()

    def _line(self, check: Check) -> None:
        indent = MARK_WIDTH + NAME_WIDTH
        room = max(20, self._width - indent)
        lines, remedy = _wrapped(check.text, room), _wrapped(f"-> {check.remedy}", room, "   ")
        if check.remedy and len(lines) == len(remedy) == 1 and len(lines[0] + remedy[0]) < room:
            lines, remedy = [f"{lines[0]} {remedy[0]}"], []  # it fits into the same line
        lines += remedy if check.remedy else []
        head = Text.assemble(
            (check.status.ljust(MARK_WIDTH), COLOURS[check.status]), check.name.ljust(NAME_WIDTH)
        )
        for line in lines:
            self._console.print(head + Text(line), soft_wrap=True)
            head = Text(" " * indent)


def _wrapped(text: str, width: int, indent: str = "") -> list[str]:
    """In lines of this width; what some peer said may not steer the terminal."""
    seen = printable(text)
    return textwrap.wrap(seen, width, subsequent_indent=indent, break_on_hyphens=False) or [""]

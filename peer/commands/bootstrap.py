"""The command `dilocox bootstrap`: the operator's of a run, or a copy of it.

Both are the same node with the same archive and figures; only the manifest comes from elsewhere
(dht/manifest_keeper.py). A copy needs nothing but an invite.

It can be asked over HTTP for figures, health and readiness. The bootstrap's thread looks every few
seconds, because the DHT process answers that thread alone; a caller gets what it saw last.
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, cast

import typer

from dilocox import __version__
from dilocox.dht.addresses import check_ports
from dilocox.dht.bootstrap_node import bootstrap_node
from dilocox.dht.errors import EnvironmentFault, InvalidInput
from dilocox.dht.files import bytes_below, write_atomically
from dilocox.dht.identity import Identity, peer_id_of
from dilocox.dht.invite import SCHEME, Invite, bootstrap_address, run_id
from dilocox.dht.manifest import PROTOCOL_VERSION, Manifest, warnings
from dilocox.dht.manifest_keeper import ManifestCopy, ManifestKeeper, OwnManifest
from dilocox.dht.manifest_revisions import RevisionFolder
from dilocox.dht.node import RunDHT
from dilocox.dht.records import MANIFEST_LIFETIME_S
from dilocox.dht.swarm import Swarm
from dilocox.peer.chain.archive_keeper import Archive
from dilocox.peer.chain.history_keeper import HistoryKeeper
from dilocox.peer.chain.model_samples import Sampler
from dilocox.peer.chain.round_history import FILE, RoundHistory
from dilocox.peer.chain.store import archive_folder
from dilocox.peer.commands.operate import checked_manifest
from dilocox.peer.http_pages import (
    RUN_LABEL,
    MetricSpec,
    MetricTable,
    Pages,
    by_source,
    check_port,
    served,
    usual_pages,
)
from dilocox.peer.memory_and_disk import proportional_bytes
from dilocox.peer.options import BootstrapOptions
from dilocox.peer.os_process import StopSignal
from dilocox.peer.process.initial_weights import archive_initial
from dilocox.peer.process.run_tokenizer import archive_tokenizer
from dilocox.peer.process.sizes import print_sizes
from dilocox.peer.state_folder import StateFolder

logger = logging.getLogger(__name__)

PREFIX = "dilocox_bootstrap_"
WATCH_PERIOD_S = 1.0
LOOK_PERIOD_S = 10.0
DISK_PERIOD_S = 60.0  # the archive may have many files
ASK_LIMIT_S = 2.0
STUCK_AFTER_S = 90.0  # a turn of the bootstrap's thread waits for the DHT for up to half a minute

# with another folder it would get another key, and with it begin another run
BOOTSTRAP_RUNS = "the bootstrap of this folder runs already; stop it first"

Role = Literal["operator", "copy"]


@dataclass(frozen=True, kw_only=True)
class BootstrapFacts:
    """What was seen at one look; None and empty what is not known. Counts are since the start.

    archive_bytes, archive_rounds: by stage. served_bytes: by what it was. refused: by the part that
    refused, and why. manifest_until: Unix time. admission_end: likewise, `Admission.first_end`.
    """

    role: Role
    not_ready: str = "the first look is to come"
    dht_peers: int | None = None
    memory_bytes: int | None = None
    manifest_until: float = 0.0
    admission_end: int | None = None
    archive_bytes: Mapping[int, int] = field(default_factory=dict[int, int])
    archive_rounds: Mapping[int, int] = field(default_factory=dict[int, int])
    served_bytes: Mapping[str, int] = field(default_factory=dict[str, int])
    refused: Mapping[str, int] = field(default_factory=dict[str, int])


def bytes_by_stage(folder: Path) -> dict[int, int]:
    """What the files of each stage's archive hold together; those that vanish meanwhile do not."""
    found: dict[int, int] = {}
    for path in folder.glob("stage*"):
        if path.name.removeprefix("stage").isdecimal():
            found[int(path.name.removeprefix("stage"))] = bytes_below(path)
    return found


_Spec = MetricSpec[BootstrapFacts]
METRICS = (
    _Spec(
        "build_info",
        "What runs here: the operator's bootstrap, or a copy.",
        lambda f: {(__version__, PROTOCOL_VERSION, f.role): 1},
        ("version", "protocol", "role"),
    ),
    _Spec("ready", "Whether peers can join and fetch here.", lambda f: not f.not_ready),
    _Spec("dht_peers", "Other DHT nodes that this one knows.", lambda f: f.dht_peers),
    _Spec(
        "memory_bytes",
        "Of all processes but the child that asks the model, as shared; no pages of files.",
        lambda f: f.memory_bytes,
    ),
    _Spec(
        "manifest_expiry_timestamp_seconds",
        "Until when the manifest is valid, if the operator's bootstrap does not renew it.",
        lambda f: f.manifest_until or None,
    ),
    _Spec(
        "admission_end_timestamp_seconds",
        "When the first peer's admission ends, or ended within a day, in a listed run.",
        lambda f: f.admission_end,
    ),
    _Spec(
        "archive_bytes",
        "Bytes on the disk of a stage's states and records.",
        lambda f: f.archive_bytes,
        ("stage",),
    ),
    _Spec(
        "archive_round",
        "The newest round of a stage that is kept; -1 before the first one.",
        lambda f: f.archive_rounds,
        ("stage",),
    ),
    _Spec(
        "served_bytes_total",
        "Payload bytes of what was kept, sent to those who asked.",
        lambda f: {"state": 0, "record": 0} | dict(f.served_bytes),
        ("kind",),
    ),
    _Spec(
        "refused_total",
        "Records of others and requests that were refused, by who refused them and why.",
        lambda f: f.refused,
        ("reason",),
    ),
)


def metrics_of(run: str, facts: Callable[[], BootstrapFacts]) -> MetricTable[BootstrapFacts]:
    labels = {"run": run[:RUN_LABEL]}
    return MetricTable(specs=METRICS, source=facts, prefix=PREFIX, labels=labels)


# ---- the command --------------------------------------------------------------------------------
def run_bootstrap_command(options: BootstrapOptions) -> int:
    """Serve until a signal comes; the exit code."""
    keeper_for = _keeper(options)
    copies = isinstance(options.manifest, Invite)
    if options.metrics_port:
        check_port(options.metrics_host, options.metrics_port)
    if options.check:
        return check_run(options, keeper_for)
    folder = StateFolder(options.state)
    with folder.locked(BOOTSTRAP_RUNS), StopSignal() as stop:
        is_new = not folder.identity.exists()
        check_ports([options.listen])  # a start that fails should not leave a key behind
        identity = Identity.load_or_create(folder.identity)
        if is_new and not copies:
            explain_key(folder.identity)
        keeper = keeper_for(identity)
        others = other_bootstraps(options, keeper.run, identity.peer_id)
        if keeper.known and not (copies or options.join):
            others = joined_before(folder, keeper.run, identity.peer_id)
        if not (is_new or copies or keeper.known or others):
            logger.warning(
                "run %s begins here: this folder has the operator's key, but nothing of the run. "
                "If it has begun elsewhere, stop this at once, or the run is split: remove the "
                "folder %s-revisions and start again with --join and the invite of a copy of the "
                "bootstrap, or put the old folder of that name here",
                keeper.run,
                keeper.run,
            )
        if copies and not others:
            raise InvalidInput(
                "the invite names this bootstrap alone, and a copy needs another one: give "
                "run.yaml if this is the operator's state folder, else the operator's invite"
            )

        if not copies:  # before anybody can ask for it
            manifest = keeper.signed.verify(keeper.run)
            archive_initial(options.state, keeper.run, manifest)
            archive_tokenizer(options.state, keeper.run, manifest)

        with bootstrap_node(
            keeper=keeper,
            identity=identity,
            listen=[options.listen],
            announce=options.announce,
            others=others,
        ) as node:
            stop.defer()
            if copies and keeper.signed.run_key == identity.public_key:
                raise InvalidInput(
                    f"--state {options.state}: it has the operator's key, so this is no copy; give "
                    "run.yaml instead of the invite, or another folder"
                )
            manifest = keeper.signed.verify(keeper.run)
            for line in warnings(manifest):
                logger.warning("%s", line)
            write_atomically(folder.invite, f"{node.invite}\n".encode())
            what = "a copy of the bootstrap of run" if copies else "run"
            logger.info("%s %s (%s) is up; volunteers join with", what, keeper.run, manifest.name)
            typer.echo(f"dilocox peer {node.invite}")
            with closing(
                BootstrapServices(options, keeper, identity, node.dht, node.swarm)
            ) as services:
                while not stop.event.wait(WATCH_PERIOD_S):
                    node.tick()
                    services.tick()
    logger.info("left: stopped on request")
    return 0


def check_run(options: BootstrapOptions, keeper_for: Callable[[Identity], ManifestKeeper]) -> int:
    """See whether `dilocox bootstrap` with these options would start, and what the run would take;
    the exit code. Nothing is published, and nothing is written.

    Raises what a start would.
    """
    if isinstance(options.manifest, Invite):
        raise InvalidInput("--check is for a run.yaml; a copy of a bootstrap has none to check")
    folder = StateFolder(options.state)
    if folder.in_use:
        raise EnvironmentFault(f"{options.state}: {BOOTSTRAP_RUNS}")
    check_ports([options.listen])
    with tempfile.TemporaryDirectory() as temporary:
        own = folder.identity
        key = own if own.exists() else Path(temporary) / own.name
        keeper = keeper_for(identity := Identity.load_or_create(key))
        other_bootstraps(options, keeper.run, identity.peer_id)
    manifest = Manifest.from_bytes(keeper.signed.manifest_bytes)
    for line in warnings(manifest):
        typer.echo(f"warning: {line}", err=True)
    print_sizes(manifest)
    went_on = f"goes on as run {keeper.run}" if keeper.known else "would be a new run"
    typer.echo(f"{options.manifest} is good: {manifest.name} {went_on}; nothing was published")
    return 0


def explain_key(path: Path) -> None:
    """Say what the key is that was just made, and what its loss would mean."""
    logger.warning("made the operator's key of this run: %s", path.resolve())
    for line in (
        "whoever has it can revise, pause, end and roll back the run, and nobody else can: keep it "
        "secret",
        "keep a copy of it in another place: it cannot be made again. Without it the peers train "
        "on to the end, but nothing can be changed, and nobody new can join once the manifest "
        f"expires, {MANIFEST_LIFETIME_S / 86400:.0f} days after it was renewed last",
        "if it is lost: let the peers train to the end; `dilocox export` writes the model. If it "
        "is stolen: export the model, and tell the volunteers to leave",
    ):
        logger.warning("%s", line)


class BootstrapServices:
    """What runs beside the DHT node: the archive, the operator's questions to the model, and the
    figures of it all. `tick` belongs to the node's thread, the pages to their callers' threads.
    """

    def __init__(
        self,
        options: BootstrapOptions,
        keeper: ManifestKeeper,
        identity: Identity,
        dht: RunDHT,
        swarm: Swarm,
        *,
        clock: Callable[[], float] = time.monotonic,
    ):
        """clock: seconds that only grow. Raises EnvironmentFault if the port for the figures cannot
        be had.
        """
        self._keeper = keeper
        self._me = identity.peer_id
        self._dht = dht
        self._swarm = swarm
        self._clock = clock
        self._signed = keeper.signed
        self._manifest = manifest = keeper.signed.verify(keeper.run)
        witness = peer_id_of(keeper.signed.run_key)
        swarm.admit_by(manifest, witness)
        if not swarm.admits(identity.peer_id):
            logger.warning(
                "the run takes only whom its operator admits: until `dilocox operate admit %s` no "
                "peer hears of this copy's archive",
                identity.peer_id,
            )
        self._folder = archive_folder(options.state, keeper.run, manifest)
        history = RoundHistory(self._folder / FILE, manifest)
        # what is announced may not be reached from behind the same router
        here = options.listen.replace("/0.0.0.0/", "/127.0.0.1/").replace("/ip6/::/", "/ip6/::1/")
        at = (f"{here}/p2p/{identity.peer_id}",)
        invite = Invite(keeper.run, dht.visible_addresses()[:1] if here.endswith("/tcp/0") else at)
        self._sampler = Sampler(str(invite), self._folder / "sample.log", history)
        self._archive = Archive(
            dht=dht,
            swarm=swarm,
            run=keeper.run,
            me=identity.peer_id,
            witness=witness,
            manifest=manifest,
            folder=self._folder,
            history=HistoryKeeper(history, identity, keeper.run, manifest.stages, swarm.time),
        )
        self._facts = BootstrapFacts(role="operator" if keeper.own else "copy")
        self._turn_at = clock()
        self._looked_at = self._measured_at = float("-inf")
        self._open = ExitStack()
        port = options.metrics_port
        self._open.enter_context(served(options.metrics_host, port, self.pages()))

    def tick(self) -> None:
        """Do what is due; to look takes a few seconds at most."""
        if self._keeper.signed.manifest_bytes != self._signed.manifest_bytes:
            self._signed = self._keeper.signed
            self._manifest = manifest = self._signed.verify(self._keeper.run)
            if self._swarm.admission is not None:
                self._swarm.admission.take(manifest)
            self._archive.revise(manifest)
        self._archive.tick()
        if self._keeper.own:
            self._sampler.turn(self._manifest, self._swarm.time())
        now = self._turn_at = self._clock()
        if now >= self._looked_at + LOOK_PERIOD_S:
            self._looked_at = now
            self._facts = self._look()

    def close(self) -> None:
        self._open.close()
        self._archive.close()
        self._sampler.close()

    def pages(self) -> Pages:
        metrics = metrics_of(self._keeper.run, lambda: self._facts)
        signs = {
            "main thread": lambda: self._clock() < self._turn_at + STUCK_AFTER_S,
            "DHT process": lambda: bool(self._dht.running),
            "archive": lambda: self._archive.keeper is not None,
        }
        return usual_pages(metrics, signs, lambda: self._facts.not_ready)

    def _look(self) -> BootstrapFacts:
        keeper, archive_bytes = self._archive.keeper, self._facts.archive_bytes
        if self._looked_at >= self._measured_at + DISK_PERIOD_S:
            self._measured_at = self._looked_at
            archive_bytes = bytes_by_stage(self._folder)
        admission = self._swarm.admission
        if admission is not None:
            admission.remind(self._me)
        refused = {
            "dht": self._swarm.all_refused,
            "archive": {} if keeper is None else keeper.refused.copy(),
            "probe": {} if keeper is None else keeper.probe_refused.read(),
        }
        dht_peers, not_ready = None, "" if keeper else "the archive does not run"
        try:
            dht_peers = self._dht.known_nodes(ASK_LIMIT_S)
        except EnvironmentFault as error:
            not_ready = str(error)
        child = cast("int | None", self._dht.pid)  # pyright: ignore[reportUnknownMemberType]
        pids = (os.getpid(), child, self._dht.p2pd_pid)
        return replace(
            self._facts,
            not_ready=not_ready,
            dht_peers=dht_peers,
            memory_bytes=sum(proportional_bytes(pid) for pid in pids if pid),
            manifest_until=self._keeper.expires_at,
            admission_end=None if admission is None else admission.first_end,
            archive_bytes=archive_bytes,
            archive_rounds={} if keeper is None else keeper.rounds,
            served_bytes={} if keeper is None else keeper.served.copy(),
            refused=by_source(refused),
        )


def other_bootstraps(options: BootstrapOptions, run: str, me: str) -> tuple[str, ...]:
    """Addresses of the run's other bootstraps, each once: of the invite, and those to join.

    Raises:
        InvalidInput: an invite is of another run, or an address is none.
    """
    invites = [options.manifest] if isinstance(options.manifest, Invite) else []
    addresses: list[str] = []
    for text in options.join:
        if text.startswith(SCHEME):
            invites.append(Invite.parse(text))
        else:
            addresses.append(text)
    for invite in invites:
        if invite.run_id != run:
            raise InvalidInput(
                f"--join: the invite is of run {invite.run_id}, this bootstrap's is {run}"
            )
    found: Iterable[str] = [each for invite in invites for each in invite.bootstraps] + addresses
    return tuple(dict.fromkeys(each for each in found if bootstrap_address(each).peer_id != me))


def joined_before(folder: StateFolder, run: str, me: str) -> tuple[str, ...]:
    """Addresses of the other bootstraps in the invite that this folder's bootstrap printed last.

    They stay in it without being named again: volunteers who have it are to find them.
    """
    try:
        invite = Invite.parse(folder.invite.read_text())
    except (OSError, UnicodeDecodeError, InvalidInput):  # none yet, or damaged
        return ()
    of_run = invite.bootstraps if invite.run_id == run else ()
    return tuple(each for each in of_run if bootstrap_address(each).peer_id != me)


def _keeper(options: BootstrapOptions) -> Callable[[Identity], ManifestKeeper]:
    """What keeps the manifest, for an identity. Raises InvalidInput for a wrong run.yaml."""
    source = options.manifest
    if isinstance(source, Invite):
        path = options.state / f"{source.run_id}.manifest"
        return lambda _: ManifestCopy(source.run_id, path)
    manifest = checked_manifest(source)

    def keeper(identity: Identity) -> OwnManifest:
        run = run_id(identity.public_key, manifest.name)
        revisions = RevisionFolder(options.state, run)
        return OwnManifest(identity, manifest, revisions, joins=bool(options.join))

    return keeper

"""The command `dilocox bootstrap`: the operator's of a run, or a copy of it.

Both are the same node with the same archive and figures; only the manifest comes from elsewhere
(dht/manifest_keeper.py). A copy needs nothing but an invite.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import typer

from dilocox.dht.bootstrap import run_bootstrap
from dilocox.dht.errors import InvalidInput
from dilocox.dht.identity import Identity
from dilocox.dht.invite import SCHEME, Invite, bootstrap_address, run_id
from dilocox.dht.keys import MANIFEST_LIFETIME_S
from dilocox.dht.manifest import warnings
from dilocox.dht.manifest_keeper import ManifestCopy, ManifestKeeper, OwnManifest
from dilocox.dht.node import RunDHT
from dilocox.dht.reach import check_ports
from dilocox.dht.swarm import Swarm
from dilocox.peer.archive import Archive
from dilocox.peer.bootstrap_figures import BootstrapFigures
from dilocox.peer.files import write_atomically
from dilocox.peer.metrics_server import check_port, served
from dilocox.peer.operate import checked_manifest
from dilocox.peer.revisions import RevisionFolder
from dilocox.peer.signals import StopSignal
from dilocox.peer.state_folder import StateFolder

logger = logging.getLogger(__name__)

# with another folder it would get another key, and with it begin another run
BOOTSTRAP_RUNS = "the bootstrap of this folder runs already; stop it first"


@dataclass(frozen=True, kw_only=True)
class BootstrapOptions:
    """The options of `dilocox bootstrap`; see their help texts. With an invite it is a copy."""

    manifest: Path | Invite
    state: Path
    host: str
    port: int
    announce: tuple[str, ...]
    join: tuple[str, ...]
    metrics_host: str
    metrics_port: int | None

    @property
    def listen(self) -> str:
        """The multiaddr to listen on."""
        return f"/ip4/{self.host}/tcp/{self.port}"


def run_bootstrap_command(options: BootstrapOptions) -> int:
    """Serve until a signal comes; the exit code."""
    keeper_for = _keeper(options)
    copies = isinstance(options.manifest, Invite)
    if options.metrics_port:
        check_port(options.metrics_host, options.metrics_port)
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
            others = joined_before(options.state, keeper.run, identity.peer_id)
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

        def ready(invite: Invite) -> None:
            stop.defer()
            if copies and keeper.signed.public_key == identity.public_key:
                raise InvalidInput(
                    f"--state {options.state}: it has the operator's key, so this is no copy; give "
                    "run.yaml instead of the invite, or another folder"
                )
            manifest = keeper.signed.verify(keeper.run)
            for line in warnings(manifest):
                logger.warning("%s", line)
            write_atomically(options.state / "invite", f"{invite}\n".encode())
            what = "a copy of the bootstrap of run" if copies else "run"
            logger.info("%s %s (%s) is up; volunteers join with", what, keeper.run, manifest.name)
            typer.echo(f"dilocox peer {invite}")

        def beside(dht: RunDHT, swarm: Swarm) -> Beside:
            return Beside(options, keeper, identity, dht, swarm)

        run_bootstrap(
            keeper=keeper,
            identity=identity,
            listen=[options.listen],
            announce=options.announce,
            others=others,
            alone=keeper.known,
            stop_event=stop.event,
            on_ready=ready,
            beside=beside,
        )
    logger.info("left: as asked")
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


class Beside:
    """What runs beside the DHT node, in its thread: the archive, and the figures of it all."""

    def __init__(
        self,
        options: BootstrapOptions,
        keeper: ManifestKeeper,
        identity: Identity,
        dht: RunDHT,
        swarm: Swarm,
    ):
        """Raises EnvironmentFault if the port for the figures cannot be had."""
        self._keeper = keeper
        self._signed = keeper.signed
        manifest = keeper.signed.verify(keeper.run)
        # with another root nothing of it would fit
        folder = options.state / f"{keeper.run}-archive-{manifest.root[:16]}"
        self._archive = Archive(
            dht=dht,
            swarm=swarm,
            run=keeper.run,
            me=identity.peer_id,
            manifest=manifest,
            folder=folder,
        )
        self._figures = BootstrapFigures(
            role="operator" if keeper.own else "copy",
            keeper=keeper,
            dht=dht,
            swarm=swarm,
            archive=self._archive,
            folder=folder,
        )
        self._open = ExitStack()
        pages = self._figures.pages()
        self._open.enter_context(served(options.metrics_host, options.metrics_port, pages))

    def tick(self) -> None:
        """Do what is due."""
        if self._keeper.signed.manifest_bytes != self._signed.manifest_bytes:
            self._signed = self._keeper.signed
            self._archive.revise(self._signed.verify(self._keeper.run))
        self._archive.tick()
        self._figures.tick()

    def close(self) -> None:
        """End it all."""
        self._open.close()
        self._archive.close()


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


def joined_before(state: Path, run: str, me: str) -> tuple[str, ...]:
    """Addresses of the other bootstraps in the invite that this folder's bootstrap printed last.

    They stay in it without being named again: volunteers who have it are to find them.
    """
    try:
        invite = Invite.parse((state / "invite").read_text())
    except (OSError, UnicodeDecodeError, InvalidInput):  # none yet, or damaged
        return ()
    of_run = invite.bootstraps if invite.run_id == run else ()
    return tuple(each for each in of_run if bootstrap_address(each).peer_id != me)


def _keeper(options: BootstrapOptions) -> Callable[[Identity], ManifestKeeper]:
    """What keeps the manifest, for an identity. Raises InvalidInput for a wrong run.yaml."""
    source = options.manifest
    if isinstance(source, Invite):
        path = options.state / f"{source.run_id}.manifest"
        return lambda _: ManifestCopy(source.run_id, path, write_atomically)
    manifest = checked_manifest(source)

    def keeper(identity: Identity) -> OwnManifest:
        run = run_id(identity.public_key, manifest.name)
        revisions = RevisionFolder(options.state, run)
        return OwnManifest(identity, manifest, revisions, joins=bool(options.join))

    return keeper

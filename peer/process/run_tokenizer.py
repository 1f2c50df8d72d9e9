"""The tokenizer of a run where its source is out of reach: the operator's bootstrap keeps its files
and gives them to any caller.

A tokenizer is a folder of small files, which transformers loads without running any of it. They
travel as one msgpack map from name to bytes. What comes is not believed: the manifest has the
digest of what the tokenizer makes of text (`check_tokenizer`).
"""

from __future__ import annotations

import logging
import re
import shutil
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import cast

from dilocox.dht.errors import DilocoxError, EnvironmentFault
from dilocox.dht.files import make_folder, write_atomically
from dilocox.dht.invite import bootstrap_address
from dilocox.dht.join import Joined
from dilocox.dht.manifest import Manifest
from dilocox.dht.names import shown_peer
from dilocox.dht.records import averaging_prefix
from dilocox.dht.rpc import REFUSED, Client, LoopThread
from dilocox.dht.wire import Malformed, pack, unpack
from dilocox.peer.chain.store import TOKENIZER_NAME, archive_folder
from dilocox.peer.training.data import PretrainedTokenizer, check_tokenizer, open_tokenizer
from dilocox.peer.training.data_sources import HubAway

logger = logging.getLogger(__name__)

MAX_BYTES = 64 << 20
FETCH_LIMIT_S = 600.0  # of one bootstrap; one that stalls fails much sooner
WAIT_S = 60.0  # until a bootstrap that has just started gives it
PAUSE_S = 2.0

_FILE = re.compile(r"[a-zA-Z0-9_-][a-zA-Z0-9_.-]{0,63}\.(json|txt|model|jinja|spm|vocab|codes)")


def archive_tokenizer(state: Path, run: str, manifest: Manifest) -> None:
    """Put the tokenizer's files where a bootstrap's archive gives them to others; what is there
    stays. Where that cannot be, a warning says so: peers may reach it by themselves.

    Raises EnvironmentFault if the disk is full.
    """
    folder = archive_folder(state, run, manifest) / "stage0"
    if (folder / TOKENIZER_NAME).exists():
        return
    try:
        packed = _packed(manifest)
    except DilocoxError as error:
        logger.warning("peers must reach data.tokenizer by themselves: %s", error)
        return
    if packed is not None:
        make_folder(folder)
        write_atomically(folder / TOKENIZER_NAME, packed)


def _packed(manifest: Manifest) -> bytes | None:
    """The files of the run's tokenizer, tried as others will get them; None where it has none."""
    tokenizer = open_tokenizer(manifest.data.tokenizer)
    if not isinstance(tokenizer, PretrainedTokenizer):
        return None
    with tempfile.TemporaryDirectory() as name:
        tokenizer.save(Path(name))
        for path in Path(name).iterdir():
            if not (path.is_file() and _FILE.fullmatch(path.name)):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        check_tokenizer(manifest.data, open_tokenizer(name), manifest.model)
        packed = pack({path.name: path.read_bytes() for path in Path(name).iterdir()})
    if len(packed) > MAX_BYTES:
        raise EnvironmentFault(f"its files have {len(packed) / 1e6:.0f} MB, too many to be given")
    return packed


def reachable_tokenizer(joined: Joined, bootstraps: Sequence[str], folder: Path) -> str:
    """What to call the run's tokenizer on this machine: its name where that opens here, else a
    folder, below this one, with what a bootstrap gave.

    bootstraps: their addresses. Raises EnvironmentFault if nobody gives it in time, HubAway if
    the hub may later, InvalidInput if it is not the run's.
    """
    data, kept = joined.manifest.data, folder / TOKENIZER_NAME
    if data.tokenizer == "byt5":
        return data.tokenizer
    reason: DilocoxError | None = None
    for name in [str(kept)] * kept.is_dir() + [data.tokenizer]:
        try:
            check_tokenizer(data, open_tokenizer(name), joined.manifest.model)
            return name
        except DilocoxError as error:
            reason = error
    logger.info("the tokenizer cannot be had here (%s): taking the bootstrap's", reason)
    files = _fetched(joined, bootstraps, time.monotonic() + WAIT_S)
    if files is None:
        kind = HubAway if isinstance(reason, HubAway) else EnvironmentFault
        raise kind(f"no bootstrap gives the run's tokenizer, and here: {reason}")
    make_folder(folder)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        partial = Path(name) / TOKENIZER_NAME
        partial.mkdir()
        for file, content in files.items():
            write_atomically(partial / file, content)
        check_tokenizer(data, open_tokenizer(str(partial)), joined.manifest.model)
        if kept.is_dir():  # damaged, or it would have been taken
            shutil.rmtree(kept)
        partial.rename(kept)
    return str(kept)


def _fetched(joined: Joined, bootstraps: Sequence[str], give_up: float) -> dict[str, bytes] | None:
    """The files, from the first bootstrap that gives them; None if none does until then."""
    with closing(LoopThread("tokenizer", p2p=joined.dht.replicate_p2p)) as thread:
        thread.start()
        client = Client(p2p=thread.p2p, namespace=averaging_prefix(joined.run, 0), record_bytes=0)
        while True:
            for address in bootstraps:
                peer = bootstrap_address(address).peer_id
                asked = client.fetch(peer, {"what": TOKENIZER_NAME}, limit_bytes=MAX_BYTES)
                try:
                    if (found := thread.ask(asked, FETCH_LIMIT_S)) is not None:
                        return _unpacked(found.data)
                except REFUSED as error:
                    logger.info("no tokenizer from %s: %s", shown_peer(peer), error)
            if time.monotonic() > give_up:
                return None
            time.sleep(PAUSE_S)


def _unpacked(data: bytes) -> dict[str, bytes]:
    """Raises Malformed for what is no map of plain file names."""
    found = unpack(data, MAX_BYTES)
    if not isinstance(found, dict) or not found:
        raise Malformed("it is no map of files")
    files = cast("dict[object, object]", found)
    for name, content in files.items():
        named = isinstance(name, str) and _FILE.fullmatch(name)
        if not (named and isinstance(content, bytes)):
            raise Malformed(f"{str(name)[:80]!r} is no file of a tokenizer")
    return cast("dict[str, bytes]", files)

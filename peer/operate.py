"""The command `dilocox export`, and what an operator's run.yaml must hold to be published."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from dilocox.dht.errors import InvalidInput
from dilocox.dht.invite import Invite
from dilocox.dht.manifest import Manifest
from dilocox.peer.signals import StopSignal

if TYPE_CHECKING:  # both are heavy, and `dilocox --help` needs none of them
    from dilocox.peer.download import StageAnchor
    from dilocox.peer.join import Joined


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """The options of `dilocox export`; see their help texts."""

    invite: Invite
    folder: Path
    host: str
    timeout_s: float


def run_export_command(options: ExportOptions) -> int:
    """Download the newest anchors of a run and write a Hugging Face folder; the exit code."""
    with StopSignal():
        _export(options)
        return 0
    return 130  # stopped before it was done


def _export(options: ExportOptions) -> None:
    from dilocox.peer.download import download_anchors
    from dilocox.peer.join import visiting

    with visiting(options.invite, options.host) as place:
        anchors = download_anchors(place, timeout_s=options.timeout_s)
        write_anchors(options.folder, place, anchors)
    rounds = shown_rounds([each.round for each in anchors])
    typer.echo(f"wrote {options.folder}: {rounds}, {anchors[0].chain_tokens:,} tokens")


def shown_rounds(rounds: Sequence[int]) -> str:
    """The rounds of the anchors of all stages."""
    *others, last = map(str, rounds)
    return f"rounds {', '.join(others)} and {last} of its stages" if others else f"round {last}"


def write_anchors(folder: Path, place: Joined, anchors: Sequence[StageAnchor]) -> None:
    """Write a Hugging Face folder from the anchors of all stages; raises as `write_checkpoint`."""
    from dilocox.peer.export import write_checkpoint

    manifest = place.manifest
    info = {
        "run": place.run,
        "name": manifest.name,
        "tokens": anchors[0].chain_tokens,
        "stages": [{"round": each.round, "digest": each.digest} for each in anchors],
    }
    write_checkpoint(
        folder,
        manifest.model,
        [(e.stage, manifest.stages, e.layout.view(e.anchor)) for e in anchors],
        manifest.data.tokenizer,
        info,
    )


def checked_manifest(path: Path) -> Manifest:
    """The run's description, completed by what only this machine can tell: that the model can be
    cut and has a row for each id of the tokenizer, and the digest of the held-out data.

    Raises:
        InvalidInput: a field is wrong, the model cannot be cut so, there is no such tokenizer or
            it has too many ids, or the data are not as stated.
        EnvironmentFault: the tokenizer or the data are on the hub, which does not answer.
    """
    from dilocox.peer.data import held_out_digest
    from dilocox.peer.tokens import check_vocabulary, open_tokenizer
    from dilocox.pipeline.partition import plan_stages

    manifest = Manifest.load(path)
    plan_stages(manifest.model, manifest.stages)
    tokenizer = manifest.data.tokenizer
    check_vocabulary(tokenizer, open_tokenizer(tokenizer), manifest.model)
    found = held_out_digest(manifest.data)
    if manifest.data.held_out not in ("", found):
        raise InvalidInput(
            f"{path}: data.held_out is {manifest.data.held_out[:12]}..., the data here give "
            f"{found[:12]}...; remove the field, or use the data it was made from"
        )
    return replace(manifest, data=replace(manifest.data, held_out=found))

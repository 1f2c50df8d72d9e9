"""The commands `dilocox operate ...`: the operator changes, pauses, ends or turns back a run, and
admits peers to it.

They work on the state folder of the operator's bootstrap, with its key, while that runs or not: a
command signs the next revision of the manifest and puts it there; the bootstrap publishes it.

`checked_manifest` says what a run.yaml must hold to be published; `dilocox bootstrap` asks it, too.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer

from dilocox.dht.admission import DAY_S, date
from dilocox.dht.errors import EnvironmentFault, InvalidInput
from dilocox.dht.identity import Identity
from dilocox.dht.invite import Invite
from dilocox.dht.manifest import Manifest, SignedManifest, hand_over, warnings
from dilocox.dht.manifest_revisions import (
    RevisionFolder,
    RunState,
    admitting,
    back_to,
    changes,
    in_state,
    revised,
    revoking,
    under_next_key,
)
from dilocox.peer.options import (
    AdmitOptions,
    AdmittedOptions,
    EndRunOptions,
    OperateOptions,
    ReviseOptions,
    RevokeOptions,
    RollbackOptions,
    RotateOptions,
    StateOptions,
)
from dilocox.peer.state_folder import StateFolder
from dilocox.peer.training.data_sources import with_formats


def completed(given: dict[str, Any]) -> dict[str, Any]:
    """The fields of a run.yaml, with what its data folders and its checkpoint say; raises as
    `with_formats` and `described_by`.
    """
    given = with_formats(given)
    from dilocox.pipeline.pretrained import described_by

    return described_by(given)


def checked_manifest(path: Path) -> Manifest:
    """The run's description, completed by what only this machine can tell: that the model can be
    cut and has a row for each id of the tokenizer, and the digests of that, of the held-out data
    and of the weights of a checkpoint that it starts from.

    Raises:
        InvalidInput: a field is wrong, the model cannot be cut so or keep documents apart, its
            exchanges could not end in time, there is no such tokenizer or it has too many ids, the
            data are not as stated, or the checkpoint is not to be used.
        EnvironmentFault: something of this is on the hub, which does not answer.
    """
    manifest = Manifest.load(path, completed)  # what is misspelt is said before torch is loaded
    from dilocox.peer.process.initial_weights import pinned
    from dilocox.peer.process.prepare import check_deadlines
    from dilocox.peer.training.data import (
        check_tokenizer,
        held_out_digest,
        open_tokenizer,
        tokenizer_digest,
    )
    from dilocox.pipeline.partition import check_document_masks, plan_stages

    plan_stages(manifest.model, manifest.stages)
    check_deadlines(manifest)
    tokenizer = open_tokenizer(manifest.data.tokenizer)
    check_tokenizer(manifest.data, tokenizer, manifest.model)
    if manifest.data.document_masks:
        check_document_masks(manifest.model)
    found = held_out_digest(manifest.data)
    if manifest.data.held_out not in ("", found):
        raise InvalidInput(
            f"{path}: data.held_out is {manifest.data.held_out[:12]}..., the data here give "
            f"{found[:12]}...; remove the field, or use the data it was made from"
        )
    filled_in: dict[str, Any] = {
        "held_out": found,
        "tokenizer_digest": tokenizer_digest(tokenizer),
        "end_of_text": tokenizer.eos_id if manifest.data.document_masks else None,
    }
    return pinned(replace(manifest, data=replace(manifest.data, **filled_in)))


PUBLISH_LIMIT_S = 60.0
POLL_S = 0.2
NEXT: dict[RunState, str] = {
    "paused": "is paused: its peers end the exchange in flight and wait; `resume` lets them go on",
    "running": "goes on",
    "ended": "is ended: its peers send what they have learnt, and leave",
}


@dataclass(frozen=True)
class Operator:
    """The operator of a run, by the state folder of the bootstrap."""

    state: Path
    run: str
    identity: Identity
    revisions: RevisionFolder
    signed: SignedManifest

    @classmethod
    def of(cls, options: OperateOptions) -> Operator:
        """Raises InvalidInput where no run is operated from this folder."""
        state = options.state
        remedy = "name the --state folder of the `dilocox bootstrap` that was given run.yaml"
        try:
            invite = Invite.parse(StateFolder(state).invite.read_text())
        except OSError as error:
            raise InvalidInput(f"{state}: no bootstrap has run here; {remedy}") from error
        revisions = RevisionFolder(state, invite.run_id)
        signed = revisions.newest()
        if signed is None:
            raise InvalidInput(f"{state}: has no revision of run {invite.run_id}; {remedy}")
        identity = _signing_key(options, signed)
        return cls(state, invite.run_id, identity, revisions, signed)

    @property
    def manifest(self) -> Manifest:
        """The newest."""
        return self.signed.verify(self.run)

    def publish(self, manifest: Manifest) -> int:
        """Sign the next revision, and see it published if the bootstrap runs; its number.

        Raises EnvironmentFault if that takes too long.
        """
        return self.publish_signed(
            SignedManifest.sign(self.identity, manifest, self.signed.handovers)
        )

    def publish_signed(self, signed: SignedManifest) -> int:
        """As `publish`."""
        number = self.revisions.add(signed)
        deadline = time.monotonic() + PUBLISH_LIMIT_S
        while self.revisions.published < number:
            if not StateFolder(self.state).in_use:
                typer.echo(f"revision {number} is signed; no bootstrap runs now. Once one does:")
                return number
            if time.monotonic() > deadline:
                raise EnvironmentFault(
                    f"revision {number} is signed, but the bootstrap has not published it for "
                    f"{PUBLISH_LIMIT_S:.0f} s: look at its log"
                )
            time.sleep(POLL_S)
        return number


def _signing_key(options: OperateOptions, signed: SignedManifest) -> Identity:
    """The key that signed the newest revision; raises InvalidInput where it is not to be found."""
    folder = StateFolder(options.state)
    places = [options.key] if options.key else [folder.operator, folder.identity]
    for place in places:
        if (
            place.exists()
            and (found := Identity.load_or_create(place)).public_key == signed.public_key
        ):
            return found
    raise InvalidInput(
        f"{' and '.join(map(str, places))}: not the key that signed the newest revision of this "
        "run: name the operator's key with --key"
    )


def set_state(options: StateOptions) -> int:
    """`pause`, `resume` and `end`; the exit code."""
    operator = Operator.of(options)
    manifest, wanted = operator.manifest, options.wanted
    if manifest.operation.state == wanted:
        typer.echo(
            f"run {manifest.name} is {wanted} already (revision {manifest.operation.revision})"
        )
        return 0
    following = in_state(manifest, wanted)
    if isinstance(options, EndRunOptions):
        _confirm(f"this ends run {manifest.name} for good: its peers leave", yes=options.yes)
    number = operator.publish(following)
    typer.echo(f"revision {number}: run {manifest.name} {NEXT[wanted]}")
    return 0


def _confirm(what: str, *, yes: bool) -> None:
    """Ask a person; a no ends the command, with exit code 1.

    Raises InvalidInput where nobody is at a terminal and no --yes is given.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise InvalidInput(f"{what}; nobody can be asked here: if you mean it, add --yes")
    typer.confirm(f"{what}. Go on?", abort=True)


def revise(options: ReviseOptions) -> int:
    operator = Operator.of(options)
    wanted = checked_manifest(options.manifest)
    following = revised(operator.manifest, wanted)
    _check_end(operator, following)
    for line in warnings(following):
        typer.echo(f"warning: {line}", err=True)
    number = operator.publish(following)
    for change in changes(operator.manifest, following):
        typer.echo(f"revision {number}: {change}")
    return 0


def _check_end(operator: Operator, following: Manifest) -> None:
    """Raise InvalidInput if a new end lies behind what the run has trained: most often a typo."""
    from dilocox.peer.chain.rollback import archived_tokens

    end = following.end_tokens
    if end == operator.manifest.end_tokens:
        return
    trained = archived_tokens(operator.state, operator.run, operator.manifest)
    if end <= trained:
        raise InvalidInput(
            f"end_tokens is {end:,}, but the run has trained {trained:,} tokens: this would end it "
            "for everybody; if you mean that, `dilocox operate end`"
        )


def roll_back(options: RollbackOptions) -> int:
    from dilocox.peer.chain.rollback import prepare_rollback  # torch, which the others need not

    operator, number = Operator.of(options), options.round_number
    rules = operator.manifest.operation.revision + 1
    _confirm(
        f"run {operator.manifest.name} goes back to round {number}: all that it has trained since "
        "counts no more, and its peers start again from there",
        yes=options.yes,
    )
    base = prepare_rollback(
        operator.state, operator.run, operator.manifest, number, rules, tell=typer.echo
    )
    revision = operator.publish(back_to(operator.manifest, number, base))
    typer.echo(f"revision {revision}: run {operator.manifest.name} goes on from round {number}")
    return 0


def admit(options: AdmitOptions) -> int:
    operator, today = Operator.of(options), int(time.time()) // DAY_S
    until = today + options.days + 1  # the day has begun
    following = admitting(operator.manifest, dict.fromkeys(options.peers, until), today)
    number = operator.publish(following)
    for peer in options.peers:
        typer.echo(f"revision {number}: {peer} is admitted until {date(until * DAY_S)}")
    if operator.manifest.admission == "open":
        typer.echo(
            "the run is open: whoever has the invite takes part. To close it set `admission: "
            "listed` in its run.yaml, then `dilocox operate revise`"
        )
    return 0


def revoke(options: RevokeOptions) -> int:
    operator = Operator.of(options)
    number = operator.publish(revoking(operator.manifest, options.peers))
    for peer in options.peers:
        typer.echo(f"revision {number}: {peer} is not admitted any more")
    return 0


def show_admitted(options: AdmittedOptions) -> int:
    manifest = Operator.of(options).manifest
    for peer, day in manifest.operation.admitted:
        typer.echo(f"{peer} until {date(day * DAY_S)}")
    typer.echo(f"admission: {manifest.admission}")
    return 0


def rotate(options: RotateOptions) -> int:
    operator, place = Operator.of(options), options.new_key or StateFolder(options.state).operator
    draft = place.with_name(f"{place.name}.new")
    draft.unlink(missing_ok=True)
    fresh = Identity.load_or_create(draft)
    handovers = (*operator.signed.handovers, hand_over(operator.identity, fresh.public_key))
    following = SignedManifest.sign(fresh, under_next_key(operator.manifest), handovers)
    if place.exists():
        place.replace(place.with_name(f"{place.name}.{len(handovers) - 1}"))
    draft.replace(place)  # before it is needed
    number = operator.publish_signed(following)
    typer.echo(f"revision {number}: from now on the operator's key is {place}")
    typer.echo(
        "the former one signs nothing any more. Keep a copy of the new one in another place; it "
        "need not stay on this machine: `dilocox operate ... --key FILE`"
    )
    return 0

"""How a running manifest is revised: what may change, and what a change does to the records.

A revision is a whole manifest, signed like the first one, with a number of its own; the highest
counts. Rounds go on over it: the chain of records still begins at the first revision, every record
names the rules it was made under, and a manifest tells what its run needs to know of earlier rules.
So the newest revision is enough to replay all records. Who may revise: whoever has the operator's
key (`dilocox operate`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from dilocox.dht.errors import InvalidInput
from dilocox.dht.manifest import Manifest, OperationSpec
from dilocox.dht.manifest_checks import shown

RunState = Literal["running", "paused", "ended"]

REVISABLE = (
    "end_tokens",
    "inner.learning_rate",
    "inner.muon_learning_rate",
    "inner.weight_decay",
    "inner.clip_norm",
    "inner.warmup_tokens",
    "inner.final_fraction",
    "outer.learning_rate",
    "outer.momentum",
    "deadlines.",
)
REASONS = {
    "name": "the run id is made of it",
    "protocol": "the peers that train now speak it",
    "seed": "the initial weights are made of it, and so is every anchor",
    "model": "the weights would not fit",
    "preset": "the weights would not fit",
    "stages": "every peer holds the weights of one of them",
    "data": "parts are leased and losses compared by it",
    "batch": "tokens of the records are counted by it",
    "pipeline": "replicas that stand agreed on it",
    "inner": "the optimizers' states would not fit",
    "outer": "peers keep their unsent progress by it",
    "codec": "the records of the chain are coded by it",
    "rounds": "the records of the chain are checked by it",
}


@dataclass(frozen=True)
class Change:
    """A field whose value differs."""

    field: str
    before: object
    after: object

    def __str__(self) -> str:
        return f"{self.field}: {shown(self.before)} -> {shown(self.after)}"


def changes(before: Manifest, after: Manifest) -> list[Change]:
    """The fields that differ, but for what the operator's commands write."""
    old, new = _flat(before.to_dict()), _flat(after.to_dict())
    names = sorted(old.keys() | new.keys())
    return [
        Change(name, old.get(name), new.get(name))
        for name in names
        if old.get(name) != new.get(name) and not name.startswith("operation.")
    ]


def check_of_run(wanted: Manifest, run: str, known: Iterable[Manifest]) -> None:
    """Raise InvalidInput if a run.yaml differs from all of these revisions of a run that began."""
    differences = [changes(each, wanted) for each in known]
    if all(differences):
        first = differences[-1][0]
        raise InvalidInput(
            f"run.yaml says {first.after!r} for {first.field}, run {run} has {first.before!r}; to "
            "change a run that has begun use `dilocox operate revise`, to begin another one give "
            "it another name"
        )


def revised(before: Manifest, wanted: Manifest) -> Manifest:
    """The next revision, with the values of a run.yaml that was edited.

    Raises:
        InvalidInput: nothing differs, or a field that cannot change in a running run.
    """
    _check_not_ended(before)
    found = changes(before, wanted)
    if not found:
        raise InvalidInput("nothing differs from the run's manifest: edit a value first")
    for change in found:
        if not any(
            change.field == name or (name.endswith(".") and change.field.startswith(name))
            for name in REVISABLE
        ):
            reason = REASONS.get(change.field.partition(".")[0], "all peers rely on it")
            may = ", ".join(name.rstrip(".") for name in REVISABLE)
            raise InvalidInput(
                f"{change.field} is {shown(change.after)}, the run has {shown(change.before)}; it "
                f"cannot change in a running run ({reason}): put it back, or start a run of "
                f"another name. What may change: {may}"
            )
    return _under_new_rules(before, replace(wanted, operation=before.operation))


def in_state(before: Manifest, state: RunState) -> Manifest:
    """The next revision, in this state; InvalidInput if the run is in it, or has ended."""
    _check_not_ended(before)
    operation = before.operation
    if operation.state == state:
        raise InvalidInput(f"the run is {state} already (revision {operation.revision})")
    following = replace(operation, revision=operation.revision + 1, state=state, root=before.root)
    return replace(before, operation=following)


def back_to(before: Manifest, round_number: int, base: Sequence[str]) -> Manifest:
    """The next revision, in which the run goes on from the records up to a round.

    base: by stage, the digest of its last record of that round or an earlier one, or the root.
    """
    _check_not_ended(before)
    made = _under_new_rules(before, before)
    operation = made.operation
    rollbacks = (*operation.rollbacks, (operation.rules, round_number))
    return replace(made, operation=replace(operation, rollbacks=rollbacks, base=tuple(base)))


def _under_new_rules(before: Manifest, wanted: Manifest) -> Manifest:
    operation = before.operation
    held = (before.outer.learning_rate, before.outer.momentum)
    outer = operation.outer
    if held != (wanted.outer.learning_rate, wanted.outer.momentum):
        outer = (*outer, (operation.rules, *held))
    following: OperationSpec = replace(
        operation,
        revision=operation.revision + 1,
        rules=operation.revision + 1,
        root=before.root,
        outer=outer,
    )
    return replace(wanted, operation=following)


def _check_not_ended(manifest: Manifest) -> None:
    if manifest.operation.state == "ended":
        raise InvalidInput("the run has ended: its peers have left; start a run of another name")


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{name}.")  # pyright: ignore[reportUnknownArgumentType]
        else:
            found[prefix + name] = value
    return found

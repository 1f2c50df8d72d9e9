"""The errors that a person sees: their own mistakes (exit code 2) and their machine's troubles (1),
each of several kinds.

Each message is one line that names the thing, the value and the remedy. The command line prints it
without a traceback; anything else that escapes is a bug and keeps its traceback.
"""


def reason_of(error: Exception) -> str:
    """What an error says, its first line; its kind where it says nothing."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def in_one_line(error: BaseException) -> str:
    """All that an error says, its lines and indents as spaces; empty where it says nothing."""
    return " ".join(str(error).split())


class DilocoxError(Exception):
    """An error with a message for people."""

    exit_code = 1


class InvalidInput(DilocoxError):
    """A bad option, manifest, invite or key file: the user fixes it and starts again."""

    exit_code = 2


class CannotFollow(InvalidInput):
    """The run goes on, but not with this peer as it is."""


class NotAdmitted(CannotFollow):
    """The run takes only peers that its operator admits, and not this one."""


class AdmissionLapsed(NotAdmitted):
    """It was admitted until a day that is over; once its operator renews that it can go on."""


class UnreadableManifest(CannotFollow):
    """The manifest is proven to be the operator's, and for another version of this program."""


class UnknownRun(InvalidInput):
    """The others answer, and none of them knows a run of this id."""


class EnvironmentFault(DilocoxError):
    """The machine or the network is not as needed: no bootstrap answers, disk full, port in use."""

    exit_code = 1


class BootstrapsSilent(EnvironmentFault):
    """No bootstrap of the invite answers now; a peer that was in the run returns once one does."""

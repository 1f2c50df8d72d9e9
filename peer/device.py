"""The device that a peer computes on. Nobody may ask for it before everything is forked: a process
that has touched CUDA cannot fork one that will.
"""

from __future__ import annotations

import torch

from dilocox.dht.errors import InvalidInput


def chosen_device(option: str) -> torch.device:
    """The device that `--device` names; InvalidInput if it is not here."""
    if option == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(option)
        torch.zeros((), device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise InvalidInput(f"--device {option}: {reason}; choose cpu or auto") from error
    return device

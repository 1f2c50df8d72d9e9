from typing import Any

from hivemind.p2p import P2PDaemonError

class ControlFailure(P2PDaemonError): ...

def __getattr__(name: str) -> Any: ...

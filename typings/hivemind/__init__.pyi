"""What strict types need to know of hivemind, which carries none: its names. A member is Any."""

from typing import Any

class DHT(Any):
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def run(self) -> None: ...

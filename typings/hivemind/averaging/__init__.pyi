from typing import Any

class DecentralizedAverager(Any):
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

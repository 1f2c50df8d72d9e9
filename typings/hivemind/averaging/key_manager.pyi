from typing import Any

class GroupKeyManager(Any):
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

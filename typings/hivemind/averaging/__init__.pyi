from typing import Any

class DecentralizedAverager(Any):
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    run: Any
    _shutdown: Any
    _step: Any
    rpc_join_group: Any

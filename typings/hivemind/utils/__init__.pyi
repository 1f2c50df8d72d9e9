from typing import Any

from . import timed_storage as timed_storage

class MPFuture(Any):
    def __class_getitem__(cls, item: Any) -> Any: ...

def __getattr__(name: str) -> Any: ...

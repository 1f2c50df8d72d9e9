from typing import Any

class DHTProtocol(Any):
    async def rpc_find(self, request: Any, context: Any) -> Any: ...

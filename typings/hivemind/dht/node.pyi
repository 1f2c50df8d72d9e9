from typing import Any

DHTProtocol: Any

class DHTNode(Any): ...

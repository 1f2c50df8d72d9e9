"""How the stages of a run's model lie in flat vectors, and what follows from that.

It imports the code of models, of 100 MB: who only watches a run, as a monitor does, stays without.
"""

from __future__ import annotations

from dilocox.compression.layout import FlatLayout
from dilocox.dht.manifest import Manifest
from dilocox.peer.plan import stage_codec
from dilocox.peer.record import max_record_bytes
from dilocox.pipeline.stage import parameter_shapes


def stage_layout(manifest: Manifest, stage: int) -> FlatLayout:
    """Of the parameters of a stage."""
    return FlatLayout.of(parameter_shapes(manifest.model, manifest.stages, stage))


def stage_record_bytes(manifest: Manifest, stage: int) -> int:
    """The most bytes of a record of a stage, for who is no peer of it."""
    return max_record_bytes(stage_codec(manifest, stage_layout(manifest, stage)))

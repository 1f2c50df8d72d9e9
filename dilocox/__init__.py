"""dilocox: volunteers train one language model together over ordinary internet links."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dilocox.compression.group_quantization import GroupCodec as GroupCodec
    from dilocox.compression.layout import FlatLayout as FlatLayout
    from dilocox.compression.low_rank import LowRank as LowRank
    from dilocox.compression.stage_codec import Compression as Compression
    from dilocox.compression.stage_codec import StageCodec as StageCodec
    from dilocox.dht.manifest import CodecSpec as CodecSpec
    from dilocox.dht.manifest import DataSpec as DataSpec
    from dilocox.dht.manifest import InnerSpec as InnerSpec
    from dilocox.dht.manifest import OuterSpec as OuterSpec
    from dilocox.dht.manifest import RoundSpec as RoundSpec
    from dilocox.peer.rounds.outer_step import OuterStep as OuterStep
    from dilocox.peer.training.data import Corpus as Corpus
    from dilocox.peer.training.data import held_out_windows as held_out_windows
    from dilocox.peer.training.data import validation_loss as validation_loss
    from dilocox.peer.training.inner_optimizer import InnerOptimizer as InnerOptimizer
    from dilocox.peer.training.inner_optimizer import clip_factor as clip_factor
    from dilocox.peer.training.inner_optimizer import learning_rate as learning_rate
    from dilocox.peer.training.local_swarm import local_swarm as local_swarm
    from dilocox.peer.training.merge import Merge as Merge
    from dilocox.peer.training.merge import MergeConfig as MergeConfig
    from dilocox.peer.training.merge import RecordFacts as RecordFacts
    from dilocox.peer.training.merge import Remainder as Remainder
    from dilocox.pipeline.stage import build_stage as build_stage
    from dilocox.pipeline.stage_worker import next_token_loss as next_token_loss

    PROJECT_URL: str

__version__ = "0.1.0"
# For a loop of one's own (docs/library.md): each is imported when it is asked for.
_HOMES = {
    "compression.group_quantization": ("GroupCodec",),
    "compression.layout": ("FlatLayout",),
    "compression.low_rank": ("LowRank",),
    "compression.stage_codec": ("Compression", "StageCodec"),
    "dht.manifest": ("CodecSpec", "DataSpec", "InnerSpec", "OuterSpec", "RoundSpec"),
    "peer.rounds.outer_step": ("OuterStep",),
    "peer.training.data": ("Corpus", "held_out_windows", "validation_loss"),
    "peer.training.inner_optimizer": ("InnerOptimizer", "clip_factor", "learning_rate"),
    "peer.training.local_swarm": ("local_swarm",),
    "peer.training.merge": ("Merge", "MergeConfig", "RecordFacts", "Remainder"),
    "pipeline.stage": ("build_stage",),
    "pipeline.stage_worker": ("next_token_loss",),
}


def __getattr__(name: str) -> Any:
    if name == "PROJECT_URL":  # setup.cfg's; "" for its placeholder, and where nothing is installed
        found = import_module("importlib.metadata").distributions(name=__name__)
        url = str(next((each.metadata["Project-URL"] for each in found), "")).partition(", ")[2]
        return "" if "OWNER" in url else url
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

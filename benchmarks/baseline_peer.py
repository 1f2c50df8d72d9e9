"""One peer of a rival, or a plain loop: a process that benchmarks/baselines.py starts on a link.

    python -m benchmarks.baseline_peer SETTINGS        # JSON, see `Settings`

Model, data, batch and inner optimizer are those of the product's peers; the loop is transformers
and torch.optim.AdamW, and what joins the peers is torch's or hivemind's own:

    plain       nothing: as many lonely loops as there would be peers
    allreduce   torch.distributed (gloo) with DistributedDataParallel, every step
    opendiloco  as OpenDiLoCo's optimizer does: H inner steps, pseudo-gradients averaged in fp16,
                Nesterov SGD at 0.7 and 0.9, then the state (the outer parameters) averaged in fp16,
                which hivemind's optimizer does at every outer step if it is told nothing else
    averager    the same without the average of the state

Both averages are hivemind's DecentralizedAverager in its stock form, over a real DHT; told how many
peers there are, so that a group starts as soon as all have come instead of after the 15 s that
OpenDiLoCo waits for more.

It writes JSON lines as things happen, so that one that hangs has still told how far it got:
`training`, `step`, `mark` (all steps up to here are joined), and `model` (a file of weights, by the
first peer, outside of the timed part if the caller says so). It goes on until it is killed.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dilocox.dht.manifest import DataSpec, InnerSpec
from dilocox.peer.training.data import Corpus
from dilocox.pipeline.stage import build_stage

OUTER_RATE, OUTER_MOMENTUM = 0.7, 0.9  # of OpenDiLoCo
GROUP_LIMIT_S, REDUCE_LIMIT_S = 60.0, 1800.0
WARM_STEPS = 5  # before anything is joined, to know what a step takes; undone
RENDEZVOUS_PORT = 29500


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a peer is told.

    kind: see above. rank, peers: which of how many. address: its own; first_address: of rank 0.
    folder: for the files of all peers.
    model, inner, batch, parts, seed: as a manifest has them. inner_steps: H of the two last kinds.
    model_s: seconds between two files of weights, at least.
    """

    kind: str
    rank: int
    peers: int
    address: str
    first_address: str
    folder: str
    model: dict[str, Any]
    inner: dict[str, Any]
    batch: dict[str, int]
    parts: int
    seed: int
    inner_steps: int
    model_s: float


class Peer:
    """A model, its optimizer and its data; what it has done is in the file of its events."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self.model, self.network = plain_model(settings.model, settings.seed)
        self.inner = InnerSpec(**settings.inner)
        self.optimizer = self.new_optimizer()
        spec = DataSpec(parts=settings.parts)
        self.corpus = Corpus(spec, **settings.batch, seed=settings.seed)
        self.corpus.open_part(settings.rank)
        self.folder = Path(settings.folder)
        self._events = (self.folder / f"peer-{settings.rank}.jsonl").open("w", buffering=1)
        self._steps, self._saved_at = 0, 0.0

    def new_optimizer(self) -> torch.optim.Optimizer:
        """AdamW as the product has it: no weight decay on vectors."""
        inner, parameters = self.inner, list(self.network.parameters())
        groups = [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": inner.weight_decay},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        ]
        options: dict[str, Any] = {"betas": inner.betas, "eps": inner.eps, "fused": True}
        return torch.optim.AdamW(groups, lr=inner.learning_rate, **options)

    def event(self, kind: str, **facts: Any) -> None:
        """Note what has just happened."""
        self._events.write(json.dumps({"event": kind, "time": time.time(), **facts}) + "\n")

    def step(self, network: nn.Module | None = None) -> None:
        """One inner step, through a wrapped network if there is one."""
        windows = next(self.corpus)  # [b, t + 1]
        logits: Tensor = (network or self.network)(input_ids=windows[:, :-1]).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), self.inner.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def warm_up(self) -> float:
        """Some steps that are undone; the seconds of one."""
        weights = {name: value.clone() for name, value in self.network.state_dict().items()}
        self.step()
        began = time.monotonic()
        for _ in range(WARM_STEPS):
            self.step()
        step_s = (time.monotonic() - began) / WARM_STEPS
        self.network.load_state_dict(weights)
        self.optimizer = self.new_optimizer()
        return step_s

    def stepped(self) -> None:
        """Note an inner step."""
        self._steps += 1
        self.event("step")

    def joined(self, *, alone: bool = False) -> None:
        """Note that all steps so far are in the model; keep its weights now and then."""
        self.event("mark")
        settings = self.settings
        if settings.rank or time.monotonic() - self._saved_at < settings.model_s:
            return
        self._saved_at = time.monotonic()
        own = self._steps * settings.batch["sequence_length"] * settings.batch["microbatch_size"]
        file = self.folder / f"model-{self._steps}.safetensors"
        self.save(file)
        self.event("model", tokens=own * (1 if alone else settings.peers), file=str(file))

    def save(self, file: Path) -> None:
        """Write the weights; into memory, so that it takes milliseconds."""
        from safetensors.torch import save_file

        save_file({name: p.detach() for name, p in self.network.named_parameters()}, file)


def plain_model(config: dict[str, Any], seed: int) -> tuple[Any, nn.Module]:
    """The configuration and the transformers model with the run's initial weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    options = {name: value for name, value in config.items() if name != "model_type"}
    described = AutoConfig.for_model(config["model_type"], **options)
    network: nn.Module = AutoModelForCausalLM.from_config(described)
    stage = build_stage(config, 0, 1, seed)
    network.load_state_dict(dict(stage.named_parameters()), strict=True)
    return described, network.float().train()


def plain(peer: Peer) -> None:
    """A lonely loop."""
    step_s = peer.warm_up()
    wait_for_all(peer)
    peer.event("training", step_s=step_s)
    while True:
        peer.step()
        peer.stepped()
        peer.joined(alone=True)


def all_reduce(peer: Peer) -> None:
    """The gradients of every step are averaged."""
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    settings = peer.settings
    step_s = peer.warm_up()
    distributed.init_process_group(
        "gloo",
        init_method=f"tcp://{settings.first_address}:{RENDEZVOUS_PORT}",
        rank=settings.rank,
        world_size=settings.peers,
        timeout=timedelta(seconds=REDUCE_LIMIT_S),
    )
    # all have built the same weights: to send them would take two minutes at 1 Mbit/s
    network = DistributedDataParallel(peer.network, init_sync=False)
    distributed.barrier()
    peer.event("training", step_s=step_s)
    peer.event("mark")
    while True:
        peer.step(network)
        peer.stepped()
        peer.joined()


def diloco(peer: Peer, *, average_state: bool) -> None:
    """H inner steps, then stock averages by hivemind."""
    import hivemind
    from hivemind.averaging import DecentralizedAverager
    from hivemind.compression import Float16Compression

    settings = peer.settings
    # forked before this process computes: torch's threads do not outlive a fork
    torch.set_num_threads(1)
    contact = peer.folder / "contact.json"
    dht = hivemind.DHT(
        host_maddrs=[f"/ip4/{settings.address}/tcp/0"],
        initial_peers=None if settings.rank == 0 else json.loads(_wait_for(contact).read_text()),
        start=True,
        startup_timeout=60,
    )
    if settings.rank == 0:
        new = contact.with_suffix(".new")
        new.write_text(json.dumps([str(each) for each in dht.get_visible_maddrs()]))
        new.rename(contact)
    parameters = list(peer.network.parameters())
    outer = [p.detach().clone().requires_grad_() for p in parameters]
    optimizer = torch.optim.SGD(outer, lr=OUTER_RATE, momentum=OUTER_MOMENTUM, nesterov=True)

    def averager(name: str) -> DecentralizedAverager:
        return DecentralizedAverager(
            averaged_tensors=[torch.zeros_like(p) for p in outer],
            dht=dht,
            start=True,
            prefix=name,
            target_group_size=settings.peers,
            compression=Float16Compression(),
            allow_state_sharing=False,
        )

    gradients = averager("gradients")
    state = averager("state") if average_state else None

    def average(through: DecentralizedAverager, values: list[Tensor]) -> None:
        with torch.no_grad(), through.get_tensors() as tensors:
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value)
        through.step(timeout=GROUP_LIMIT_S + REDUCE_LIMIT_S)
        with torch.no_grad(), through.get_tensors() as tensors:
            for tensor, value in zip(tensors, values, strict=True):
                value.copy_(tensor)

    step_s = peer.warm_up()
    wait_for_all(peer)
    peer.event("training", step_s=step_s)
    while True:
        for _ in range(settings.inner_steps):
            peer.step()
            peer.stepped()
        with torch.no_grad():
            pseudo = [a - p for a, p in zip(outer, parameters, strict=True)]
        average(gradients, pseudo)
        for anchor, gradient in zip(outer, pseudo, strict=True):
            anchor.grad = gradient
        optimizer.step()
        if state is not None:
            average(state, [anchor.data for anchor in outer])
        with torch.no_grad():
            for anchor, parameter in zip(outer, parameters, strict=True):
                parameter.copy_(anchor)
        peer.joined()


def wait_for_all(peer: Peer) -> None:
    """Until every peer is here."""
    (peer.folder / f"here-{peer.settings.rank}").touch()
    for rank in range(peer.settings.peers):
        _wait_for(peer.folder / f"here-{rank}")


def _wait_for(path: Path) -> Path:
    deadline = time.monotonic() + GROUP_LIMIT_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path.name} did not come")
        time.sleep(0.02)
    return path


def main() -> None:
    """Be that peer."""
    torch.set_num_threads(1)
    settings = Settings(**json.loads(sys.argv[1]))
    torch.manual_seed(settings.seed)
    peer = Peer(settings)
    match settings.kind:
        case "plain":
            plain(peer)
        case "allreduce":
            all_reduce(peer)
        case "opendiloco" | "averager":
            diloco(peer, average_state=settings.kind == "opendiloco")
        case _:
            raise ValueError(f"no rival {settings.kind!r}")


if __name__ == "__main__":
    main()

"""One stage of the model: built alone, initialised from the run's seed, run as a link of a chain.

What: `build_stage` gives a module that takes token ids (first stage) or hidden states and returns
hidden states or (last stage) logits.
Why: a peer must never hold more than its stage, and round 0 needs no download only if every machine
builds the same bytes, whatever the number of stages.
How: the whole model is built on the meta device, stand-ins replace the parts of other stages, and
only what remains gets memory. The model's own forward runs, so masks, rotary tables and logit
scaling stay the family's. So do the rules of initialisation, run module by module; but their random
numbers come from a stream keyed by seed and module name and are made of integers and single IEEE
operations, because torch's own differ between processors with and without AVX2.

`chosen_device` is what a peer computes on. Nobody may ask for it before everything is forked: a
process that has touched CUDA cannot fork one that will.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    checkpoint,  # pyright: ignore[reportUnknownVariableType]
)

from dilocox.compression.layout import FlatLayout
from dilocox.dht.errors import EnvironmentFault, InvalidInput
from dilocox.dht.manifest import Manifest
from dilocox.pipeline.partition import ADVICE, Skeleton, StagePlan, build_skeleton, plan_skeleton

logger = logging.getLogger(__name__)

_NOTHING = torch.empty(0)

# Like the arithmetic of the draws, part of what a seed means: changing it changes initial weights.
_BLOCK = 1 << 16
_LANES = np.uint64(0x0000FFFF_0000FFFF)

_Doubles = npt.NDArray[np.float64]
_Draw = Callable[[int, float, float], _Doubles]


class _StandIn(nn.Module):
    """Takes the place of a module of another stage and hands the hidden states on.

    What is no hidden states (positions, a mask) was to become an addend to the embedding: 0.
    """

    def __init__(self, original: nn.Module, returns_tuple: bool = False) -> None:
        super().__init__()
        self._returns_tuple = returns_tuple
        # Decoders read plain attributes of their layers, such as the kind of attention.
        for name, value in vars(original).items():
            if not name.startswith("_") and isinstance(value, (str, int, float, type(None))):
                setattr(self, name, value)

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor | tuple[Tensor]:
        output = self.output(hidden_states)
        return (output,) if self._returns_tuple else output

    def output(self, hidden_states: Tensor) -> Tensor:
        return hidden_states if hidden_states.dim() == 3 else hidden_states.new_zeros(())


class _Inlet(_StandIn):
    """Stands before the stage's first layer and gives it what the previous stage sent.

    What comes along instead has been through the model's opening again (granite scales it).
    """

    sent = _NOTHING

    def output(self, hidden_states: Tensor) -> Tensor:
        return self.sent


class _Outlet(_StandIn):
    """Stands behind the stage's last layer and keeps what it made, untouched by the closing."""

    made = _NOTHING

    def output(self, hidden_states: Tensor) -> Tensor:
        self.made = hidden_states
        return hidden_states


class _DecoderForward:
    """The decoder's forward, which may be left out.

    Within `giving` the model's forward gets hidden states in place of a decoder's output, so that
    it runs its head alone: logit scales, soft caps and auxiliary losses stay the family's.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward
        self._output_type: Callable[..., Any] = type(None)
        self._given: list[dict[str, Any]] = []  # one, or none

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._given:
            return self._output_type(**self._given.pop())
        output = self._forward(*args, **kwargs)
        self._output_type = type(output)
        return output

    @contextmanager
    def giving(self, hidden: Tensor, **more: Any) -> Generator[None]:
        """more: of the decoder's output. RuntimeError where the forward inside did not take it."""
        self._given.append({"last_hidden_state": hidden, **more})
        try:
            yield
            if self._given:
                raise RuntimeError("this family's head takes its hidden states from elsewhere")
        finally:
            self._given.clear()


class StageModule(nn.Module):
    """The parts of one stage; its parameters have the names that they have in the whole model.

    Cuts `skeleton` in place and leaves its tensors on the meta device: `build_stage` fills them.
    """

    def __init__(self, skeleton: Skeleton, plan: StagePlan) -> None:
        super().__init__()
        model = skeleton.model
        self.is_first = plan.is_first  # takes token ids
        self.is_last = plan.is_last  # returns logits
        self.vocabulary = int(cast(Any, model).config.get_text_config().vocab_size)
        layers = cast(nn.ModuleList, model.get_submodule(skeleton.layers))
        # tuples, so that they are no children
        self._layers = tuple(layers[plan.start : plan.stop])
        routers = _count_routers(model)
        self._gates = _cut(skeleton, plan)
        coefficient = skeleton.auxiliary_coefficient
        self._auxiliary = coefficient and coefficient * _count_routers(model) / max(1, routers)
        # the innermost module with the layers in it: opt's head does not ask the one around it
        decoder = model.get_submodule(skeleton.layers.rpartition(".")[0])
        decoder.forward = self._decoder = _DecoderForward(decoder.forward)
        self._run_decoder: Callable[..., Any] = model.get_submodule(skeleton.base).__call__
        self._run_model: Callable[..., Any] = model.__call__
        self._set_mode = model.train
        # The model is no child either, for that would put a prefix before every name: the stage
        # shares its registers.
        for register in ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules"):
            self.__dict__[register] = model.__dict__[register]

    def forward(self, inputs: Tensor) -> Tensor:
        """Run the stage with a plain causal mask.

        `inputs`: token ids int64 [b, t] on the first stage, else hidden states [b, t, d]. Returns
        hidden states [b, t, d], on the last stage logits [b, t, v].
        """
        hidden, _ = self.hidden_states(inputs)
        return self.logits(hidden) if self.is_last else hidden

    def hidden_states(
        self, inputs: Tensor, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """What `forward` returns of any other stage, [b, t, d]; on the last one behind the final
        norm, for `logits`.

        positions: int64 [b, t]; where they begin anew a token sees none before it, in families of
        `DOCUMENT_MASKS`.

        With them the auxiliary loss of the stage's routers, a scalar times the family's coefficient
        and the stage's share of all routers; None where none is asked for or has a gradient.
        """
        inlet, outlet = self._gates
        more = {} if positions is None else {"position_ids": positions}
        if self.is_first:
            output = self._run_decoder(input_ids=inputs, use_cache=False, **more)
        else:
            inlet.sent = inputs
            output = self._run_decoder(inputs_embeds=inputs, use_cache=False, **more)
            inlet.sent = _NOTHING
        made, outlet.made = outlet.made, _NOTHING
        hidden = cast(Tensor, output.last_hidden_state) if self.is_last else made
        if not (self._auxiliary and torch.is_grad_enabled()):
            return hidden, None
        token = hidden[:1, :1].detach()
        with self._decoder.giving(token, router_logits=output.router_logits):
            loss = self._run_model(inputs_embeds=token, use_cache=False).aux_loss
        return hidden, cast(Tensor, loss) * self._auxiliary

    def logits(self, hidden: Tensor) -> Tensor:
        """On the last stage, the logits [b, t, v] of hidden states [b, t, d], each token by itself.

        Any of those that `hidden_states` returned before, in any shape.
        """
        with self._decoder.giving(hidden):
            return cast(Tensor, self._run_model(inputs_embeds=hidden, use_cache=False).logits)

    def recompute_layers(self) -> None:
        """From now on each layer keeps only its input for its backward, and runs again before."""
        for layer in self._layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)

    def compile_layers(self) -> None:
        """From now on each layer runs as `torch.compile` makes it at the first pass of its kind,
        which takes long; before `recompute_layers`, if that is called, too.
        """
        # in this process: a pool of others would each take memory that nobody planned
        options: dict[str, Any] = {"compile_threads": 1}
        for layer in self._layers:
            layer.forward = torch.compile(  # pyright: ignore[reportUnknownMemberType]
                layer.forward, dynamic=False, options=options
            )

    def train(self, mode: bool = True) -> StageModule:
        """Set the mode of the stage and of the model whose forward it runs."""
        self.training = mode
        self._set_mode(mode)
        return self


@contextmanager
def compiler_faults() -> Generator[None]:
    """Where layers cannot be compiled inside, raise EnvironmentFault, which names the remedy."""
    try:
        yield
    except RuntimeError as error:
        from torch._dynamo.exc import TorchDynamoException  # loads the compiler

        if not isinstance(error, TorchDynamoException):
            raise
        raise EnvironmentFault(
            f"--compile: torch.compile fails ({str(error).partition(chr(10))[0]}); install a C++ "
            "compiler (on a GPU also Triton, of torch's version), or start without --compile"
        ) from error


def build_stage(
    config: Mapping[str, Any],
    stage: int,
    num_stages: int,
    seed: int,
    device: str | torch.device = "cpu",
) -> StageModule:
    """Stage `stage` of the model with its initial weights, in fp32 on `device`.

    The weights depend on the configuration, the seed and the name of their module, on nothing else;
    the caller's random state stays as it is. Raises InvalidInput: see `plan_stages`.
    """
    model, module = _empty_stage(config, num_stages, stage)
    _materialise(model, None)
    _initialise(model, seed)
    return module.to(device)


def shape_stage(
    config: Mapping[str, Any], stage: int, num_stages: int, mode: FakeTensorMode
) -> StageModule:
    """As `build_stage`, of tensors with shapes and no memory, to be run inside `mode`."""
    model, module = _empty_stage(config, num_stages, stage)
    with mode:
        _materialise(model, None)
    return module


def parameter_shapes(
    config: Mapping[str, Any], num_stages: int, stage: int
) -> list[tuple[str, tuple[int, ...]]]:
    """Name and shape of each parameter of a stage, in the order of `named_parameters`."""
    _, module = _empty_stage(config, num_stages, stage)
    return [(name, tuple(parameter.shape)) for name, parameter in module.named_parameters()]


def constant_buffers(config: Mapping[str, Any], num_stages: int, stage: int) -> dict[str, Tensor]:
    """What a checkpoint holds besides parameters: in few families, like minimax, constants."""
    model, module = _empty_stage(config, num_stages, stage)
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    names = set(module.state_dict()) - parameters
    if names:
        _materialise(model, names)
        _initialise(model, seed=0)
    return {name: module.get_buffer(name) for name in sorted(names)}


def flatten_parameters(module: nn.Module, layout: FlatLayout, into: Tensor | None = None) -> Tensor:
    """Move the parameters of `module` into one flat fp32 vector [layout.numel] and return it.

    into: the vector, if it is there already. Each parameter becomes a view of it; the padding
    between them is zero. Raises ValueError if names, shapes or their order are not those of the
    layout.
    """
    parameters = dict(module.named_parameters())
    found = [(name, tuple(parameter.shape)) for name, parameter in parameters.items()]
    expected = [(piece.name, piece.shape) for piece in layout.slices]
    if found != expected:
        differ = sorted(set(found) ^ set(expected))[:3] or "only in their order"
        raise ValueError(f"the module's parameters differ from the layout: {differ}")
    device = next(iter(parameters.values())).device
    if into is None:
        into = torch.empty(layout.numel, dtype=torch.float32, device=device)
    flat = into.zero_()
    for name, view in layout.view(flat).items():
        view.copy_(parameters[name].detach())
        parameters[name].data = view
    return flat


def _empty_stage(
    config: Mapping[str, Any], num_stages: int, stage: int
) -> tuple[nn.Module, StageModule]:
    """The cut model and the stage made of it, both on the meta device."""
    skeleton = build_skeleton(config)
    plans = plan_skeleton(skeleton, num_stages)
    if not 0 <= stage < num_stages:
        raise InvalidInput(f"stage: {stage} does not exist; choose 0 to {num_stages - 1}")
    return skeleton.model, StageModule(skeleton, plans[stage])


def _count_routers(model: nn.Module) -> int:
    """How many modules choose experts, by what transformers records of the family."""
    recorders: dict[str, Any] = getattr(model, "_can_record_outputs", None) or {}
    kind = getattr(recorders.get("router_logits"), "target_class", ())
    return sum(isinstance(module, kind) for module in model.modules())


def _cut(skeleton: Skeleton, plan: StagePlan) -> tuple[_Inlet, _Outlet]:
    """Replace all that other stages hold by stand-ins."""
    model = skeleton.model
    layers = cast(nn.ModuleList, model.get_submodule(skeleton.layers))
    # The first stage needs no inlet and the last one no outlet: theirs stay outside.
    inlet = _Inlet(layers[plan.start - 1], skeleton.tuples)
    outlet = _Outlet(layers[plan.stop % len(layers)], skeleton.tuples)
    for index, layer in enumerate(layers):
        if index == plan.start - 1:
            layers[index] = inlet
        elif index == plan.stop:
            layers[index] = outlet
        elif not plan.start <= index < plan.stop:
            layers[index] = _StandIn(layer, skeleton.tuples)
    opening = () if plan.is_first else skeleton.opening
    closing = () if plan.is_last else skeleton.closing
    for name in opening + closing:
        model.set_submodule(name, _StandIn(model.get_submodule(name)))
    return inlet, outlet


def _materialise(module: nn.Module, names: Collection[str] | None) -> None:
    """Give memory to the tensors called `names` (None: to all), filled with NaN; what is tied stays
    one tensor.
    """
    made: dict[int, Tensor] = {}  # by the id of what it replaces
    for prefix, owner in cast(Iterator[tuple[str, nn.Module]], module.named_modules()):
        own = chain(owner.named_parameters(recurse=False), owner.named_buffers(recurse=False))
        for name, tensor in list(own):
            if tensor.is_meta and (names is None or f"{prefix}.{name}".lstrip(".") in names):
                filled = made.get(id(tensor))
                if filled is None:
                    fill = float("nan") if tensor.is_floating_point() else 0
                    filled = torch.full(tensor.shape, fill, dtype=tensor.dtype, device="cpu")
                    if isinstance(tensor, nn.Parameter):
                        filled = nn.Parameter(filled, requires_grad=tensor.requires_grad)
                    made[id(tensor)] = filled
                setattr(owner, name, filled)


def _initialise(model: nn.Module, seed: int) -> None:
    """Run the family's rules on every module, innermost first, and see that no NaN is left."""
    fork = cast(Callable[..., AbstractContextManager[None]], cast(Any, torch.random).fork_rng)
    with torch.no_grad(), fork(devices=[]), _SeededDraws(seed) as draws:

        def visit(name: str, module: nn.Module, rules: Callable[[nn.Module], None]) -> None:
            rules = getattr(module, "_init_weights", rules)  # a model inside a model has its own
            for child_name, child in module.named_children():
                visit(f"{name}.{child_name}".lstrip("."), child, rules)
            draws.begin(name)
            rules(module)

        visit("", model, lambda _: None)
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if not tensor.is_meta and bool(tensor.isnan().any()):
            family = cast(Any, model).config.model_type
            reason = f"{family!r} has no rule for the initial value of {name}"
            raise InvalidInput(f"model.model_type: {reason}; {ADVICE}")


class _SeededDraws(TorchDispatchMode):
    """While active, normal_ and uniform_ draw from a stream keyed by the seed and a name.

    Every step is exact or correctly rounded, hence the same on every machine. Rules that go on to
    take logarithms (the decay rates of linear attention) are as exact as the machine's logarithm.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self._seed = seed
        self.begin("")

    def begin(self, name: str) -> None:
        key = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        self._stream = np.random.Philox(key=int.from_bytes(key[:16], "little"))
        # For rules that draw by other functions: equal for any split, but not on every processor.
        torch.default_generator.manual_seed(int.from_bytes(key[16:24], "little"))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.normal_.default:
            return self._fill(self._normal, *args, **(kwargs or {}))
        if func is torch.ops.aten.uniform_.default:
            return self._fill(self._uniform, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _fill(
        self, draw: _Draw, tensor: Tensor, a: float = 0.0, b: float = 1.0, **_: Any
    ) -> Tensor:
        """Fill `tensor` by `draw(count, a, b)`, whose defaults are those of both distributions."""
        if tensor.is_meta:
            return tensor
        values = np.empty(tensor.numel(), dtype=np.float32)
        for start in range(0, len(values), _BLOCK):
            block = values[start : start + _BLOCK]
            block[:] = draw(len(block), a, b)
        return tensor.copy_(torch.as_tensor(values).view(tensor.shape))

    def _normal(self, count: int, mean: float, std: float) -> _Doubles:
        """Sums of twelve 16-bit integers: variance 2^32 - 1, hardly to be told from a normal's."""
        pairs = np.zeros(count, dtype=np.uint64)  # two sums of six, each in 32 bits
        for _ in range(3):
            words = self._stream.random_raw(count)
            pairs += (words & _LANES) + ((words >> np.uint64(16)) & _LANES)
        sums = (pairs >> np.uint64(32)) + (pairs & np.uint64(0xFFFFFFFF))
        return (sums.astype(np.float64) - 12 * 65535 / 2) / 65536 * std + mean

    def _uniform(self, count: int, low: float, high: float) -> _Doubles:
        return (self._stream.random_raw(count) >> np.uint64(40)) / (1 << 24) * (high - low) + low


def stage_layout(manifest: Manifest, stage: int) -> FlatLayout:
    """Of the parameters of a stage."""
    return FlatLayout.of(parameter_shapes(manifest.model, manifest.stages, stage))


NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


def chosen_device(option: str) -> torch.device:
    """The device that `--device` names; InvalidInput if it is not here."""
    if option == "auto":
        if not torch.cuda.is_available():
            if NVIDIA_DRIVER.exists():
                logger.warning(
                    "a GPU's driver is here, and torch cannot use it: computing on the CPU; "
                    "`dilocox doctor` says more"
                )
            return torch.device("cpu")
        try:
            return chosen_device("cuda")
        except InvalidInput as error:  # a GPU that this torch has no kernels for, or a full one
            logger.warning("%s: computing on the CPU", error)
            return torch.device("cpu")
    try:
        device = torch.device(option)
        torch.zeros((), device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise InvalidInput(f"--device {option}: {reason}; choose cpu or auto") from error
    return device

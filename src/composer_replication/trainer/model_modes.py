"""What a model is: its mode, its weights, whole and a second time, its head, and whether it can share a prompt exactly.

FSDP2 gives each process a part of every parameter (a DTensor), which its hooks gather around a forward and a backward.
Letters: N rows, S columns, H hidden size, V vocabulary; M tokens that carry loss.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from accelerate.state import AcceleratorState, is_initialized
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import DynamicCache
from transformers.cache_utils import get_layer_types_and_kwargs

from composer_replication.losses.gathered_weight import gathered, is_spread
from composer_replication.trainer.collator import TokenRows
from composer_replication.trainer.generation import temporarily
from composer_replication.trainer.processes import num_processes


def lies_in_parts(tensor: Any) -> bool:
    """Whether this process has a part of it alone: a DTensor of FSDP2, a parameter of ZeRO-3."""
    return is_spread(tensor) or hasattr(tensor, "ds_tensor")


def whole_tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    """The entries of the model's state, sorted by name; each is whole until the next one is asked for.

    A collective call where weights lie in parts: every process has to come here, and to ask for all.
    """
    for name, part in sorted(model.state_dict(keep_vars=True).items()):
        if hasattr(part, "ds_tensor"):
            import deepspeed

            with deepspeed.zero.GatheredParameters([part]):
                yield name, part.detach()
        else:
            yield name, (part.full_tensor() if is_spread(part) else part).detach()


def parameter_sha256(model: Any) -> str:
    """Hex sha256 over the state dict: sorted names, dtypes, shapes and bytes; tied weights count under each name.

    A sharded tensor is gathered first, so every process must call it.
    """
    digest = hashlib.sha256()
    for name, value in whole_tensors(model):
        tensor = value.cpu().contiguous()
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data if tensor.numel() else b"")
    return digest.hexdigest()


@contextmanager
def evaluation_mode(model: Any) -> Iterator[None]:
    """Inside, no part of the model is in training mode; afterwards the same parts are as before. None is no model."""
    trained = [part for part in model.modules() if part.training] if model is not None else []
    try:
        for part in trained:
            part.training = False
        yield
    finally:
        for part in trained:
            part.training = True


def weights_are_sharded(model: Any) -> bool:
    """Whether a forward needs every process: FSDP, DeepSpeed's ZeRO-3, or parameters that are parts of a whole."""
    if is_initialized():
        state = AcceleratorState()
        kind = state.distributed_type
        is_zero3 = kind == DistributedType.DEEPSPEED and state.deepspeed_plugin.zero_stage == 3
        if kind == DistributedType.FSDP or is_zero3:
            return True
    return model is not None and any(map(lies_in_parts, model.parameters()))


def spread_again(model: Any) -> None:
    """Let FSDP2 free what it left whole after a forward: every parameter is a DTensor again. Backward gathers what it needs."""
    for module in model.modules():
        getattr(module, "reshard", lambda: None)()


class WeightCopy:
    """The trained weights a second time: the teacher, or the policy as it was before the first step; not the frozen ones.

    ``model`` is without data-parallel wrappers. Where FSDP2 spreads the weights over processes, each has its part of the copy,
    too. The copy is in float32 where they are of lower precision: an average that moves by a twentieth of a small difference
    would stand still in bfloat16.
    """

    def __init__(self, model: nn.Module) -> None:
        spread_again(model)
        self._weights = {
            name: parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32), copy=True)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }

    @torch.no_grad()
    def move_towards(self, model: nn.Module, rate: float) -> None:
        """copy = (1 - rate) copy + rate weights, for each trained parameter."""
        for parameter, weight in self._pairs(model):
            _own_part(weight).lerp_(_own_part(parameter).to(weight.dtype), rate)

    @contextmanager
    def in_place_of(self, model: nn.Module) -> Iterator[None]:
        """Inside, the model has this copy's weights; no gradient may be asked for through them.

        They are written into the memory that autograd has seen, unnoticed by it, and so are the originals afterwards: FSDP2
        gathers from there, and what a forward before this one has saved is whole again when its backward comes.
        """
        pairs = self._pairs(model)
        kept = [_own_part(parameter).clone() for parameter, _ in pairs]
        torch.clear_autocast_cache()  # it keeps casts by parameter, whatever data that holds
        try:
            for parameter, weight in pairs:
                _own_part(parameter).copy_(_own_part(weight))
            yield
        finally:
            spread_again(model)
            for (parameter, _), own in zip(pairs, kept, strict=True):
                _own_part(parameter).copy_(own)
            torch.clear_autocast_cache()

    def tensors(self) -> dict[str, Tensor]:
        """The copy itself, whole, by parameter name, for a checkpoint. A collective call for spread weights."""
        weights: dict[str, Any] = self._weights
        return {name: each.full_tensor().cpu() if is_spread(each) else each for name, each in weights.items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        for name, weight in self._weights.items():
            _own_part(weight).copy_(_own_part(_spread_as(weight, tensors[name])))

    def _pairs(self, model: nn.Module) -> list[tuple[nn.Parameter, Tensor]]:
        """Each parameter and its copy; where weights were spread since the copy was made, it is spread alike."""
        spread_again(model)
        trained = [(name, each) for name, each in model.named_parameters() if name in self._weights]
        self._weights |= {name: _spread_as(each, self._weights[name]) for name, each in trained}
        return [(each, self._weights[name]) for name, each in trained]


def _own_part(tensor: Any) -> Tensor:
    """The memory of a tensor, or of this process's part of it; autograd does not see what is written there."""
    part: Tensor = (tensor.to_local() if is_spread(tensor) else tensor).data
    return part


def _spread_as(weight: Any, whole: Tensor) -> Tensor:
    """A whole tensor that each process has, spread as ``weight`` is; a spread one as it is."""
    if not is_spread(weight) or is_spread(whole):
        return whole
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = weight.device_mesh, weight.placements
    return distribute_tensor(whole.to(weight.device), mesh, placements, src_data_rank=None)


# Of prompts that are shared: each sentence is a way in which a forward behind a cache, or in a pack, is not that of the row alone.
VIRTUAL_TOKENS = "a PEFT prompt-learning adapter puts virtual tokens before the prompt."
_EXACT_LAYERS = ("DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer")
_RANDOM_NAMES = ("dropout", "pdrop", "drop_rate", "layerdrop", "jitter")
_UNUSED_DROPOUTS = ("classifier", "summary")  # heads that a causal language model does not run


def sampling_reason(model: nn.Module) -> str | None:
    """Why rows cannot be sampled behind a shared cache exactly, in one sentence; None if they can. Sampling has no dropout."""
    return next(chain(_structure(model), _cache_layers(model), _rope(model)), None)


def packing_reason(model: nn.Module) -> str | None:
    """Why completions cannot be packed behind their prompt exactly, in one sentence; None if they can.

    Dropout modules are judged in their current mode.
    """
    return next(chain(_structure(model), _rope(model), _packing(model), _randomness(model)), None)


def inner_model(model: nn.Module) -> Any:
    """Find the transformers model inside data-parallel, DeepSpeed's, compiled and PEFT wrappers."""
    inner: Any = model
    while True:
        # DeepSpeed's engine has a configuration of its own
        is_wrapper = not hasattr(getattr(inner, "config", None), "get_text_config")
        if hasattr(inner, "get_base_model"):
            inner = inner.get_base_model()
        elif isinstance(getattr(inner, "_orig_mod", None), nn.Module):
            inner = inner._orig_mod  # noqa: SLF001 - torch.compile offers no public name
        elif is_wrapper and isinstance(getattr(inner, "module", None), nn.Module):
            inner = inner.module
        else:
            return inner


def accepts(model: nn.Module, argument: str) -> bool:
    """Whether the inner model's forward names this argument."""
    return argument in inspect.signature(inner_model(model).forward).parameters


def _adapter_has(model: nn.Module, setting: str) -> bool:
    """Whether an adapter of PEFT, maybe inside a data-parallel wrapper, has this setting on."""
    found = (getattr(module, "peft_config", None) for module in model.modules())
    return any(getattr(c, setting, None) for each in found if isinstance(each, dict) for c in each.values())


def _structure(model: nn.Module) -> Iterator[str]:
    inner = inner_model(model)
    config: Any = getattr(inner, "config", None)
    name = type(inner).__name__
    if not hasattr(config, "get_text_config"):
        yield f"{name} is not a transformers model, so its cache is unknown."
        return
    if getattr(inner, "_is_stateful", False):
        yield f"{name} has recurrent or convolution layers, whose state cannot be copied exactly."
    for argument in ("past_key_values", "logits_to_keep"):
        if not accepts(model, argument):
            yield f"the forward of {name} takes no {argument}."
    if _adapter_has(model, "is_prompt_learning"):
        yield VIRTUAL_TOKENS
    is_two_way = getattr(config.get_text_config(), "use_bidirectional_attention", None) in (True, "all")
    if is_two_way or _adapter_has(model, "alora_invocation_tokens"):
        yield "its prompts depend on the completion: it attends in both directions, or has an activated LoRA."


def _cache_layers(model: nn.Module) -> Iterator[str]:
    inner = inner_model(model)
    name = type(inner).__name__
    if "chunked_attention" in get_layer_types_and_kwargs(inner.config.get_text_config(decoder=True))[0]:
        yield f"{name} has chunked attention, whose chunks are not checked behind a cache."
    for layer in DynamicCache(config=inner.config).layers:
        if type(layer).__name__ not in _EXACT_LAYERS:
            yield f"{name} keeps state in {type(layer).__name__}, which is not a plain key-value cache."


def _rope(model: nn.Module) -> Iterator[str]:
    for module in model.modules():
        rope_type = getattr(module, "rope_type", None)
        for kind in rope_type.values() if isinstance(rope_type, dict) else [rope_type]:
            if isinstance(kind, str) and ("dynamic" in kind or kind == "longrope"):
                yield f"its rotary embedding is of type {kind}, which depends on the length of the forward."


def _packing(model: nn.Module) -> Iterator[str]:
    config = inner_model(model).config.get_text_config(decoder=True)
    attention = config._attn_implementation  # noqa: SLF001 - transformers' only name
    name = f"completions are packed behind their prompt, and {type(inner_model(model)).__name__}"
    if not accepts(model, "position_ids") or getattr(config, "alibi", False):
        yield f"{name} takes no positions of its tokens."
    if attention not in ("sdpa", "eager"):
        yield f"{name} runs {attention}, which takes no mask of ours: set it to sdpa."
    if others := set(get_layer_types_and_kwargs(config)[0]) - {"full_attention"}:
        yield f"{name} has layers of {', '.join(sorted(others))}."


def _randomness(model: nn.Module) -> Iterator[str]:
    """Dropout modules, an adapter's too, and rates that layers read off their configuration."""
    dropouts = (module for module in model.modules() if isinstance(module, nn.modules.dropout._DropoutNd))  # noqa: SLF001
    rates: list[tuple[str, Any]] = [("dropout", module.p) for module in dropouts if module.training]
    if model.training:
        rates += vars(inner_model(model).config.get_text_config()).items()
    for key, rate in rates:
        is_random = any(part in key for part in _RANDOM_NAMES) and not key.startswith(_UNUSED_DROPOUTS)
        if is_random and isinstance(rate, int | float) and not isinstance(rate, bool) and rate > 0:
            yield f"{key} {rate} acts in training; rows do not share a prompt."


def head_of(model: nn.Module) -> tuple[Tensor, dict[str, Any]]:
    """The weight (V, H) of the output head as it is now, and keyword arguments for ``losses.chunked_head``.

    logits = softcap(weight states), of ``last_states``; ``softcap`` None is the identity. With
    ``adds_to_weight_grad`` the weight's gradient goes straight into ``weight.grad``: nothing else waits for it. Only for models
    without ``states_problem``. Under FSDP2 the weight is a DTensor: what a forward left whole may be freed before backward.
    """
    spread_again(model)
    inner = inner_model(model)
    weight = inner.get_output_embeddings().weight
    softcap = getattr(inner.config.get_text_config(), "final_logit_softcapping", None)
    # With several processes the data-parallel wrapper waits for the gradient, and so do hooks of an optimizer inside backward.
    hooks = (weight._backward_hooks, getattr(weight, "_post_accumulate_grad_hooks", None))  # noqa: SLF001 - no public name
    is_alone = num_processes() == 1 and not is_spread(weight)
    adds = weight.requires_grad and weight.is_leaf and is_alone and not any(hooks)
    return weight, {"softcap": softcap, "adds_to_weight_grad": adds}


@torch.no_grad()
def states_problem(model: nn.Module) -> str | None:
    """Why the head cannot be applied apart from the model, in one sentence; None if it can. Forwards a few ids."""
    if (problem := _spread_problem(model)) is not None:
        return problem
    inner = inner_model(model)
    name = type(inner).__name__
    head: Any = getattr(inner, "get_output_embeddings", lambda: None)()
    kind = type(head)  # FSDP2 makes a class of its own of each layer that it wraps
    is_linear = kind is nn.Linear or (hasattr(head, "reshard") and kind.__bases__[-1] is nn.Linear)
    if not is_linear or head.bias is not None:
        return f"the head of {name} is not a plain linear layer without bias (an adapter on it counts)."
    if inner.base_model is inner:
        return f"{name} does not give its last hidden states apart from its logits."
    if _adapter_has(model, "is_prompt_learning"):
        return VIRTUAL_TOKENS
    weight, options = head_of(model)
    weight_VH, softcap = gathered(weight), options["softcap"]
    ids_NS = torch.arange(min(4, weight_VH.size(0)), device=weight_VH.device)[None]
    with evaluation_mode(inner):
        states_NSH = last_states(model, ids_NS)
        logits_NSV = _called(model)(input_ids=ids_NS, use_cache=False).logits
    made_NSV = linear(states_NSH.to(weight_VH.dtype), weight_VH).float()
    if softcap is not None:
        made_NSV = softcap * torch.tanh(made_NSV / softcap)
    tolerance = 1e-3 if logits_NSV.dtype.itemsize > 2 else 3e-2  # rounding alone is some of the last bits
    most_apart = tolerance * logits_NSV.float().abs().max()
    if made_NSV.shape == logits_NSV.shape and (made_NSV - logits_NSV.float()).abs().max() <= most_apart:
        return None
    return f"the logits of {name} are not what its head makes of its last hidden states."


def last_states(model: nn.Module, ids_NS: Tensor) -> Tensor:
    """What the head reads at every position (N, S, H), times ``_logit_scale``; rows begin with their first token.

    The model's own forward is replaced by that of its body and called as ever, so that hooks gather spread weights.
    """
    inner = inner_model(model)

    def states(**arguments: Any) -> Tensor:
        # an adapter adds some that are None
        given = {name: value for name, value in arguments.items() if value is not None}
        found: Tensor = inner.base_model(**given).last_hidden_state
        return found * _logit_scale(inner.config.get_text_config())

    with temporarily(inner, forward=states):
        found: Tensor = _called(model)(input_ids=ids_NS, use_cache=False)
    return found


def _logit_scale(config: Any) -> float:
    """What the logits are multiplied by before a soft cap, as each family names it; Granite divides."""
    for key in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        if getattr(config, key, None) is not None:
            return float(getattr(config, key))
    factor = float(getattr(config, "logits_scaling", None) or 1.0)
    return factor if config.model_type == "hyperclovax" else 1.0 / factor


def _called(model: nn.Module) -> nn.Module:
    """Wrappers gather spread weights; others are left out, as the gradient hooks of DDP sit on the parameters."""
    inner: nn.Module = inner_model(model)
    return model if weights_are_sharded(model) else inner


def _spread_problem(model: nn.Module) -> str | None:
    """Why the head of a model whose weights are, or will be, spread over processes cannot be gathered by itself."""
    if not weights_are_sharded(model):
        return None
    from torch.distributed.fsdp import CPUOffloadPolicy

    plugin = getattr(AcceleratorState(), "fsdp_plugin", None) if is_initialized() else None
    is_by_hand = plugin is None and any(is_spread(part) for part in model.parameters())
    if not is_by_hand and getattr(plugin, "fsdp_version", None) != 2:
        return "its weights are spread over processes, and not by FSDP2."
    is_offloaded = isinstance(getattr(plugin, "cpu_offload", None), CPUOffloadPolicy)
    if is_offloaded or getattr(plugin, "cpu_ram_efficient_loading", False):
        return "FSDP2 runs with fsdp_offload_params or fsdp_cpu_ram_efficient_loading."
    return None


def completion_states(model: nn.Module, rows: TokenRows) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Last hidden state before each id that carries loss (M, H), row by row, and the head of ``head_of``."""
    states_MH = last_states(model, rows.ids_NS)[:, :-1][rows.loss_mask_NS[:, 1:].bool()]
    return states_MH, *head_of(model)

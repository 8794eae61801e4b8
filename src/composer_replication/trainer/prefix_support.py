"""Can this model share a prompt between rows exactly, in the mode it is in?

Each rule below is one way in which the forward of a completion behind a cache, or in a pack, differs
from the forward of prompt and completion together. The answer is a sentence for the
person who reads the log, never an exception: the caller falls back to the plain forward.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from itertools import chain
from typing import Any

from torch import nn
from transformers import DynamicCache
from transformers.cache_utils import get_layer_types_and_kwargs

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


def has_virtual_tokens(model: nn.Module) -> bool:
    """Whether a prompt-learning adapter of PEFT, maybe inside a data-parallel wrapper, puts tokens before the prompt."""
    return any(config.is_prompt_learning for config in _adapters(model))


def _adapters(model: nn.Module) -> Iterator[Any]:
    found = (getattr(module, "peft_config", None) for module in model.modules())
    return (config for each in found if isinstance(each, dict) for config in each.values())


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
    if getattr(config.get_text_config(), "use_bidirectional_attention", None) in (True, "all"):
        yield f"{name} attends in both directions, so a prompt's states depend on the completion."
    if has_virtual_tokens(model):
        yield VIRTUAL_TOKENS
    if any(getattr(adapter, "alora_invocation_tokens", None) for adapter in _adapters(model)):
        yield "an activated LoRA changes weights at an invocation token inside the sequence."


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

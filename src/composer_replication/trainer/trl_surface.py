"""What the parts of the trainer read of TRL, of transformers and of one another, for type checkers; nothing is set here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from composer_replication.trainer.chained_rows import ChainedRows
    from composer_replication.trainer.router_replay import RouterReplay


class TrlSurface:
    """Attributes and methods of the one trainer that all parts are mixed into."""

    accelerator: Any
    chained_rows: ChainedRows
    router_replay: RouterReplay
    add_callback: Any
    args: Any
    beta: Any
    callback_handler: Any
    chat_template: Any
    chat_template_kwargs: Any
    control: Any
    current_gradient_accumulation_steps: Any
    environment_factories: Any
    eos_token_ids: Any
    get_train_dataloader: Any
    is_in_train: Any
    log: Any
    loss_type: Any
    mask_truncated_completions: Any
    max_completion_length: Any
    model: Any
    model_wrapped: Any
    num_generations: Any
    num_iterations: Any
    pad_to_multiple_of: Any
    processing_class: Any
    ref_model: Any
    reward_weights: Any
    rollout_func: Any
    state: Any
    temperature: Any
    tools: Any
    train_dataset: Any
    use_transformers_continuous_batching: Any
    use_vllm: Any
    _begin_checks: Any
    _buffered_inputs: Any
    _check_generation: Any
    _check_importance: Any
    _check_policy_settings: Any
    _check_prefix_settings: Any
    _dist: Any
    _generation_with_terms: Any
    _get_per_token_logps_and_entropies: Any
    _load_from_checkpoint: Any
    _metrics: Any
    _newest_sampled: Any
    _prepare_for_training: Any
    _read_own_state: Any
    _save_checkpoint: Any
    _step: Any
    _tokenizer: Any
    _tr_loss: Any

"""The methods of the installed TRL that the trainer overrides, with their parameters.

An upgrade that renames one of them fails in a test, loudly, and not in a run.
"""

from __future__ import annotations

from typing import Final

TRL_SURFACE: Final[dict[str, tuple[str, ...]]] = {
    "_compute_loss": ("model", "inputs"),
    "_get_per_token_logps_and_entropies": (
        "model",
        "input_ids",
        "attention_mask",
        "logits_to_keep",
        "batch_size",
        "compute_entropy",
        "compute_aux_loss",
        "pixel_values",
        "image_grid_thw",
        "num_images",
        "pixel_attention_mask",
        "spatial_shapes",
        "num_tiles",
        "image_sizes",
        "token_type_ids",
        "mm_token_type_ids",
        "image_position_ids",
    ),
    "_generate": ("prompts",),
    "_generate_single_turn": (
        "prompt_ids",
        "images",
        "multimodal_fields",
        "num_generations",
        "has_tool_images",
    ),
    "_generate_and_score_completions": ("inputs",),
    "_calculate_rewards": ("inputs", "prompts", "completions", "completion_ids_list"),
    "_get_grad_norm": ("model", "grad_norm"),
    "_get_train_sampler": ("dataset",),
    "_save_checkpoint": ("model", "trial"),
    "create_optimizer": ("model",),
    "create_scheduler": ("num_training_steps", "optimizer"),
    "evaluate": ("eval_dataset", "ignore_keys", "metric_key_prefix"),
    "log": ("logs", "start_time"),
    "prediction_step": ("model", "inputs", "prediction_loss_only", "ignore_keys"),
    "train": ("resume_from_checkpoint", "trial", "ignore_keys_for_eval"),
}

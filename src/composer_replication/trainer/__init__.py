"""How are weights updated?

By TRL's GRPO trainer with five things added: a guard that halts a run whose reward has come
apart from the held-out score, checkpoints from which a killed run goes on exactly, one log
line for every step, prefix sharing, which forwards each prompt once for its whole group, and two
loss channels: hints at the turns that went wrong, and replayed preferences.

    composer_trainer   ComposerReplicationTrainer; import it from there
    generation         what one generation knows of its rows, and what of it travels with them
    guard              one fold of the guard: when it is asked, with which numbers, and what follows
    guard_callback     the guard for any other trainer of transformers or TRL
    checkpoints        whole, half-written or damaged, whose they are, and what we keep in them
    metrics_log        metrics.jsonl and verdicts.jsonl
    packed_rows        each prompt forwarded once in training; policy in sampling
    preset_settings    a recipe's method of the GRPO family; policy_terms carries it out
    setting_errors     what settings alone are refused for, before a model is loaded
    checks             what speaks when a run no longer trains what it says
    model_loading, run_setup
    collator           hinted turns and pairs to tensors, which ids carry loss, rollouts out of a batch
    loss_channels      hint distillation, replayed preferences, and what both keep
    rollout_columns    what a rollout function may bring: chains of conversations, routing to replay

The only folder that imports TRL and transformers. Importing this package loads neither.
"""

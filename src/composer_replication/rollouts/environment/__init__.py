"""What does a policy live in? One attempt at one task, and several faces of it.

feature_deletion_env.py  the attempt: a fresh sandbox with the task's tree, tools, submit, grading outside, what it is worth
trl_face.py              TRL's environment_factory: reset, tools as methods, get_reward
openenv_client.py        OpenEnv: action, observation, state; the client
openenv_server.py        OpenEnv: reset, step, state, close; its own server over our environments
hosted_attempt.py        an environment in an event loop: a thread of its own, closed whatever happens; the address of a server
verifiers_face.py        an environment of verifiers; composer_replication_verifiers is the plugin's name
inspect_face.py          a task of inspect_ai

env = FeatureDeletionEnv(grader)
message = env.reset(task_id)
result = env.call(ToolCall("bash", '{"command": "ls"}'))
judgement = env.finish()
"""

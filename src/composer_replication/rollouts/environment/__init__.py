"""What does a policy live in? One attempt at one task, and several faces of it.

reward_options.py        what an attempt is worth: tests, what it broke, invalid calls, effort
attempt.py               a fresh sandbox with the task's tree in it, and its end, whatever happens
feature_deletion_env.py  the attempt itself: tools, submit, grading outside
judged_attempts.py       attempts of a trainer: the grading says reward, breaks and findings of the monitor
trl_face.py              TRL's environment_factory: reset, tools as methods, get_reward
gym_face.py              reset and step
openenv_options.py       bounds and address of a server of environments
openenv_types.py         OpenEnv: action, observation, state
openenv_environment.py   OpenEnv: reset, step, state, close
openenv_client.py        OpenEnv: the client
openenv_messages.py      OpenEnv: the frames of a session
openenv_session.py       OpenEnv: one client's session, and its end
openenv_server.py        OpenEnv: sessions over a bound, health, drain
hosted_attempt.py        an attempt inside another library's event loop
verifiers_face.py        an environment of verifiers; composer_replication_verifiers is the plugin's name
inspect_face.py          a task of inspect_ai
needed_library.py        the sentence for one of these that is not installed

env = FeatureDeletionEnv(store, grader)
message = env.reset(task_id)
result = env.call(ToolCall("bash", '{"command": "ls"}'))
score, reward = env.grade(), env.reward()
"""

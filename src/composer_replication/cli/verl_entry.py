"""What verl's entry point loads in each of its processes: registers our parts in a job of ``composer-rl export-verl``.

Apart from ``verl_parts``, which the agent loop imports by itself: were it one module, the loop would register what it is to
ask about, and never find it missing.
"""

import os

from composer_replication.cli.verl_parts import open_guard
from composer_replication.engines.verl_export import FOLDER_VARIABLE, job_folder
from composer_replication.engines.verl_guard import end_with_our_code
from composer_replication.engines.verl_plugin import register

if os.environ.get(FOLDER_VARIABLE):
    register(open_guard)
    if "RAY_JOB_ID" not in os.environ and "RAY_RAYLET_PID" not in os.environ:  # the process that was started
        end_with_our_code(job_folder())

"""The contract that ships with the package, held up to the backend over Harbor."""

from __future__ import annotations

from composer_replication.sandbox.conformance.test_commands import *  # noqa: F403  the tests are the names
from composer_replication.sandbox.conformance.test_files import *  # noqa: F403
from composer_replication.sandbox.conformance.test_limits import *  # noqa: F403
from composer_replication.sandbox.conformance.test_walls import *  # noqa: F403

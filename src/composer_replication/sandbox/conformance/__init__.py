"""Does a backend keep the contract? Its tests, for whoever writes one.

    pytest --pyargs composer_replication.sandbox.conformance -p composer_replication.sandbox.conformance.plugin
        --sandbox-backend package.module:Class

The tests are those that the backends of this package pass: what ``LocalSandbox`` promises about commands,
limits, walls, files, snapshots, ends and bad input. They need pytest, which nothing else of the package does.
The self-test of the backend comes first: with a guard that does not hold only those tests run that touch
nothing but their tree, because the others would get out.

A class may name what it does not keep, by test and with a reason; such a test must fail for certain:

    class MyBackend:
        known_failures = {"test_the_jail_dies_with_us": "the service keeps it for a minute"}
"""

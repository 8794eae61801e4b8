"""How are many test runs done fast? One sandbox and one start of the test runner for a batch of them."""

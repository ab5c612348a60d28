"""The losses: pure functions of per-token statistics, and the call forms that users type."""

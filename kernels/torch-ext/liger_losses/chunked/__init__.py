"""The streaming engine and the losses on it."""

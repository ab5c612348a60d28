"""Hidden states -> per-token statistics and gradients: the only code that sees logits."""

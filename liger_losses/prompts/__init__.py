"""A prompt is computed once for all of its completions; padding is packed away."""

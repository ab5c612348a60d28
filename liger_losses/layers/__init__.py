"""Norms, gated MLPs and rotary embeddings: the torch reference, the Triton kernels, and the functions over them."""

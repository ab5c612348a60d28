"""Finds the parts of a model that the kernels can do, by what they compute, and replaces them."""

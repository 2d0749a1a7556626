"""The compatibility matrix: which vLLM and Ray versions the engine package works with, as shown by running them."""

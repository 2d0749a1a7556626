"""The data plane: the engine job's launcher and the vLLM plugin that travels with it.

Importing the package costs nothing: Ray and vLLM are imported only where they are used, since the package is also
loaded by processes (vLLM's plugin discovery) in which it has nothing to do.
"""

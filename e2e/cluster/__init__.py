"""A real Kubernetes with KubeRay on one Linux machine, in namespaces of its own.

Run it as ``python -m e2e.cluster``; see ``--help``. Needs only the standard library and PyYAML.
"""

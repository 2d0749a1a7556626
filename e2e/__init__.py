"""End-to-end ground: a real Kubernetes on one machine, and the tests that need it."""

"""All I/O: three small protocols (Kubernetes, Ray, engine) and their real implementations."""

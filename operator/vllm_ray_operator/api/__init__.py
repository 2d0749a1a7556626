"""The VLLMDeployment resource (``vllm-ray.dev/v1alpha1``): types, validation and the CRD made from them."""

GROUP = "vllm-ray.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "VLLMDeployment"
PLURAL = "vllmdeployments"

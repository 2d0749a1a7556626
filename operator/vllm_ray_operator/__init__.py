"""The control plane: reconciles VLLMDeployment resources into RayClusters and engine jobs."""

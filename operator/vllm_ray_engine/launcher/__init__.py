"""The launcher's parts: Ray's side, the engine process, its health and output, the state that others see."""

"""The embedded engine: Hugging Face models on PyTorch, with a scheduler and a paged cache of our own."""

from nearfar.fallback_server.torch_engine.client import TorchBackend
from nearfar.fallback_server.torch_engine.options import TorchOptions

__all__ = ["TorchBackend", "TorchOptions"]

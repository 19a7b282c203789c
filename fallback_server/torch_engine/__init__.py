"""The embedded engine: Hugging Face models on PyTorch, with nearfar's scheduler and paged cache."""

from nearfar.fallback_server.torch_engine.client import TorchBackend
from nearfar.fallback_server.torch_engine.options import TorchOptions

__all__ = ["TorchBackend", "TorchOptions"]

"""A loaded model with its text side, as chats, completions and embeddings use it."""

from __future__ import annotations

from nearfar.edge_runtime.engine.core import EngineCore
from nearfar.edge_runtime.grammars.compiler import Grammars
from nearfar.edge_runtime.openai.context import ContextPolicy, check_policy
from nearfar.edge_runtime.text.codec import TextCodec
from nearfar.format.manifest import Manifest


class LoadedModel:
    """A model whose requests share its cache and its steps."""

    def __init__(
        self, core: EngineCore, codec: TextCodec, *, context_policy: ContextPolicy = "error"
    ) -> None:
        check_policy(context_policy)
        self.core = core
        self.codec = codec
        self.context_policy: ContextPolicy = context_policy
        model = core.manifest.model
        self.grammars = Grammars(codec, model.vocab_size, model.eos_token_ids)

    @property
    def manifest(self) -> Manifest:
        """The artifact's manifest."""
        return self.core.manifest

    @property
    def context(self) -> int:
        """Tokens that a prompt and its answer may have together."""
        return self.core.context

"""The sizes and switches of ALBERTa's own architecture (see `alberta.py`)."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from stretto.errors import StrettoError


class AlbertaConfig(PreTrainedConfig):
    """The defaults are close to the published base model: three groups of twelve layers, some 30 million parameters.

    num_hidden_groups        layers of one group share all parameters
    embedding_size           tokens are embedded this narrow, then widened to hidden_size
    max_relative_distance    larger distances count as this one
    use_absolute             position embeddings are added to the tokens' (False: the ablation "w/o AbsPos")
    use_relative             relative terms are added to attention scores (False: the ablation "w/o RelPos")
    """

    model_type = "alberta"

    vocab_size: int = 30000
    embedding_size: int = 128
    hidden_size: int = 768
    num_hidden_layers: int = 36
    num_hidden_groups: int = 3
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    max_position_embeddings: int = 512
    max_relative_distance: int = 64
    use_absolute: bool = True
    use_relative: bool = True
    type_vocab_size: int = 2
    hidden_dropout_prob: int | float = 0.1
    attention_probs_dropout_prob: int | float = 0.1
    layer_norm_eps: float = 1e-12
    initializer_range: float = 0.02
    pad_token_id: int | None = 0
    tie_word_embeddings: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.num_attention_heads < 1 or self.hidden_size % self.num_attention_heads:
            raise StrettoError(
                f"Expected num_attention_heads to divide hidden_size, got {self.num_attention_heads} and "
                f"{self.hidden_size}. Change one of them."
            )
        if not 1 <= self.num_hidden_groups <= self.num_hidden_layers:
            raise StrettoError(
                f"Expected num_hidden_groups between 1 and num_hidden_layers, got {self.num_hidden_groups} and "
                f"{self.num_hidden_layers}. A group has a layer or more."
            )
        if self.use_relative and self.max_relative_distance < 1:
            raise StrettoError(
                f"Expected a max_relative_distance of 1 or more, got {self.max_relative_distance}. "
                "Raise it, or set use_relative to False."
            )

    def group_of(self, layer: int) -> int:
        """The group whose parameters layer `layer` (from 0) uses."""
        return layer * self.num_hidden_groups // self.num_hidden_layers

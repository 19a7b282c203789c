"""What a model does with real text, for a quantization that loses where it matters least."""

"""Compile pipeline: checkpoint → Relax model → quantized → lowered → plan."""

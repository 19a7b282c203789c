"""Calibration: measures a model on real text, so that quantization errors fall where they matter least."""

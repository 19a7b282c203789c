"""Products of matrices with rows: few rows (decode), many rows (prefill), and rows of the embedding."""

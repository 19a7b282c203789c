"""What several benchmarks do in the same way."""

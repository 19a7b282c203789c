"""The engine: it schedules requests, runs steps, samples tokens and emits them."""

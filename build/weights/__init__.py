"""The weights of a checkpoint: read, quantized, streamed into what targets write."""

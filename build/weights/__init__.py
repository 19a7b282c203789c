"""Reads the weights of a checkpoint, quantizes them and streams them to the targets' writers."""

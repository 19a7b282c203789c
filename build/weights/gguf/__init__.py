"""GGUF files, as llama.cpp and its converters write them: one file with metadata, tokenizer and tensors."""

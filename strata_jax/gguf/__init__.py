"""What is in a GGUF file: header, block formats, tokenizer, chat template. Nothing here imports JAX."""

"""From problems to packed batches of token ids."""

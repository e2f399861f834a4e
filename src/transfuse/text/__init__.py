"""Text to token ids and back, without torch: tokenizer, chat templates, detokenising, stop strings."""

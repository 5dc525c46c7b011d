from real_tokenizers import sentencepiece, sentencepiece_folder, smollm_folder, tokenizer

__all__ = ["sentencepiece", "sentencepiece_folder", "smollm_folder", "tokenizer"]

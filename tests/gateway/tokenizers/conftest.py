from real_tokenizers import sentencepiece_folder, smollm_folder

__all__ = ["sentencepiece_folder", "smollm_folder"]

"""LoRA shrink and expand."""

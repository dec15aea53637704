"""LoRA shrink and expand: problems, specs, plans."""

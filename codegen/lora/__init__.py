"""LoRA shrink and expand: the static facts of calls (problems), kernels and plans."""

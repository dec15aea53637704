"""Pattern `lora_qkv`."""

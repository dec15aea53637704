"""The attention ops: QKV projection, RoPE and cache write."""

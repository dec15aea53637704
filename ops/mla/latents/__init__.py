"""Operations on latents: norm, rotation and cache write; and keys and values computed from them."""

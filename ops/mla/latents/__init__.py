"""What is done to latents: norm, rotation and cache write; and the keys and values made of them."""

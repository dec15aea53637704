"""The attention core: softmax attention with heads that have an unrotated and a rotated part."""

"""The core of MLA ops: softmax attention with heads that have an unrotated and a rotated part."""

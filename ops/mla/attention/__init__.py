"""The attention core: softmax of queries and keys whose heads have a part that is rotated."""

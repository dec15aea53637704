"""The templates of linears for few tokens."""

"""Parts of references that several families share."""

"""A step of a model: what it should take, and what a profile says that it takes."""

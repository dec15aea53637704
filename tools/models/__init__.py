"""Loads the models of commands from a user's function or a checkpoint, and shards zoo models over
ranks."""

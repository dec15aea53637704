"""Models for commands: loaded from a user's function or a checkpoint, or sharded over ranks."""

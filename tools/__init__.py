"""The programs for users: the command line and the model zoo."""

"""Contains the programs for users: the command line and the model zoo."""

"""The models that commands are given: loaded from a function of the user, or shared by ranks."""

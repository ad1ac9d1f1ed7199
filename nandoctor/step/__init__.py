"""Turns a dump, the settings and the user's code into the step that failed."""

"""Turns a dump into the step that failed, and runs it."""

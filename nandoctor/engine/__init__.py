"""Runs the step that failed, under any precision and with any change, and puts all of its state back."""

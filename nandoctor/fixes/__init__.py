"""Searches for changes that fix the failing step, and verifies each by running it."""

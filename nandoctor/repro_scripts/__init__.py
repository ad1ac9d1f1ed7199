"""Cuts the failing operation out of a step and writes it as a script of its own."""

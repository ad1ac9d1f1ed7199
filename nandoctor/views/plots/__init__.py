"""Plots of a report, one file per kind."""

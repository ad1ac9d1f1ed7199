"""Bugs of released packages, each cited and labelled by hand; `python benchmarks/real_bugs` asks the tools."""

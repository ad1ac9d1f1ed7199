"""A report made visible: on the terminal, as a picture, as JSON, in a notebook.

From a `Report` or `DumpSummary`, never a tensor. Each file stands alone: import what you need.
"""

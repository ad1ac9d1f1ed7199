"""A report made visible: on the terminal, as a picture, as JSON, in a notebook.

In: `Report` or `DumpSummary`, never a tensor. Out: text, figures, files; each file stands alone, import what you need.
"""

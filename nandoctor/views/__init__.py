"""Say what a record holds, once, as a document of blocks; and draw its blocks on every surface.

A document is the blocks of anything that a command shows: a headline, then excerpts, facts, patches, tables, plots
and texts, alone or in sections (`blocks`). One file writes the document of one record: `report`, with the sentences of
`evidence` and `fixes` and the tables of `layers`; `verification`, `triage`, `explain` and `inspect_dump`.
`terminal`, `markdown` and `html` (a page, and a card for a notebook's cell) draw blocks and decide nothing else; `save`
chooses one by a file's extension.

Nothing here reads a tensor.
"""

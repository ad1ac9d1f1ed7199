"""The frozen plain records that all other packages exchange; nothing here imports torch.

`trace` records one run and `report` the conclusions from two, with `edits` (changes to a run) and `dump_summary`.
`triage` and `verification` are the results of other commands. `formats` describes floating-point formats, `codec` turns
records into JSON and back.
"""

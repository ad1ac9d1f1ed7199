"""Frozen plain data, in which every other room speaks; nothing here knows torch.

`trace` is what one run showed and `report` what is concluded from two, with `edits` (changes to a run), `exhibits`,
`dump_summary` and `verdicts`. `checkup`, `triage`, `verification` and `report_diff` are the results of other commands.
`formats` knows what a floating-point format holds, `serialization` turns records into JSON and back.
"""

"""Render a report: on the terminal, as a page, as Markdown, as JSON, as pictures, in a notebook.

The content is written once: `answer` (cause, place, verdict), `facts` (evidence, next commands), `fix_facts` (fixes),
`trial_facts` (what else was tried), `layers` and `table` (both runs side by side), `plots`. The surfaces arrange it:
`terminal`, `page`, `markdown`, `notebook_card`; `save` chooses one by the file's extension, `jsonfile` writes the
record itself, `notebook` shows its parts. `checkup`, `diff`, `eps`, `explain`, `inspect_dump`, `triage` and
`verification` print the results of the other commands. All share `console` (rich renderables), `templating` (jinja),
`verdicts` (words and colours) and `progress`.

Nothing here reads a tensor.
"""

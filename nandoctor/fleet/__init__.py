"""Many dumps at once: `triage` replays them in long-lived workers and groups what it finds.

In: files. Out: groups by cause and place, one result per file, a page that links to the reports.
"""

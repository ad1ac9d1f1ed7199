"""Many dumps at once: `triage` replays them in long-lived workers and groups what it finds."""

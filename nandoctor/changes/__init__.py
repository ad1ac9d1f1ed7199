"""Changes of a step: how each kind is called, applied to a run, and written into the source."""

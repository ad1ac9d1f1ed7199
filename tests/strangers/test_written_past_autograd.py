"""Code that may not be watched: what cannot be traced is said."""

from torch import nn

from nandoctor.tracing import dispatch_hook
from strangers.visits import Between, louder, normal


def test_what_cannot_be_watched_is_said(examine):
    class Shy(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = louder(nn.Linear(8, 8), 1e4)

        def forward(self, x):
            if dispatch_hook._handlers.stack:
                raise RuntimeError("somebody is watching")
            return self.inner(x * 30)

    report = examine(Between(Shy()), {"x": 10 * normal(5, 8)})
    assert report.first_nonfinite.place.module == "middle.inner"
    assert any("could not be traced (RuntimeError: somebody is watching)" in note for note in report.notes)

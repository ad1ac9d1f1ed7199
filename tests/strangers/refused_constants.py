"""Numbers that torch refuses to write into a half-precision tensor: the step ends with an error, not with a NaN."""

import torch
import torch.nn.functional as F

from strangers.rows import Rows
from strangers.visits import Lifted, normal

rows = Rows()
BATCH = {"x": normal(2, 5, 8)}
RAISES = ("raises an error rather than write -inf",)


def attends(hide):
    """Scores of tokens against tokens, hidden by anything, and the mean that they weigh."""

    def attend(query, x):
        scores = query @ x.transpose(-1, -2)
        later = torch.ones_like(scores, dtype=torch.bool).triu(1)
        return hide(scores, later).softmax(-1) @ x

    return Lifted(attend)


@rows("precision . masked_fill mask-constant-overflow", BATCH, make=attends, line="scores.masked_fill_(later, -1e9)")
@rows("healthy", BATCH, make=attends, name="in bf16", amp_dtype="bfloat16")
def in_place(scores, later):
    scores = scores.clone()
    scores.masked_fill_(later, -1e9)
    return scores


REFUSED = {
    "masked_fill": lambda scores, later: scores.masked_fill(later, torch.finfo(torch.float32).min),
    "full_like": lambda scores, later: torch.where(later, torch.full_like(scores, -1e20), scores),
    "pad": lambda scores, later: F.pad(scores, (0, 1), value=-1e6)[..., :-1],
}
for op, hide in REFUSED.items():
    rows(f"precision . {op} mask-constant-overflow", BATCH, hide, name=op, says=RAISES)(attends)
for value in (-1e4, -65504.0, float("-inf")):
    rows("healthy", BATCH, lambda scores, later, value=value: scores.masked_fill(later, value), name=f"{value}")(
        attends
    )

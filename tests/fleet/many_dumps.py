"""Dumps of many runs, of twelve causes, as hundreds of trainings would leave them: `many_dumps.py FOLDER [NUMBER]`.

In: a folder. Out: runs/RUN/nan-*.pth below it, and a pyproject.toml that names the code of each.
"""

import sys
from pathlib import Path

import torch

TESTS = Path(__file__).resolve().parents[1]
if str(TESTS) not in sys.path:
    sys.path.insert(0, str(TESTS))

from sick_models import Case, all_cases  # noqa: E402  (its folder is put on the path above)

CAUSES = (
    *("eps-underflow", "matmul-overflow", "elementwise-overflow", "exp-overflow", "reduction-overflow", "log-of-zero"),
    *("mask-constant-overflow", "fully-masked-softmax", "division-by-zero", "poisoned-weights", "invalid-domain"),
    "where-gradient-trap",
)
RECURRING = "eps-underflow"
"""The cause of which 9 of 10 dumps hold the same samples."""

_TABLE = """
[[tool.nandoctor.dumps]]
pattern = "*/{folder}-*.pth"
model = "code_of_runs.py:build_{number}"
call = "code_of_runs.py:call_{number}"
loss-scale = {case.loss_scale}
mode = "{mode}"
"""


def choose_cases() -> list[Case]:
    """One case of each cause, of which nobody would say another."""
    first = {case.cause: case for case in reversed(all_cases()) if case.optimizer is None and not case.near_causes}
    return [first[cause] for cause in CAUSES]


def make_dumps(folder: Path, number: int) -> dict[Path, str]:
    cases = choose_cases()
    code = f"import sys\n\nsys.path.append({str(TESTS)!r})\nfrom fleet.many_dumps import choose_cases\n\n"
    tables = ["[tool.nandoctor]\n"]
    for index, case in enumerate(cases):
        code += f"build_{index}, call_{index}, loss_{index} = (\n    getattr(choose_cases()[{index}], name)"
        code += ' for name in ("build", "call", "loss")\n)\n'
        tables.append(_TABLE.format(folder=case.cause, number=index, case=case, mode="train" if case.train else "eval"))
        if case.loss is not None:
            tables.append(f'loss = "code_of_runs.py:loss_{index}"\n')
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "code_of_runs.py").write_text(code)
    (folder / "pyproject.toml").write_text("".join(tables))
    return dict(_write(folder, cases[index % len(cases)], index) for index in range(number))


def _write(folder: Path, case: Case, index: int) -> tuple[Path, str]:
    """One dump: its step, rank, fold and the names of its samples make it unlike the others of its case."""
    batch = case.batch()
    nth = index // len(CAUSES)
    same = case.cause == RECURRING and nth % 10 != 9
    size = max((len(array) for array in batch.values() if array.dim()), default=0)
    path = folder / "runs" / f"run{nth % 7}" / f"{case.cause}-step{100 * nth:06}.pth"
    path.parent.mkdir(parents=True, exist_ok=True)
    contents = {
        "state_dict": case.build().state_dict(),
        **batch,
        "step": 100 * nth,
        "rank": nth % 4,
        "fold": nth % 5,
        "path": [f"tile_{sample if same else 1000 * nth + sample:06}" for sample in range(size)],
    }
    torch.save(contents, path)
    return path, case.cause


if __name__ == "__main__":
    made = make_dumps(Path(sys.argv[1]), int((*sys.argv[2:], "400")[0]))
    print(f"{len(made)} dumps of {len(CAUSES)} causes")  # noqa: T201

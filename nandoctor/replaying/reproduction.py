"""Brings the failing step back: the policy, mode, seed and call under which the replay agrees with the saved output.

In: a `Preparation`, a dump and `Settings`. Out: an `Attempt`, graded; `Replay` runs it again, whatever is asked next.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from nandoctor.autocast.policy import REFERENCE, Policy, make_policy
from nandoctor.dumps.dump import Dump
from nandoctor.dumps.recorded_format import Recorded
from nandoctor.errors import ModelError
from nandoctor.evidence.edits import Edit
from nandoctor.evidence.formats import FORMATS
from nandoctor.evidence.report import Reproduction
from nandoctor.evidence.trace import Trace
from nandoctor.replaying.grading import grade
from nandoctor.replaying.runner import CLOSELY, MODULES_ONLY, Outcome, Setup, Step, Watch, run
from nandoctor.replaying.settings import Settings
from nandoctor.replaying.setup import Preparation

Progress = Callable[[str, int, int | None], None]
"""Told (stage, module calls done, module calls in all or None where that is not known yet)."""

NUM_EXTRA_SEEDS = 3
CLOSE_ENOUGH = 0.02
"""A replay that differs from the saved output by no more than this share of its largest magnitude is the same run:
other hardware sums in another order, and fp16 rounds at every layer."""

_GRADE_RANK = {"exact": 0, "same-mask": 1, "elsewhere": 2, "no-reference": 3, "finite": 3}
_WRONG_CALL = (TypeError, AttributeError, KeyError, IndexError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One replay under autocast with one train flag and seed, and its grade."""

    setup: Setup
    outcome: Outcome
    reproduction: Reproduction

    @property
    def name(self) -> str:
        """What was chosen: mode and seed."""
        trace = self.outcome.trace
        drawn = "the saved random state" if trace.seed is None else f"seed {trace.seed}"
        return f"{'train' if trace.training else 'eval'} mode, {drawn}"

    def step(self, policy: Policy, loss_scale: float) -> Step:
        """This attempt, to be run again."""
        trace = self.outcome.trace
        return Step(setup=self.setup, policy=policy, training=trace.training, seed=trace.seed, loss_scale=loss_scale)

    @property
    def accepted(self) -> bool:
        """Whether this is the failing step again, so that no other setting need be tried."""
        if self.reproduction.grade == "no-reference":
            return not self.outcome.trace.finite
        close = (self.reproduction.max_rel_err or 0.0) <= CLOSE_ENOUGH
        return self.reproduction.grade == "exact" or (self.reproduction.grade == "same-mask" and close)

    @property
    def rank(self) -> tuple[int, bool, float]:
        """Sorts the better attempt first."""
        error = self.reproduction.max_rel_err or 0.0
        return _GRADE_RANK[self.reproduction.grade], self.outcome.trace.finite, error


class Replay:
    """The runs of one replay: the policy, the progress and the number of calls to expect are the same for all."""

    def __init__(self, policy: Policy, progress: Progress, *, per_sample: bool = False) -> None:
        self.policy = policy
        self._per_sample = per_sample
        self.low = policy.format
        self._progress = progress
        self._num_calls: int | None = None

    def run(
        self,
        stage: str,
        setup: Setup,
        policy: Policy,
        *,
        training: bool,
        seed: int | None,
        watch: Watch = MODULES_ONLY,
        edits: tuple[Edit, ...] = (),
    ) -> Outcome:
        """Run `setup` once, with progress shown as `stage`."""
        self._progress(stage, 0, self._num_calls)
        outcome = run(
            setup,
            policy,
            training=training,
            seed=seed,
            low=self.low,
            watch=replace(watch, per_sample=self._per_sample and not watch.keep),
            edits=edits,
            on_call=lambda done: self._progress(stage, done, self._num_calls),
        )
        self._num_calls = sum(call.leave is not None for call in outcome.trace.calls)
        return outcome

    def run_again(self, stage: str, attempt: Attempt, policy: Policy, watch: Watch = MODULES_ONLY) -> Trace:
        """The step of `attempt` again, under another policy or with more to watch."""
        trace = attempt.outcome.trace
        name = f"{stage} {'in fp32' if policy is REFERENCE else 'under autocast'}"
        return self.run(name, attempt.setup, policy, training=trace.training, seed=trace.seed, watch=watch).trace


def make_replay(dump: Dump, settings: Settings, progress: Progress) -> Replay:
    """The replay that the user, the dump or the default asks for."""
    return Replay(choose_policy(dump, settings), progress, per_sample=settings.per_sample)


def choose_policy(dump: Dump, settings: Settings) -> Policy:
    """The user's word; else what the recorder saw; else CUDA's autocast in fp16."""
    autocast = dump.recorded.autocast if dump.recorded is not None else None
    if autocast is None:
        return make_policy(settings.policy or "cuda", FORMATS[settings.amp_dtype or "float16"])
    native = autocast.device != "cuda" and not autocast.emulated
    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in dump.state.values()}
    low = next((name for name in ("float16", "bfloat16") if name in dtypes), "float16")
    dtype = autocast.dtype if autocast.enabled and autocast.dtype in ("float16", "bfloat16") else low
    return make_policy(
        settings.policy or ("native" if native else "cuda"),
        FORMATS[settings.amp_dtype or dtype],
        ambient=autocast.enabled or settings.amp_dtype is not None,
    )


def reproduce(replay: Replay, preparation: Preparation, settings: Settings, recorded: Recorded | None) -> Attempt:
    """The first attempt that shows the failing step again, else the nearest to it; all attempts are named."""
    attempts: list[Attempt] = []
    setups = preparation.setups
    saved = [recorded.training[""]] if recorded is not None and "" in recorded.training else [True, False]
    flags = [settings.mode == "train"] if settings.mode else saved
    seeds = _seeds(settings, setups[0])
    watch = CLOSELY if preparation.saved_bad else MODULES_ONLY
    for training, seed in [*((flag, seeds[0]) for flag in flags), *((flags[0], seed) for seed in seeds[1:])]:
        if seed != seeds[0] and not any(attempt.outcome.random for attempt in attempts):
            break
        attempts.append(_attempt(replay, setups, preparation, training, seed, watch))
        setups = (attempts[0].setup,)
        if attempts[-1].accepted:
            break
    best = min(attempts, key=lambda attempt: attempt.rank)
    others = [attempt for attempt in attempts if attempt is not best]
    names = tuple(f"{attempt.name}: {attempt.reproduction.grade}" for attempt in (*others, best))
    return replace(best, reproduction=replace(best.reproduction, attempts=names))


def _seeds(settings: Settings, setup: Setup) -> list[int | None]:
    """The user's seed, else the random state that the dump saved (None), else 0; then a few more."""
    first = settings.seed if settings.seed is not None or setup.rng_states else 0
    return [first, *((first or 0) + extra for extra in range(1, NUM_EXTRA_SEEDS + 1))]


def _attempt(
    replay: Replay,
    setups: tuple[Setup, ...],
    preparation: Preparation,
    training: bool,
    seed: int | None,
    watch: Watch,
) -> Attempt:
    """Replay the first of `setups`, or the next where the model rejects the arguments themselves."""
    setup, *others = setups
    try:
        outcome = replay.run("replay under autocast", setup, replay.policy, training=training, seed=seed, watch=watch)
    except ModelError as error:
        if others and isinstance(error.__cause__, _WRONG_CALL):
            with suppress(ModelError):  # where no call fits, the error of the likeliest is the one to show
                return _attempt(replay, tuple(others), preparation, training, seed, watch)
        raise
    reproduction = grade(preparation.saved, outcome.output, preparation.output_field)
    return Attempt(setup=setup, outcome=replace(outcome, output=None), reproduction=reproduction)


def find_loss_scale(dump: Dump, settings: Settings) -> float:
    """The user's word, else what the dump saved (a plain number, or GradScaler's state), else 1."""
    if settings.loss_scale is not None:
        return settings.loss_scale
    saved = [value for name, value in dump.scalars.items() if name.rpartition(".")[2] in ("scale", "loss_scale")]
    return float(saved[0]) if saved and isinstance(saved[0], (int, float)) else 1.0

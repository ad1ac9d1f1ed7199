"""Builds the trials of a step on other batches: its variations, a few of its samples, the samples to blame alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property

from nandoctor.engine.runner import FailingStep
from nandoctor.fixes.variations import NEARLY_THE_SAME, OTHER_SEED, SCALED, VARIATIONS, extreme_samples
from nandoctor.fixes.verify import Trials


class OtherBatches:
    """The trials of a step on batches like its own, each built once.

    `guilty` are the samples to blame, `healthy` the others; both are () if they are not known. `random`: random numbers
    are drawn.
    """

    def __init__(self, trials: Trials, *, guilty: tuple[int, ...], healthy: tuple[int, ...], random: bool) -> None:
        self._trials, self._random = trials, random
        self._guilty, self._healthy = guilty, healthy

    def of_samples(self, samples: tuple[int, ...]) -> Trials:
        """Return the trials of the step with these samples alone."""
        step = self._trials.step
        return self._trials.on(replace(step, call=step.call.on_samples(samples)))

    @cached_property
    def guilty_alone(self) -> Trials | None:
        """The trials of the samples to blame; None if no other sample is known."""
        return self.of_samples(self._guilty) if self._healthy else None

    @cached_property
    def others_alone(self) -> Trials | None:
        """The trials of as many healthy samples as there are samples to blame; None if there are fewer."""
        number_of = len(self._guilty)
        return self.of_samples(self._healthy[:number_of]) if number_of <= len(self._healthy) else None

    @cached_property
    def few(self) -> tuple[int, ...] | None:
        """Two of the samples to blame and one other, if these are at most half of the batch; else None.

        They are those with the largest values, and of those to blame also the one with the smallest.
        """
        call = self._trials.step.call
        guilty = extreme_samples(self._guilty, call)
        few = sorted((*guilty, *extreme_samples(self._healthy, call)[:1]))
        return tuple(few) if guilty and 2 * len(few) <= (call.batch_size or 0) else None

    @cached_property
    def variations(self) -> Mapping[str, Trials | None]:
        """The trials of the step's variations, by name; None for a variation that does not apply."""
        return {name: self._varied((name,), self._trials.step) for name in (*VARIATIONS, OTHER_SEED)}

    @cached_property
    def joined(self) -> Mapping[tuple[str, ...], Trials | None]:
        """Combined variations, on a few samples: all that hardly change the values, alone and with each scaling."""
        alike = tuple(name for name in NEARLY_THE_SAME if self.variations[name] is not None)
        scaled = ((name, *alike) for name in SCALED if self.variations[name] is not None)
        # Scale first: flags of 0 and 1 are not scaled, and noise would disguise them.
        step = self._trials.step
        few = step if self.few is None else replace(step, call=step.call.on_samples(self.few))
        return {names: self._varied(names, few) for names in (alike, *scaled)}

    def first_tries(self, name: str, *, widens: bool) -> Iterator[list[tuple[str, ...]]]:
        """Yield tries, each of combined variations, to run before one by itself; it is settled if all of a try pass.

        A change that only `widens` formats can fail only because of the size of values: if small changes do no harm at
        half and at double the size, they do none at the original size. This is not true of a guard around 1, say.
        """
        scaled = [names for names in self.joined if name in names and names[0] in SCALED]
        if len(scaled) == (1 if name in SCALED else len(SCALED)) and (widens or name in SCALED):
            yield scaled
        yield from ([names] for names in self.joined if name in names and names not in scaled)

    def _varied(self, names: Iterable[str], step: FailingStep) -> Trials | None:
        """Return the trials of a step varied in all of these ways; None if one of them does not apply."""
        for name in names:
            if name == OTHER_SEED:
                seed = (step.randomness.seed or 0) + 1
                varied = step.varied(training=step.mode.training, seed=seed) if self._random else None
            else:
                call = VARIATIONS[name](step.call)
                varied = replace(step, call=call) if call is not None else None
            if varied is None:
                return None
            step = varied
        return self._trials.on(step)

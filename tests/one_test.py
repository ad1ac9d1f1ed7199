"""Run many small cases in one test: as separate tests, they would take longer to distribute than to run."""

from itertools import product


def for_each(*axes, star=False):
    """Call the test with each combination of one item per axis as its arguments; with `star`, items are unpacked.

    All failing cases are reported, with their arguments.
    """

    def decorate(test):
        def run():
            failed, last = [], None
            for case in product(*axes):
                arguments = [argument for item in case for argument in (item if star else (item,))]
                try:
                    test(*arguments)
                except Exception as error:
                    last = error
                    failed.append(f"{', '.join(repr(argument)[:200] for argument in arguments)}: {error!r}")
            if failed:
                raise AssertionError("\n".join(failed)) from last

        run.__name__, run.__doc__ = test.__name__, test.__doc__
        return run

    return decorate
